import dataclasses
from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
import torch
from torch.nn import functional as F

from odtpack.autodiff import REGISTRY, Registry
from odtpack.autodiff.expand import expand
from odtpack.errors import OdtpackError
from odtpack.graph.fold import fold
from odtpack.graph.graphs import Ops
from odtpack.graph.inference import infer_shapes
from odtpack.model.loading import load_model
from tests.autodiff.cases import elementwise, matrix, transformers
from tests.autodiff.oracle import (
    Case,
    ask_torch,
    cases,
    check,
    declare_ranks,
    forward_model,
    ints,
    normal,
    session,
    spread,
)
from tests.model_text import inferred, parsed
from tests.refused import refused
from tests.sweep import split

X = spread(2, 4, 6)
SCORES, LABELS = normal(3, 5), np.array([1, 4, 0])
PLANES, PLANE_LABELS = normal(2, 4, 3), np.array([[0, 1, 3], [2, 2, 1]])
WEIGHTS = np.float32([0.5, 1.5, 1.0, 2.0, 0.7])
Q, K, V = normal(2, 2, 3, 4), normal(2, 2, 5, 4, seed=1), normal(2, 2, 5, 4, seed=2)
FLAT = {"q": normal(2, 3, 8), "k": normal(2, 5, 8, seed=1), "v": normal(2, 5, 8, seed=2)}
ANGLES = normal(2, 3, 2)
ATTENTION = F.scaled_dot_product_attention


