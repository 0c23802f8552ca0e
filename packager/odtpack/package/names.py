"""What names say of initializers: a list that ``--like`` gives, or the older exporter's own."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import onnx_ir as ir

from odtpack.errors import some
from odtpack.model.exporters import folded, made_up, module_names
from odtpack.names_file import Named, read_names

_STATISTICS = ("running_mean", "running_var", "moving_mean", "moving_variance")
_LOSSES = {"loss", "losses", "loss_fn", "loss_function", "criterion"}
_CLASS_WEIGHTS = ("weight", "weights", "class_weight", "class_weights", "pos_weight")
# Parts of the names of what an input is normalized with.
_NORMALIZERS = {"mean", "means", "std", "var", "variance", "sigma", "mu", "min", "max"}
# What layers call the parameters that they multiply and add.
_OF_LAYERS = ("weight", "bias", "gamma", "beta")
_ARITHMETIC = ("Add", "Div", "Mul", "Sub")
_VIEWS = ("Cast", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
_ROWS: Final = 6  # with which a table must begin like a sinusoid, before all of it is looked at
_LARGEST: Final = 2**22  # elements of a table whose values are looked at
_NEAR: Final = 1e-4
_PARAMETRIZED: Final = re.compile(r"\.parametrizations\.|\bweight_(g|v|orig)$")


def by_looks(
    graph: ir.Graph, names: Sequence[str], unnamed: Collection[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Those of some initializers that are buffers by their looks, and may be, each with why."""
    # `unnamed`: Those whose name an exporter made up.
    adjusting = _adjusting(graph)
    sure, doubtful = dict[str, str](), dict[str, str]()
    for name in names:
        value = graph.initializers[name]
        *above, last = name.split(".")
        in_loss = bool(_LOSSES.intersection(above))
        shape = () if value.shape is None else value.shape.numpy()
        vector = sum(size > 1 for size in shape) <= 1
        if last in _STATISTICS:
            sure[name] = "a running statistic"
        elif vector and (last == "pos_weight" or (in_loss and last in _CLASS_WEIGHTS)):
            sure[name] = "a weight of a loss"
        elif vector and last not in _OF_LAYERS and value in adjusting:
            certain = name in unnamed or _NORMALIZERS.intersection(last.lower().split("_"))
            (sure if certain else doubtful)[name] = "it scales or shifts an input"
        elif (kind := _kind(value, vector)) is not None:
            sure[name] = kind
        elif vector and in_loss:
            doubtful[name] = "it belongs to a loss"
    return sure, doubtful


def _kind(value: ir.Value, vector: bool) -> str | None:
    """What a tensor is by its values."""
    array = None if value.const_value is None else value.const_value.numpy()
    if array is None or not _ROWS <= array.size <= _LARGEST:
        return None
    if vector and _is_even(array.reshape(-1)):
        return "evenly spaced numbers"
    table = array.squeeze()
    if table.ndim == 2 and any(map(_is_sinusoid, (table, table.T))):
        return "a sinusoid"
    return None


def _adjusting(graph: ir.Graph) -> set[ir.Value]:
    """Constants that are only added to inputs, or scale them, as do constants made of them."""
    plain, constants = set(graph.inputs), dict.fromkeys(graph.initializers.values())
    for node in graph:
        known = all(v is None or v in plain or v in constants for v in node.inputs)
        if known and node.inputs and node.op_type in (*_ARITHMETIC, *_VIEWS):
            if plain.isdisjoint(node.inputs):
                constants.update(dict.fromkeys(node.outputs))
            else:
                plain.update(node.outputs)
    found = set[ir.Value]()
    for value in reversed(constants):
        made = [node.outputs[0] for node, _ in value.uses()]
        if made and not value.is_graph_output() and all(y in plain or y in found for y in made):
            found.add(value)
    return found


def _is_even(numbers: np.ndarray) -> bool:
    """Whether numbers are at equal distances: positions, bins, anchors."""
    steps = np.diff(numbers.astype(np.float64))
    return bool(steps[0]) and np.allclose(steps, steps[0], rtol=_NEAR, atol=0)


def _is_sinusoid(table: np.ndarray) -> bool:
    """Whether each column is a sine or cosine of the row: a[t + 1] + a[t - 1] = c a[t]."""
    # Float16 rounds each of the numbers by up to 2.4e-4.
    near = 2e-3 if table.dtype == np.float16 else _NEAR
    if len(table) < _ROWS or np.abs(table[:_ROWS]).max() > 1 + _NEAR:
        return False
    for part in (table[:_ROWS], table):
        rows = part.astype(np.float64)
        middle, around = rows[1:-1], rows[2:] + rows[:-2]
        norm = (middle**2).sum(axis=0)
        factor = (middle * around).sum(axis=0) / np.where(norm > 0, norm, 1)
        if np.abs(around - factor * middle).max() > near or np.abs(factor).max() > 2 + near:
            return False
    return float(np.ptp(table, axis=0).max()) > 0.5


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
