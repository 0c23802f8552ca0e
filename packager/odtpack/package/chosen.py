"""What trains: by the options of a build, a list of names, and what the model looks like."""

from __future__ import annotations

import dataclasses
import glob
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

import onnx_ir as ir

from odtpack.errors import OdtpackError
from odtpack.model.exporters import made_up, module_names
from odtpack.names_file import Named, read_names
from odtpack.package.parameters import resolve, sort_out
from odtpack.spec import BuildSpec


@dataclasses.dataclass(frozen=True)
class Chosen:
    """What becomes of the initializers of a model."""

    trained: tuple[str, ...]
    frozen: tuple[str, ...]  # those that become inputs all the same
    alike: tuple[str, ...]  # what may be trained, whether a gradient reaches it or not
    remarks: tuple[str, ...]  # what was decided without being asked for


def choose(
    model: ir.Model,
    spec: BuildSpec,
    wanted: Sequence[str],
    read: Sequence[str],
    own: Collection[str] = (),
) -> Chosen:
    """Choose what trains; ``wanted`` are patterns, ``own`` the initializers of an adapter."""
    names, buffers, doubtful = sort_out(model)
    alike, freeze, remarks = tuple(names), spec.freeze, list[str]()
    if spec.like is not None:
        if spec.train:
            raise OdtpackError(
                "option-not-used",
                "--train and --like both say what trains",
                hint="leave one of them out; --freeze may stand beside --like",
            )
        said = said_by(model, Path(spec.like), alike, own)
        alike, remarks = said.parameters, [*said.remarks]
        if not wanted:
            freeze = (*freeze, *map(glob.escape, said.frozen))
    trained, frozen = resolve(model, wanted, freeze, read, alike)
    if spec.like is None and not wanted:
        if buffers:
            shown = some([f"{name} ({why})" for name, why in buffers.items()])
            remarks.append(
                f"not trained, as buffers look: {shown}; if one trains, say so with --like "
                "names.txt, which odtpack.names(module, 'names.txt') writes"
            )
        doubts = {name: why for name, why in doubtful.items() if name in trained}
        if doubts:
            shown = some([f"{name} ({why})" for name, why in doubts.items()])
            option = " ".join(f"--freeze {name!r}" for name in [*doubts][:4])
            remarks.append(f"trained, and may be buffers: {shown}; if so, {option}")
    return Chosen(trained, frozen, alike, tuple(remarks))


@dataclasses.dataclass(frozen=True)
class Said:
    """What a list of names says of the initializers of a model."""

    parameters: tuple[str, ...]  # those that are parameters of the module
    frozen: tuple[str, ...]  # those of them that do not train
    remarks: tuple[str, ...]  # what could not be matched


def said_by(model: ir.Model, path: Path, alike: Sequence[str], own: Collection[str]) -> Said:
    """Match a list of names with the initializers of a model, of which ``own`` are the build's."""
    # By the name, which an exporter may have changed; then by the shape, where one tensor of the
    # list and one initializer are left that have it.
    graph = model.graph
    listed = {each.name: each for each in read_names(path)}
    original = module_names(graph)
    found: dict[str, Named] = {}
    for name in graph.initializers:
        each = listed.get(name) or listed.get(original.get(name, name))
        if each is not None and _fits(graph, name, each):
            found[name] = each
    matched = {each.name for each in found.values()}
    rest = [e for e in listed.values() if e.parameter and e.name not in matched]
    open_ = [name for name in alike if name not in found and name not in own]
    unnamed = made_up(graph).intersection(open_)
    shapes = Counter(_key(each.shape) for each in rest)
    left = Counter(_key(graph.initializers[name].shape.numpy()) for name in open_)  # type: ignore[union-attr] # alike have shapes
    for each in rest:
        key = _key(each.shape)
        fitting = [n for n in unnamed if _fits(graph, n, each)]
        if shapes[key] == left[key] == len(fitting) == 1:
            found[fitting[0]] = each
    matched = {each.name for each in found.values()}
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
    return shape is not None and _key(shape.numpy()) == _key(each.shape)


def _key(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a shape and of that of the transposed tensor."""
    return tuple(sorted(shape)) if len(shape) == 2 else tuple(shape)


def some(names: Sequence[str], most: int = 4) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - most} more" if names[most:] else ""
    return f"{', '.join(names[:most])}{more}"
