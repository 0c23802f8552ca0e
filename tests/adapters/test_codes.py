"""Weights in 8 bits that a model makes numbers of by itself: each is a layer."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx.numpy_helper
import onnx_ir as ir
import onnxruntime
import pytest

from odtpack.adapters import insert_adapter
from odtpack.choices import BaseKind
from odtpack.graph.ops import Ops
from odtpack.model.loading import load_model
from odtpack.package.segments import cut as packed
from odtpack.quantized import quantize_base
from odtpack.spec import AdapterSpec
from tests.autodiff.oracle import add_gradients, normal, session

IN, OUT, RANK = 6, 4, 2
FORMS = {  # how a model writes a weight [IN, OUT] of codes, scales and zero points
    "cast": ("w = Mul(f, s)", "f = Cast<to = 1>(q)", False),
    "scale-first": ("w = Mul(s, f)", "f = Cast<to = 1>(q)", False),
    "zero-points": ("d = Sub(f, z) \n w = Mul(d, s)", "f = Cast<to = 1>(q)", True),
    "dequantized": ("w = DequantizeLinear<axis = 1>(q, t)", "", False),
    "transposed": ("m = Mul(f, s) \n u = Transpose(m) \n w = Transpose(u)", "f = Cast<to = 1>(q)",
                   False),
    "divided": ("w = Div(f, s)", "f = Cast<to = 1>(q)", False),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["int8", "uint8"])
@pytest.mark.parametrize("form", FORMS)
def test_low_rank_adapter_on_codes(form: str, kind: str) -> None:
    """Value and gradients are those of the product with the numbers, and a thin one beside it."""
    after, before, zeros = FORMS[form]
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]>'
        f" g (float[n, {IN}] x) => (float[n, {OUT}] y) <{kind}[{IN}, {OUT}] q, float[1, {OUT}] s,"
        f" float[{OUT}] t, float[1, {OUT}] z> {{ {before} \n {after} \n y = MatMul(x, w) }}"
    )
    codes = np.random.default_rng(1).integers(0, 100, (IN, OUT)).astype(kind)
    scales, points = normal(1, OUT, seed=2) + 3, normal(1, OUT, seed=3)
    stored = {"q": codes, "s": scales, "t": scales[0], "z": points}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in stored.items())
    del model.graph.value_info[:]
    inserted = insert_adapter(load_model(model), AdapterSpec("lora", ("q",), rank=RANK, alpha=6))
    assert inserted.layers == ("q",)
    a, b = (str(name) for name in inserted.parameters)
    given = {a: normal(RANK, IN, seed=4), b: normal(OUT, RANK, seed=5)}
    for name, array in given.items():
        inserted.model.graph.initializers[name].const_value = ir.tensor(array, name=name)
    loaded, gradients = add_gradients(inserted.model, [a, b])
    x, seed = normal(3, IN, seed=6), normal(3, OUT, seed=7)
    outputs = ["y", gradients[a], gradients[b]]
    found = session(ir.to_proto(loaded), "all").run(outputs, {"x": x, "seed_y": seed})
    numbers = codes - (points if zeros else 0)
    weight = (numbers / scales if form == "divided" else numbers * scales).astype(np.float64)
    wide = x.astype(np.float64)
    wanted = [
        wide @ weight + 3 * wide @ given[a].T @ given[b].T,
        3 * (seed @ given[b]).T @ wide,
        3 * seed.T @ (wide @ given[a].T),
    ]
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["int8", "int4", "nf4"])
def test_a_base_of_float16(kind: BaseKind) -> None:
    """Its matrices and its table get codes as those of float32 do, and it goes on in float16."""
    logits = []
    for dtype in ("float", "float16"):
        model = onnx.parser.parse_model(
            '<ir_version: 10, opset_import: ["" : 21]> g (int64[n] x) => (float[n, 8] y) '
            "{ e = Gather(table, x) \n l = MatMul(e, w) \n y = Cast<to = 1>(l) }"
        )
        random = np.random.default_rng(1)
        for name, shape in (("table", (40, 64)), ("w", (64, 8))):
            array = random.standard_normal(shape).astype(np.float16)
            array = array.astype(np.float32) if dtype == "float" else array
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        loaded = quantize_base(load_model(model), kind, (), 21)
        assert not {"table", "w"} & {*loaded.graph.initializers}
        (product,) = (node for node in loaded.graph if node.op_type == "MatMul")
        assert product.outputs[0].dtype == ir.DataType[dtype.upper()]
        ours = onnxruntime.InferenceSession(ir.to_proto(loaded).SerializeToString())
        logits += ours.run(None, {"x": np.arange(40)})
    # Each of 64 products of about 0.64 is rounded four times, to 11 bits.
    np.testing.assert_allclose(logits[1], logits[0], rtol=0, atol=4 * 64 * 0.64 / 2**11)


# Weights of 4 bits that a model takes apart from bytes.


@pytest.mark.parametrize("kind", [ml_dtypes.int4, ml_dtypes.uint4])
@pytest.mark.parametrize("shape", [(4, 32), (3, 5), (1, 1)])
@pytest.mark.parametrize("zeros", [None, "stored", "constant"])
@pytest.mark.parametrize("late", [False, True])
def test_what_it_unpacks(kind: type, shape: tuple[int, int], zeros: str | None, late: bool) -> None:
    """As numpy computes it from the codes, with a scale a column."""
    rng = np.random.default_rng(0)
    low = int(ml_dtypes.iinfo(kind).min)
    codes = rng.integers(low, low + 16, shape).astype(kind)
    scales = rng.uniform(0.5, 2, shape[1]).astype(np.float32)
    points = rng.integers(low, low + 16, shape[1]).astype(kind)

    scale = ir.val("scale", dtype=ir.DataType.FLOAT, shape=[shape[1]])
    graph = ir.Graph([scale], [], nodes=[], opset_imports={"": 21})
    op = Ops(graph)
    stored = [ir.val("codes", const_value=ir.tensor(codes, name="codes"))]
    if zeros is not None:
        stored.append(ir.val("points", const_value=ir.tensor(points, name="points")))
    for value in stored:
        graph.register_initializer(value)
    unpacked = op.DequantizeLinear(stored[0], op.Mul(scale, 1.0) if late else scale, *stored[1:])
    result = op.Identity(unpacked)
    result.type = unpacked.type = ir.TensorType(ir.DataType.FLOAT)
    result.shape = ir.Shape(shape)
    graph.outputs.append(result)

    lifted = stored if zeros == "stored" else stored[:1]
    packed.unpack(graph, lifted)
    fed = {"scale": scales}
    for value in lifted:
        assert value.const_value is not None
        fed[str(value.name)] = value.const_value.numpy()
        assert fed[str(value.name)].dtype == np.uint8
        graph.initializers.pop(str(value.name))
        value.const_value = None
        graph.inputs.append(value)
    model = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    (found,) = onnxruntime.InferenceSession(model).run(None, fed)
    zero = points if zeros else np.zeros_like(points)
    wanted = (codes.astype(np.float32) - zero.astype(np.float32)) * scales
    np.testing.assert_array_equal(found, wanted)
