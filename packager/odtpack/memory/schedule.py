"""Puts the nodes of a training model into an order that makes ONNX Runtime execute them as planned.

ONNX Runtime walks depth first from the nodes whose outputs nothing reads, the last in the file
first, to what they need, the last in the file first. So the file is written from its end: of the
nodes whose readers are all placed, the one that is executed first comes last.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir

from odtpack.graph.graphs import reads
from odtpack.memory.timeline import Timeline


class Schedule:
    """An order for the nodes of a training model.

    Args:
        graph: Its graph.
        places: When each value is computed, by name; of a value without a place, as soon as what
            it is computed from exists.
    """

    def __init__(self, graph: ir.Graph, places: Mapping[str, float]) -> None:
        self._graph = graph
        self._places = places

    @classmethod
    def of(
        cls,
        graph: ir.Graph,
        timeline: Timeline,
        renamed: Mapping[str, str],
        at_once: Collection[str] = (),
    ) -> Schedule:
        """The order of a timeline.

        Args:
            graph: The graph.
            timeline: The planned order.
            renamed: Names that the graph has for those of the timeline that differ.
            at_once: Names of values that the loss needs and that are computed as soon as they can
                be instead.
        """
        places = {
            renamed.get(name, name): float(index)
            for index, node in enumerate(timeline.nodes)
            for name in node.outputs
            if name and name not in at_once
        }
        if at_once:
            places[str(graph.outputs[0].name)] = 0.0  # all that the loss needs comes first
        return cls(graph, places)

    def arrange(self) -> None:
        """Sort the nodes of the graph."""
        nodes = list(self._graph)
        producers = {value: i for i, node in enumerate(nodes) for value in node.outputs}
        needs = [{producers[v] for v in reads(node) if v in producers} for node in nodes]
        order = _from_the_end(needs, self._keys(nodes, needs))
        self._graph.remove(nodes)
        self._graph.extend(nodes[index] for index in order)

    def _keys(self, nodes: Sequence[ir.Node], needs: Sequence[set[int]]) -> list[float]:
        """When each node runs.

        What the runtime makes a part of another comes right after what it needs, and what needs
        nothing with what reads it.
        """
        keys = [
            min(
                (self._places[v.name] for v in node.outputs if v.name and v.name in self._places),
                default=-1.0,
            )
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
        return keys


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
