"""A training step in which some values of the forward pass are computed again.

What is not kept is computed once more, right before the first node of the backward pass that
needs it, from what is kept or computed again itself, and stays until the last such node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from typing import Final

from odtpack.graph.graphs import RANDOM_OPERATORS
from odtpack.memory import costs
from odtpack_runtime.session.graph_signature import RESET_NAME, UPDATE_SUFFIX
from odtpack_simulator.memory.arena import Allocation, Known, allocate
from odtpack_simulator.memory.kernel_memory import ALIASES
from odtpack_simulator.memory.runtime_graph import Node, RuntimeGraph
from odtpack_simulator.memory.session_memory import BYTES_PER_NODE

AGAIN: Final = "~again"
"""What the name of a value that is computed again ends in, in a timeline."""

EDGE_NODES: Final = 3
"""Nodes that it takes to hold back what is computed again, see :mod:`.control_edge`."""

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
        self.seconds = [costs.node_seconds(node, graph.values) for node in graph.nodes]
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

    def nbytes(self, name: str) -> int:
        """Its size; 0 where it depends on data."""
        return self.graph.values[name].nbytes or 0

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
