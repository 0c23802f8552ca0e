"""Puts nodes into an order that ONNX Runtime executes, and keeps buffers from being held."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from odtpack.graph.graphs import ancestors, dims_of, reads, subgraphs
from odtpack.graph.ops import Ops
from odtpack.memory.timeline import Step, Timeline
from odtpack_runtime.session.graph_signature import RESET_NAME
from odtpack_simulator.memory.kernel_memory import IN_PLACE

# Edges that copy nothing and make ONNX Runtime execute one node after another.
#
# A view of a value that exists only after another one does:
#
#     Reshape(value, Size(late) * [0, ..., 0])
#
# A zero in the shape of a Reshape is the size that the axis has, so this is the value itself, in
# the same memory. ONNX Runtime's optimizers cannot know that: Size is neither folded (Shape is,
# where sizes are known) nor merged, on no optimization level, and so nodes that read different
# views are not merged by its elimination of common subexpressions.

_OWN = "again "


class SizeNames:
    """Names of sizes that nothing else in a model has."""

    # numbers: Of the families of names that are still to come.

    def __init__(self, numbers: Iterator[int] | None = None) -> None:
        self._numbers = itertools.count() if numbers is None else numbers
        self._number = next(self._numbers)

    def another(self) -> SizeNames:
        """Names that differ from these and from those of every call before."""
        return SizeNames(self._numbers)

    def named(self, shape: Sequence[int | str | None], axis: int | None = None) -> ir.Shape:
        """A shape one of whose axes, by default the first that is not 1, has a name of its own."""
        dims = list(shape)
        if axis is None:
            axis = next((i for i, dim in enumerate(dims) if dim != 1), None)
        if axis is not None:
            dims[axis] = f"{_OWN}{self._number} {dims[axis] or '?'}"
        return ir.Shape(dims)

    def open(self, shape: Sequence[int | str | None]) -> ir.Shape:
        """A shape whose first open axis, if any, has a name of its own."""
        axes = (axis for axis, dim in enumerate(shape) if not isinstance(dim, int))
        axis = next(axes, None)
        return ir.Shape(shape) if axis is None else self.named(shape, axis)


class ControlEdge:
    """Views of values that exist once ``late`` does."""

    # op: Writer for the graph, which puts nodes where they may stand. late: A value of any type;
    # its last reader may well be this edge. sizes: Names the first axis of the views.

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
                op, size = self._op, self._op.Size(self._late)
                self._shapes[rank] = op.Mul(size, op.constant(np.zeros(rank, np.int64)))
            view = self._op.Reshape(value, self._shapes[rank])
            view.type, view.shape = value.type, self._sizes.named(dims)
            self._views[value] = view
        return self._views[value]


# Puts the nodes of a training model into an order that makes ONNX Runtime execute them as planned.
#
# ONNX Runtime walks depth first from the nodes whose outputs nothing reads, the last in the file
# first, to what they need, the last in the file first. So the file is written from its end: of the
# nodes whose readers are all placed, the one that is executed first comes last.


def places_of(
    graph: ir.Graph, timeline: Timeline, renamed: Mapping[str, str], at_once: Collection[str] = ()
) -> dict[str, float]:
    """When a timeline computes each value, by name."""
    # renamed: Names that the graph has for those of the timeline that differ. at_once: Names of
    # values that the loss needs and that are computed as soon as they can be instead.
    places = {
        renamed.get(name, name): float(index)
        for index, node in enumerate(timeline.nodes)
        for name in node.outputs
        if name and name not in at_once
    }
    if at_once:
        places[str(graph.outputs[0].name)] = 0.0  # all that the loss needs comes first
    return places


def arrange(graph: ir.Graph, places: Mapping[str, float]) -> None:
    """Sort the nodes of a training model by when their values are computed."""
    # A value without a place is computed as soon as what it is computed from exists.
    nodes = list(graph)
    producers = {value: i for i, node in enumerate(nodes) for value in node.outputs}
    needs = [{producers[v] for v in reads(node) if v in producers} for node in nodes]
    # What the runtime makes a part of another comes right after what it needs, and what needs
    # nothing with what reads it.
    keys = [
        min((places[v.name] for v in node.outputs if v.name and v.name in places), default=-1.0)
        for node in nodes
    ]
    sorted_nodes = _from_the_end(needs, [0.0] * len(nodes))
    for index in sorted_nodes:
        if keys[index] < 0:
            keys[index] = max((keys[source] for source in needs[index]), default=-1.0)
    unknown = [key < 0 for key in keys]
    for index in reversed(sorted_nodes):
        for source in needs[index]:
            if unknown[source] and (keys[source] < 0 or keys[index] < keys[source]):
                keys[source] = keys[index]
    order = _from_the_end(needs, keys)
    assert len(order) == len(nodes)  # noqa: S101 - a copy never waits for what reads it
    graph.remove(nodes)
    graph.extend(nodes[index] for index in order)


def _from_the_end(needs: Sequence[Collection[int]], keys: Sequence[float]) -> list[int]:
    """Places of nodes, each after what it needs; what is free to stand last has the lowest key."""
    readers = [0] * len(needs)
    for sources in needs:
        for source in sources:
            readers[source] += 1
    free = [(keys[index], index) for index, count in enumerate(readers) if not count]
    heapq.heapify(free)
    order = []
    while free:
        _, index = heapq.heappop(free)
        order.append(index)
        for source in needs[index]:
            readers[source] -= 1
            if not readers[source]:
                heapq.heappush(free, (keys[source], source))
    return order[::-1]


# Keeps ONNX Runtime from holding the memory of the forward pass for the backward pass.
#
# Its planner gives a tensor the buffer of one that is no longer needed if both are known to be of
# the same size, by number or by the name of a size, and the buffer stays allocated in between. A
# gradient has the size of its value: it would get the buffer of some activation that was freed long
# ago, or of the one that is computed again; the form of a weight that a gradient needs would get
# that of the forward pass. Names are compared as names, so the backward pass reads values under
# another name of the same size: through a view whose first axis has a name
# of its own. The zeros of its shape are a flag times zeros: of Size, inference of shapes would know
# the number, and with it the view's sizes where they are numbers. What the backward pass computes
# has names of its own, too: else the gradients of one layer would hold their memory for those of
# the next. Only what an operator may write over its input, as activations may, keeps the name of
# that input.

_LARGE = 1 << 14
"""Bytes from which on a buffer is worth a view."""


def rename_sizes(op: Ops, graph: ir.Graph, step: Step, names: SizeNames) -> None:
    """Let the backward pass read what it starts from under sizes of other names."""
    # graph: The graph; new nodes go to its end. step: It as ONNX Runtime executes it.
    forward = ancestors(graph.outputs[:1])
    reset = next((v for v in graph.inputs if v.name == RESET_NAME), None)
    if reset is None:
        return
    renamed: set[ir.Value] = set()
    views: dict[ir.Value, ir.Value] = {}
    shapes: dict[int, ir.Value] = {}
    flag = op.cast(reset, ir.DataType.INT64)  # what it is, no inference of shapes knows
    for node in list(graph):
        if node in forward:
            _own_sizes(node, step, names)
            continue
        if subgraphs(node):
            continue
        if any(value in renamed for value in reads(node)):
            renamed.update(node.outputs)
            _own_sizes(node, step, names)
            continue
        large = any(step.nbytes(value.name) >= _LARGE for value in node.outputs)
        # What it reads that is no constant, the largest first.
        source = max(
            (v for v in node.inputs if v is not None and _dims(v, step) and not v.is_initializer()),
            key=lambda value: step.nbytes(value.name),
            default=None,
        )
        if not large or source is None:
            continue
        dims = dims_of(node.outputs[0]) or ()
        sizes = [size for size in dims if isinstance(size, int)]
        if node.op_type == "Reshape" and dims and len(sizes) == len(dims):
            # Two views in a row, the second of known sizes, would be joined by ONNX Runtime 1.23 to
            # 1.30, which then cannot load the model: it loses the edge that the shape comes by.
            zeros = op.Mul(flag, op.ints(*[0] * len(sizes)))
            node.replace_input_with(1, op.Add(zeros, op.ints(*sizes)))
            node.outputs[0].shape = names.named(sizes)
            renamed.update(node.outputs)
            continue
        if source not in views:
            dims = _dims(source, step)
            if len(dims) not in shapes:
                shapes[len(dims)] = op.Mul(flag, op.ints(*[0] * len(dims)))
            view = op.Reshape(source, shapes[len(dims)])
            view.type, view.shape = source.type, names.named(dims)
            views[source] = view
        for index, value in enumerate(node.inputs):
            if value is source:
                node.replace_input_with(index, views[source])
        renamed.update(node.outputs)
        _own_sizes(node, step, names)


def _own_sizes(node: ir.Node, step: Step, names: SizeNames) -> None:
    """Give what a node computes sizes that nothing else has but what it may overwrite."""
    source = dims_of(node.inputs[0]) if node.inputs and node.inputs[0] is not None else None
    overwrites = not node.domain and node.op_type in IN_PLACE  # its result has its input's shape
    for value in node.outputs:
        dims = _dims(value, step)
        if not dims or value.is_graph_output():
            continue
        if dims_of(value) is None and all(isinstance(dim, int) for dim in dims):
            continue  # ONNX Runtime takes the name over from what it is computed from
        if overwrites and source and any(str(size).startswith(_OWN) for size in source):
            value.shape = ir.Shape(source)
        else:
            value.shape = names.another().open(dims)


def _dims(value: ir.Value, step: Step) -> tuple[int | str | None, ...]:
    """Sizes of the axes: what the graph says, or else ONNX Runtime; none where neither does."""
    known = step.graph.values.get(value.name or "")
    return dims_of(value) or (known.dims if known is not None else None) or ()
