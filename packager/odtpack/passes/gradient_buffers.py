"""Accumulates gradients, and keeps gradients of tables sparse."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.backward import SUM_OF_COTANGENTS
from odtpack.graph import graphs
from odtpack.graph.graphs import Ops, nodes_of, operand, static_dims

# Elements from which on entering an If is cheaper than Where. For a matrix that is soon:
# the Where kernel handles a scalar against axes of length one element by element.
_LARGE_VECTOR, _LARGE_MATRIX = 1 << 15, 1 << 9

# Gradient accumulation: out = gradient if lazy_reset_grad else buffer + gradient.
#
# 1. A small gradient: Add(Where(reset, 0, buffer), gradient). Two nodes of about a
#    microsecond; Where also clears a buffer that holds NaN after a diverged step.
# 2. A large gradient: If(reset) then Identity(gradient) else Add(buffer, gradient). An If
#    costs ten microseconds to enter, and saves a pass over buffer and gradient.
# 3. A large gradient that one Gemm computes: the Gemm moves into both branches, so that a
#    fresh gradient is written straight into its buffer, without a copy and without memory
#    of its own. (Adding through Gemm's C would save a pass more, but a kernel may write its
#    output before it reads C, and here they share memory.)
# 4. A large gradient that adds rows at indices, as an embedding's does: If(reset) then the
#    rows are added to zeros, else straight into the buffer. Then a step that accumulates
#    touches nothing but those rows.
#
# In each case the output may be bound to the memory of the buffer (:mod:`.aliases`).

BUFFER_SUFFIX = "_grad.accumulation.buffer"
OUTPUT_SUFFIX = "_grad.accumulation.out"


def accumulate(
    op: Ops, gradient: ir.Value, buffer: ir.Value, reset: ir.Value, *, branches: bool = True
) -> ir.Value:
    """Write the accumulation of one gradient."""
    # buffer: Graph input with the gradient accumulated so far. reset: BOOL scalar; true to start
    # afresh. branches: Whether an If may choose.
    dims = static_dims(buffer) or ()
    if not branches or int(np.prod(dims)) < (_LARGE_VECTOR if len(dims) <= 1 else _LARGE_MATRIX):
        return op.Add(op.Where(reset, 0, buffer), gradient)
    scatter = read(unrounded(gradient))
    if scatter is not None and not gradient.uses():
        fresh, added = _scattered(op, scatter, buffer, dims, reset)
    else:
        product = product_of(gradient)
        if product is None or gradient.is_graph_output():
            first, total = ir.node("Identity", [gradient]), [ir.node("Add", [buffer, gradient])]
        else:
            first, copy = (
                ir.node("Gemm", product.inputs[:2], dict(product.attributes)) for _ in range(2)
            )
            total = [copy, ir.node("Add", [buffer, copy.outputs[0]])]
            op.graph.remove(product)
        # Branches may not share value names with each other or with the main graph.
        fresh = _branch(op, f"{buffer.name}.fresh", gradient, [first])
        added = _branch(op, f"{buffer.name}.added", gradient, total)
    out = op.If(reset, then_branch=fresh, else_branch=added)
    out.type = buffer.type
    return out


def product_of(gradient: ir.Value) -> ir.Node | None:
    """The one product that computes a gradient which nothing reads."""
    node = graphs.producer(gradient, "Gemm")
    if node is None or gradient.uses() or any(node.inputs[2:]):
        return None
    return node


def _scattered(
    op: Ops, scatter: Scatter, buffer: ir.Value, dims: tuple[int, ...], reset: ir.Value
) -> tuple[ir.Graph, ir.Graph]:
    """The updates of a scatter added to zeros, and to the buffer."""
    fresh = ir.Graph([], [], nodes=[], name=f"{buffer.name}.fresh")
    added = ir.Graph([], [], nodes=[], name=f"{buffer.name}.added")
    outputs = scatter.fresh(op.inside(fresh), dims, reset), scatter.onto(op.inside(added), buffer)
    for graph, output in zip((fresh, added), outputs, strict=True):
        graph.outputs.append(graphs.typed(output, buffer))
    scatter.remove()
    return fresh, added


def _branch(op: Ops, name: str, gradient: ir.Value, nodes: list[ir.Node]) -> ir.Graph:
    """A subgraph without inputs, which reads outer values, and returns the last node's output."""
    for node in nodes:
        node.name = op.fresh_name(name)
        value = node.outputs[0]
        value.name, value.type, value.shape = node.name, gradient.type, gradient.shape
    return ir.Graph([], nodes[-1].outputs, nodes=nodes, name=name)


# Gradients of tables: rows added at indices, without zeros as large as the table.
#
# The gradient of an embedding is ScatterElements(zeros, indices, rows), adding. ONNX Runtime
# folds zeros of a constant shape into a constant as large as the table: the session keeps it,
# and a model that is saved after optimization stores it. Instead
#
# 1. what several uses of a table add up to is scattered at once, and onto the gradient of
#    those uses that are not lookups (:func:`merge`);
# 2. a gradient that is nothing but a scatter goes straight into its buffer
#    (:meth:`Scatter.onto`), or starts afresh (:meth:`Scatter.fresh`), see :mod:`.accumulate`;
# 3. zeros that remain are computed in every run (:func:`zeros_at_run_time`).
#
# ScatterElements runs in one thread and in the order of the indices. It copies its data, unless
# the output is the same memory, and then touches only the places that it adds to.

