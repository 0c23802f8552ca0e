"""Who still reads a parameter when its gradient is complete.

The gradient of a layer's input is a product with its weight, which the weight's own gradient does
not wait for; a weight that is used twice, a value that is computed again, may be read later still.
An update that is written over the parameter has to wait for all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from odtpack.graph.graphs import reads, static_dims
from odtpack.graph.ops import Ops
from odtpack.passes import aliases


class Readers:
    """The nodes of a graph by what they read, and what each needs.

    Args:
        graph: A training graph without updates; nodes that are added later are not known.
        parameters: Those of its inputs that are parameters, trained or not.
    """

    def __init__(self, graph: ir.Graph, parameters: Iterable[ir.Value]) -> None:
        self._readers: dict[ir.Value, list[ir.Node]] = {}
        for node in graph:
            for value in set(reads(node)):
                self._readers.setdefault(value, []).append(node)
        self._forms = {*parameters, *graph.initializers.values()}
        for node in graph:
            is_view = node.op_type in aliases.VIEWS and node.inputs[0] in self._forms
            if is_view or all(value in self._forms for value in reads(node)):
                self._forms.update(node.outputs)

    def of(self, parameter: ir.Value) -> set[ir.Node]:
        """All nodes that read a parameter, or what is made of it and of other parameters only.

        A form of a parameter, as its transpose, may lie in its memory, and ONNX Runtime may let
        what reads the form read the parameter in its place.
        """
        found: set[ir.Node] = set()
        stack = [parameter]
        while stack:
            for node in self._readers.get(stack.pop(), ()):
                if node in found:
                    continue
                found.add(node)
                stack += (value for value in node.outputs if value in self._forms)
        return found


def ancestors(values: Iterable[ir.Value]) -> set[ir.Node]:
    """Nodes that have run once some values exist."""
    found: set[ir.Node] = set()
    stack = list(values)
    while stack:
        node = stack.pop().producer()
        if node is not None and node not in found:
            found.add(node)
            stack += reads(node)
    return found


def after(op: Ops, nodes: Iterable[ir.Node], value: ir.Value, dims: tuple[int, ...]) -> ir.Value:
    """A view of a parameter, of the shape ``dims``, that exists once some nodes have run."""
    found = [next(value for value in node.outputs if value.name) for node in nodes]
    shape = op.ints(*dims)
    if found:
        sizes = [op.Size(late) for late in sorted(found, key=lambda each: str(each.name))]
        zeros = op.Mul(functools.reduce(op.Add, sizes), op.constant(np.zeros(len(dims), np.int64)))
        # A zero stands for the size that the axis has.
        shape = zeros if dims == static_dims(value) else op.Add(zeros, shape)
    view: ir.Value = op.Reshape(value, shape)
    view.type, view.shape = value.type, ir.Shape(dims)
    return view
