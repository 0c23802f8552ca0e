"""Groups of nodes that a native kernel computes row by row; :mod:`native` wraps them.

Elementwise nodes and reductions of the last axis, or of all others, over values of one shape. A
group is a stretch of the order of execution: its inputs are there before its first node runs, and
nothing but views runs between its nodes. So no value lives longer for it, and what lived only
inside it needs no memory.

1. A group has a reduction or an exponential, as backward passes have: for others a single pass
   saves little, and ONNX Runtime fuses them, activations among them, with what is before them.
   Its LayerNormalization, Softmax and Gelu are as fast as a group would be.
2. Shapes are compared at one size of each axis that has a name: two such axes are then the same
   where their sizes are. A kernel refuses a value that is another one's repetition after all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from odtpack.graph.graphs import constant, dims_of, reads, static_dims
from odtpack.graph.inference import inferred_proto
from odtpack.passes.aliases import VIEWS
from odtpack.passes.compact import all_graphs
from odtpack_runtime.package.native import (
    ELEMENTWISE_OPERATORS,
    MOST_NODES,
    REDUCTIONS,
)
from odtpack_simulator.memory.execution_order import execution_order

_WORTH: Final = {"Exp", "Log", *REDUCTIONS}
_WIDTHS: Final = range(16, (1 << 14) + 1)
"""Of rows that are worth a kernel and whose registers fit a cache."""
_TRIAL: Final = 64
"""Sizes are odd multiples: batches can be cut, and layers are seldom so wide."""

Sizes = Mapping[ir.Value, tuple[int, ...]]
_FREE: Final = {*VIEWS, "Size", "Shape"}
_NUMBERS: Final = (ir.DataType.FLOAT, ir.DataType.BOOL)


def trial_sizes(model: ir.Model) -> Sizes:
    """The shapes of a graph's values where named axes have sizes; only those that follow."""
    if _WORTH.isdisjoint(node.op_type for node in model.graph):
        return {}
    trial = model.clone()
    inputs = [*trial.graph.inputs]
    _cut_unpacking(trial)
    named: dict[object, int] = {}
    for value in trial.graph.inputs:
        dims = dims_of(value)
        if dims is not None:
            sizes = [
                dim if isinstance(dim, int) or dim is None
                else named.setdefault(dim, _TRIAL * (2 * len(named) + _TRIAL - 1))
                for dim in dims
            ]  # fmt: skip
            value.shape = ir.Shape(sizes)
    values = {str(value.name): value for node in trial.graph for value in node.outputs}
    for each in values.values():
        dims = dims_of(each)
        if dims is not None:
            each.shape = ir.Shape([dim if isinstance(dim, int) else None for dim in dims])
    waiting = True
    while waiting:
        inferred = inferred_proto(trial)
        if inferred is None:
            return {}
        for info in inferred.graph.value_info:
            found = values.get(info.name)
            if found is not None and info.type.tensor_type.HasField("shape"):
                axes = info.type.tensor_type.shape.dim
                found.shape = ir.Shape(
                    [axis.dim_value if axis.HasField("dim_value") else None for axis in axes]
                )
        waiting = False
        for node in trial.graph:  # a size that is computed follows from the number of elements
            if node.op_type != "Reshape" or node.domain or node.inputs[0] is None:
                continue
            whole, dims = static_dims(node.inputs[0]), dims_of(node.outputs[0])
            if whole is None or dims is None or dims.count(None) != 1:
                continue
            rest = math.prod(dim for dim in dims if isinstance(dim, int))
            if rest:
                sizes = [dim if isinstance(dim, int) else math.prod(whole) // rest for dim in dims]
                node.outputs[0].shape = ir.Shape(sizes)
                waiting = True
    known = (
        *((value, values.get(str(value.name))) for node in model.graph for value in node.outputs),
        *zip(model.graph.inputs, inputs, strict=True),
        *((value, value) for value in model.graph.initializers.values()),
    )
    pairs = ((value, static_dims(twin)) for value, twin in known)
    return {value: dims for value, dims in pairs if dims is not None}


def _cut_unpacking(model: ir.Model) -> None:
    """Make inputs of matrices that nodes unpack: inference would follow each of their codes."""
    for graph in list(all_graphs(model.graph)):
        for node in list(graph):
            if node.op_type == "DequantizeLinear" and static_dims(node.outputs[0]) is not None:
                (old,) = node.outputs
                new = ir.Value(name=f"{old.name}/whole", type=old.type, shape=old.shape)
                model.graph.inputs.append(new)
                old.replace_all_uses_with(new, replace_graph_outputs=True)
    while common_passes.RemoveUnusedNodesPass()(model).modified:
        pass


def row_groups(graph: ir.Graph, sizes: Sizes) -> Iterator[list[ir.Node]]:
    """Groups of two or more nodes of a graph, each in the order of the file."""
    places = {node: place for place, node in enumerate(graph)}
    group: list[ir.Node] = []
    whole: tuple[int, ...] = ()
    known: set[ir.Value] = set()  # what the group reads and computes
    late: set[ir.Value] = set()  # what was computed since it began
    for node in [*_in_order(graph), None]:
        if node is not None and node.op_type in _FREE and not node.domain:
            made = {each.outputs[0] for each in group}
            if not (late | made).isdisjoint(reads(node)):  # others may as well run before the group
                late.update(node.outputs)
            continue
        if node is not None and group and len(group) < MOST_NODES // 2:
            values = {value for value in node.inputs if value is not None}
            if values & known and not values & late and _fits(node, whole, sizes):
                group.append(node)
                known |= {*values, node.outputs[0]}
                continue
        if len(group) > 1 and not _WORTH.isdisjoint(each.op_type for each in group):
            yield sorted(group, key=places.__getitem__)
        group, late = [], set()
        found = None if node is None else _whole(node, sizes)
        if node is not None and found and _fits(node, found, sizes):
            group, whole = [node], found
            known = {value for value in (*node.inputs, *node.outputs) if value is not None}


def _in_order(graph: ir.Graph) -> list[ir.Node]:
    """The nodes of a graph in the order of execution."""
    nodes = list(graph)
    numbers: dict[ir.Value, str] = {}
    names = onnx.GraphProto()
    for node in nodes:
        proto = names.node.add()
        proto.input.extend(numbers[value] for value in reads(node) if value in numbers)
        for value in node.outputs:
            numbers[value] = str(len(numbers))
            proto.output.append(numbers[value])
    return [nodes[place] for place in execution_order(names)]


def _whole(node: ir.Node, sizes: Sizes) -> tuple[int, ...] | None:
    """The shape that a group would have whose first node is this one; None if there is none."""
    values = node.inputs if node.op_type in REDUCTIONS else node.outputs
    dims = sizes.get(values[0]) if values and values[0] is not None else None
    return dims if dims and dims[-1] in _WIDTHS else None


def _fits(node: ir.Node, whole: tuple[int, ...], sizes: Sizes) -> bool:
    """Whether a node computes something of a shape, of its rows, or of its columns."""
    rows, reduces = (*whole[:-1], 1), node.op_type in REDUCTIONS
    numbers = [*node.inputs[:1], *node.outputs] if reduces else [*node.inputs, *node.outputs]
    if node.domain or len(node.outputs) != 1:
        return False
    if any(v is None or v.dtype not in _NUMBERS for v in numbers):
        return False
    shapes = [sizes.get(value) for value in numbers if value is not None]
    if reduces:
        columns = node.op_type == "ReduceSum" and shapes[1] == whole[-1:] and len(whole) > 1
        return shapes[0] == whole and (columns or shapes[1] == rows)
    if node.op_type not in ELEMENTWISE_OPERATORS or node.op_type == "Gemm":
        return False
    return shapes[-1] in (whole, rows) and all(
        dims in (whole, rows)
        or (dims is not None and len(dims) < len(whole) and math.prod(dims) in (1, *dims[-1:]))
        for dims in shapes
    )


def axes_of(node: ir.Node) -> ir.Value | None:
    """The input of a reduction that says its axes, if it has one."""
    if node.op_type not in REDUCTIONS or len(node.inputs) < 2:
        return None
    value = node.inputs[1]
    return value if constant(value, 8) is not None else None
