"""Keeps ONNX Runtime from holding the memory of the forward pass for the backward pass.

Its planner gives a tensor the buffer of one that is no longer needed if both are known to be of
the same size, by number or by the name of a size, and the buffer stays allocated in between. A
gradient has the size of its value: it would get the buffer of some activation that was freed long
ago, or of the one that is computed again; the form of a weight that a gradient needs would get that
of the forward pass. Names are compared as names, so the backward pass reads values under another
name of the same size: through a view (:mod:`.control_edge`) whose first axis has a name of its own.
The zeros of its shape are a flag times zeros: of Size, inference of shapes would know the number,
and with it the view's sizes where they are numbers. What the backward pass computes has names of
its own, too: else the gradients of one layer would hold their memory for those of the next. Only
what an operator may write over its input, as activations may, keeps the name of that input.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from odtpack.graph.graphs import dims_of, reads, subgraphs
from odtpack.graph.ops import Ops
from odtpack.memory.control_edge import SizeNames
from odtpack.memory.forward import ancestors
from odtpack.memory.timeline import Step
from odtpack_runtime.session.graph_signature import RESET_NAME
from odtpack_simulator.memory.kernel_memory import IN_PLACE

_LARGE = 1 << 14
"""Bytes from which on a buffer is worth a view."""


def rename_sizes(op: Ops, graph: ir.Graph, step: Step, names: SizeNames) -> None:
    """Let the backward pass read what it starts from under sizes of other names.

    Args:
        op: Writer for the training graph.
        graph: The graph; new nodes go to its end.
        step: It as ONNX Runtime executes it.
        names: Makes the names.
    """
    forward = ancestors(graph.outputs[:1])
    reset = next((v for v in graph.inputs if v.name == RESET_NAME), None)
    if reset is None:
        return
    renamed: set[ir.Value] = set()
    views: dict[ir.Value, ir.Value] = {}
    shapes: dict[int, ir.Value] = {}
    flag = op.cast(reset, ir.DataType.INT64)  # what it is, no inference of shapes knows
    for node in list(graph):
        if node in forward:
            _own_sizes(node, step, names)
            continue
        if subgraphs(node):
            continue
        if any(value in renamed for value in reads(node)):
            renamed.update(node.outputs)
            _own_sizes(node, step, names)
            continue
        large = any(_nbytes(step, value) >= _LARGE for value in node.outputs)
        source = next(_sources(node, step), None) if large else None
        if source is None:
            continue
        if source not in views:
            dims = _dims(source, step)
            if len(dims) not in shapes:
                shapes[len(dims)] = op.Mul(flag, op.ints(*[0] * len(dims)))
            view = op.Reshape(source, shapes[len(dims)])
            view.type, view.shape = source.type, names.named(dims)
            views[source] = view
        for index, value in enumerate(node.inputs):
            if value is source:
                node.replace_input_with(index, views[source])
        renamed.update(node.outputs)
        _own_sizes(node, step, names)


def _own_sizes(node: ir.Node, step: Step, names: SizeNames) -> None:
    """Give what a node computes sizes that nothing else has but what it may overwrite."""
    source = dims_of(node.inputs[0]) if node.inputs and node.inputs[0] is not None else None
    overwrites = not node.domain and node.op_type in IN_PLACE  # its result has its input's shape
    for value in node.outputs:
        dims = _dims(value, step)
        if not dims or value.is_graph_output():
            continue
        if dims_of(value) is None and all(isinstance(dim, int) for dim in dims):
            continue  # ONNX Runtime takes the name over from what it is computed from
        if overwrites and source and any(map(SizeNames.is_own, source)):
            value.shape = ir.Shape(source)
        else:
            value.shape = names.another().open(dims)


def _sources(node: ir.Node, step: Step) -> Iterator[ir.Value]:
    """What a node reads that is no constant, the largest first."""
    found = [
        value
        for value in node.inputs
        if value is not None and _dims(value, step) and not value.is_initializer()
    ]
    yield from sorted(found, key=lambda value: -_nbytes(step, value))


def _dims(value: ir.Value, step: Step) -> tuple[int | str | None, ...]:
    """Sizes of the axes: what the graph says, or else ONNX Runtime; none where neither does."""
    known = step.graph.values.get(value.name or "")
    return dims_of(value) or (known.dims if known is not None else None) or ()


def _nbytes(step: Step, value: ir.Value) -> int:
    known = step.graph.values.get(value.name or "")
    return 0 if known is None else known.nbytes or 0
