"""A training step in time: when values live, and an order of nodes that ONNX Runtime executes.

What is not kept is computed once more, right before the first node of the backward pass that
needs it, from what is kept or computed again itself, and stays until the last such node.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Final

import onnx_ir as ir

from odtpack.graph.graphs import RANDOM_OPERATORS, Dims, Ops, ancestors, dims_of, reads, subgraphs
from odtpack_runtime.session.graph_signature import RESET_NAME, UPDATE_SUFFIX
from odtpack_simulator.memory.allocation import Allocation, Known, allocate
from odtpack_simulator.memory.kernel_memory import ALIASES, IN_PLACE
from odtpack_simulator.memory.operator_work import SMALL, Roof, Tensor, operator_work
from odtpack_simulator.memory.runtime_graph import Node, RuntimeGraph, Value
from odtpack_simulator.memory.session_memory import BYTES_PER_NODE


def named_values(graph: ir.Graph) -> dict[str, ir.Value]:
    """What the nodes of a graph compute, by name."""
    return {v.name: v for node in graph for v in node.outputs if v.name}


def nameable(graph: ir.Graph) -> frozenset[str]:
    """Values of a graph that a control edge can be put on: those of a known rank."""
    return frozenset(n for n, v in named_values(graph).items() if dims_of(v) is not None)


def take_ranks(graph: ir.Graph, executed: RuntimeGraph) -> None:
    """Give values of the forward pass whose rank is unknown the one that ONNX Runtime infers."""
    # With the sizes that are the same for every batch.
    for node in ancestors(graph.outputs[:1]):
        for value in node.outputs:
            known = executed.values.get(value.name or "")
            if value.shape is None and known is not None and known.dims is not None:
                value.shape = ir.Shape(d if isinstance(d, int) else None for d in known.dims)


# How long an operator takes, to weigh what is computed again against what is kept.
#
# Only ratios count: which of two tensors is cheaper to compute, and which part of a step that is.
# The rates are those of one core of an x86-64 server with AVX-512 running ONNX Runtime; the sums
# over the benchmarks' transformer, ViT and MobileNetV2 are within 20 % of its profiles. A core of a
# phone is two to four times slower in all of them alike. A tensor of a step is read from a cache
# more often than from memory.

_FLOPS: Final = 100e9
_CONVOLUTION_FLOPS: Final = 60e9
_GROUPED_FLOPS: Final = 5e9
_BANDWIDTH: Final = 50e9
MEMORY_BANDWIDTH: Final = 20e9  # bytes a second where tensors come from memory, and from no cache
_NODE_SECONDS: Final = 2e-6
_CONVOLUTIONS: Final = {"Conv", "ConvTranspose", "FusedConv"}

_NANOSECONDS: Final = {
    "BiasGelu": 0.8, "Erf": 0.5, "Exp": 0.4, "FastGelu": 0.8, "Gelu": 0.8,
    "LayerNormalization": 0.5, "Log": 0.5, "LogSoftmax": 0.5, "Pow": 1.0, "QuickGelu": 0.8,
    "ReduceSum": 0.3, "ScatterElements": 3.0, "Sigmoid": 0.4, "Softmax": 0.5, "Sqrt": 0.4,
    "Tanh": 0.4, "Transpose": 0.4, "Where": 0.5,
}  # fmt: skip
"""Nanoseconds an element of the largest tensor, of operators that arithmetic or scattered
accesses make slower than their traffic."""


def node_seconds(node: Node, values: Mapping[str, Value], bandwidth: float = _BANDWIDTH) -> float:
    """Estimated time of one run of a node: of its first branch, or of one turn of its body."""
    # values: Every value that it and its subgraphs may name. bandwidth: Bytes a second that are
    # read and written.
    if node.subgraphs:
        body = next(iter(node.subgraphs.values()))
        inner = {**values, **body.values}
        return 5 * _NODE_SECONDS + sum(node_seconds(each, inner, bandwidth) for each in body.nodes)
    if node.op_type in SMALL:
        return _NODE_SECONDS
    inputs, outputs = (
        [
            Tensor(values[name].shape or (), values[name].itemsize)
            for name in names
            if name and name in values
        ]
        for names in (node.inputs, node.outputs)
    )
    work, rate = operator_work(node.op_type, inputs, outputs), _FLOPS
    if node.op_type in _CONVOLUTIONS:  # grouped ones are slow, depthwise above all
        rate = _CONVOLUTION_FLOPS if node.attributes.get("group", 1) == 1 else _GROUPED_FLOPS
    elements = max((tensor.size for tensor in (*inputs, *outputs)), default=0)
    return _NODE_SECONDS + max(
        Roof(rate, bandwidth).seconds(work), elements * _NANOSECONDS.get(node.op_type, 0.0) * 1e-9
    )


AGAIN: Final = "~again"  # what the name of a value that is computed again ends in, in a timeline
EDGE_NODES: Final = 3  # nodes that it takes to hold back what is computed again
OPTIONAL_OUTPUTS = {"BatchNormalization", "LayerNormalization", "MaxPool"}
"""Operators that run again whose outputs beyond the first may be left out."""


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A step as it would be executed."""

    again: frozenset[str]  # names of the values that are computed again
    nodes: tuple[Node, ...]  # in order, those that compute again among them
    # For each node that computes again, by place, the place of the node of the backward pass in
    # front of which it stands.
    triggers: Mapping[int, int]
    allocation: Allocation  # its buffers

    @cached_property
    def uses(self) -> list[int]:
        """Bytes of activations during each node, with what the added nodes take throughout."""
        edges = len({*self.triggers.values()})
        added = (len(self.triggers) + EDGE_NODES * edges) * BYTES_PER_NODE
        return [use.total + added for use in self.allocation.uses]

    @cached_property
    def peak(self) -> int:
        """The most of them."""
        return max(self.uses, default=0)


