"""Refuses loops of which the graph itself says that they do not end.

Whether any other loop ends is found out by running it, under a limit of time.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from odtpack.errors import OdtpackError
from odtpack.graph.graphs import nodes_of

_MOST_TRIPS: Final = 2**24
"""Without another end: at a microsecond a trip, which no operator is quicker than, 17 seconds."""


_WHOLE: Final = {ir.DataType.BOOL, ir.DataType.INT32, ir.DataType.INT64}


def check_loops(graph: ir.Graph, where: str) -> None:
    """Check that no Loop goes on for ever because its condition is always true.

    A trip count that is only a bound, as exporters write 2^63 - 1 for ``while``, is fine where the
    condition is computed.

    Raises:
        OdtpackError: ``endless-loop``.
    """
    for node in nodes_of(graph):
        if node.op_type != "Loop" or node.domain not in ("", "ai.onnx") or len(node.inputs) < 2:
            continue
        trips, condition = node.inputs[0], node.inputs[1]
        if condition is not None and _truth(condition) is not True:
            continue
        body = node.attributes["body"].as_graph()
        if len(body.outputs) < 1 or not _stays_true(body):
            continue
        number = None if trips is None else _constant(trips)
        if trips is not None and (number is None or number <= _MOST_TRIPS):
            continue
        name = node.name or f"the one that computes {node.outputs[0].name}"
        raise OdtpackError(
            "endless-loop",
            f"the loop {name!r} does not end: its condition is always true, and "
            + ("it has no trip count" if number is None else f"its trip count is {number:,}"),
            where=where,
        )


def _stays_true(body: ir.Graph) -> bool:
    """Whether a body's condition for another trip is true whenever that of its own was."""
    value = _origin(body.outputs[0])
    return value in body.inputs[1:2] or _truth(value) is True


def _origin(value: ir.Value) -> ir.Value:
    """What a value is a copy of."""
    for _ in range(1000):
        node = value.producer()
        if node is None or node.op_type not in ("Identity", "Cast") or node.inputs[0] is None:
            break
        value = node.inputs[0]
    return value


def _truth(value: ir.Value) -> bool | None:
    number = _constant(value)
    return None if number is None else bool(number)


def _constant(value: ir.Value) -> int | None:
    """The only element of a constant; None for what is computed, or has more."""
    tensor = ir.convenience.get_const_tensor(_origin(value))
    if tensor is None or tensor.size != 1 or tensor.dtype not in _WHOLE:
        return None
    return int(tensor.numpy().item())
