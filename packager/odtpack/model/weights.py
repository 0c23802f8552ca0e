"""Values of a stored weight, however it is stored: as it is, transposed, cast or quantized."""

from __future__ import annotations

import numpy as np
import onnx.reference
import onnx_ir as ir

from odtpack.errors import OdtpackError
from odtpack.graph.graphs import subgraphs

_GROWING = {
    "CenterCropPad", "Col2Im", "ConstantOfShape", "Expand", "EyeLike", "OneHot", "Pad",
    "RandomNormal", "RandomUniform", "Range", "Resize", "Tile", "Upsample",
}  # fmt: skip


def weight_array(value: ir.Value) -> np.ndarray:
    """What a value that follows from initializers alone holds.

    Raises:
        OdtpackError: It follows from something else, too, or by way of an operator whose result
            may be of any size and take any time (``unknown-weight``).
    """
    if value.const_value is not None:
        return value.const_value.numpy()
    node = value.producer()
    if node is None or any(each is None for each in node.inputs):
        raise OdtpackError("unknown-weight", f"the value of {value.name!r} is not stored")
    if node.op_type in _GROWING or next(iter(subgraphs(node)), None) is not None:
        raise OdtpackError(
            "unknown-weight",
            f"the value of {value.name!r} is computed by {node.op_type}, which may make any size",
        )
    arrays = [weight_array(each) for each in node.inputs if each is not None]
    opset = node.graph.opset_imports.get("", 21) if node.graph is not None else 21
    proto = ir.to_proto(node)
    evaluator = onnx.reference.ReferenceEvaluator(proto, opsets={"": opset})
    (found,) = evaluator.run(None, dict(zip(proto.input, arrays, strict=True)))
    return np.asarray(found)
