"""Runs in float32 what ONNX Runtime, or its gradient, has no float16 kernel for.

- Recurrent layers. The layer's parameters remain float16 in the model.
- Scatters that add, multiply or take extrema.
- What reads planes at positions: ONNX Runtime computes those in float32, and so must their
  gradients, as float16 does not distinguish neighbouring elements beyond 2048.
- AffineGrid, whose function body ONNX Runtime fails to run in float16.
"""

from __future__ import annotations

import onnx_ir as ir

from odtpack.errors import OdtpackError
from odtpack.graph import match
from odtpack.graph.graphs import nodes_of
from odtpack.graph.ops import Ops

_RECURRENT = ("GRU", "LSTM", "RNN")
_POSITIONED = ("AffineGrid", "DeformConv", "GridSample", "MaxRoiPool", "RoiAlign")
_WIDENED_REDUCTIONS = ("ScatterElements", "ScatterND")


def widen(graph: ir.Graph) -> None:
    """Put casts around every such node that reads float16; types must be known."""
    op = Ops(graph, "half/")
    for node in list(graph):
        half = [v is not None and v.dtype == ir.DataType.FLOAT16 for v in node.inputs]
        if node.domain or not any(half) or not _is_widened(node):
            continue
        with op.before(node):
            operands = [
                _cast(op, value) if narrow and value is not None else value
                for value, narrow in zip(node.inputs, half, strict=True)
            ]
            attributes = {key: attribute.value for key, attribute in node.attributes.items()}
            results = op.emit(node.op_type, operands, outputs=len(node.outputs), **attributes)
            for old, new in zip(node.outputs, results, strict=True):
                if not old.name:
                    new.name = old.name
                    continue
                new.shape = old.shape
                match.replace(old, op.cast(new, ir.DataType.FLOAT16), [])
        graph.remove(node, safe=True)


def _cast(op: Ops, value: ir.Value) -> ir.Value:
    wide = op.cast(value, ir.DataType.FLOAT)
    wide.shape = value.shape
    return wide


def _is_widened(node: ir.Node) -> bool:
    if node.op_type in _WIDENED_REDUCTIONS:
        return node.attributes.get_string("reduction", "none") != "none"
    return node.op_type in (*_RECURRENT, *_POSITIONED)


def refuse_bfloat16(graph: ir.Graph) -> None:
    """Refuse a type for which ONNX Runtime has no kernels on a processor."""
    values = (*graph.initializers.values(), *graph.inputs)
    for value in (*values, *(y for node in nodes_of(graph) for y in node.outputs)):
        if value.dtype == ir.DataType.BFLOAT16:
            raise OdtpackError(
                "bfloat16-not-supported",
                f"{value.name!r} is of type BFLOAT16, for which ONNX Runtime has no kernels on a "
                "processor",
            )
