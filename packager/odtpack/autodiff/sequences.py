"""Replaces tensor sequences whose members are known by the members themselves.

Exporters write chunk, split, unbind, stack and lists of tensors with sequence operators:
SplitToSequence and SequenceAt, SequenceConstruct and ConcatFromSequence. Where lengths and
positions are constants these are a Split and a Concat, which have gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from odtpack.graph.graphs import dims_of
from odtpack.graph.ops import Ops

Members = tuple[ir.Value, ...]
_LARGEST = 4096  # members of a sequence; a longer one is left as it is


@dataclasses.dataclass
class _Node:
    """A sequence operator, and the sequences that are known before it."""

    op: Ops
    node: ir.Node
    known: dict[ir.Value, Members]

    def value(self, index: int) -> ir.Value | None:
        return self.node.inputs[index] if index < len(self.node.inputs) else None

    def members(self) -> Members | None:
        """Members of the sequence that the node reads."""
        value = self.value(0)
        return None if value is None else self.known.get(value)

    def constant(self, index: int) -> np.ndarray | None:
        value = self.value(index)
        tensor = None if value is None else ir.convenience.get_const_tensor(value)
        return None if tensor is None else tensor.numpy()

    def position(self, index: int, count: int, last: int) -> int | None:
        """A constant position up to ``last``, which it is if absent.

        A negative one counts back from ``count``, the number of members, in every operator:
        SequenceInsert at -1 puts its tensor in front of the last member.
        """
        if self.value(index) is None:
            return last if last >= 0 else None
        constant = self.constant(index)
        if constant is None or constant.size != 1 or not -count <= int(constant.item()) <= last:
            return None
        place = int(constant.item())
        return place if place >= 0 else place + count

    def integer(self, name: str, default: int) -> int:
        return self.node.attributes.get_int(name, default)


def resolve(graph: ir.Graph) -> bool:
    """Resolve every sequence operator of the graph that can be; return whether any was.

    Args:
        graph: In topological order, with types and shapes inferred; changed in place.
            Types and shapes of new values are not inferred.
    """
    if not any(node.op_type in _READERS and not node.domain for node in graph):
        return False
    op = Ops(graph, "sequence/")
    known: dict[ir.Value, Members] = {}
    changed = False
    for node in list(graph):
        if node.domain:
            continue
        call = _Node(op, node, known)
        with op.before(node):
            if node.op_type in _WRITERS:
                members = _WRITERS[node.op_type](call)
                if members is not None and len(members) <= _LARGEST:
                    known[node.outputs[0]] = members
            elif node.op_type in _READERS:
                result = _READERS[node.op_type](call)
                if result is not None:
                    _replace(op, node, result)
                    changed = True
    return changed


def _replace(op: Ops, node: ir.Node, result: ir.Value) -> None:
    """Let ``result`` take the place and the name of the node's output."""
    output = node.outputs[0]
    # A member may be read elsewhere, or be an output itself: it keeps its name.
    copy = op.Identity(result)
    copy.type, copy.shape = output.type, output.shape
    name, output.name = output.name, None
    copy.name = name
    output.replace_all_uses_with(copy, replace_graph_outputs=True)
    if node.graph is not None:
        node.graph.remove(node, safe=True)


def _construct(call: _Node) -> Members | None:
    return tuple(value for value in call.node.inputs if value is not None)


def _insert(call: _Node) -> Members | None:
    members, tensor = call.members(), call.value(1)
    if members is None or tensor is None:
        return None
    place = call.position(2, len(members), len(members))
    return None if place is None else (*members[:place], tensor, *members[place:])


def _erase(call: _Node) -> Members | None:
    members = call.members()
    place = None if members is None else call.position(1, len(members), len(members) - 1)
    return None if members is None or place is None else members[:place] + members[place + 1 :]


def _same(call: _Node) -> Members | None:
    return call.members()


def _split(call: _Node) -> Members | None:
    """Parts of given sizes, of one size but the last, or of one element each."""
    op, x = call.op, call.value(0)
    dims = None if x is None else dims_of(x)
    if x is None or not dims:
        return None
    axis = call.integer("axis", 0) % len(dims)
    size = dims[axis]
    if call.value(1) is not None:
        given = call.constant(1)
        if given is None:
            return None
        sizes = [int(part) for part in given.reshape(-1)]
        if given.ndim == 0:
            if not isinstance(size, int) or sizes[0] < 1:
                return None
            sizes = [min(sizes[0], size - start) for start in range(0, size, sizes[0])]
    elif isinstance(size, int):
        sizes = [1] * size
    else:
        return None
    if not 0 < len(sizes) <= _LARGEST:
        return None
    parts = op.split(x, axis, sizes)
    if call.value(1) is None and not call.integer("keepdims", 1):
        parts = tuple(op.squeeze(part, axis) for part in parts)
    return tuple(parts)


def _at(call: _Node) -> ir.Value | None:
    members = call.members()
    place = None if members is None else call.position(1, len(members), len(members) - 1)
    return None if members is None or place is None else members[place]


def _length(call: _Node) -> ir.Value | None:
    members = call.members()
    return None if members is None else call.op.constant(np.array(len(members), np.int64))


def _concat(call: _Node) -> ir.Value | None:
    op, members = call.op, call.members()
    if not members:
        return None
    axis = call.integer("axis", 0)
    if call.integer("new_axis", 0):
        members = tuple(op.unsqueeze(member, axis) for member in members)
    return op.Concat(*members, axis=axis)


_WRITERS: dict[str, Callable[[_Node], Members | None]] = {
    "SequenceConstruct": _construct,
    "SequenceEmpty": lambda _: (),
    "SequenceInsert": _insert,
    "SequenceErase": _erase,
    "SplitToSequence": _split,
    "Identity": _same,
}
_READERS: dict[str, Callable[[_Node], ir.Value | None]] = {
    "SequenceAt": _at,
    "SequenceLength": _length,
    "ConcatFromSequence": _concat,
}
