"""The order in which a training step needs least memory: gradients of parameters at once.

ONNX Runtime comes to the gradients of parameters in the order of the model's outputs, and what one
of them is computed from waits until then: the gradients of all layers for those of the biases,
where an exporter has put biases in front of weights. Here what only the gradient of one parameter
needs is computed as soon as it can be.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection

from odtpack_simulator.memory.runtime_graph import RuntimeGraph


def gradients_at_once(graph: RuntimeGraph) -> RuntimeGraph:
    """The graph with the nodes that only one gradient needs right after what they need."""
    nodes = graph.nodes
    producer = {name: index for index, node in enumerate(nodes) for name in node.outputs if name}
    needs = [{producer[n] for n in node.reads if n in producer} for node in nodes]
    owner = _owners(graph, needs)
    parts: dict[int, list[int]] = defaultdict(list)
    missing: dict[int, set[int]] = defaultdict(set)
    for index, own in enumerate(owner):
        if own is not None:
            parts[own].append(index)
            missing[own].update(each for each in needs[index] if owner[each] != own)
    waiting: dict[int, list[int]] = defaultdict(list)
    for own, sources in missing.items():
        for source in sources:
            waiting[source].append(own)
    order: list[int] = [index for own in parts if not missing[own] for index in parts[own]]

    def ran(index: int) -> None:
        order.append(index)
        for own in waiting[index]:
            missing[own].discard(index)
            if not missing[own]:
                for each in parts[own]:
                    ran(each)

    for index, own in enumerate(owner):
        if own is None:
            ran(index)
    return dataclasses.replace(graph, nodes=tuple(nodes[index] for index in order))


def weights_late(graph: RuntimeGraph, parameters: Collection[str]) -> RuntimeGraph:
    """The graph with the nodes that only need parameters right before what reads them."""
    # ONNX Runtime computes them as soon as it can: the weights of all layers in the form that a
    # product takes, long before the last layers run.
    # graph: The graph in the order of execution. parameters: Names of those of its inputs that are
    # parameters.
    known = {*parameters, *graph.initializers, ""}
    nodes = graph.nodes
    early: dict[str, int] = {}
    for index, node in enumerate(nodes):
        if not node.subgraphs and all(name in known for name in node.reads):
            known.update(node.outputs)
            early.update(dict.fromkeys(node.outputs, index))
    placed: dict[int, None] = {}
    waiting = set(early.values())
    late = [index for index in range(len(nodes)) if index not in waiting]
    for index in (*late, *sorted(waiting)):  # at the end what nothing else reads
        stack = [index]
        while stack:
            needs = [early[name] for name in nodes[stack[-1]].reads if name in early]
            missing = [each for each in needs if each not in placed]
            if missing:
                stack += reversed(missing)
            else:
                placed[stack.pop()] = None
    return dataclasses.replace(graph, nodes=tuple(nodes[index] for index in placed))


def _owners(graph: RuntimeGraph, needs: list[set[int]]) -> list[int | None]:
    """For each node the last node of the one gradient that needs it; None if several things do."""
    loss = set(graph.outputs[:1])
    readers: list[set[int]] = [set() for _ in graph.nodes]
    for index, sources in enumerate(needs):
        for source in sources:
            readers[source].add(index)
    owner: list[int | None] = [None] * len(needs)
    for index in range(len(needs) - 1, -1, -1):
        if not readers[index]:
            is_gradient = loss.isdisjoint(graph.nodes[index].outputs)
            owner[index] = index if is_gradient else None
            continue
        owners = {owner[reader] for reader in readers[index]}
        is_output = not set(graph.nodes[index].outputs).isdisjoint(graph.outputs)
        owner[index] = owners.pop() if len(owners) == 1 and not is_output else None
    return owner
