"""Writes a recipe for a model: what must be said is said, the rest stands there as comments."""

from __future__ import annotations

import glob
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import onnx_ir as ir

from odtpack import choices
from odtpack.adapters.layers import find_layers
from odtpack.graph.graphs import dims_of
from odtpack.model.exporters import known_names
from odtpack.model.loading import load_model
from odtpack.ort.kernel_needs import oldest_runtime
from odtpack.package.candidates import candidates
from odtpack.recipe.schema import json_schema
from odtpack_simulator.values.text import toml_value
from odtpack_simulator.values.units import format_bytes

SCHEMA_NAME: Final = "recipe.schema.json"
_MOST_LINES: Final = 40
_USUAL_TARGET: Final = (1, 20)

_TEMPLATE: Final = Path(__file__).with_name("recipe.toml.in")
_HEAD: Final = """
# [head]                     # classes for an encoder that has none
# pool = "mean"              # over its tokens; or: cls, the first of them
# classes = 10
"""
_TOKENS_AND_WIDTH: Final = 3  # dimensions of what an encoder returns: batch, tokens, width


def draft(model: Path, folder: Path) -> str:
    """The text of a recipe that builds as it is."""
    loaded = load_model(model)
    names = candidates(loaded)
    modules = _modules(loaded, names)
    pattern = toml_value(next(iter(_modules(loaded, _nearest(loaded.graph, names))), "*"))
    layers = find_layers(loaded.graph)
    on = toml_value(glob.escape(layers[-1].name) if layers else "*")
    kind, reason = _guess_loss(loaded)
    lowest = oldest_runtime([loaded])
    version = lowest.name if lowest.version > _USUAL_TARGET else "{}.{}".format(*_USUAL_TARGET)
    *others, last = choices.module_names("odtpack.optimizers")
    dims = dims_of(loaded.graph.outputs[0])
    head = _HEAD if dims is not None and len(dims) == _TOKENS_AND_WIDTH else ""
    return _TEMPLATE.read_text(encoding="utf-8").format(
        model=toml_value(relative(model, folder)),
        head=head,
        reason=reason,
        kind=toml_value(kind),
        listed="".join(f"{line}\n" for line in _listed(modules)),
        pattern=pattern,
        optimizers=f"{', '.join(others)} or {last}",
        on=on,
        version=version,
    )


def schema_text() -> str:
    """The file that a recipe names as its schema."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def relative(path: Path, folder: Path) -> str:
    """A path from the recipe's folder; as it is where there is no way, as between drives."""
    try:
        return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()
    except ValueError:
        return path.resolve().as_posix()


def _modules(model: ir.Model, names: Sequence[str]) -> dict[str, tuple[int, int, int]]:
    """Parameters, elements and bytes by pattern, in the order of the model."""
    found: dict[str, tuple[int, int, int]] = {}
    known = known_names(model.graph)
    for initializer in names:
        tensor = model.graph.initializers[initializer].const_value
        name = next(iter(known.get(initializer, ())), initializer)
        prefix, dot, _ = name.rpartition(".")
        pattern = glob.escape(prefix) + ".*" if dot else glob.escape(name)
        count, elements, size = found.get(pattern, (0, 0, 0))
        if tensor is not None:
            elements += math.prod(tensor.shape.numpy())
            size += tensor.nbytes
        found[pattern] = count + 1, elements, size
    return found


def _nearest(graph: ir.Graph, names: Sequence[str]) -> list[str]:
    """The parameter that is nearest to the prediction, if there is one: the head's."""
    waiting, known, seen = [graph.outputs[0]], set(names), set[ir.Value]()
    found: list[str] = []
    for value in waiting:  # which grows
        if value.name in known:
            found.append(str(value.name))
            if len(value.shape or ()) > 1:  # not a factor or a bias behind the head
                return found[-1:]
        node = value.producer()
        inputs = () if node is None else node.inputs
        fresh = [v for v in dict.fromkeys(inputs) if v is not None and v not in seen]
        waiting += fresh
        seen.update(fresh)
    return found[:1]


def _listed(modules: dict[str, tuple[int, int, int]]) -> list[str]:
    shown = list(modules.items())[:_MOST_LINES]
    width = max((len(toml_value(pattern)) for pattern, _ in shown), default=0)
    lines = [
        f"#   {toml_value(pattern):<{width}}  {elements:>12,} in {count}, {format_bytes(size)}"
        for pattern, (count, elements, size) in shown
    ]
    if len(modules) > len(shown):
        lines.append(f"#   and {len(modules) - len(shown)} more: odtpack inspect lists them")
    return lines


def _guess_loss(model: ir.Model) -> tuple[str, str]:
    """A loss that fits the first output, and why."""
    output = model.graph.outputs[0]
    dims = dims_of(output)
    name = toml_value(str(output.name))
    if dims is not None and (not dims or dims == (1,)):
        return "none", f"The first output, {name}, is one number, as a loss is."
    shape = "of unknown shape" if dims is None else str([str(d) for d in dims]).replace("'", "")
    classes = dims[1] if dims is not None and len(dims) > 1 else None
    what = f"A guess: the first output, {name}, is {one_line(shape)}"
    if isinstance(classes, int) and classes > 1:
        return "cross_entropy", f"{what}, as logits of {classes} classes are."
    return "mse", f"{what}. mse compares it with a target of its shape."


def one_line(text: str) -> str:
    """The text in one line, without characters that do not print."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
