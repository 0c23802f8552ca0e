"""Edges that copy nothing and make ONNX Runtime execute one node after another.

A view of a value that exists only after another one does:

    Reshape(value, Size(late) * [0, ..., 0])

A zero in the shape of a Reshape is the size that the axis has, so this is the value itself, in the
same memory. ONNX Runtime's optimizers cannot know that: Size is neither folded (Shape is, where
sizes are known) nor merged, on no optimization level, and so nodes that read different views are
not merged by its elimination of common subexpressions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from odtpack.graph.graphs import dims_of
from odtpack.graph.ops import Ops

_OWN = "again "


def zeros_of(op: Ops, late: ir.Value, rank: int) -> ir.Value:
    """As many zeros as a shape has axes, once ``late`` exists."""
    return op.Mul(op.Size(late), op.constant(np.zeros(rank, np.int64)))


class SizeNames:
    """Names of sizes that nothing else in a model has, see :mod:`.own_buffers`.

    Args:
        numbers: Of the families of names that are still to come.
    """

    def __init__(self, numbers: Iterator[int] | None = None) -> None:
        self._numbers = itertools.count() if numbers is None else numbers
        self._number = next(self._numbers)

    def another(self) -> SizeNames:
        """Names that differ from these and from those of every call before."""
        return SizeNames(self._numbers)

    @staticmethod
    def is_own(size: object) -> bool:
        """Whether a size has such a name."""
        return isinstance(size, str) and size.startswith(_OWN)

    def shape(self, value: ir.Value) -> ir.Shape:
        """The shape of a value whose first axis has a name of its own."""
        return self.named(dims_of(value) or ())

    def named(self, shape: Sequence[int | str | None], axis: int = 0) -> ir.Shape:
        """A shape one of whose axes has a name of its own."""
        dims = list(shape)
        if dims and dims[axis] != 1:
            dims[axis] = f"{_OWN}{self._number} {dims[axis] or '?'}"
        return ir.Shape(dims)

    def open(self, shape: Sequence[int | str | None]) -> ir.Shape:
        """A shape whose first open axis, if any, has a name of its own."""
        axes = (axis for axis, dim in enumerate(shape) if not isinstance(dim, int))
        axis = next(axes, None)
        return ir.Shape(shape) if axis is None else self.named(shape, axis)


class ControlEdge:
    """Views of values that exist once ``late`` does.

    Args:
        op: Writer for the graph, which puts nodes where they may stand.
        late: A value of any type; its last reader may well be this edge.
        sizes: Names the first axis of the views.
    """

    def __init__(self, op: Ops, late: ir.Value, sizes: SizeNames) -> None:
        self._op = op
        self._late = late
        self._sizes = sizes
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
                self._shapes[rank] = zeros_of(self._op, self._late, rank)
            view = self._op.Reshape(value, self._shapes[rank])
            view.type, view.shape = value.type, self._sizes.shape(value)
            self._views[value] = view
        return self._views[value]
