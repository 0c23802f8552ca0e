"""Every registered rule against PyTorch and finite differences; see ``oracle``."""

import collections
import functools
from typing import Any

import numpy as np
import onnx.defs
import onnx.helper
import onnx_ir as ir
import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from onnx.reference import ReferenceEvaluator
from torch.nn import functional as F

from odtpack.autodiff import REGISTRY, differentiate
from odtpack.autodiff.context import INTERNAL_DOMAIN
from odtpack.autodiff.expand import expand
from odtpack.graph.graphs import Ops
from odtpack.passes import batch_norm, patterns
from tests.autodiff.cases import (
    elementwise,
    index,
    matrix,
    planes,
    products,
    quantize,
    recurrent,
    regions,
    resize,
    sampling,
    structure,
    sums,
    windows,
    windows_sweep,
)
from tests.autodiff.node_cases import VERDICTS, collect, judge
from tests.autodiff.oracle import (
    LEVELS,
    Array,
    Case,
    add_gradients,
    cases,
    check,
    cotangents,
    forward_model,
    gradient_model,
    ints,
    normal,
    run,
    session,
    spread,
)
from tests.autodiff.random_graphs import RandomGraph, random_graphs
from tests.autodiff.representatives import representatives
from tests.autodiff.rule_reads import attributes, compared_words
from tests.autodiff.versions import at_every_version
from tests.model_text import retyped
from tests.refused import refused
from tests.sweep import split

CASES = [
    *at_every_version([
        *elementwise.CASES, *index.CASES, *matrix.CASES, *products.CASES, *quantize.CASES,
        *structure.CASES, *sums.CASES,
    ]),
    *planes.CASES, *recurrent.CASES, *regions.CASES, *resize.CASES, *sampling.CASES, *windows.CASES,
    *windows_sweep.CASES,
]  # fmt: skip
# Held to an oracle by a test of their own below.
BESIDE_THE_TABLE = {
    ("", "Dropout"),
    ("", "If"),  # control flow: test_control
    ("", "Loop"),
    ("", "Scan"),
    (INTERNAL_DOMAIN, "BatchNormTraining"),
    (INTERNAL_DOMAIN, "FakeQuant"),
    (INTERNAL_DOMAIN, "Gelu"),
    (INTERNAL_DOMAIN, "StraightThrough"),  # tests/contrib/test_dynamic.py
}


REPRESENTATIVES = {case.id for case in representatives(CASES)}


@pytest.mark.parametrize(
    "case", split(CASES, lambda case: case.id in REPRESENTATIVES, name=lambda case: case.id)
)
def test_gradient_is_that_of_both_oracles(case):
    check(case)


def test_every_rule_has_a_case():
    found = {}
    for case in CASES:
        rule = REGISTRY.lookup(case.domain, case.op, case.opset if not case.domain else 1)
        assert rule is not None, case.id
        found[case.domain, case.op, rule.since] = case
    missing = [
        (domain, op_type, rule.since)
        for domain, op_type, rule in REGISTRY.entries()
        if rule.differentiable
        and (domain, op_type) not in BESIDE_THE_TABLE
        and (domain, op_type, rule.since) not in found
    ]
    assert not missing


def test_every_attribute_and_every_word_that_a_rule_reads_has_cases():
    """Each attribute takes two values, left out being one; each word it is compared with occurs."""
    given: dict[tuple[str, str], dict[str, set[str]]] = {}
    for case in CASES:
        values = given.setdefault((case.domain, case.op), {})
        for name in _schema_attributes(case.domain, case.op):
            values.setdefault(name, set()).update(_words(case.attrs.get(name)))
    one_value, never = [], []
    for domain, op_type, rule in REGISTRY.entries():
        if rule.function is None or (domain, op_type) in BESIDE_THE_TABLE:
            continue
        values = given[domain, op_type]
        read = attributes(rule.function) & set(values)
        one_value += [(op_type, name) for name in sorted(read) if len(values[name]) < 2]
        usual = _schema_attributes(domain, op_type)
        taken = set().union(*values.values(), *usual.values(), usual)
        words = compared_words(rule.function) - _NOT_VALUES
        never += [(op_type, word) for word in sorted(words - taken)]
    assert not one_value
    assert not never


