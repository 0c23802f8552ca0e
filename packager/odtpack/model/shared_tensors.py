"""Tensors that several places of a model read, and that therefore train as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import onnx_ir as ir

from odtpack.errors import UnknownNameError
from odtpack.graph.dtypes import TRAINABLE_TYPES
from odtpack.graph.graphs import Names, used_names
from odtpack.model.exported_parameters import ExportedParameters
from odtpack.model.exporters import matching, module_names
from odtpack.model.split_merged import Use, separate, separated_from


@dataclasses.dataclass(frozen=True)
class SharedTensor:
    """A tensor that is read in several places.

    Attributes:
        name: The initializer.
        places: Who reads it: names of nodes, or what they compute.
        one_parameter: Whether the exporter noted that it is one parameter of the module.
    """

    name: str
    places: tuple[str, ...]
    one_parameter: bool

    def sentence(self) -> str:
        """What ``build`` says of it."""
        shown = ", ".join(self.places[:3]) + (", ..." if self.places[3:] else "")
        return (
            f"{self.name} is read in {len(self.places)} places ({shown}) and trains as one "
            f"tensor; --untie {self.name!r} gives each place its own"
        )


def shared_tensors(graph: ir.Graph, names: Iterable[str]) -> list[SharedTensor]:
    """Those of some initializers that several nodes read.

    Args:
        graph: Graph of a loaded model.
        names: The initializers to look at, in the order of the result.
    """
    parameters = ExportedParameters(graph)
    found = []
    for name in names:
        value = graph.initializers[name]
        nodes = {id(node): node for node, _ in value.uses()}
        if len(nodes) > 1:
            labels = {_label(parameters, use) for use in value.uses()}
            places = tuple(_place(node) for node in nodes.values())
            found.append(SharedTensor(name, places, len(labels) == 1 and None not in labels))
    return found


def untie(graph: ir.Graph, patterns: Sequence[str]) -> None:
    """Give each place that reads a shared tensor its own copy.

    Places that the exporter noted as one parameter of the module stay together, unless all do.

    Args:
        graph: Graph of a loaded model; changed in place.
        patterns: Of the names of the initializers, as ``--train`` takes them.

    Raises:
        UnknownNameError: A pattern matches no tensor that is shared (``unknown-parameter``).
    """
    if not patterns:
        return
    parameters, original = ExportedParameters(graph), module_names(graph)
    names = Names(used_names(graph))
    candidates = [n for n, v in graph.initializers.items() if v.dtype in TRAINABLE_TYPES]
    shared = [each.name for each in shared_tensors(graph, candidates)]
    for pattern in patterns:
        hits = matching(pattern, candidates, original)
        if not any(name in shared or _was_merged(graph, name) for name in hits):
            known = ", ".join(map(repr, shared[:4])) + (", ..." if shared[4:] else "")
            raise UnknownNameError(
                "unknown-parameter",
                f"--untie {pattern!r} matches no tensor that several places of the model read",
                hint=f"those are {known}; odtpack inspect MODEL.onnx lists them"
                if shared
                else "the model has none: leave it out",
            )
    for name in shared:
        if any(matching(pattern, [name], original) for pattern in patterns):
            _separate_places(graph, graph.initializers[name], parameters, names)


def copies_of(graph: ir.Graph, names: Sequence[str]) -> tuple[str, ...]:
    """Some initializers, and those that were one with them in the file.

    Args:
        graph: Graph of a loaded model.
        names: Names as they are in the file. What was separated stands after its origin,
            unless it is named, too.
    """
    separated: dict[str, list[str]] = {}
    for name, value in graph.initializers.items():
        if separated_from(value) != name:
            separated.setdefault(separated_from(value), []).append(name)
    return tuple(dict.fromkeys(n for name in names for n in (name, *separated.get(name, ()))))


def _was_merged(graph: ir.Graph, name: str) -> bool:
    """Whether a tensor was stored together with another, which loading separated already."""
    origin = separated_from(graph.initializers[name])
    return origin != name or len(copies_of(graph, [name])) > 1


def _separate_places(
    graph: ir.Graph, value: ir.Value, parameters: ExportedParameters, names: Names
) -> None:
    groups: dict[object, list[Use]] = {}
    for use in value.uses():
        groups.setdefault(_label(parameters, use) or id(use[0]), []).append(use)
    if len(groups) == 1:
        groups = {id(use[0]): [use] for use in value.uses()}
    groups.pop(value.name if value.name in groups else next(iter(groups)))
    for label, places in groups.items():
        separate(
            graph, value, places, names.fresh(label if isinstance(label, str) else str(value.name))
        )


def _label(parameters: ExportedParameters, use: Use) -> str | None:
    """The parameter of the module that a place reads, if need be through a transposition."""
    node, _ = use
    if node.op_type not in ("Identity", "Transpose"):
        return parameters.read(*use)
    labels = {parameters.read(*reader) for reader in node.outputs[0].uses()}
    return labels.pop() if len(labels) == 1 else None


def _place(node: ir.Node) -> str:
    if node.op_type in ("Identity", "Transpose") and (readers := node.outputs[0].consumers()):
        node = readers[0]
    return node.name or f"{node.op_type} of {node.outputs[0].name}"