# Zeros of fewer elements may become a constant.
_LARGE_ZEROS = 1 << 12

# From these sizes on a table is written faster row by row than as zeros that are then copied.
# Of shorter rows copying each takes longer; of smaller tables nothing is gained.
_LONG_ROW, _LARGE_TABLE = 16, 1 << 18


@dataclass(frozen=True)
class Scatter:
    """A ScatterElements that adds to zeros."""

    node: ir.Node
    axis: int  # axis of the table that the indices count along, not negative
    # Reshape of n indices to [1, .., n, .., 1] along ``axis``, if slice j of the updates goes as a
    # whole to index j; None if each element has an index of its own.
    column: ir.Node | None

    @property
    def zeros(self) -> ir.Value:
        """The data of the node: zeros of the table's shape."""
        return operand(self.node, 0)

    @property
    def updates(self) -> ir.Value:
        """What is added."""
        return operand(self.node, 2)

    def onto(self, op: Ops, data: ir.Value) -> ir.Value:
        """Add the updates to ``data``, of the shape of the table."""
        if self.column is None:
            indices = operand(self.node, 1)
        else:  # made where they are needed: they are twice as large as the updates
            indices = op.Expand(self.column.outputs[0], op.Shape(self.updates))
        return op.ScatterElements(data, indices, self.updates, axis=self.axis, reduction="add")

    def fresh(self, op: Ops, dims: tuple[int, ...], reset: ir.Value) -> ir.Value:
        """Add the updates to zeros."""
        # op: Writer for a branch that is entered only if ``reset`` is true. dims: Shape of the
        # table. reset: BOOL scalar. It makes the zeros, so that nothing folds them.
        false = op.Not(reset)
        zero = op.cast(false, _fill_type(self.zeros.producer()))
        width = math.prod(dims[1:])
        if self.column is None or self.axis or width < _LONG_ROW or dims[0] * width < _LARGE_TABLE:
            return self.onto(op, op.Expand(zero, op.ints(*dims)))
        return self._by_rows(op, op.reshape(self.column.outputs[0], -1), dims, false, zero)

    def _by_rows(
        self, op: Ops, numbers: ir.Value, dims: tuple[int, ...], false: ir.Value, zero: ir.Value
    ) -> ir.Value:
        """:meth:`fresh` without zeros of the table's shape, for n updates to rows ``numbers``."""
        # The updates are summed in a table of n + 1 rows, of which row 0 stays zero. ``slots`` says
        # which of them each row of the large table is: 0, or 1 + j of the last update j for it.
        end = op.Add(op.Shape(numbers), op.ints(1))
        one = op.constant(np.array(1, np.int64))
        blank = op.Expand(op.cast(false, ir.DataType.INT64), op.ints(dims[0]))
        own = op.Range(one, op.squeeze(end, 0), one)
        slots = op.ScatterElements(blank, numbers, own, axis=0)
        rows = op.reshape(op.Gather(slots, numbers, axis=0), -1, *[1] * (len(dims) - 1))
        indices = op.Expand(rows, op.Shape(self.updates))
        none = op.Expand(zero, op.Concat(end, op.ints(*dims[1:]), axis=0))
        summed = op.ScatterElements(none, indices, self.updates, axis=0, reduction="add")
        return op.Gather(summed, slots, axis=0)

    def remove(self) -> None:
        """Take the node, which is not read, out of its graph, and what only it needed."""
        for node in (self.node, *(value.producer() for value in self.node.inputs[:2] if value)):
            if node is not None and node.graph is not None and not node.outputs[0].uses():
                node.graph.remove(node, safe=True)


def read(value: ir.Value) -> Scatter | None:
    """The scatter that computes a value which nothing but one node may read, if one does."""
    node = graphs.producer(value, "ScatterElements")
    if node is None or value.is_graph_output() or len(value.uses()) > 1:
        return None
    if node.attributes.get_string("reduction", "none") != "add" or not _zeros(operand(node, 0)):
        return None
    axis = node.attributes.get_int("axis", 0)
    return None if axis < 0 else Scatter(node, axis, _column(node, axis))


def unrounded(gradient: ir.Value) -> ir.Value:
    """The float32 value that a float32 gradient of float16 numbers was before it was rounded."""
    # Models in float16 train copies of their parameters in float32. ONNX Runtime adds float16 in
    # float32; between the two there is no need to round. Casts that are no longer read are left to
    # the pass that removes such nodes.
    outer = graphs.producer(gradient, "Cast")
    inner = None if outer is None else graphs.producer(outer.inputs[0], "Cast")
    if inner is None or len(inner.outputs[0].uses()) > 1:
        return gradient
    value = operand(inner, 0)
    return value if value.dtype == gradient.dtype == ir.DataType.FLOAT else gradient


