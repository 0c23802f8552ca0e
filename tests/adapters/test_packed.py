"""Weights of 4 bits that a model takes apart from bytes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from odtpack.graph.ops import Ops
from odtpack.package.segments import cut as packed


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
