"""Cotangents that fill a part of their value: joined, not padded with zeros and added.

Where a model cuts a value into pieces, by Slice or by Gather with one index, as exporters
write the q, k and v of an attention, each piece brings back a cotangent of its own part.
Together they are one Concat, without a tensor of zeros for each and the sum of them.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

import onnx_ir as ir

from odtpack.graph.ops import Ops

_KEY = "odtpack.placed"


@dataclasses.dataclass(frozen=True)
class Placed:
    """A cotangent and where it lies along one axis of its value."""

    part: ir.Value
    axis: int
    start: int
    stop: int
    size: int


def place(
    op: Ops, part: ir.Value, before: Sequence[int], after: Sequence[int], sizes: Sequence[object]
) -> ir.Value:
    """Pad a part with zeros, and remember it where it is padded along one axis alone.

    Args:
        op: Writer for the graph.
        part: Cotangent of the part.
        before: Zeros in front of each axis.
        after: Zeros after each axis.
        sizes: Dimensions of the whole.
    """
    whole = op.pad(part, before, after)
    padded = [axis for axis, pads in enumerate(zip(before, after, strict=True)) if any(pads)]
    node = whole.producer()
    if len(padded) == 1 and node is not None:
        (axis,) = padded
        size = sizes[axis]
        if isinstance(size, int):
            stop = size - after[axis]
            node.meta[_KEY] = Placed(part, axis, before[axis], stop, size)
    return whole


def join(op: Ops, parts: Sequence[ir.Value]) -> list[ir.Value]:
    """Replace parts that fill an axis without gap or overlap by their Concat.

    Args:
        op: Writer for the graph.
        parts: Cotangents of one value, to be added up.

    Returns:
        Cotangents with the same sum.
    """
    placed: defaultdict[tuple[int, int], list[tuple[Placed, ir.Value]]] = defaultdict(list)
    for whole in parts:
        node = whole.producer()
        found = None if node is None else node.meta.get(_KEY)
        if isinstance(found, Placed):
            placed[found.axis, found.size].append((found, whole))
    for (axis, size), group in placed.items():
        ordered = sorted((each for each, _ in group), key=lambda each: each.start)
        starts = [*(each.start for each in ordered), size]
        if starts == [0, *(each.stop for each in ordered)]:
            joined = op.join([each.part for each in ordered], axis)
            replaced = [whole for _, whole in group]
            return [joined, *(part for part in parts if part not in replaced)]
    return list(parts)
