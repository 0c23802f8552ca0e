"""The table of decompositions, and what several of them share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from odtpack.autodiff.backward import REASON
from odtpack.autodiff.context import Context
from odtpack.graph.graphs import Ops, dims_of

DOMAIN = "com.microsoft"
Outputs = ir.Value | Sequence[ir.Value | None]
Decomposition = Callable[[Context], Outputs | None]

TABLE: dict[str, Decomposition] = {}


def decomposition(*op_types: str) -> Callable[[Decomposition], Decomposition]:
    """Register how the named operators are written in standard ones."""
    # The decorated function writes nodes with ``ctx.op`` and returns the node's outputs, the first
    # ones or all; or None, before it has written anything, for a node it does not cover.

    def register(function: Decomposition) -> Decomposition:
        for op_type in op_types:
            TABLE[op_type] = function
        return function

    return register


def not_covered(ctx: Context, why: str) -> Outputs | None:
    """Leave a node as it is, and let the error of a gradient that would pass it say why."""
    ctx.node.metadata_props[REASON] = why
    return None


def asked_for(ctx: Context, index: int) -> bool:
    """Whether anybody reads output ``index``."""
    outputs = ctx.node.outputs
    if index >= len(outputs):
        return False
    return bool(outputs[index].uses()) or outputs[index].is_graph_output()


def known_rank(value: ir.Value | None) -> int | None:
    """Number of axes of a value, if it is known."""
    dims = dims_of(value)
    return None if dims is None else len(dims)


def known_size(value: ir.Value | None, axis: int) -> int | None:
    """Length of one axis of a value, if it is known."""
    dims = dims_of(value)
    size = None if not dims else dims[axis]
    return size if isinstance(size, int) else None


_ACTIVATIONS = {  # and their parameters
    "Relu": (), "Sigmoid": (), "Tanh": (), "Softplus": (), "Softsign": (),
    "LeakyRelu": ("alpha",), "Elu": ("alpha",), "ThresholdedRelu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"), "Clip": ("min", "max"),
}  # fmt: skip


def covers_activation(name: str, count: int) -> bool:
    """Whether :func:`activate` knows an activation with that many parameters."""
    return name in _ACTIVATIONS and len(_ACTIVATIONS[name]) == count


def activate(op: Ops, value: ir.Value, name: str, parameters: Sequence[float]) -> ir.Value:
    """The activation that is fused into a Conv or Gemm."""
    if name == "Clip":
        return op.Min(op.Max(value, parameters[0]), parameters[1])
    attributes: dict[str, Any] = dict(zip(_ACTIVATIONS[name], parameters, strict=True))
    return op.emit(name, [value], **attributes)[0]


def gelu(op: Ops, x: ir.Value, *, tanh: bool) -> ir.Value:
    """x Phi(x), exact or by the approximation with tanh."""
    if op.opset >= 20:
        return op.Gelu(x, approximate="tanh" if tanh else "none")
    if tanh:
        inner = op.Mul(op.Add(op.Mul(op.Mul(x, x), 0.044715), 1.0), x)
        bell = op.Tanh(op.Mul(inner, math.sqrt(2 / math.pi)))
    else:
        bell = op.Erf(op.Div(x, math.sqrt(2)))
    return op.Mul(op.Mul(x, op.Add(bell, 1.0)), 0.5)


def layer_norm(
    op: Ops, x: ir.Value, scale: ir.Value, bias: ir.Value | None, epsilon: float
) -> ir.Value:
    """Layer normalization over the last axis."""
    if op.opset >= 17:
        operands = [x, scale] if bias is None else [x, scale, bias]
        return op.LayerNormalization(*operands, axis=-1, epsilon=epsilon)
    return written_norm(op, x, scale, bias, [-1], epsilon)[0]


def written_norm(
    op: Ops,
    x: ir.Value,
    scale: ir.Value,
    bias: ir.Value | None,
    axes: Sequence[int],
    epsilon: float,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Layer normalization over ``axes``, the means and the inverse deviations."""
    mean = op.reduce_mean(x, axes)
    centered = op.Sub(x, mean)
    deviation = op.Sqrt(op.Add(op.reduce_mean(op.Mul(centered, centered), axes), epsilon))
    normal = op.Mul(op.Div(centered, deviation), scale)
    return normal if bias is None else op.Add(normal, bias), mean, op.Reciprocal(deviation)


def rms_norm(
    op: Ops, x: ir.Value, scale: ir.Value, axes: Sequence[int], epsilon: float
) -> ir.Value:
    """x / sqrt(mean of x^2 + epsilon) * scale over ``axes``."""
    mean = op.reduce_mean(op.Mul(x, x), axes)
    return op.Mul(op.Div(x, op.Sqrt(op.Add(mean, epsilon))), scale)
