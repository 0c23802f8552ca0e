"""Recognizes simulated quantization, so that it can be trained through.

    QuantizeLinear(x, scale, zero) -> DequantizeLinear(levels, scale, zero)

Before differentiation :func:`mark` replaces the second of such a pair by an internal
operator FakeQuant(x, scale, zero, levels), whose gradient rule is the straight-through
estimator; :func:`lower` puts it back after it. The forward pass rounds as before.

A pair must agree in scale, zero point, axis and block size, and its integer type must have
at most 16 bits. No gradient passes any other QuantizeLinear.
"""

from __future__ import annotations

import onnx_ir as ir

from odtpack.autodiff.registry import INTERNAL_DOMAIN
from odtpack.graph import match

OP_TYPE = "FakeQuant"

_BOUNDS = {
    ir.DataType.INT4: (-8, 7),
    ir.DataType.UINT4: (0, 15),
    ir.DataType.INT8: (-128, 127),
    ir.DataType.UINT8: (0, 255),
    ir.DataType.INT16: (-(2**15), 2**15 - 1),
    ir.DataType.UINT16: (0, 2**16 - 1),
}
_WHERE = {"axis": 1, "block_size": 0}  # attributes that say where a scale applies


def mark(graph: ir.Graph) -> None:
    """Replace every pair's DequantizeLinear by the internal operator."""
    for node in list(graph):
        if node.op_type != "DequantizeLinear" or node.domain:
            continue
        levels = node.inputs[0]
        quantize = match.producer(levels, "QuantizeLinear")
        if quantize is None or levels is None or not _is_pair(quantize, node):
            continue
        low, high = _BOUNDS[levels.dtype or ir.DataType.UINT8]
        new = ir.node(
            OP_TYPE,
            [*quantize.inputs[:2], _zero_point(quantize), levels],
            {"low": low, "high": high},
            domain=INTERNAL_DOMAIN,
            name=node.name,
        )
        new.attributes.update(node.attributes)
        graph.insert_before(node, new)
        match.replace(node.outputs[0], new.outputs[0], [node])


def _is_pair(quantize: ir.Node, dequantize: ir.Node) -> bool:
    return (
        quantize.outputs[0].dtype in _BOUNDS
        and quantize.inputs[1] is dequantize.inputs[1]
        and _zero_point(quantize) is _zero_point(dequantize)
        and all(
            quantize.attributes.get_int(name, default)
            == dequantize.attributes.get_int(name, default)
            for name, default in _WHERE.items()
        )
    )


def _zero_point(node: ir.Node) -> ir.Value | None:
    return node.inputs[2] if len(node.inputs) > 2 else None


def lower(graph: ir.Graph) -> None:
    """Put the DequantizeLinear nodes back."""
    for node in list(graph):
        if node.op_type != OP_TYPE or node.domain != INTERNAL_DOMAIN:
            continue
        _, scale, zero, levels = node.inputs
        new = ir.node(
            "DequantizeLinear", [levels, scale] + [zero] * (zero is not None), name=node.name
        )
        kept = {k: v for k, v in node.attributes.items() if k not in ("low", "high")}
        new.attributes.update(kept)
        graph.insert_before(node, new)
        match.replace(node.outputs[0], new.outputs[0], [node])
