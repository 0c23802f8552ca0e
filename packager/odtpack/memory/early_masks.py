"""Keeps where an activation was cut off instead of the activation, where nothing else is needed.

The gradient of a ReLU6 asks of its output only whether it lies between the bounds. Where no weight
gradient reads the output, a byte for each element, computed right after it, does for the backward
pass. ONNX Runtime executes first what the loss needs, so the loss is a view of itself that exists
once all these masks do. The masks are part of the forward pass then: what chooses what is computed
again may choose them as well.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

import numpy as np
import onnx_ir as ir

from odtpack.graph.graphs import Ops, ancestors, dims_of, typed
from odtpack.memory.schedule import Step
from odtpack.spec import MemorySpec
from odtpack_simulator.memory.kernel_memory import ALIASES

_LARGE: Final = 1 << 14  # bytes from which on a value is worth a mask
_SHARE: Final = 2  # times that what is freed must be larger than what is kept in its place
_STEEP: Final = 2.0**100  # slope from which on a HardSigmoid of float32 is a step from 0 to 1
_SIGMOID: Final = {"alpha": 0.2, "beta": 0.5}  # a HardSigmoid's attributes where it has none
_BOOLEAN: Final = {
    *("And", "Equal", "Greater", "GreaterOrEqual", "IsNaN"),
    *("Less", "LessOrEqual", "Not", "Or", "Xor"),
}
_SIZES: Final = {"Shape", "Size"}
_ELEMENTWISE: Final = {
    *_BOOLEAN,
    *("Abs", "Add", "Cast", "HardSigmoid", "Max", "Min", "Mul", "Neg", "Sign", "Sub"),
}


@dataclasses.dataclass(eq=False)
class _Group:
    """Values of the forward pass, and the masks that would do for them; bytes of each."""

    masks: list[ir.Value]
    freed: int
    kept: int = 0


def compute_early(op: Ops, graph: ir.Graph, step: Step) -> frozenset[str]:
    """Let masks for which the backward pass would keep what is larger be needed by the loss."""
    # graph: The graph; new nodes go to its end. step: It as ONNX Runtime executes it.
    # Returns the names of values to compute as early as possible: the masks, what is computed on
    # the way to them, and the loss. None where that would save too little: the graph is as it was.
    search = _Search(graph, step)
    groups, loss = list(search.groups()), graph.outputs[0]
    saved = sum(group.freed - group.kept for group in groups)
    if dims_of(loss) is None or saved <= MemorySpec.worth * step.timeline().peak:
        return frozenset()
    masks = [_as_bytes(op, mask, step) for group in groups for mask in group.masks]
    early = ancestors(graph.outputs[:1]) - ancestors(graph.outputs[1:])
    early |= ancestors(masks) - search.forward
    zeros = op.constant(np.zeros(len(dims_of(loss) or ()), np.int64))
    view = typed(op.Reshape(loss, op.Mul(op.Max(*map(op.Size, masks)), zeros)), loss)
    loss.name, view.name = view.name, loss.name
    graph.outputs[0] = view
    return frozenset(v.name for node in early for v in node.outputs if v.name)


def _as_bytes(op: Ops, mask: ir.Value, step: Step) -> ir.Value:
    """The mask as booleans; what reads a step of numbers reads them as numbers again."""
    node = mask.producer()
    if node is None or node.op_type != "HardSigmoid":
        return mask
    alpha, beta = (node.attributes.get_float(name, usual) for name, usual in _SIGMOID.items())
    with op.before(node):
        found = (op.Greater if alpha > 0 else op.Less)(node.inputs[0], -beta / alpha)
        numbers, name = op.cast(found, ir.DataType.FLOAT), mask.name
    mask.replace_all_uses_with(numbers)
    found.shape = numbers.shape = ir.Shape(step.graph.values[str(name)].dims or ())
    op.graph.remove(node, safe=True)
    numbers.name = name  # which has a place in the step, where it is read
    return found


class _Search:
    def __init__(self, graph: ir.Graph, step: Step) -> None:
        self._graph = graph
        self._step = step
        self.forward = ancestors(graph.outputs[:1])
        # What can be computed from the forward pass element by element, and the sizes of it.
        self._early: set[ir.Value] = set()
        for node in graph:
            if node in self.forward or (
                not node.domain
                and node.op_type in _ELEMENTWISE | _SIZES
                and all(v is None or v.producer() is None or v in self._early for v in node.inputs)
            ):
                self._early.update(node.outputs)

    def groups(self) -> Iterator[_Group]:
        """What would do for what, where it is worth it."""
        owner: dict[ir.Value, _Group] = {}
        groups: list[_Group] = []
        for root, masks in self._roots():
            group = _Group(list(masks), self._step.nbytes(root.name))
            for other in {id(owner[m]): owner[m] for m in masks if m in owner}.values():
                group.freed += other.freed
                group.masks = list(dict.fromkeys([*other.masks, *group.masks]))
                groups.remove(other)
            owner.update(dict.fromkeys(group.masks, group))
            groups.append(group)
        for group in groups:
            group.kept = sum(
                self._step.nbytes(v.name) // int((v.dtype or ir.DataType.BOOL).itemsize)
                for v in group.masks
            )
            if _SHARE * group.kept <= group.freed:
                yield group

    def _roots(self) -> Iterator[tuple[ir.Value, list[ir.Value]]]:
        """Values that only masks are computed from in the backward pass, with these."""
        families: dict[ir.Value, list[ir.Value]] = defaultdict(list)
        for node in self._graph:
            if node in self.forward:
                for value in node.outputs:
                    families[self._root(value)].append(value)
        for root, family in families.items():
            if self._step.nbytes(root.name) >= _LARGE and root.producer() is not None:
                masks = self._masks(family)
                if masks:
                    yield root, masks

    def _root(self, value: ir.Value) -> ir.Value:
        node = value.producer()
        while node is not None and not node.domain and node.op_type in ALIASES:
            source = node.inputs[0]
            if source is None:
                break
            value, node = source, source.producer()
        return value

    def _masks(self, family: list[ir.Value]) -> list[ir.Value] | None:
        """The masks that the backward pass computes from a buffer; None if it needs more of it."""
        found: dict[ir.Value, None] = {}
        seen: set[ir.Node] = set()
        if any(value.is_graph_output() for value in family):
            return None
        stack = [n for v in family for n in v.consumers() if n not in self.forward]
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            value = node.outputs[0]
            if value.is_graph_output() or value not in self._early:
                return None
            if self._is_mask(value):
                found[value] = None
            else:
                stack += value.consumers()
        return list(found)

    def _is_mask(self, value: ir.Value) -> bool:
        """Whether a value tells two cases apart, and more than other masks are computed from it."""
        # Or is a number of elements, which takes no memory either.
        node = value.producer()
        if node is None or node.op_type in _SIZES:
            return node is not None
        if value.dtype == ir.DataType.BOOL:
            return any(each.op_type not in _BOOLEAN for each in value.consumers())
        is_step = node.op_type == "HardSigmoid" and value.dtype == ir.DataType.FLOAT
        return is_step and abs(node.attributes.get_float("alpha", 0.0)) >= _STEEP
