"""Which tensors are buffers by their looks: PyTorch's older exporter names them like parameters."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
import onnx_ir as ir

_STATISTICS = ("running_mean", "running_var", "moving_mean", "moving_variance")
_LOSSES = {"loss", "losses", "loss_fn", "loss_function", "criterion"}
_CLASS_WEIGHTS = ("weight", "weights", "class_weight", "class_weights", "pos_weight")
# Parts of the names of what an input is normalized with.
_NORMALIZERS = {"mean", "means", "std", "var", "variance", "sigma", "mu", "min", "max"}
# What layers call the parameters that they multiply and add.
_OF_LAYERS = ("weight", "bias", "gamma", "beta")
_ARITHMETIC = ("Add", "Div", "Mul", "Sub")
# What repairs an input, number by number, or takes a part of it.
_REPAIRS = frozenset({
    *("Abs", "Add", "And", "Cast", "Clip", "Concat", "Div", "Equal", "Exp", "Expand", "Flatten"),
    *("Greater", "GreaterOrEqual", "Identity", "IsInf", "IsNaN", "Less", "LessOrEqual", "Log"),
    *("Max", "Min", "Mul", "Neg", "Not", "Or", "Pow", "Reshape", "Sign", "Slice", "Split", "Sqrt"),
    *("Squeeze", "Sub", "Transpose", "Unsqueeze", "Where"),
})  # fmt: skip
_VIEWS = ("Cast", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
_ROWS: Final = 6  # with which a table must begin like a sinusoid, before all of it is looked at
_LARGEST: Final = 2**22  # elements of a table whose values are looked at
_NEAR: Final = 1e-4


def by_looks(
    graph: ir.Graph, names: Sequence[str], unnamed: Collection[str], constants: Collection[ir.Value]
) -> tuple[dict[str, str], dict[str, str]]:
    """Those of some initializers that are buffers by their looks, and may be, each with why."""
    # `unnamed`: Those whose name an exporter made up. `constants`: initializers that were nodes.
    # Without a name, only what changes an input itself: behind an activation it may be a layer's.
    adjusting, nearest = _adjusting(graph, constants), _adjusting(graph, None)
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
            certain = (name in unnamed and value in nearest) or _NORMALIZERS.intersection(
                last.lower().split("_")
            )
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
    for each in (table, table.T) if table.ndim == 2 else ():
        # A Fourier basis may hold its cosines, and then its sines, of any window.
        halves = np.array_split(each, 2)
        if _is_sinusoid(each) or all(_is_sinusoid(half, ramps=False) for half in halves):
            return "a sinusoid"
        if _is_filter_bank(each):
            return "a filter bank"
    return None


def _adjusting(graph: ir.Graph, nodes: Collection[ir.Value] | None) -> set[ir.Value]:
    """Constants that are only added to inputs, or scale them, as do constants made of them."""
    plain, constants = set(graph.inputs), dict.fromkeys(graph.initializers.values())
    # What follows from the inputs alone; a matrix may be a weight, in a model of constants only.
    given = set() if nodes is None else {*plain, *(v for v in nodes if len(v.shape or ()) < 2)}
    for node in graph:
        read = [v for v in node.inputs if v is not None]
        known = all(v in plain or v in constants for v in read)
        if not plain.isdisjoint(read) and given.issuperset(read) and node.op_type in _REPAIRS:
            plain.update(node.outputs)
            given.update(node.outputs)
        elif known and read and node.op_type in (*_ARITHMETIC, *_VIEWS):
            if plain.isdisjoint(read):
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


def _is_filter_bank(table: np.ndarray) -> bool:
    """Whether columns are triangles of the row, and no row is in three, as of a mel scale."""
    inside = table > 0
    if table.min() < 0 or inside.any(axis=0).sum() < _ROWS:
        return False
    # A weight that is mostly zero, or means of blocks, are no triangles with a peak.
    if (table == table.max(axis=0))[:, inside.any(axis=0)].sum(axis=0).max() > 2:
        return False
    # A triangle has three corners, each between two rows.
    bends = np.abs(np.diff(table.astype(np.float64), 2, axis=0)) > _near(table) * table.max(axis=0)
    few = inside.sum(axis=1).max() <= 2 and bends.sum(axis=0).max() <= 6
    return bool(few and _ROWS < inside.sum(axis=0).max() < len(table) / 2)


def _near(table: np.ndarray) -> float:
    """How far from a formula its numbers may be: float16 rounds each of them by up to 2.4e-4."""
    return 2e-3 if table.dtype == np.float16 else _NEAR


def _is_sinusoid(table: np.ndarray, *, ramps: bool = True) -> bool:
    """Whether each column is a sine or cosine of the row: a[t + 1] + a[t - 1] = c a[t]."""
    # `ramps`: whether all columns may be straight lines, which have c = 2.
    near = _near(table)
    if len(table) < _ROWS or np.abs(table[:_ROWS]).max() > 1 + _NEAR:
        return False
    for part in (table[:_ROWS], table):
        rows = part.astype(np.float64)
        middle, around = rows[1:-1], rows[2:] + rows[:-2]
        norm = (middle**2).sum(axis=0)
        factor = (middle * around).sum(axis=0) / np.where(norm > 1e-12, norm, np.inf)
        if np.abs(around - factor * middle).max() > near or np.abs(factor).max() > 2 + near:
            return False
        if not ramps and np.abs(factor).min() > 2 - near:
            return False
    return float(np.ptp(table, axis=0).max()) > 0.5
