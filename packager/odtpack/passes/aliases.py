"""Proves that an output may be written into the memory of an input.

ONNX Runtime lets a caller bind one buffer as input and output and does not check that
this is safe. It is, in whatever order the runtime executes, if

1. every node that reads the input, except the one that writes the output, is an ancestor
   of the writer, and so has finished before the writer starts (a path through a Shape does not
   count: ONNX Runtime folds it where sizes are known); and
2. the writer either does not read the input, or reads and writes it element by element
   at the same place, or is a Gemm that adds the product of other values to it, or adds to places
   of it that other inputs give; a Scan does so part by part if its body does.

A node that reads a view of the input, the result of a Reshape that shares its memory, counts as a
reader of the input.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable

import onnx_ir as ir

from odtpack.graph.graphs import dims_of, reads, static_dims, subgraphs
from odtpack_runtime.package.native import ELEMENTWISE
from odtpack_runtime.session.native import DOMAIN

# Operators that compute element i of the output from element i of equally shaped inputs.
_ELEMENTWISE = {"Add", "Sub", "Mul", "Div", "Identity", "Where"}

_OWNER = "owner"

# Operators whose output may be the memory of their first input.
VIEWS = {"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"}


class UnsafeAliasError(Exception):
    """An alias that odtpack promised cannot be proven safe: a bug, not bad input."""


def verify(graph: ir.Graph, source: ir.Value, output: ir.Value) -> None:
    """Check that ``output`` may overwrite ``source``, a graph input."""
    dims, written = dims_of(source), dims_of(output)
    if dims is None or None in dims or written is None:
        raise UnsafeAliasError(f"the shape of {source.name!r} is unknown")
    same = static_dims(source), static_dims(output)
    if dims != written and (None in same or math.prod(same[0] or ()) != math.prod(same[1] or ())):
        raise UnsafeAliasError(f"{output.name!r} and {source.name!r} differ in shape")
    _verify_within(graph, source, output)


def _verify_within(graph: ir.Graph, source: ir.Value, output: ir.Value) -> None:
    """:func:`verify` in a graph, or in a branch whose output is the aliased one."""
    writer = output.producer()
    if writer is None or writer.graph is not graph:
        raise UnsafeAliasError(f"{output.name!r} is not computed")
    views = _views(source)
    readers = {reader for value in views for reader in _readers(value, graph)}
    late = not_upstream(readers, [writer])
    if late:
        first = min(str(node.name) for node in late)
        raise UnsafeAliasError(
            f"{first!r} may read {source.name!r} after {output.name!r} overwrites it"
        )
    if writer not in readers:
        return
    read = [value for value in views if value in writer.inputs]
    if read and not _is_in_place(writer, read):
        raise UnsafeAliasError(f"{writer.op_type} does not write {output.name!r} in place")
    if any(dims_of(value) != dims_of(output) for value in read):
        raise UnsafeAliasError(f"{output.name!r} and a view of {source.name!r} differ in shape")
    branches = subgraphs(writer)
    if read and branches:
        _verify_parts(writer, views, output)
        return
    if branches and writer.op_type != "If":
        raise UnsafeAliasError(f"{source.name!r} is read again in every turn of {writer.name!r}")
    for branch in branches:
        if any(_readers(value, branch) for value in views):
            _verify_within(branch, source, branch.outputs[writer.outputs.index(output)])


def _verify_parts(scan: ir.Node, views: list[ir.Value], output: ir.Value) -> None:
    """:func:`verify` for a Scan that cuts the source and the output into the same parts."""
    (body,) = subgraphs(scan)
    states = len(body.inputs) - scan.attributes.get_int("num_scan_inputs", 0)
    moved = set(scan.attributes) - {"body", "num_scan_inputs"}
    places = [index for index, value in enumerate(scan.inputs) if value in views]
    if states or moved or any(_readers(value, body) for value in views):
        raise UnsafeAliasError(f"{scan.name!r} does not read {output.name!r} part by part")
    for place in places:
        part, written = body.inputs[place], body.outputs[scan.outputs.index(output)]
        if dims_of(part) != dims_of(written):
            raise UnsafeAliasError(f"{output.name!r} is not cut as what it overwrites")
        _verify_within(body, part, written)


def _is_in_place(writer: ir.Node, read: list[ir.Value]) -> bool:
    """Whether a node may overwrite the values in ``read``, which share memory."""
    if writer.domain:
        # A kernel reads what has the shape of its results at the places that it writes.
        kernel = writer.attributes.get_string("kernel", "")
        return writer.domain == DOMAIN and kernel == ELEMENTWISE
    if writer.op_type == "Scan":
        return True  # its body decides
    if writer.op_type == "ScatterElements":
        # It copies its first input, unless it is the memory of the output, and then reads and
        # writes single elements of the output. What it reads besides must be other memory.
        return not any(value in read for value in writer.inputs[1:])
    if writer.op_type == "Gemm":
        # It copies its third input, unless it is the memory of the output, and then adds to the
        # output. What it multiplies must be other memory.
        return not any(value in read for value in writer.inputs[:2])
    return writer.op_type in _ELEMENTWISE


def _views(source: ir.Value) -> list[ir.Value]:
    """The value, and values that may share its memory, those in subgraphs included."""
    views = [source]
    for value in views:
        views += [n.outputs[0] for n in value.consumers() if n.op_type in VIEWS]
    return views


def _readers(source: ir.Value, graph: ir.Graph) -> set[ir.Node]:
    """Nodes of a graph that read a value of the main graph, also from inside their subgraphs."""
    readers = set()
    for consumer in source.consumers():
        node: ir.Node = consumer
        while node.graph is not graph:
            if node.graph is source.graph:
                break  # outside of the branch that is looked at
            owner = None if node.graph is None else _owner(node.graph, source.graph)
            if owner is None:
                raise UnsafeAliasError(f"{source.name!r} is read in a subgraph of unknown owner")
            node = owner
        else:
            readers.add(node)
    return readers


def _owner(graph: ir.Graph, outermost: ir.Graph | None) -> ir.Node | None:
    """The node that a subgraph belongs to. Looked for once: a graph does not know it by itself."""
    known = graph.meta.get(_OWNER)
    # A clone of the graph may still name the node of the original.
    if isinstance(known, ir.Node) and any(each is graph for each in subgraphs(known)):
        return known
    queue = [] if outermost is None else [outermost]
    while queue:
        for node in reversed(queue.pop()):  # what is asked for was mostly just added
            for each in subgraphs(node):
                each.meta[_OWNER] = node
                queue.append(each)
                if each is graph:
                    return node
    return None


def not_upstream(wanted: Iterable[ir.Node], nodes: Iterable[ir.Node]) -> set[ir.Node]:
    """Those of the wanted nodes that are neither some nodes nor ancestors of them."""
    seen = dict.fromkeys(nodes)  # the nearest are looked at first
    missing, queue = {*wanted}.difference(seen), collections.deque(seen)
    while queue and missing:
        for value in awaited(queue.popleft()):
            node = value.producer()
            if node is not None and node not in seen:
                seen[node] = None
                missing.discard(node)
                queue.append(node)
    return missing


def awaited(node: ir.Node) -> Iterable[ir.Value]:
    """Values that must be there before a node runs; a Shape is taken to wait for none."""
    return () if node.op_type == "Shape" else reads(node)