class Step:
    """A training step as ONNX Runtime executes it."""

    def __init__(self, graph: RuntimeGraph) -> None:
        self.graph = graph
        # Place of the node that computes a value.
        self.producer = {
            name: index for index, node in enumerate(graph.nodes) for name in node.outputs if name
        }
        # Places of the nodes that the loss needs.
        self.forward = graph.needed_for(graph.outputs[:1])
        # Estimated time of each node.
        self.seconds = [node_seconds(node, graph.values) for node in graph.nodes]
        # What a step itself overwrites is copied before: the copy is that of the beginning.
        self._carried = {n for n in graph.inputs if n + UPDATE_SUFFIX in graph.outputs}
        self._known: Known = {}
        self._root: dict[str, str] = {}
        for node in graph.nodes:
            if node.op_type in ALIASES and node.domain in ("", "ai.onnx"):
                self._root[node.outputs[0]] = self.root(node.inputs[0])

    def root(self, name: str) -> str:
        """The value whose memory this one is a view of; itself if it has its own."""
        return self._root.get(name, name)

    def nbytes(self, name: str | None) -> int:
        """Its size; 0 where it depends on data, or is not known."""
        known = self.graph.values.get(name or "")
        return 0 if known is None else known.nbytes or 0

    def can_repeat(self, index: int) -> bool:
        """Whether a node of the forward pass gives the same when it runs again."""
        node = self.graph.nodes[index]
        fixed = node.subgraphs or node.op_type in RANDOM_OPERATORS
        return index in self.forward and not fixed and self._carried.isdisjoint(node.inputs)

    def time(self, again: Collection[str]) -> float:
        """Estimated seconds of computing some values again, each node once."""
        places = {self.producer[name] for name in again}
        return sum(self.seconds[place] for place in sorted(places))

    def timeline(self, again: frozenset[str] = frozenset()) -> Timeline:
        """The step with these values computed again for the backward pass."""
        nodes: list[Node] = []
        triggers: dict[int, int] = {}
        made: set[int] = set()
        later = self._read_later(again) if again else set()
        for index, node in enumerate(self.graph.nodes):
            if index in self.forward or not again:
                nodes.append(node)
                continue
            wanted = self._to_repeat([n for n in node.reads if n in again], again, made)
            start = len(nodes)
            nodes += [self._copy(each, again, later) for each in wanted]
            made.update(wanted)
            triggers |= dict.fromkeys(range(start, len(nodes)), len(nodes))
            nodes.append(self._redirected(node, again))
        values = dict(self.graph.values)
        for each in made:
            for name in self.graph.nodes[each].outputs:
                if name:
                    values[name + AGAIN] = dataclasses.replace(values[name], dims=None)
        graph = dataclasses.replace(self.graph, nodes=tuple(nodes), values=values)
        allocation = allocate(graph, conditions={RESET_NAME: True}, known=self._known)
        return Timeline(again, graph.nodes, triggers, allocation)

    def _read_later(self, again: Collection[str]) -> set[str]:
        """Values among these that a node of the backward pass or one that runs again reads."""
        found = {
            name
            for index, node in enumerate(self.graph.nodes)
            if index not in self.forward
            for name in node.reads
            if name in again
        }
        for name in again:
            found.update(n for n in self.graph.nodes[self.producer[name]].inputs if n in again)
        return found

    def _to_repeat(
        self, names: Iterable[str], again: Collection[str], made: Collection[int]
    ) -> list[int]:
        """Places of the nodes that must run again for some values, in order."""
        found: set[int] = set()
        stack = [self.producer[name] for name in names]
        while stack:
            index = stack.pop()
            if index not in found and index not in made:
                found.add(index)
                inputs = self.graph.nodes[index].inputs
                stack += [self.producer[name] for name in inputs if name in again]
        return sorted(found)

    def _copy(self, index: int, again: Collection[str], later: Collection[str]) -> Node:
        node = self._redirected(self.graph.nodes[index], again)
        optional = node.op_type in OPTIONAL_OUTPUTS
        outputs = [
            "" if not name or (optional and name not in later) else name + AGAIN
            for name in node.outputs
        ]
        return dataclasses.replace(node, name=node.name + AGAIN, outputs=tuple(outputs))

    def _redirected(self, node: Node, again: Collection[str]) -> Node:
        if not any(name in again for name in node.reads):
            return node
        inputs = tuple(name + AGAIN if name in again else name for name in node.inputs)
        implicit = tuple(name + AGAIN if name in again else name for name in node.implicit)
        return dataclasses.replace(node, inputs=inputs, implicit=implicit)


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
    """Views of values that exist once another one does."""

    # op: Writer for the graph, which puts nodes where they may stand. number: Writes a whole number
    # that is computed from the other value; its last reader may well be this edge. sizes: Names the
    # first axis of the views.

    def __init__(self, op: Ops, number: Callable[[], ir.Value], sizes: SizeNames) -> None:
        self._op, self._number, self._sizes = op, number, sizes
        self._views: dict[ir.Value, ir.Value] = {}
        self._shapes: dict[int, ir.Value] = {}

    def view(self, value: ir.Value, dims: Dims | None) -> ir.Value:
        """The value, of these dimensions, once the other exists; itself if its rank is unknown."""
        if dims is None:
            return value
        if value not in self._views:
            rank = len(dims)
            if rank not in self._shapes:
                self._shapes[rank] = self._op.Mul(self._number(), self._op.ints(*[0] * rank))
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

_LARGE = 1 << 14  # bytes from which on a buffer is worth a view


def rename_sizes(op: Ops, graph: ir.Graph, step: Step, names: SizeNames) -> None:
    """Let the backward pass read what it starts from under sizes of other names."""
    # graph: The graph; new nodes go to its end. step: It as ONNX Runtime executes it.
    forward = ancestors(graph.outputs[:1])
    reset = next((v for v in graph.inputs if v.name == RESET_NAME), None)
    if reset is None:
        return
    renamed: set[ir.Value] = set()
    flag = op.cast(reset, ir.DataType.INT64)  # what it is, no inference of shapes knows
    edge = ControlEdge(op, lambda: flag, names)
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
        view = edge.view(source, _dims(source, step))
        for index, value in enumerate(node.inputs):
            if value is source:
                node.replace_input_with(index, view)
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


def _dims(value: ir.Value, step: Step) -> Dims:
    """Sizes of the axes: what the graph says, or else ONNX Runtime; none where neither does."""
    known = step.graph.values.get(value.name or "")
    return dims_of(value) or (known.dims if known is not None else None) or ()