# Calls of PyTorch's, as an exporter notes them, are no attributes.
_CALLS = {"aten.clamp", "aten.max.dim", "aten.min.dim"}
_NOT_VALUES = {"", "...", *_CALLS, *(schema.name for schema in onnx.defs.get_all_schemas())}


@functools.cache
def _schema_attributes(domain: str, op_type: str) -> dict[str, set[str]]:
    """Default of each attribute that a definition of the operator has."""
    found: dict[str, set[str]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if (schema.domain, schema.name) == (domain, op_type):
            for name, attribute in schema.attributes.items():
                default = attribute.default_value
                value = onnx.helper.get_attribute_value(default) if default.name else None
                found.setdefault(name, set()).update(_words(value))
    return found


def _words(value: Any) -> set[str]:
    """A value and, of a list, its entries, as text."""
    entries = value if isinstance(value, list | tuple) else ()
    parts = (part.decode() if isinstance(part, bytes) else part for part in (value, *entries))
    return {str(part) for part in parts}


def test_no_two_cases_have_one_name():
    ids = [case.id for case in CASES]
    assert len(set(ids)) == len(ids), sorted({i for i in ids if ids.count(i) > 1})


NOT_DIFFERENTIABLE = [(d, o) for d, o, rule in REGISTRY.entries() if not rule.differentiable]


@pytest.mark.parametrize(("domain", "op_type"), NOT_DIFFERENTIABLE)
def test_no_gradient_passes_a_piecewise_constant_operator(domain, op_type):
    """L = f(x) + 2 x, where f is the operator: only the second term contributes."""
    x = ir.val("x", ir.DataType.FLOAT, [3])
    node = ir.node(op_type, [x], domain=domain, name="f")
    node.outputs[0].type, node.outputs[0].shape = x.type, x.shape
    graph = ir.Graph([x], [], nodes=[node], opset_imports={"": 17}, name="g")
    op = Ops(graph)
    assert differentiate(graph, {node.outputs[0]: x}, [x], op) == {}
    double = op.Mul(x, 2.0)
    y = op.Add(node.outputs[0], double)
    y.shape = double.shape = x.shape
    before = len(graph)
    differentiate(graph, {y: op.constant(np.ones(3, np.float32))}, [x], op)
    assert [new.op_type for new in list(graph)[before:]] == ["Mul"]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("ratio", "training", "runtime", "kept"), [
    (0.4, True, (), 0.6), (None, True, (), 0.5), (0.0, True, (), 1.0), (0.4, False, (), None),
    (0.4, None, (), None), (0.4, True, ("training",), 0.6), (0.4, False, ("training",), None),
    (0.4, True, ("ratio", "training"), 0.6), (0.4, False, ("ratio", "training"), None),
])  # fmt: skip
def test_dropout_lets_through_what_it_kept(ratio, training, runtime, kept, level):
    inputs = {"x": normal(40, 50) + 3, "ratio": None if ratio is None else np.float32(ratio)}
    if training is not None:
        inputs["training"] = np.array(training)
    fixed = [name for name in ("ratio", "training") if name not in runtime]
    case = cases("Dropout", inputs, torch.relu, wrt=["x"], const=fixed, seed=5)[0]
    model, names = gradient_model(case)
    seed = normal(40, 50, seed=1)
    feeds = {name: np.asarray(inputs[name]) for name in ("x", *runtime)}
    found = run(model, {**feeds, "seed_y0": seed}, level)
    y, dx, x = found["y0"], found[names["x"]], inputs["x"]
    if kept is None:
        np.testing.assert_array_equal(dx, seed)
        return
    np.testing.assert_allclose(dx, np.where(y != 0, seed / np.float32(kept), 0), rtol=1e-6)
    np.testing.assert_allclose(dx * x, seed * y, rtol=1e-5, atol=1e-5)
    assert abs((y != 0).mean() - kept) < 0.05


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5), (4, 3, 5, 2)])
def test_training_mode_batch_normalization(shape, level):
    inputs: dict[str, Array | None] = {
        "x": normal(*shape) * 2 + 1, "scale": spread(3, seed=1), "bias": normal(3, seed=2),
        "mean": normal(3, seed=3), "var": spread(3, low=0.5, seed=4),
    }  # fmt: skip
    wrt = ["x", "scale", "bias"]
    case = Case(
        "BatchNormalization", inputs, torch.relu, attrs={"training_mode": 1, "epsilon": 1e-3},
        batch=["x"], outputs=3, used=[0],
    )  # fmt: skip
    model = forward_model(case)
    batch_norm.mark(model.graph)
    model, names = add_gradients(model, wrt, after=batch_norm.lower)
    model.graph.opset_imports.pop(INTERNAL_DOMAIN, None)
    seed = normal(*shape, seed=5)
    arrays = {name: array for name, array in inputs.items() if array is not None}
    found = run(model, {**arrays, "seed_y0": seed}, level)
    tensors = [torch.tensor(arrays[name]).double().requires_grad_() for name in wrt]
    y = F.batch_norm(tensors[0], None, None, *tensors[1:], training=True, eps=1e-3)
    np.testing.assert_allclose(found["y0"], y.detach(), rtol=1e-4, atol=1e-5)
    expected = torch.autograd.grad((y * torch.tensor(seed)).sum(), tensors)
    for name, gradient in zip(wrt, expected, strict=True):
        np.testing.assert_allclose(found[names[name]], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
def test_written_out_gelu(level):
    x = ir.val("x", ir.DataType.FLOAT, ["batch", 7])
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 17}, name="g")
    op = Ops(graph)
    y = op.Mul(op.Mul(x, op.Add(op.Erf(op.Div(x, np.sqrt(2))), 1.0)), 0.5)
    y.name, y.shape = "y", x.shape
    graph.outputs.append(y)
    model = ir.Model(graph, ir_version=8)
    patterns.mark_gelu(graph)
    assert [node.domain for node in graph] == [INTERNAL_DOMAIN]
    model, names = add_gradients(model, ["x"], after=patterns.lower_gelu)
    model.graph.opset_imports.pop(INTERNAL_DOMAIN, None)
    points, seed = normal(5, 7), normal(5, 7, seed=1)
    found = run(model, {"x": points, f"seed_{graph.outputs[0].name}": seed}, level)
    tensor = torch.tensor(points).double().requires_grad_()
    (F.gelu(tensor) * torch.tensor(seed)).sum().backward()
    np.testing.assert_allclose(found[names["x"]], tensor.grad, rtol=1e-4, atol=1e-5)


