"""Edges that copy nothing and make ONNX Runtime execute one node after another.

A view of a value that exists only after another one does:

    Reshape(value, Size(late) * [0, ..., 0])

A zero in the shape of a Reshape is the size that the axis has, so this is the value itself, in the
same memory. ONNX Runtime's optimizers cannot know that: Size is neither folded (Shape is, where
sizes are known) nor merged, on no optimization level, and so nodes that read different views are
not merged by its elimination of common subexpressions.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from odtpack.graph.graphs import dims_of
from odtpack.graph.ops import Ops


class ControlEdge:
    """Views of values that exist once ``late`` does.

    Args:
        op: Writer for the graph, which puts nodes where they may stand.
        late: A value of any type; its last reader may well be this edge.
    """

    def __init__(self, op: Ops, late: ir.Value) -> None:
        self._op = op
        self._late = late
        self._views: dict[ir.Value, ir.Value] = {}
        self._shapes: dict[int, ir.Value] = {}

    def view(self, value: ir.Value) -> ir.Value:
        """The value, once ``late`` exists; itself where its rank is unknown."""
        dims = dims_of(value)
        if dims is None:
            return value
        if value not in self._views:
            rank = len(dims)
            if rank not in self._shapes:
                zeros = self._op.constant(np.zeros(rank, np.int64))
                self._shapes[rank] = self._op.Mul(self._op.Size(self._late), zeros)
            view = self._op.Reshape(value, self._shapes[rank])
            view.type, view.shape = value.type, value.shape
            self._views[value] = view
        return self._views[value]
