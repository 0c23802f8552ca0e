"""What a list of names, as ``--like`` gives it, says of the initializers of a model."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

import onnx_ir as ir

from odtpack.errors import some
from odtpack.model.exporters import folded, made_up, module_names
from odtpack.names_file import Named, read_names

_PARAMETRIZED: Final = re.compile(r"\.parametrizations\.|\bweight_(g|v|orig)$")


@dataclasses.dataclass(frozen=True)
class Said:
    """What a list of names says of the initializers of a model."""

    parameters: tuple[str, ...]  # those that are parameters of the module
    frozen: tuple[str, ...]  # those of them that do not train
    remarks: tuple[str, ...]  # what could not be matched


def said_by(model: ir.Model, path: Path, alike: Sequence[str], own: Collection[str]) -> Said:
    """Match a list of names with the initializers of a model, of which ``own`` are the build's."""
    # By the name, which an exporter may have changed, or by that of what it was computed from; then
    # by the shape, where one tensor of the list and one initializer are left that have it.
    graph = model.graph
    listed = {each.name: each for each in read_names(path)}
    original, computed = module_names(graph), folded(graph)
    found: dict[str, Named] = {}
    matched = set[str]()
    for name in graph.initializers:
        each = listed.get(name) or listed.get(original.get(name, name))
        sources = computed[name].parameters if name in computed else ()
        known = [listed[source] for source in sources if source in listed]
        if known:
            found[name] = max(known, key=lambda source: source.trained)
        elif each is not None and _fits(graph, name, each):
            found[name] = each
        else:
            continue
        matched.update(source.name for source in (known or [found[name]]))
    rest = [e for e in listed.values() if e.parameter and e.name not in matched]
    open_ = [name for name in alike if name not in found and name not in own]
    unnamed = made_up(graph).intersection(open_)
    for key in (_key, _bare_key):
        wanted = [(key(e.shape), e) for e in rest if e.name not in matched]
        left = {n: key(graph.initializers[n].shape.numpy()) for n in open_ if n not in found}  # type: ignore[union-attr] # alike have shapes
        counts, shapes = Counter(left.values()), Counter(shape for shape, _ in wanted)
        for shape, each in wanted:
            if _PARAMETRIZED.search(each.name):
                continue  # what is left was computed from it, and from others
            fitting = [name for name in unnamed if left.get(name) == shape]
            if shapes[shape] == counts[shape] == len(fitting) == 1:
                found[fitting[0]] = each
                matched.add(each.name)
    order = [name for name in graph.initializers if name in found or name in own]
    parameters = tuple(n for n in order if n in own or found[n].parameter)
    lost = [e.name for e in rest if e.trained and e.name not in matched]
    unknown = [name for name in open_ if name not in found]
    remarks = []
    if lost:
        remarks.append(
            f"{path.name} trains {some(lost)}, of which the model has no tensor: not trained"
        )
    if unknown:
        remarks.append(
            f"{some(unknown)}: not in {path.name} under a name or shape of its own, not trained; "
            "export with the module's names, or --train instead of --like"
        )
    held = (n for n in parameters if n not in own and not found[n].trained)
    return Said(parameters, tuple(held), tuple(remarks))


def _fits(graph: ir.Graph, name: str, each: Named) -> bool:
    shape = graph.initializers[name].shape
    return shape is not None and _bare_key(shape.numpy()) == _bare_key(each.shape)


def _key(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a shape and of that of the transposed tensor."""
    return tuple(sorted(shape)) if len(shape) == 2 else tuple(shape)


def _bare_key(shape: Sequence[int]) -> tuple[int, ...]:
    """The same, whatever axes of length one stand between the others."""
    bare = tuple(size for size in shape if size != 1)
    return min(bare, bare[::-1])
