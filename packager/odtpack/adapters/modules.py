"""The linear layers of a file as the module has them that PEFT adapts.

What onnxruntime-genai's builder joins, queries, keys and values, is several layers of the module,
each of some rows; what it parts, Phi-3's ``gate_up_proj``, is one (``model/exporters.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from odtpack.adapters.layers import Layer, Linear
from odtpack.adapters.low_rank import A, B
from odtpack.graph.graphs import Ops
from odtpack.model.exporters import joined, parted

_Given = TypeVar("_Given")


@dataclasses.dataclass(frozen=True)
class Share:
    """Rows of a layer in the file that are rows of a layer of the module."""

    layer: Layer
    start: int  # the first of them in the file's layer
    first: int  # and in the module's
    rows: int

    @property
    def whole(self) -> bool:
        """Whether it is all of the file's layer."""
        return self.rows == self.layer.outputs


@dataclasses.dataclass(frozen=True)
class Module(Linear):
    """A linear layer of the module."""

    name: str
    shape: tuple[int, ...]
    shares: tuple[Share, ...]

    def matches(self, patterns: Sequence[str]) -> bool:
        """Whether a pattern matches its name, or that of a layer in the file."""
        named = dataclasses.replace(self.shares[0].layer, name=self.name)
        return any(layer.matches(patterns) for layer in (named, *(s.layer for s in self.shares)))


def modules_of(graph: ir.Graph, layers: Iterable[Layer], *, split: bool = True) -> list[Module]:
    """The layers of the module that some layers of a graph are, in their order."""
    # split: Whether layers are joined and parted; otherwise each stands for itself.
    named = {layer.name: layer for layer in layers}
    parts = {name: (whole, all_of) for whole, all_of in joined(graph, named).items()
             for name in all_of if split}  # fmt: skip
    found = []
    for name, layer in named.items():
        whole, all_of = parts.get(name, (name, (name,)))
        if name != all_of[0]:
            continue
        own = [named[each] for each in all_of]
        shares: list[Share] = []
        for each in own:
            first = shares[-1].first + shares[-1].rows if shares else 0
            shares.append(Share(each, 0, first, each.outputs))
        rows = parted(graph, name, layer.outputs) if split and len(layer.shape) == 2 else {}
        for part, (start, end) in rows.items():
            share = Share(layer, start, 0, end - start)
            found.append(Module(part, (share.rows, layer.inputs), (share,)))
        if not rows:
            shape = (sum(each.outputs for each in own), *layer.shape[1:])
            found.append(Module(whole, shape, tuple(shares)))
    return found


def by_layer(
    modules: Iterable[tuple[Module, _Given]],
) -> list[tuple[Layer, list[tuple[Share, _Given]]]]:
    """The layers of the file, each with its rows and what is given for their modules."""
    found: dict[int, tuple[Layer, list[tuple[Share, _Given]]]] = {}
    for module, given in modules:
        for share in module.shares:
            found.setdefault(id(share.layer.source), (share.layer, []))[1].append((share, given))
    return [*found.values()]


def together(
    op: Ops, layer: Layer, pieces: Sequence[tuple[Share, Mapping[str, ir.Value]]]
) -> Mapping[str, ir.Value]:
    """The parameters on a layer of the file: A of all its modules, and B with zeros elsewhere."""
    if len(pieces) == 1 and pieces[0][0].whole:
        share, given = pieces[0]
        dims = None if B not in given else given[B].shape
        if dims is None or dims[0] == share.rows:
            return given
    columns = []
    for share, given in pieces:
        b = op.slice(given[B], [0], [share.first], [share.first + share.rows])
        columns.append(op.pad(b, [share.start, 0], [layer.outputs - share.start - share.rows, 0]))
    if len(columns) == 1:
        return {**pieces[0][1], B: columns[0]}
    return {A: op.Concat(*(given[A] for _, given in pieces), axis=0),
            B: op.Concat(*columns, axis=1)}  # fmt: skip


def merged(
    layer: Layer, pieces: Sequence[tuple[Share, Mapping[str, np.ndarray]]]
) -> Mapping[str, np.ndarray]:
    """The same of values."""
    if len(pieces) == 1 and pieces[0][0].whole:
        share, given = pieces[0]
        if B not in given or len(given[B]) == share.rows:
            return given
    columns = []
    for share, given in pieces:
        columns.append(np.zeros((layer.outputs, given[B].shape[1])))
        columns[-1][share.start : share.start + share.rows] = given[B][share.first :][: share.rows]
    return {A: np.concatenate([given[A] for _, given in pieces]), B: np.concatenate(columns, 1)}