def heads(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def group_norm(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.group_norm(x, 2, scale, bias)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([cos * a - sin * b, sin * a + cos * b], -1)


def mean_variance(x: torch.Tensor) -> torch.Tensor:
    mean, square = x.mean((0, 2, 3), True), (x * x).mean((0, 2, 3), True)
    return (x - mean) / ((square - mean * mean).sqrt() + 1e-9)


CASES: list[Case] = [
    *cases("Celu", {"x": X}, lambda x: F.celu(x, 0.7), (12, 17, 21, 23), alpha=0.7, batch=["x"]),
    *cases("Celu", {"x": X}, F.celu, (17,), label="default"),
    *cases("Mish", {"x": X}, F.mish, (18, 22, 24), batch=["x"]),
    *cases("Swish", {"x": X}, lambda x: x * torch.sigmoid(1.5 * x), (24, 26), alpha=1.5),
    *cases("MeanVarianceNormalization", {"x": normal(2, 3, 2, 2)}, mean_variance,
           (13, 17, 18, 23), differences="torch"),
    *cases("RMSNormalization", {"x": X, "scale": normal(6)},
           lambda x, s: F.rms_norm(x, (6,), s, 1e-5), (23, 26), batch=["x"]),
    *cases("RMSNormalization", {"x": X, "scale": normal(4, 6)},
           lambda x, s: F.rms_norm(x, (4, 6), s, 1e-5), (23,), axis=1, label="axis1"),
    *cases("GroupNormalization", {"x": normal(2, 4, 3, 2), "scale": normal(4), "bias": normal(4)},
           group_norm, (21, 23), num_groups=2, batch=["x"], differences="torch"),
    *cases("NegativeLogLikelihoodLoss", {"x": SCORES, "t": LABELS}, F.nll_loss,
           (13, 17, 22, 24), runtime=["t"], batch=["x", "t"]),
    *cases("NegativeLogLikelihoodLoss", {"x": SCORES, "t": LABELS, "w": WEIGHTS}, F.nll_loss,
           (13, 17, 22), runtime=["t"], const=["w"], label="weights"),
    *cases("NegativeLogLikelihoodLoss", {"x": SCORES, "t": LABELS},
           lambda x, t: F.nll_loss(x, t, ignore_index=4, reduction="sum"), (13, 17, 22),
           runtime=["t"], ignore_index=4, reduction="sum", label="ignored"),
    *cases("SoftmaxCrossEntropyLoss", {"x": SCORES, "t": LABELS}, F.cross_entropy,
           (17, 21, 24), runtime=["t"], batch=["x", "t"]),
    *cases("SoftmaxCrossEntropyLoss", {"x": SCORES, "t": LABELS}, F.cross_entropy, (12, 13),
           runtime=["t"], label="fixed"),
    *cases("SoftmaxCrossEntropyLoss", {"x": SCORES, "t": LABELS, "w": WEIGHTS},
           lambda x, t, w: (F.cross_entropy(x, t, w), x.log_softmax(1)), (13, 17),
           runtime=["t"], const=["w"], outputs=2, label="log-prob"),
    *cases("SoftmaxCrossEntropyLoss", {"x": PLANES, "t": PLANE_LABELS},
           lambda x, t: F.cross_entropy(x, t, reduction="none", ignore_index=2), (17, 22),
           runtime=["t"], batch=["x", "t"], reduction="none", ignore_index=2, label="planes"),
    *cases("Attention", {"q": Q, "k": K, "v": V}, ATTENTION, (23, 24, 26)),
    *cases("Attention", {"q": Q, "k": K, "v": V, "mask": normal(3, 5)}, ATTENTION, (23, 24),
           label="mask"),
    *cases("Attention", {"q": Q, "k": K[:, :, :3], "v": V[:, :, :3]},
           lambda *x: ATTENTION(*x, is_causal=True), (23, 24), is_causal=1, label="causal"),
    *cases("Attention", FLAT,
           lambda *x: ATTENTION(*(heads(v, 2) for v in x)).transpose(1, 2).flatten(2), (23, 24),
           q_num_heads=2, kv_num_heads=2, batch=["q", "k", "v"], label="flat"),
    *cases("RotaryEmbedding", {"x": Q, "cos": np.cos(ANGLES), "sin": np.sin(ANGLES)}, rotate,
           (23, 24), batch=["x"]),
    *cases("Shrink", {"x": spread(3, 4, avoid=[-0.5, 0.5])},
           lambda x: torch.where(x.abs() > 0.5, x - 0.2 * x.sign(), 0.0), (18, 23), bias=0.2,
           lambd=0.5),
    *cases("CenterCropPad", {"x": normal(4, 5), "shape": ints(6, 3)},
           lambda x, _: F.pad(x, (0, 0, 1, 1))[:, 1:4], (18, 23)),
    *transformers.CASES,
]  # fmt: skip
# What has a rule is not expanded: its cases are in the rule's own table.
CASES = [case for case in CASES if REGISTRY.lookup("", case.op, case.opset) is None]


def body_of(case: Case) -> int | None:
    """The opset for which the specification wrote the body that a case is expanded to."""
    schema: Any = onnx.defs.get_schema(case.op, case.opset, case.domain)
    versions = [*schema.function_opset_versions, *schema.context_dependent_function_opset_versions]
    return max((version for version in versions if version <= case.opset), default=None)


# The first case of each body and label.
FIRST = {(case.op, case.label, body_of(case)): case.id for case in reversed(CASES)}
FIRST_IDS = set(FIRST.values())


@pytest.mark.parametrize(
    "case", split(CASES, lambda case: case.id in FIRST_IDS, name=lambda case: case.id)
)
def test_gradient_of_the_body_is_that_of_both_oracles(case):
    assert REGISTRY.lookup("", case.op, case.opset) is None
    check(dataclasses.replace(case, expanded=True))


TABLES = [*elementwise.CASES, *matrix.CASES, *CASES]
DEFINED = [case for case in TABLES if case.domain == "" and body_of(case) is not None]


@pytest.mark.parametrize("case", DEFINED, ids=lambda case: case.id)
def test_a_body_computes_what_its_operator_does(case):
    """Without any rules whatever has a body is expanded, down to operators that have none."""
    feeds = {name: np.asarray(a) for name, a in case.present.items() if name not in case.constants}
    expected = ask_torch(case)[0].outputs
    expanded = expand(forward_model(case), case.differentiated, registry=Registry())
    declare_ranks(case, expanded)
    assert case.op not in {node.op_type for node in expanded.graph}
    proto = ir.to_proto(expanded)
    onnx.checker.check_model(proto, full_check=True)
    assert [value.name for value in proto.graph.output] == case.output_names
    for name, y in zip(expected, session(proto, "off").run(None, feeds), strict=True):
        np.testing.assert_allclose(y, expected[name], rtol=1e-4, atol=1e-5)


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


TWO_PATHS = """net (float[batch, 3] x) => (float[batch, 3] y, float[batch, 3] z)
<float[3] w = {1, 2, 3}> { data = Mish(x) h = Mul(data, w) y = Mish(h) z = Relu(y) }"""


def test_only_what_lies_on_the_way_and_has_no_rule_is_expanded():
    model = expand(inferred(TWO_PATHS, 18), ["w"])
    assert operators(model) == ["Mish", "Mul", "Softplus", "Tanh", "Mul", "Relu"]
    assert operators(expand(inferred(TWO_PATHS, 18), ["x"])).count("Softplus") == 2
    assert operators(expand(inferred(TWO_PATHS, 18), [])) == operators(inferred(TWO_PATHS, 18))


def test_names_are_those_of_the_calls_and_come_out_the_same_each_time():
    model = expand(inferred(TWO_PATHS, 18), ["x"])
    names = [value.name for node in model.graph for value in node.outputs]
    assert names == [
        "data/Softplus_X", "data/TanHSoftplusX", "data", "h",
        "y/Softplus_X", "y/TanHSoftplusX", "y", "z",
    ]  # fmt: skip
    again = expand(inferred(TWO_PATHS, 18), ["x"])
    first, second = (ir.to_proto(m).SerializeToString(deterministic=True) for m in (model, again))
    assert first == second
    assert all(value.dtype is not None for node in model.graph for value in node.outputs)


def test_nodes_inside_a_body_are_expanded_in_their_turn():
    case = next(c for c in CASES if c.id == "SoftmaxCrossEntropyLoss-opset17-batch")
    model = expand(forward_model(case), ["x"])
    assert "LogSoftmax" in operators(model)
    assert "NegativeLogLikelihoodLoss" not in operators(model)


LOCAL = """net (float[batch, 3] x) => (float[batch, 3] y) <float[3] w = {1, 2, 3}>
{ h = my.twice <factor = 3.0> (x, w) y = my.twice <factor = 0.5> (h, w) }
<domain: "my", opset_import: ["" : %d, "my" : 1]>
twice <factor> (a, b) => (c, unused)
{ k = Constant <value_float: float = @factor> () s = my.scale(a, k) unused = Neg(s) c = %s }
<domain: "my", opset_import: ["" : %d]>
scale (a, k) => (c) { c = Mul(a, k) }"""


def local(body: str, body_opset: int, model_opset: int = 17) -> onnx.ModelProto:
    return parsed(LOCAL % (body_opset, body, body_opset), model_opset, domains=["my"])


@pytest.mark.parametrize(("model_opset", "body_opset"), [(17, 17), (17, 13), (15, 18)])
def test_functions_of_the_model_are_inlined(model_opset, body_opset):
    proto = local("Add(s, b)", body_opset, model_opset)
    model = expand(infer_shapes(ir.from_proto(proto)), ["w"])
    assert not model.functions
    assert [op for op in operators(model) if op not in ("Constant", "Neg")] == ["Mul", "Add"] * 2
    x = normal(2, 3)
    (y,) = session(model, "off").run(None, {"x": x})
    w = np.float32([1, 2, 3])
    np.testing.assert_allclose(y, (x * 3 + w) * 0.5 + w, rtol=1e-6)


def test_a_function_that_means_something_else_in_the_opset_of_the_model_is_refused():
    for body in ("Softmax(s)", "ReduceSum <axes: ints = [0]> (s)"):
        with refused("bad-function", "written in opset 12", hint="convert_version=True"):
            expand(infer_shapes(ir.from_proto(local(body, 12))), ["w"])


def test_a_function_that_calls_itself_is_refused():
    proto = local("my.twice <factor = 1.0> (s, b)", 17)
    with pytest.raises(OdtpackError, match="cannot be inlined"):
        expand(ir.from_proto(proto), ["w"])


def test_an_operator_without_rule_and_body_stays():
    text = "net (float[2, 3] x) => (float[2, 3] y) { h = custom.Fancy(x) y = Mish(h) }"
    assert operators(expand(inferred(text, 18, domains=["custom"]), ["x"]))[0] == "Fancy"


# Folding


def test_arithmetic_on_known_dimensions_is_folded():
    model = inferred("""
    net (float[batch, 4, 6] x, int64[2] given) => (float[a, b] y, float[c, d] z)
    <int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64 last = {-1},
     int64[2] kept = {4, -1}>
    {
        shape = Shape(x) channels = Gather(shape, one) width = Gather(shape, last)
        tail = Slice(shape, one, two) half = Div(tail, two) batch = Slice(shape, zero, one)
        minus = Neg(one) flat = Concat <axis = 0> (minus, half) y = Reshape(x, flat)
        other = Mul(kept, kept) unknown = Concat <axis = 0> (batch, channels)
        sum = Add(given, one) z = Reshape(x, other)
    }
    """)
    assert fold(model.graph, keep=["kept"])
    values = {
        node.outputs[0].name: ir.convenience.get_const_tensor(node.outputs[0])
        for node in model.graph
    }
    folded = {name: t.numpy().tolist() for name, t in values.items() if t is not None}
    assert folded == {
        "channels": [4], "width": 6, "tail": [4], "half": [2], "minus": [-1], "flat": [-1, 2],
    }  # fmt: skip
    assert not fold(model.graph, keep=["kept"])


def test_folding_leaves_floats_outputs_and_what_cannot_be_computed():
    model = inferred("""
    net (float[2, 3] x) => (int64[2] shape, float[2, 3] y)
    <int64 zero = {0}, int64[1] far = {9}, float[1] scale = {2}> {
        shape = Shape(x) inner = Shape(x) double = Add(scale, scale)
        wrong = Gather(inner, far) by_zero = Div(inner, zero) y = Mul(x, double)
    }
    """)
    fold(model.graph)
    assert operators(model) == ["Shape", "Constant", "Add", "Gather", "Div", "Mul"]


@pytest.mark.parametrize(("rank", "expected"), [(2, ["Mul", "Add"]), (3, ["Identity", "Identity"])])
def test_of_an_if_on_a_known_shape_the_branch_that_is_taken_stays(rank, expected):
    dims = ", ".join(["batch"] + ["3"] * (rank - 1))
    text = f"""
    net (float[{dims}] x) => (float[{dims}] y, float[{dims}] z) <int64[1] two = {{2}}>
    {{
        shape = Shape(x) rank = Shape(shape) is_matrix = Equal(rank, two)
        y, z = If (is_matrix) <
            then_branch = t () => (float[{dims}] h, float[{dims}] k) <float one = {{1}}>
                {{ h = Mul(x, x) k = Add(h, one) }},
            else_branch = e () => (float[{dims}] x, float[{dims}] x) {{ }}
        >
    }}
    """
    model = expand(inferred(text), ["x"])
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert [op for op in operators(model) if op not in ("Constant", "Shape")] == expected
    x = normal(*[3] * rank)
    y, z = session(model, "off").run(None, {"x": x})
    np.testing.assert_array_equal(y, x * x if rank == 2 else x)
    np.testing.assert_array_equal(z, x * x + 1 if rank == 2 else x)


@pytest.mark.parametrize("taken", [True, False])
def test_a_branch_that_stays_may_hold_the_names_of_what_is_around_it(taken):
    """Nodes without a name get one that is unique in their graph, but not in the model."""
    text = f"""
    net (float[3] x) => (float[3] y) <bool condition = {{{int(taken)}}}>
    {{
        h = Mul(x, x)
        z = If (condition) <
            then_branch = t () => (float[3] result) {{ late = Mul(h, h) result = Neg(late) }},
            else_branch = e () => (float[3] result) {{ late = Add(h, h) result = Abs(late) }}
        >
        late = Exp(z) result = Add(late, x) y = Mul(result, z)
    }}
    """
    model = expand(load_model(parsed(text)), ["x"])
    assert "If" not in operators(model)
    names = [node.name for node in model.graph]
    assert len(set(names)) == len(names)
    x = normal(3)
    (y,) = session(model, "off").run(None, {"x": x})
    z = -(x**4) if taken else 2 * x**2
    np.testing.assert_allclose(y, (np.exp(z) + x) * z, rtol=1e-5)


@pytest.mark.parametrize("shape", [None, [10**12]])
def test_folding_makes_no_large_values(shape):
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 17}, name="g")
    op = Ops(graph)
    for wide in (op.Expand(op.ints(1), op.ints(10**12)), op.Tile(op.ints(1), op.ints(10**12))):
        wide.shape = None if shape is None else ir.Shape(shape)
        op.Neg(wide)
    assert not fold(graph)


def test_a_cast_to_the_same_type_is_dropped():
    """Of float32 too; a cast that changes the type stays, and so does the name of an output."""
    model = inferred(
        "g (float[2] x) => (float[2] y) { "
        "a = Cast<to=1>(x) b = Cast<to=10>(a) c = Neg(b) d = Cast<to=1>(c) e = Abs(d) "
        "y = Cast<to=1>(e) }"
    )
    assert fold(model.graph)
    assert [(node.op_type, node.inputs[0].name) for node in model.graph if node.inputs[0]] == [
        ("Cast", "x"), ("Neg", "b"), ("Cast", "c"), ("Abs", "d"), ("Cast", "e"),
    ]  # fmt: skip
    assert not fold(model.graph)