def test_repeated_indices_lose_nothing_when_threads_share_the_work():
    """Many rows of a batch read the same two rows of a table, in two threads."""
    indices = np.random.default_rng(0).integers(0, 2, 4000)
    table = np.zeros((3, 256), np.float32)
    case = cases("Gather", {"x": table, "i": indices}, torch.relu, runtime=["i"])[0]
    model, names = gradient_model(case)
    running = session(model, intra_op_num_threads=2)
    feeds = {"x": table, "i": indices, "seed_y0": np.ones((4000, 256), np.float32)}
    counts = np.bincount(indices, minlength=3)[:, None].repeat(256, axis=1)
    for _ in range(3):
        np.testing.assert_array_equal(running.run([names["x"]], feeds)[0], counts)


X = normal(2, 3, 4)
# What a rule does not cover it says, for the reason named last.
NOT_COVERED = [
    ("Pad", {"x": X, "p": ints(1, 0, 0, 0, 0, 0)}, {"mode": "edge"}, {"batch": ["x"]}, 13,
     "before opset 16"),
    ("GatherND", {"x": X, "i": ints(0)}, {}, {"runtime": ["i"], "batch": ["i"]}, 17,
     "length of its index tuples"),
    ("Det", {"x": X[:, :, :3]}, {}, {"symbols": {"x": [2]}}, 17, "axis 2"),
    ("DFT", {"x": X[..., None], "n": np.array(3)}, {}, {"runtime": ["n"]}, 17, "transform length"),
    ("DFT", {"x": normal(2, 5, 2)}, {"inverse": 1, "onesided": 1}, {}, 20, "one-sided and inverse"),
    ("STFT", {"x": X[:1, 0, :, None], "s": np.array(2), "w": X[0, 0, :2]}, {},
     {"runtime": ["s"]}, 17, "step length"),
    ("Einsum", {"x0": X, "x1": X[0]}, {"equation": "...ij,...jk->...ik"}, {}, 17,
     "ONNX Runtime does not load"),
    *(
        (op, recurrent.arrays(op, ""), {"hidden_size": 3, "layout": 1}, {}, 14,
         "refuses layout 1")
        for op in ("RNN", "GRU", "LSTM")
    ),
    ("GRU", {k: v.astype(np.float64) for k, v in recurrent.arrays("GRU", "").items()},
     {"hidden_size": 3}, {}, 17, "runs FLOAT only"),
    ("GRU", recurrent.arrays("GRU", ""), {"hidden_size": 3, "activations": ["Tanh", "Gelu"]},
     {}, 17, "no activation 'Gelu'"),
    ("RNN", recurrent.arrays("RNN", ""), {"hidden_size": 3, "activations": ["relu"]},
     {}, 17, "no activation 'relu'"),
    ("LSTM", recurrent.arrays("LSTM", ""), {"hidden_size": 3, "activations": ["Tanh"]},
     {}, 17, "names 1 activations, and not 3"),
    ("RNN", recurrent.arrays("RNN", ""), {"hidden_size": 3, "activations": ["LeakyRelu"]},
     {}, 17, "attribute activation_alpha"),
    ("RNN", recurrent.arrays("RNN", "", two=True),
     {"hidden_size": 3, "activations": ["Tanh", "LeakyRelu"], "activation_alpha": [0.1],
      "direction": "bidirectional"}, {}, 17, "attribute activation_alpha"),
    ("Col2Im", {"x": X[:, :, :1], "s": ints(2, 1), "b": ints(3, 1)}, {}, {"runtime": ["b"]}, 18,
     "block shape"),
    ("DepthToSpace", {"x": normal(1, 4, 2, 2)}, {"blocksize": 2, "mode": "CRD"},
     {"symbols": {"x": [1]}}, 17, "axis 1"),
    ("MaxPool", {"x": X}, {"kernel_shape": [2], "dilations": [2], "auto_pad": "SAME_UPPER"}, {}, 17,
     "another number of windows"),
    *(
        (op, {"x": X[:, :, :3]},
         {"kernel_shape": [1], "strides": [3], "auto_pad": "SAME_UPPER"}, options,
         19, "strides that leave gaps")
        for op in ("AveragePool", "LpPool") for options in ({}, {"symbols": {"x": [2]}})
    ),
    *(
        (op, {"x": normal(1, 1, 5)},
         {"kernel_shape": [2], "strides": [2], "pads": [1, 1], "ceil_mode": 1}, {}, opset,
         "another number of windows")
        for op, opset in (("AveragePool", 12), ("MaxPool", 12), ("LpPool", 18))
    ),
    ("RoiAlign", {"x": X[None], "r": np.float32([[0, 0, 2, 2]]), "i": ints(0)}, {"mode": "max"}, {},
     12, "before opset 16"),
    ("Conv", {"x": normal(1, 2, 4), "w": normal(2, 2, 3)}, {}, {"symbols": {"x": [2], "w": [2]}},
     17, "axis 2 of 'w' is unknown"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op_type", "inputs", "attrs", "options", "opset", "why"), NOT_COVERED,
    ids=[f"{row[0]}-{row[-1]}" for row in NOT_COVERED],
)  # fmt: skip
def test_what_is_not_covered_is_refused(op_type, inputs, attrs, options, opset, why):
    case = Case(op_type, inputs, torch.relu, opset, attrs, wrt=[next(iter(inputs))], **options)
    model = forward_model(case)
    with refused("unsupported-node", why, "'node'"):
        add_gradients(model, case.differentiated)


# The onnx package's own node cases: each is right, refused clearly or not differentiable.

PARTS = 4  # that run at once where there are processors for them
collect_once = functools.cache(collect)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(PARTS))
def test_no_gradient_of_a_node_case_is_wrong(part, record_property):
    cases = collect_once()[part::PARTS]
    assert cases
    verdicts = {case.name: judge(case) for case in cases}
    counts = collections.Counter(verdict.kind for verdict in verdicts.values())
    for kind in VERDICTS:
        record_property(f"node cases {kind}", counts[kind])
    assert not {name: v.why for name, v in verdicts.items() if v.kind == "wrong"}
    # What is left out is left out for a reason: most of what has a derivative is right.
    assert counts["right"] > 0.8 * (counts["right"] + counts["refused"] + counts["not run"])


