"""A training step in which some values of the forward pass are computed again.

What is not kept is computed once more, right before the first node of the backward pass that
needs it, from what is kept or computed again itself, and stays until the last such node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from typing import Final

import onnx_ir as ir

from odtpack.graph.graphs import RANDOM_OPERATORS, ancestors, dims_of
from odtpack_runtime.session.graph_signature import RESET_NAME, UPDATE_SUFFIX
from odtpack_simulator.memory.arena import Allocation, Known, allocate
from odtpack_simulator.memory.kernel_memory import ALIASES
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
MEMORY_BANDWIDTH: Final = 20e9
"""Bytes a second where tensors come from memory, and from no cache."""
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
    work = operator_work(node.op_type, inputs, outputs)
    elements = max((tensor.size for tensor in (*inputs, *outputs)), default=0)
    return _NODE_SECONDS + max(
        Roof(_rate(node), bandwidth).seconds(work),
        elements * _NANOSECONDS.get(node.op_type, 0.0) * 1e-9,
    )


def _rate(node: Node) -> float:
    """Operations per second; convolutions by groups, depthwise ones above all, are no products."""
    if node.op_type not in _CONVOLUTIONS:
        return _FLOPS
    return _CONVOLUTION_FLOPS if node.attributes.get("group", 1) == 1 else _GROUPED_FLOPS


AGAIN: Final = "~again"
"""What the name of a value that is computed again ends in, in a timeline."""

EDGE_NODES: Final = 3
"""Nodes that it takes to hold back what is computed again."""

OPTIONAL_OUTPUTS = {"BatchNormalization", "LayerNormalization", "MaxPool"}
"""Operators that run again whose outputs beyond the first may be left out."""


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A step as it would be executed."""

    nodes: tuple[Node, ...]  # in order, those that compute again among them
    # For each node that computes again, by place, the place of the node of the backward pass in
    # front of which it stands.
    triggers: Mapping[int, int]
    allocation: Allocation  # its buffers
    extra_nodes: int  # nodes that it has more than the step as it was

    @cached_property
    def uses(self) -> list[int]:
        """Bytes of activations during each node, with what the added nodes take throughout."""
        added = self.extra_nodes * BYTES_PER_NODE
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

    def timeline(self, again: Collection[str] = ()) -> Timeline:
        """The step with these values computed again for the backward pass."""
        nodes: list[Node] = []
        triggers: dict[int, int] = {}
        made: set[int] = set()
        groups: list[tuple[int, int]] = []
        later = self._read_later(again) if again else set()
        for index, node in enumerate(self.graph.nodes):
            if index in self.forward or not again:
                nodes.append(node)
                continue
            wanted = self._to_repeat([n for n in node.reads if n in again], again, made)
            start = len(nodes)
            nodes += [self._copy(each, again, later) for each in wanted]
            made.update(wanted)
            groups.append((start, len(nodes)))
            nodes.append(self._redirected(node, again))
        for start, end in groups:
            triggers.update(dict.fromkeys(range(start, end), end))
        values = dict(self.graph.values)
        for each in made:
            for name in self.graph.nodes[each].outputs:
                if name:
                    values[name + AGAIN] = dataclasses.replace(values[name], dims=None)
        graph = dataclasses.replace(self.graph, nodes=tuple(nodes), values=values)
        allocation = allocate(graph, conditions={RESET_NAME: True}, known=self._known)
        edges = sum(1 for start, end in groups if end > start)
        return Timeline(graph.nodes, triggers, allocation, len(triggers) + EDGE_NODES * edges)

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
