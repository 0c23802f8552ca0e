"""What onnxruntime-training's runtime needs in place of plain operators.

Two of its operators write where a plain one cannot, since its runtime reads no other outputs
of a step than the user's:

- ``InPlaceAccumulatorV2(buffer, gradient, reset) -> BOOL[1]`` adds a gradient to its buffer;
- ``BatchNormInternal(x, scale, bias, mean, variance) -> y, mean, variance, batch mean, batch
  1 / std`` replaces the running statistics. Its running variance takes the biased variance of
  the batch, as the ONNX text has it.

Everything else, the gradients above all, stays plain.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from odtpack.autodiff.context import INTERNAL_DOMAIN
from odtpack.errors import OdtpackError
from odtpack.graph import graphs
from odtpack.graph.ops import Ops
from odtpack.passes.batch_norm import OP_TYPE as BATCH_NORM
from odtpack.passes.batch_norm import count_per_channel

DOMAIN: Final = "com.microsoft"
ACCUMULATOR: Final = "InPlaceAccumulatorV2"
INTERNAL_BATCH_NORM: Final = "BatchNormInternal"


def check_float(value: ir.Value | None) -> None:
    """Refuse what the operators cannot take."""
    if value is not None and value.dtype not in (None, ir.DataType.FLOAT):
        raise OdtpackError(
            "target-cannot",
            f"{value.name!r} is of type {value.dtype.name}, and onnxruntime-training trains "
            "FLOAT models only",
            hint="leave --target out to run on stock ONNX Runtime",
        )


def accumulate(op: Ops, gradient: ir.Value, buffer: ir.Value, reset: ir.Value) -> ir.Value:
    """Write the accumulation of one gradient in place; return the flag BOOL[1]."""
    (done,) = op.emit(ACCUMULATOR, [buffer, gradient, reset], domain=DOMAIN)
    done.type, done.shape = ir.TensorType(ir.DataType.BOOL), ir.Shape([1])
    return done


def lower_batch_norms(op: Ops, graph: ir.Graph) -> None:
    """Write batch normalizations in training mode as the operator that updates in place."""
    latest: dict[ir.Value, ir.Value] = {}
    for node in list(graph):
        if node.op_type != BATCH_NORM or node.domain != INTERNAL_DOMAIN:
            continue
        x, mean, variance = (
            value for value in (node.inputs[0], *node.inputs[3:5]) if value is not None
        )
        check_float(x)
        with op.before(node):
            results = op.emit(
                INTERNAL_BATCH_NORM,
                [*node.inputs[:3], latest.get(mean, mean), latest.get(variance, variance)],
                outputs=5,
                domain=DOMAIN,
                epsilon=node.attributes.get_float("epsilon"),
                momentum=node.attributes.get_float("momentum"),
                training_mode=1,
            )
            count = count_per_channel(op, x, ir.DataType.FLOAT)
        # A layer that is used twice updates its statistics twice, in this order.
        latest[mean], latest[variance] = results[1:3]
        for old, new in zip(node.outputs, (*results, count), strict=True):
            graphs.replace(old, new, [])
        graph.remove(node, safe=True)
