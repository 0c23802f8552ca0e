"""Which tensors are buffers by their looks: PyTorch's older exporter names them like parameters."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
import onnx_ir as ir

from odtpack.model.exporters import KIND, made_up

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
_NEAR: Final = 1e-4


def by_looks(graph: ir.Graph, names: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Those of some initializers that are buffers by their looks, and may be, each with why."""
    plain, unnamed = _from_inputs(graph), made_up(graph)
    sure, doubtful = dict[str, str](), dict[str, str]()
    for name in names:
        value = graph.initializers[name]
        if value.metadata_props.get(KIND) == "PARAMETER":
            continue
        *above, last = name.split(".")
        in_loss = bool(_LOSSES.intersection(above))
        shape = () if value.shape is None else value.shape.numpy()
        vector = sum(size > 1 for size in shape) <= 1
        if last in _STATISTICS:
            sure[name] = "a running statistic"
        elif vector and (last == "pos_weight" or (in_loss and last in _CLASS_WEIGHTS)):
            sure[name] = "a weight of a loss"
        elif vector and last not in _OF_LAYERS and _only_adjusts(value, plain):
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
    if array is None or array.size < _ROWS:
        return None
    if vector and _is_even(array.reshape(-1)):
        return "evenly spaced numbers"
    table = array.squeeze()
    if table.ndim == 2 and any(map(_is_sinusoid, (table, table.T))):
        return "a sinusoid"
    return None


def _from_inputs(graph: ir.Graph) -> set[ir.Value]:
    """Inputs, and what is computed from them by arithmetic with constants alone."""
    found = set(graph.inputs)
    for node in graph:
        known = all(v is None or v in found or _is_constant(v) for v in node.inputs)
        if known and node.op_type in (*_ARITHMETIC, *_VIEWS) and found.intersection(node.inputs):
            found.update(node.outputs)
    return found


def _is_constant(value: ir.Value | None) -> bool:
    """Whether a value is computed from initializers by arithmetic."""
    node = None if value is None else value.producer()
    if value is None or node is None:
        return value is not None and value.is_initializer()
    return node.op_type in (*_ARITHMETIC, *_VIEWS) and all(map(_is_constant, node.inputs))


def _only_adjusts(value: ir.Value, plain: Collection[ir.Value]) -> bool:
    """Whether all that reads a value adds it to an input, or scales one by it."""
    for node, _ in value.uses():
        others = [v for v in node.inputs if v is not value]
        if node.op_type not in (*_ARITHMETIC, *_VIEWS):
            return False
        if node.op_type in _ARITHMETIC and any(v in plain for v in others):
            continue
        if not all(map(_is_constant, others)) or not _only_adjusts(node.outputs[0], plain):
            return False
    return bool(value.uses()) and not value.is_graph_output()


def _is_even(numbers: np.ndarray) -> bool:
    """Whether numbers are at equal distances: positions, bins, anchors."""
    steps = np.diff(numbers.astype(np.float64))
    return bool(steps[0]) and np.allclose(steps, steps[0], rtol=_NEAR, atol=0)


def _is_sinusoid(table: np.ndarray) -> bool:
    """Whether each column is a sine or cosine of the row: a[t + 1] + a[t - 1] = c a[t]."""
    if len(table) < _ROWS or np.abs(table[:_ROWS]).max() > 1 + _NEAR:
        return False
    for part in (table[:_ROWS], table):
        rows = part.astype(np.float64)
        middle, around = rows[1:-1], rows[2:] + rows[:-2]
        norm = (middle**2).sum(axis=0)
        factor = (middle * around).sum(axis=0) / np.where(norm > 0, norm, 1)
        if np.abs(around - factor * middle).max() > _NEAR or np.abs(factor).max() > 2 + _NEAR:
            return False
    return float(np.ptp(table, axis=0).max()) > 0.5
