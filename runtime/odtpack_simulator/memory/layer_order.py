"""Which trained parameters lie near the input, and a training model that leaves some of them out.

A layer begins at every trained matrix or filter, in the order in which data first meet them;
vectors (biases, scales of normalizations) belong to the layer before them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import onnx

from odtpack_runtime.package.manifest import Manifest, ParameterInfo
from odtpack_runtime.session.graph_signature import BUFFER_SUFFIX, GRADIENT_SUFFIX
from odtpack_simulator.memory.execution_order import reads

_MATRIX_RANK = 2

Layer = tuple[ParameterInfo, ...]


def trained_layers(graph: onnx.GraphProto, manifest: Manifest) -> list[Layer]:
    """The trained parameters by layer, that nearest to the input first.

    Args:
        graph: That of the training model, sorted.
        manifest: Names and shapes of the parameters, and the names of the inputs.
    """
    trained = {p.name: p for p in manifest.parameters if p.role == "trainable"}
    data = {item.name for item in manifest.inputs}
    carried: dict[str, list[str]] = {name: [name] for name in trained}
    met: dict[str, None] = {}
    for node in graph.node:
        names = list(reads(node))
        parameters = list(dict.fromkeys(each for name in names for each in carried.get(name, ())))
        if data.isdisjoint(names):  # a weight may be transposed before it meets the data
            carried.update(dict.fromkeys(node.output, parameters))
            continue
        data.update(node.output)
        met.update(dict.fromkeys(parameters))
    ordered = [trained[name] for name in (*met, *(name for name in trained if name not in met))]
    layers: list[list[ParameterInfo]] = []
    for parameter in ordered:
        if not layers or (
            len(parameter.shape) >= _MATRIX_RANK
            and any(len(each.shape) >= _MATRIX_RANK for each in layers[-1])
        ):
            layers.append([])
        layers[-1].append(parameter)
    return [tuple(layer) for layer in layers]


def drop_gradients(graph: onnx.GraphProto, names: Collection[str]) -> None:
    """Take the gradients of some parameters out of a training model, and what only they need."""
    dropped = {name + suffix for name in names for suffix in (GRADIENT_SUFFIX, BUFFER_SUFFIX)}
    _keep(graph.output, [value for value in graph.output if value.name not in dropped])
    _keep(graph.input, [value for value in graph.input if value.name not in dropped])
    needed = {value.name for value in graph.output}
    kept: list[onnx.NodeProto] = []
    for node in reversed(graph.node):
        if not needed.isdisjoint(node.output):
            kept.append(node)
            needed.update(reads(node))
    _keep(graph.node, kept[::-1])
    _keep(graph.initializer, [each for each in graph.initializer if each.name in needed])


def _keep(field: object, items: Iterable[object]) -> None:
    """Let a repeated field hold these of its items."""
    copies = list(items)
    del field[:]  # type: ignore[attr-defined]
    field.extend(copies)  # type: ignore[attr-defined]