# Gradients of random graphs against central differences of the ONNX reference in float64.

STEP = 1e-6
DIRECTIONS = 2


def slopes(proto, graph, seeds, directions):
    """Central differences of the sum of seeds times outputs, along each direction."""
    evaluator, names = ReferenceEvaluator(proto), list(seeds)

    def loss(feeds: dict[str, Array]) -> float:
        outputs = evaluator.run(names, feeds)
        return float(sum((seeds[n] * y).sum() for n, y in zip(names, outputs, strict=True)))

    return {
        name: np.array([
            loss({**graph.feeds, name: graph.feeds[name] + STEP * d})
            - loss({**graph.feeds, name: graph.feeds[name] - STEP * d})
            for d in along
        ]) / (2 * STEP)
        for name, along in directions.items()
    }  # fmt: skip


SETTINGS = settings(
    max_examples=200, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip


@settings(SETTINGS, max_examples=25)
@given(random_graphs())
def test_gradients_are_those_of_finite_differences(graph):
    compared(graph)


@pytest.mark.sweep
@SETTINGS
@given(random_graphs())
def test_gradients_of_many_graphs_are_those_of_finite_differences(graph):
    compared(graph)


def compared(graph: RandomGraph) -> None:
    note(f"{graph.steps} {'float32' if graph.single else 'float64'}")
    proto = ir.to_proto(graph.model)
    note(onnx.printer.to_text(proto))
    names = [value.name for value in proto.graph.output]
    outputs = ReferenceEvaluator(proto).run(names, graph.feeds)
    seeds = cotangents({n: y.shape for n, y in zip(names, outputs, strict=True)})
    random = np.random.default_rng(3)
    directions = {
        name: [random.standard_normal(x.shape) for _ in range(DIRECTIONS)]
        for name, x in graph.feeds.items()
    }
    expected = slopes(proto, graph, seeds, directions)

    model = ir.from_proto(retyped(proto, np.float32, np.float64) if graph.single else proto)
    model, gradients = add_gradients(expand(model, list(graph.feeds)), list(graph.feeds))
    floats = np.float32 if graph.single else np.float64
    feeds = graph.feeds | {f"seed_{name}": seed for name, seed in seeds.items()}
    for level in LEVELS:
        found = run(model, {n: np.asarray(a, floats) for n, a in feeds.items()}, level)
        for name, output in gradients.items():
            gradient = found[output]
            assert gradient.shape == graph.feeds[name].shape
            along = np.array([(gradient * d).sum() for d in directions[name]])
            scale = 1 + np.abs(gradient).sum()
            tolerance = 1e-5 if graph.single else 1e-7
            np.testing.assert_allclose(
                along, expected[name], rtol=1e-5, atol=tolerance * scale,
                err_msg=f"{name} ({level})",
            )  # fmt: skip
    unreached = set(graph.feeds) - set(gradients)
    for name in unreached:
        np.testing.assert_allclose(expected[name], 0, atol=1e-12)