def merge(op: Ops, gradient: ir.Value) -> ir.Value:
    """Write a gradient that is a sum, some of whose terms are scatters, without zeros."""
    # gradient: Of one parameter and of nothing else; returned if there is nothing to merge.
    adds, terms = _terms(gradient)
    scatters = [scatter for scatter in map(read, terms) if scatter is not None]
    if not adds or not scatters:
        return gradient
    nodes = {scatter.node for scatter in scatters}
    others = [term for term in terms if term.producer() not in nodes]
    with op.before(adds[0]):
        total = functools.reduce(op.Add, others) if others else scatters[0].zeros
        rowwise: dict[int, list[Scatter]] = {}
        for scatter in scatters:
            if scatter.column is None:
                total = scatter.onto(op, total)
            else:
                rowwise.setdefault(scatter.axis, []).append(scatter)
        for axis, alike in rowwise.items():
            total = _together(op, alike, axis, total)
    graphs.replace(gradient, total, adds)
    for scatter in scatters:
        scatter.remove()
    return total


def zeros_at_run_time(op: Ops, graph: ir.Graph, reset: ir.Value) -> None:
    """Compute large zeros that scatters start from in every run, instead of storing them."""
    # graph: The training graph, its subgraphs included. reset: Graph input, BOOL [1]. Nothing knows
    # it before the model runs.
    found = {}
    for node in filter(None, map(_origin, list(nodes_of(graph)))):
        dims = graphs.constant(node.inputs[0])
        if dims is not None and math.prod(dims.tolist()) >= _LARGE_ZEROS:
            found[node] = dims.tolist()
    if not found:
        return
    with op.before(graph.node(0)):
        false = op.And(reset, op.Not(reset))
        zero = {dtype: op.cast(false, dtype) for dtype in {_fill_type(node) for node in found}}
    for node, dims in found.items():
        with op.before(node):
            zeros = op.Expand(zero[_fill_type(node)], op.ints(*dims))
        graphs.replace(node.outputs[0], zeros, [node])


def _together(op: Ops, scatters: list[Scatter], axis: int, data: ir.Value) -> ir.Value:
    """The updates of all scatters, which have columns, added to ``data`` in one pass."""
    if len(scatters) == 1:
        return scatters[0].onto(op, data)
    updates = op.Concat(*(scatter.updates for scatter in scatters), axis=axis)
    columns = [scatter.column for scatter in scatters if scatter.column is not None]
    numbers = op.Concat(*(column.outputs[0] for column in columns), axis=axis)
    # A view of the same shape, by which :func:`read` knows a column.
    column = op.Reshape(numbers, columns[0].inputs[1])
    indices = op.Expand(column, op.Shape(updates))
    return op.ScatterElements(data, indices, updates, axis=axis, reduction="add")


def _terms(total: ir.Value) -> tuple[list[ir.Node], list[ir.Value]]:
    """Additions that a value consists of, the last first, and what they add up."""
    adds: list[ir.Node] = []
    terms: list[ir.Value] = []
    stack = [total]
    while stack:
        value = stack.pop()
        node = graphs.producer(value, "Add")
        shared = value.is_graph_output() or (value is not total and len(value.uses()) > 1)
        if node is None or SUM_OF_COTANGENTS not in node.meta or shared:
            terms.append(value)
        else:
            adds.append(node)
            stack += [operand(node, 1), operand(node, 0)]
    return adds, terms


def _column(node: ir.Node, axis: int) -> ir.Node | None:
    """The :attr:`Scatter.column` of a node, if its indices are one repeated over each slice."""
    expand = graphs.producer(node.inputs[1], "Expand")
    shape = None if expand is None else graphs.producer(expand.inputs[1], "Shape")
    if expand is None or shape is None or shape.inputs[0] is not node.inputs[2]:
        return None
    reshape = graphs.producer(expand.inputs[0], "Reshape")
    dims = None if reshape is None else graphs.constant(reshape.inputs[1])
    if dims is None:
        return None
    return reshape if np.array_equal(dims, np.where(np.arange(dims.size) == axis, -1, 1)) else None


def _origin(node: ir.Node) -> ir.Node | None:
    """The node that writes the zeros that a scatter starts from."""
    if node.op_type != "ScatterElements" or node.domain:
        return None
    value: ir.Value | None = operand(node, 0)
    while (view := graphs.producer(value, "Reshape")) is not None:
        value = view.inputs[0]
    return _zeros(value)


def _zeros(value: ir.Value | None) -> ir.Node | None:
    """The node that computes a value, if that is zeros of a shape."""
    node = graphs.producer(value, "ConstantOfShape")
    fill = None if node is None else node.attributes.get_tensor("value", None)
    return node if fill is None or not np.any(np.asarray(fill.numpy())) else None


def _fill_type(zeros: ir.Node | None) -> ir.DataType:
    fill = None if zeros is None else zeros.attributes.get_tensor("value", None)
    return ir.DataType.FLOAT if fill is None else fill.dtype
