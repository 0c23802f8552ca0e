"""The forward model without its parameters, to which a device appends those it has trained.

Protobuf merges messages that stand one after the other. A runtime in any language writes a
trained model by copying these bytes and appending the parameters as initializers, without a
library for ONNX or protobuf: see docs/formats/package.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import onnx_ir as ir

from odtpack.graph.graphs import nodes_of, subgraphs


@dataclasses.dataclass(frozen=True)
class InferenceTemplate:
    """The model, the names of its inputs and outputs, and of the parameters that it lacks."""

    model: ir.Model
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[str, ...]


def select(
    graph: ir.Graph, wanted: Sequence[str], loss: str | None, targets: Collection[str]
) -> list[str]:
    """Return the names of the values that inference gives: what neither is the loss nor reads it.

    Args:
        graph: The forward graph.
        wanted: Names of its outputs, and of further values.
        loss: Name of the value that is the loss, if the graph computes it.
        targets: Names of inputs and values that exist for the loss only.
    """
    values = {value.name: value for node in graph for value in node.outputs}
    found = []
    for name in dict.fromkeys(wanted):
        read = _read_by(values[name]) if name in values else set()
        if name != loss and read and not read & ({loss} | set(targets)):
            found.append(name)
    return found


def detach(
    graph: ir.Graph, outputs: Sequence[str], parameters: Collection[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Leave the named outputs, the inputs that they need, and no value of any parameter.

    Returns:
        Names of the inputs and of the parameters that are left.
    """
    values = {value.name: value for node in graph for value in node.outputs}
    graph.outputs[:] = [values[name] for name in outputs]
    needed = set().union(*(_read_by(value) for value in graph.outputs))
    for value in list(graph.inputs):
        if value.name not in needed:
            graph.inputs.remove(value)
    used = []
    for name in list(graph.initializers):
        if name in parameters:
            graph.initializers.pop(name).const_value = None
            used += [name] if name in needed else []
    graph.inputs[:] = [value for value in graph.inputs if value.name not in used]
    return tuple(value.name or "" for value in graph.inputs), tuple(used)


def _read_by(value: ir.Value) -> set[str | None]:
    """Names of every value that one is computed from, itself included."""
    found: set[str | None] = set()
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if value.name in found:
            continue
        found.add(value.name)
        node = value.producer()
        if node is None:
            continue
        inner = (each for subgraph in subgraphs(node) for each in nodes_of(subgraph))
        for reader in (node, *inner):
            waiting += [operand for operand in reader.inputs if operand is not None]
        for subgraph in subgraphs(node):
            waiting.extend(subgraph.outputs)
    return found
