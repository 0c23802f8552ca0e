"""Contributed operators in standard ones: the kernel's results, and the formula's gradients."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from odtpack import contrib
from odtpack.adapters import AdapterSpec
from odtpack.autodiff.backward import REASON
from odtpack.build import build_package
from odtpack.contrib.quantized import store_matrix, stored_matrix
from odtpack.losses import make_loss
from odtpack.model.loading import load_model
from odtpack.package.task import Task
from odtpack.package.training import build_graphs
from tests.autodiff.oracle import (
    add_gradients,
    ask_torch,
    check,
    forward_model,
    normal,
    run,
    session,
)
from tests.contrib.cases import CASES, NORMALIZED, stored
from tests.model_text import inferred, parsed

ON_CPUS = [case for case in CASES if not any(case is each for each in NORMALIZED)]


@pytest.mark.parametrize("case", ON_CPUS, ids=lambda case: case.id)
def test_formula_is_that_of_the_kernel(case):
    feeds = {name: np.asarray(a) for name, a in case.present.items() if name not in case.constants}
    found = session(ir.to_proto(forward_model(case)), "off").run(case.output_names, feeds)
    for (name, expected), y in zip(ask_torch(case)[0].outputs.items(), found, strict=True):
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gradient_of_the_decomposition_is_that_of_the_formula(case):
    check(case)


def test_every_decomposition_has_a_case_and_leaves_nothing():
    own_test = {
        "DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "GatherBlockQuantized",
        "LayerNormalization", "SimplifiedLayerNormalization",
    }  # fmt: skip
    assert {case.op for case in CASES} | own_test == set(contrib.covered())
    for case in CASES:
        model = contrib.decompose(forward_model(case))
        assert {node.domain for node in model.graph} == {""}, case.id
        assert contrib.DOMAIN not in model.graph.opset_imports
        assert [y.name for y in model.graph.outputs] == case.output_names
        assert all(value.dtype is not None for node in model.graph for value in node.outputs)


CONTRIB = ["com.microsoft"]


@pytest.mark.parametrize("opset", [13, 17, 21])
@pytest.mark.parametrize(("axis", "axes"), [("", (2,)), ("axis = 1, ", (1, 2))])
def test_simplified_layer_normalization_of_the_standard_domain(axis, axes, opset):
    """ONNX Runtime writes it there, and the ONNX checker refuses it."""
    shape = "8" if len(axes) == 1 else "3, 8"
    text = (
        f"g (float[n, 3, 8] x, float[{shape}] w) => (float[n, 3, 8] y)"
        f" {{ y = SimplifiedLayerNormalization<{axis}epsilon = 0.01>(x, w) }}"
    )
    proto = parsed(text, opset)
    x, w = normal(2, 3, 8), normal(*map(int, shape.split(",")), seed=1)
    (kernel,) = session(proto, "off").run(None, {"x": x, "w": w})
    model = load_model(proto)
    assert proto.graph.node[0].domain == ""  # the caller's model is not touched
    model, names = add_gradients(model, ["x", "w"])
    seed = normal(2, 3, 8, seed=2)
    tx, tw = (torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in (x, w))
    y = tx / torch.sqrt((tx * tx).mean(axes, True) + 0.01) * tw
    expected = torch.autograd.grad((y * torch.tensor(seed)).sum(), [tx, tw])
    for level in ("off", "all"):
        running = session(model, level)
        found = running.run(["y", names["x"], names["w"]], {"x": x, "w": w, "seed_y": seed})
        for ours, theirs in zip(found, (y.detach(), *expected), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found[0], kernel, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("opset", [12, 14, 16, 17])
@pytest.mark.parametrize(
    ("axis", "axes"), [("", (2,)), ("axis = 1, ", (1, 2)), ("axis = -2, ", (1, 2))]
)
def test_layer_normalization_before_the_standard_has_it(axis, axes, opset):
    """Its values are those of the kernel, its gradients those of the formula."""
    shape = "8" if len(axes) == 1 else "3, 8"
    proto = parsed(
        f"g (float[n, 3, 8] x, float[{shape}] w, float[{shape}] b) =>"
        " (float[n, 3, 8] y, float[n, k, 1] m, float[n, k, 1] s)"
        f" {{ y, m, s = LayerNormalization<{axis}epsilon = 0.01>(x, w, b) }}",
        opset,
    )
    sizes = [*map(int, shape.split(","))]
    feeds = {"x": normal(2, 3, 8), "w": normal(*sizes, seed=1), "b": normal(*sizes, seed=3)}
    kernel = session(proto, "off").run(None, feeds)
    model, names = add_gradients(load_model(proto), [*feeds])
    for index, value in enumerate(kernel):
        feeds["seed_" + "yms"[index]] = normal(*value.shape, seed=4 + index)
    x, w, b = (torch.tensor(feeds[n], dtype=torch.float64, requires_grad=True) for n in "xwb")
    mean = x.mean(axes, True)
    inverse = (x.var(axes, correction=0, keepdim=True) + 0.01).rsqrt()
    results = (x - mean) * inverse * w + b, mean, inverse
    total = sum(
        (r * torch.tensor(feeds[f"seed_{n}"])).sum() for n, r in zip("yms", results, strict=True)
    )
    expected = torch.autograd.grad(total, [x, w, b])
    fed = {n: a for n, a in feeds.items() if n in {v.name for v in model.graph.inputs}}
    found = session(model, "all").run([*"yms", *(names[n] for n in "xwb")], fed)
    for ours, theirs in zip(found, (*kernel, *expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("places", [(4,), (2, 3)])
@pytest.mark.parametrize("points", ["middle", "whole"])
@pytest.mark.parametrize(("kind", "bits"), [("UINT8", 4), ("UINT8", 8), ("UINT4", 4), ("INT4", 4)])
def test_look_up_of_rows_of_few_bits(kind, bits, points, places):
    """It has no gradient; it is held to the kernel."""
    kept = stored(6, 64, 16, bits, points)
    shapes = {"w": [6, 64 * bits // 8 if kind == "UINT8" else 64], "z": [6, 4]}
    if kind == "UINT8" and bits == 4:
        shapes["z"] = [6, 2]
    names = ["w", "i", "s"] + (["z"] if points == "whole" else [])
    axes = ", ".join("ab"[: len(places)])
    proto = parsed(
        f"look_up (int64[{axes}] i) => (float[{axes}, 64] y) {{ y = "
        "com.microsoft.GatherBlockQuantized <block_size = 16, gather_axis = 0, quantize_axis = 1,"
        f" bits = {bits}> ({', '.join(names)}) }}",
        21, ir_version=10, domains=CONTRIB, s=kept["scales"],
    )  # fmt: skip
    dtype = getattr(onnx.TensorProto, kind)
    for name, array in (("w", kept["codes"]), ("z", kept["zeros"])):
        if name in names:
            proto.graph.initializer.append(
                onnx.helper.make_tensor(name, dtype, shapes[name], array.tobytes(), raw=True)
            )
    ids = np.random.default_rng(3).integers(0, 6, places)
    (kernel,) = session(proto, "off").run(None, {"i": ids})
    loaded = load_model(proto)
    assert {node.domain for node in loaded.graph} == {""}
    sizes = {name: value.const_value.nbytes for name, value in loaded.graph.initializers.items()}
    assert sizes["w_bytes"] == 6 * 64 * bits // 8
    (found,) = session(loaded, "all").run(None, {"i": ids})
    np.testing.assert_allclose(found, kernel, rtol=1e-6, atol=1e-6)
    if kind == "UINT8":
        np.testing.assert_allclose(kernel, kept["matrix"][ids], rtol=1e-6, atol=1e-6)


def test_embedding_returns_how_many_words_count():
    text = (
        "g (int32[n, 3] i, int32[n, 3] m, float[5, 8] w, float[3, 8] p, float[8] g, float[8] b)"
        " => (float[n, 3, 8] y, int32[n] counts)"
        " { y, counts = com.microsoft.EmbedLayerNormalization(i, , w, p, , g, b, m) }"
    )
    model = load_model(parsed(text, domains=CONTRIB))
    assert {node.domain for node in model.graph} == {""}
    feeds = {"i": np.ones((2, 3), np.int32), "m": np.int32([[1, 1, 0], [1, 0, 0]])}
    feeds |= {"w": normal(5, 8), "p": normal(3, 8), "g": normal(8), "b": normal(8)}
    _, counts = session(model, "off").run(None, feeds)
    np.testing.assert_array_equal(counts, [2, 1])


@pytest.mark.parametrize("node", [
    "y = com.microsoft.FusedMatMul<transA = 1>(unknown, b)",
    "y, mean = com.microsoft.SkipSimplifiedLayerNormalization(a, a, s) z = Add(y, mean)",
    'y = com.microsoft.FusedGemm<activation = "Mystery">(a, b)',
    "y = com.microsoft.Attention<num_heads = 1, do_rotary = 1>(c, b)",
    "y = com.microsoft.Unheard(a)",
])  # fmt: skip
def test_what_is_not_covered_stays_as_it_is(node):
    text = (
        "g (float[4, 4] a, float[4, 4] b, float[2, 4, 4] c, float[4] s) => (float y)"
        f" {{ unknown = my.Op(a) {node} }}"
    )
    model = inferred(text, domains=[*CONTRIB, "my"])
    before = [str(each) for each in model.graph]
    after = contrib.decompose(model)
    assert [str(each) for each in after.graph] == before
    assert "com.microsoft" in after.graph.opset_imports


def _stored_matrix(**changes: object) -> onnx.ModelProto:
    """A product with a matrix [7, 32] of 4 bits in blocks of 16, and zero points."""
    kept = stored(7, 32, 16, 4, "whole")
    attributes: dict[str, object] = {"K": 32, "N": 7, "bits": 4, "block_size": 16}
    arrays = {"w": kept["codes"], "s": kept["scales"], "z": kept["zeros"]}
    attributes |= {name: value for name, value in changes.items() if name not in arrays}
    arrays |= {name: value for name, value in changes.items() if name in arrays}
    settings = ", ".join(f"{name} = {value}" for name, value in attributes.items())
    product = f"y = com.microsoft.MatMulNBits <{settings}> (a, {', '.join(arrays)})"
    text = f"g (float[2, 32] a) => (float[n, m] y) {{ {product} }}"
    return parsed(text, 21, domains=CONTRIB, **arrays)


@pytest.mark.parametrize("changes", [
    {"K": 48}, {"N": 0}, {"block_size": 0}, {"block_size": -16}, {"bits": 2},
    {"w": np.zeros((7, 31), np.uint8)}, {"w": np.zeros((7, 16), np.float32)},
    {"s": np.ones(3, np.float32)}, {"z": np.zeros(5, np.uint8)},
    {"z": np.zeros((7, 3), np.float32)}, {"weight_prepacked": 1},
], ids=str)  # fmt: skip
def test_a_matrix_that_is_not_stored_as_it_says_stays_and_says_why(changes):
    assert {node.domain for node in load_model(_stored_matrix()).graph} == {""}
    (node,) = load_model(_stored_matrix(**changes)).graph
    assert node.op_type == "MatMulNBits"
    assert node.metadata_props[REASON].startswith("its ")


def test_codes_have_4_bits_where_the_node_does_not_say_it():
    node = ir.from_proto(_stored_matrix()).graph[0]
    node.attributes.pop("bits")
    matrix = stored(7, 32, 16, 4, "whole")["matrix"].numpy()
    np.testing.assert_allclose(stored_matrix(node), matrix, rtol=1e-6)
    store_matrix(node, 2 * matrix)
    np.testing.assert_allclose(stored_matrix(node), 2 * matrix, atol=0.2)


OPTIMIZED = """g (float[n, 3, 8] x) => (float[n, 3, 8] y) {
    h = MatMul(x, w1) g = Gelu<approximate = "none">(h) m = MatMul(g, w2) s = Add(m, x)
    y = LayerNormalization(s, one, zero)
}"""


def test_a_model_that_onnx_runtime_has_optimized_trains_as_before(tmp_path):
    scale = {"one": np.ones(8, np.float32), "zero": np.zeros(8, np.float32)}
    proto = parsed(OPTIMIZED, 20, w1=normal(8, 6, seed=1), w2=normal(6, 8, seed=2), **scale)
    path = f"{tmp_path}/optimized.onnx"
    session(proto, "extended", optimized_model_filepath=path)
    optimized = onnx.load(path)
    assert "com.microsoft" in {node.domain for node in optimized.graph.node}
    losses = []
    for model in (proto, optimized):
        loaded = load_model(model)
        assert {node.domain for node in loaded.graph} == {""}
        graphs = build_graphs(Task(loaded, ("w1", "w2"), (), make_loss("mse")))
        feeds = {"x": normal(2, 3, 8), "target": normal(2, 3, 8, seed=5), "lazy_reset_grad": [True]}
        for name in ("w1", "w2"):
            feeds[name] = graphs.parameters[("w1", "w2").index(name)].tensor.numpy()
            feeds[f"{name}_grad.accumulation.buffer"] = np.zeros_like(feeds[name])
        found = run(graphs.training, {k: np.asarray(v) for k, v in feeds.items()})
        losses.append([*found.values()])
    for one, other in zip(*losses, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_scales_that_are_stored_otherwise_are_no_parameters(tmp_path):
    """The loss depends on them; the build said that it does not."""
    rows, columns, block = 16, 64, 32
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (rows, columns // block, block // 2), np.uint8)
    scales = rng.uniform(0.1, 1, rows * columns // block).astype(np.float32)
    text = (
        f"g (float[n, {columns}] x) => (float[n, {rows}] y) {{ y = com.microsoft.MatMulNBits<"
        f"K = {columns}, N = {rows}, bits = 4, block_size = {block}>(x, codes, scales) }}"
    )
    model, changed = (
        parsed(text, 21, domains=CONTRIB, codes=codes, scales=each) for each in (scales, 2 * scales)
    )
    said: list[str] = []
    build_package(
        model, tmp_path / "p", loss="cross_entropy", remark=said.append,
        adapter=AdapterSpec("lora", ("*",), (), 2, 4.0),
    )  # fmt: skip
    assert not any("does not depend" in line for line in said)
    x = rng.standard_normal((3, columns)).astype(np.float32)
    once, twice = (run(load_model(m), {"x": x}, "off")["y"] for m in (model, changed))
    np.testing.assert_allclose(twice, 2 * once, rtol=1e-5)
