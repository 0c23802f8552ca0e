"""Keeps ONNX Runtime from fusing a normalization whose epsilon it does not read.

Where a model writes a layer or an RMS normalization out, ONNX Runtime makes one kernel of

    Div(d, Sqrt(Add(ReduceMean(Pow(d, 2)), epsilon)))

Before 1.32 it takes epsilon from the second operand of the Add if that is a constant, and 1e-5
otherwise; of a vector it takes the first element. At the exponent it does not look to this day.
Epsilon is no constant where it is a parameter of the package. Written as a Sub of its negative
the sum is the same number, and is not fused.
"""

from __future__ import annotations

import onnx_ir as ir

from odtpack.graph import match
from odtpack.graph.graphs import nodes_of
from odtpack.graph.ops import Ops


def rewrite(op: Ops, graph: ir.Graph) -> None:
    """Rewrite every sum that would be misread, in subgraphs too."""
    for add in list(nodes_of(graph)):
        if add.op_type != "Add" or add.domain not in ("", "ai.onnx"):
            continue
        if not any(user.op_type == "Sqrt" for user in add.outputs[0].consumers()):
            continue
        for variance, epsilon in (add.inputs, reversed(add.inputs)):
            mean = match.producer(variance, "ReduceMean")
            if mean is None or epsilon is None or _is_read(add, mean, epsilon):
                continue
            with op.before(add):
                total = op.Sub(variance, op.Neg(epsilon))
            match.replace(add.outputs[0], total, [add])
            break


def _is_read(add: ir.Node, mean: ir.Node, epsilon: ir.Value) -> bool:
    """Whether the fused kernel computes what these nodes do."""
    power = match.producer(mean.inputs[0], "Pow")
    if power is not None and not match.is_scalar(power.inputs[1], 2.0):
        return False
    value: ir.Value | None = epsilon
    while (cast := match.producer(value, "Cast", "Identity")) is not None:
        value = cast.inputs[0]
    return epsilon is add.inputs[1] and match.scalar(value) is not None
