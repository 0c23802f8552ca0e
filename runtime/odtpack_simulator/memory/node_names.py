"""What to call the nodes and values of a graph in a report.

The training and the optimizer model of a package have short names without a meaning. What a
node belongs to is found in the graph: the layer whose parameters it reads, or that of the
node nearest to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from types import MappingProxyType

from odtpack_runtime.session.graph_signature import BUFFER_SUFFIX
from odtpack_simulator.memory.runtime_graph import RuntimeGraph


class Labels:
    """Names for people: ``features.3.conv/Clip``, ``grad/features.3.conv/Mul``.

    Args:
        graph: The graph.
        parameters: Names of those inputs that are parameters.
        shown: What to call a parameter, by name, where it has a better name than its own.
        later: Start of the names of nodes that the first output does not need; in a training
            graph that is the gradient.
        gradient: Whether it computes gradients alone: all its nodes are such then.
    """

    def __init__(
        self,
        graph: RuntimeGraph,
        parameters: Collection[str] = (),
        *,
        shown: Mapping[str, str] = MappingProxyType({}),
        later: str = "",
        gradient: bool = False,
    ) -> None:
        self._fixed = {*graph.inputs, *graph.outputs}
        producers = {name: i for i, node in enumerate(graph.nodes) for name in node.outputs if name}
        neighbours = _neighbours(graph, producers)
        layers = _layers(graph, {name: shown.get(name, name) for name in parameters}, neighbours)
        self._forward = forward = graph.needed_for(() if gradient else graph.outputs[:1])
        self._nodes: list[str] = []
        self._values: dict[str, str] = {}
        for index, (node, layer) in enumerate(zip(graph.nodes, layers, strict=True)):
            stem = ("" if index in forward else later) + (f"{layer}/" if layer else "")
            self._nodes.append(stem + node.op_type)
            inner = (each for subgraph in node.subgraphs.values() for each in subgraph.walk())
            for each in (*inner, node):
                self._values.update(dict.fromkeys(each.outputs, stem + each.op_type))

    def node(self, index: int) -> str:
        """Name of a node by its place in the graph."""
        return self._nodes[index]

    def is_forward(self, index: int) -> bool:
        """Whether the first output needs a node."""
        return index in self._forward

    def value(self, name: str) -> str:
        """Name of a value: that of its producer, unless it is an input or output."""
        return name if name in self._fixed else self._values.get(name, name)


def _neighbours(graph: RuntimeGraph, producers: dict[str, int]) -> list[list[int]]:
    """For each node those that it reads from, then those that read from it."""
    before = [[producers[name] for name in node.reads if name in producers] for node in graph.nodes]
    after: list[list[int]] = [[] for _ in graph.nodes]
    for index, sources in enumerate(before):
        for source in sources:
            after[source].append(index)
    return [[*sources, *readers] for sources, readers in zip(before, after, strict=True)]


def _layers(
    graph: RuntimeGraph, parameters: Mapping[str, str], neighbours: list[list[int]]
) -> list[str]:
    """The layer of each node; empty where no parameter can be reached."""
    layers = [""] * len(graph.nodes)
    queue: deque[int] = deque()
    for index, node in enumerate(graph.nodes):
        for name in node.reads:
            parameter = name.removesuffix(BUFFER_SUFFIX)
            if parameter in parameters and not layers[index]:
                shown = parameters[parameter]
                layers[index] = shown.rpartition(".")[0] or shown
                queue.append(index)
    while queue:
        index = queue.popleft()
        for other in neighbours[index]:
            if not layers[other]:
                layers[other] = layers[index]
                queue.append(other)
    return layers
