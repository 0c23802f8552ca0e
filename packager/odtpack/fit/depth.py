"""Which parameters lie near the input and which near the head, and how to freeze the former.

A layer begins at every node that reads a trained matrix or filter. The depth of a node is the
largest number of such nodes on a way from the model's inputs to it, itself included, so that
branches side by side are one layer. A parameter lies at the depth of the first node that reads
it; vectors (biases, scales of normalizations) begin no layer and belong to the one before them.
"""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase

import onnx_ir as ir

from odtpack.graph.graphs import reads
from odtpack.model.exporters import module_names
from odtpack.package.parameters import candidates, is_weight

_MATRIX_RANK = 2

MOST_FREEZES = 4
"""Depths that are tried, with that of freezing nothing."""


@dataclasses.dataclass(frozen=True)
class Freeze:
    """A choice of what to freeze besides what the recipe freezes.

    Attributes:
        title: What it freezes, for people.
        patterns: For ``freeze`` in a recipe; empty for nothing more.
        names: Parameters that are still trained.
        trained: Number of their elements.
        storable: Whether a frozen weight is large enough for another storage.
    """

    title: str
    patterns: tuple[str, ...]
    names: tuple[str, ...]
    trained: int
    storable: bool


def layers(model: ir.Model, names: Collection[str]) -> list[tuple[str, ...]]:
    """The parameters by layer, that nearest to the inputs first.

    Args:
        model: As :func:`odtpack.model.loading.load_model` returns it.
        names: Names of the parameters to order, all of them initializers.
    """
    graph = model.graph
    wanted = {graph.initializers[name] for name in names}
    constants = set(graph.initializers.values())
    # What a value is computed of if no data enter it: a weight may be transposed before use.
    carried: dict[ir.Value, frozenset[ir.Value]] = {
        value: frozenset({value} if value in wanted else ()) for value in constants
    }
    depth: dict[ir.Value, int] = dict.fromkeys(
        (value for value in graph.inputs if value not in constants), 0
    )
    found: dict[ir.Value, int] = {}
    for node in graph:
        operands = list(reads(node))
        parameters = frozenset().union(*(carried.get(value, ()) for value in operands))
        if not any(value in depth for value in operands):
            carried.update(dict.fromkeys(node.outputs, parameters))
            continue
        begins = any(_rank(value) >= _MATRIX_RANK for value in parameters)
        here = max(depth.get(value, 0) for value in operands) + begins
        depth.update(dict.fromkeys(node.outputs, here))
        for value in parameters:
            found[value] = min(here, found.get(value, here))
    # A vector in front of the first matrix, such as a normalization of the input.
    levels = [(max(1, found.get(value, 1)), value) for value in graph.initializers.values()]
    return [
        tuple(str(value.name) for at, value in levels if at == level and value in wanted)
        for level in sorted({at for at, value in levels if value in wanted})
    ]


def _rank(value: ir.Value) -> int:
    return 0 if value.shape is None else value.shape.rank()


def freezes(model: ir.Model, trained: Sequence[str], frozen: Sequence[str]) -> list[Freeze]:
    """Nothing, the first layers in a few steps, and all but the last.

    Args:
        model: As :func:`odtpack.model.loading.load_model` returns it.
        trained: Parameters that the recipe trains and that may be frozen.
        frozen: Parameters that it freezes.
    """
    found = layers(model, trained)
    count = len(found)
    steps = sorted({0, *(round((count - 1) * i / (MOST_FREEZES - 1)) for i in range(MOST_FREEZES))})
    choices = []
    for step in steps if count > 1 else [0]:
        chosen = [name for layer in found[:step] for name in layer]
        rest = [name for layer in found[step:] for name in layer]
        values = (model.graph.initializers[name] for name in (*chosen, *frozen))
        choices.append(
            Freeze(
                _title(step, count),
                patterns(model, chosen),
                tuple(rest),
                sum(_size(model.graph.initializers[name]) for name in rest),
                any(is_weight(value) for value in values),
            )
        )
    return choices


def _title(step: int, count: int) -> str:
    if step == 0:
        return "nothing"
    return "all but the head" if step == count - 1 else f"first {step} of {count} layers"


def _size(value: ir.Value) -> int:
    return 0 if value.const_value is None else value.const_value.size


def patterns(model: ir.Model, chosen: Iterable[str]) -> tuple[str, ...]:
    """The shortest list of patterns that match these parameters and no other one.

    A module of which all is chosen becomes ``module.*``, in the names of the module that the
    model was exported from.
    """
    original = module_names(model.graph)
    wanted = set(chosen)
    names = candidates(model)
    found: list[str] = []
    for name in (name for name in names if name in wanted):
        shown = original.get(name, name)
        if any(fnmatchcase(name, each) or fnmatchcase(shown, each) for each in found):
            continue
        parts = shown.split(".")
        prefixes = (".".join(parts[:count]) for count in range(1, len(parts)))
        globs = (f"{glob.escape(prefix)}.*" for prefix in prefixes)
        fitting = (each for each in globs if _matched(each, names, original) <= wanted)
        found.append(next(fitting, glob.escape(shown)))
    return tuple(found)


def _matched(pattern: str, names: Sequence[str], original: dict[str, str]) -> set[str]:
    return {
        name
        for name in names
        if fnmatchcase(name, pattern) or fnmatchcase(original.get(name, name), pattern)
    }
