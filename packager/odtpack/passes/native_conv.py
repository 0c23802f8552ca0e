"""Wraps depthwise convolutions and their gradients; see :mod:`odtpack.passes.native`.

Rules mark the nodes that they write for a result (:func:`odtpack.autodiff.windows.region`). Passes
move and share some afterwards, so a group is found again from its end: back to the values that have
the shape of the kernel's tensors. Whether it computes what the kernel does is then tried.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import onnx
import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.autodiff.rules.convolution import read_windows
from odtpack.autodiff.windows import Region, Windows, conv_windows
from odtpack.graph.graphs import Dims, constant, dims_of, producer
from odtpack.graph.ops import MARK, Ops
from odtpack_runtime.package.native_conv import (
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    weight_dims,
)
from odtpack_runtime.package.native_trial import unpacked

_KINDS = {
    "forward": FORWARD, "input gradient": INPUT_GRADIENT, "weight gradient": WEIGHT_GRADIENT,
}  # fmt: skip
_VIEWS = {"Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}


@dataclasses.dataclass(frozen=True)
class Group:
    """Nodes, in order, of which the last computes a result; and what a kernel would read."""

    nodes: list[ir.Node]
    read: list[ir.Value]  # tensors of the kernel
    fixed: list[ir.Value]  # constant tensors that nodes read besides
    places: list[ir.Value]  # whole numbers that say where nodes move elements
    program: list[int]  # of the kernel


def groups(op: Ops, graph: ir.Graph) -> Iterator[list[Group]]:
    """Each result of a graph: the ways to read its nodes, of which one may be right."""
    order = {node: place for place, node in enumerate(graph)}
    for node in list(graph):
        region = _region(op, node)
        if region is not None and _is_end(node, region):
            found = _group(node, region, order)
            if found:
                yield found


def _region(op: Ops, node: ir.Node) -> Region | None:
    """What a node was written for, or computes by itself."""
    region = node.meta.get(MARK)
    if region is not None or node.op_type not in ("Conv", "ConvTranspose") or node.domain:
        return region if isinstance(region, Region) else None
    x, w = node.inputs[:2]
    forward = node.op_type == "Conv"
    if x is None or w is None or (forward and w.const_value is not None):
        return None  # ONNX Runtime packs a convolution's constant weight for kernels of its own
    for value, first in ((x, 1), (w, 0), (node.outputs[0], 1)):
        dims = dims_of(value)
        if dims is None or not all(isinstance(dim, int) for dim in dims[first:]):
            return None
    ctx = Context(node, op, [], [])
    win = conv_windows(ctx) if forward else read_windows(ctx)
    if not win.depthwise or win.rank != 2 or (not forward and len(node.inputs) > 2):
        return None
    return Region("forward" if forward else "input gradient", win)


def _is_end(node: ir.Node, region: Region) -> bool:
    readers = [reader for reader, _ in node.outputs[0].uses()]
    outside = [each for each in readers if each.meta.get(MARK) is not region]
    return node.meta.get(MARK) is None or node.outputs[0].is_graph_output() or bool(outside)


def _group(end: ir.Node, region: Region, order: dict[ir.Node, int]) -> list[Group]:
    win, kind = region.windows, region.kind
    nodes, seen = {end}, set[ir.Value]()
    read, fixed, places = list[ir.Value](), list[ir.Value](), list[ir.Value]()
    waiting = [value for value in end.inputs if value is not None]
    while waiting:
        value = waiting.pop(0)
        if value in seen:
            continue
        seen.add(value)
        writer = value.producer()
        marked = writer is not None and writer.meta.get(MARK) is region
        inside = marked and writer is not None and not _is_end(writer, region)
        if _is_constant(value) and end.meta.get(MARK) is region:
            (fixed if value.dtype == ir.DataType.FLOAT else places).append(value)
        elif not inside and any(_fits(win, value, role) for role in "wbxy"):
            read.append(value)
        elif writer is not None and writer in order and (inside or writer.op_type in _VIEWS):
            nodes.add(writer)
            waiting += [each for each in writer.inputs if each is not None]
        else:
            return []
    if any(value.dtype != ir.DataType.FLOAT for value in (*read, end.outputs[0])):
        return []
    wanted = {"forward": "wxb", "input gradient": "wy", "weight gradient": "xy"}[kind]
    result = {"forward": "y", "input gradient": "x", "weight gradient": "w"}[kind]
    if not _fits(win, end.outputs[0], result) or len(read) not in (2, len(wanted)):
        return []
    found = []
    for some in itertools.permutations(read):
        if all(_fits(win, value, role) for value, role in zip(some, wanted, strict=False)):
            tensors = dict(zip(wanted, some, strict=False)) | {result: end.outputs[0]}
            first = [int(r in tensors and len(tensors[r].shape or ()) == 3) for r in "xy"]
            axes = zip(
                win.size, win.kernel, win.strides, win.dilations, win.before, win.out, strict=True
            )
            lies = weight_dims(win.channels, win.kernel).index(_dims(tensors["w"]))
            program = [_KINDS[kind], *first, lies, win.channels, *itertools.chain(*axes)]
            program.append(len(some) == 3)
            group = sorted(nodes, key=order.__getitem__)
            found.append(Group(group, list(some), fixed, places, [int(n) for n in program]))
    return found


def _fits(win: Windows, value: ir.Value, role: str) -> bool:
    """Whether a value has the shape of the weight, bias, input or output of a convolution."""
    dims, size = _dims(value), win.size if role == "x" else win.out
    if dims is None or role in "wb":
        return dims in (weight_dims(win.channels, win.kernel) if role == "w" else [(win.channels,)])
    planes = len(dims) == 4 and dims[1:] == (win.channels, *size)
    return planes or (len(dims) == 3 and dims[::2] == (win.channels, int(np.prod(size))))


def _dims(value: ir.Value) -> Dims | None:
    """The shape of a value; a view that only waits for another value has that of what it views."""
    view, own = producer(value, "Reshape"), dims_of(value)
    factor = None if view is None else producer(view.inputs[1], "Mul")
    zeros = None if factor is None else constant(factor.inputs[1])
    if view is None or view.inputs[0] is None or zeros is None or zeros.any():
        return own
    dims = _dims(view.inputs[0])
    if dims is None or own is None or len(dims) != len(own):
        return dims if own is None else own
    return tuple(a if isinstance(a, int) else b for a, b in zip(own, dims, strict=True))


def _is_constant(value: ir.Value) -> bool:
    if constant(value) is not None:
        return True
    writer = value.producer()
    return (
        writer is not None
        and bool(writer.inputs)
        and all(each is not None and _is_constant(each) for each in writer.inputs)
    )


def value_of(value: ir.Value) -> np.ndarray:
    """What a constant holds that nodes may unpack."""
    tensors: dict[str, onnx.TensorProto] = {}
    writers: dict[str, onnx.NodeProto] = {}
    waiting = [value]
    while waiting:
        each = waiting.pop()
        writer = each.producer()
        if each.const_value is not None:
            tensors[str(each.name)] = ir.to_proto(each.const_value)
        elif writer is not None:
            writers[str(each.name)] = ir.to_proto(writer)
            waiting += [read for read in writer.inputs if read is not None]
    return unpacked(str(value.name), tensors, writers)
