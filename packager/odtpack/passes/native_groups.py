"""Groups of nodes that a native kernel computes: rows, convolutions, products.

Rows: elementwise nodes and reductions of the last axis, or of all others, over values of one shape.
A group is a stretch of the order of execution: its inputs are there before its first node runs, and
nothing but views runs between its nodes. So no value lives longer for it, and what lived only
inside it needs no memory.

1. A group has a reduction or an exponential, as backward passes have: for others a single pass
   saves little, and ONNX Runtime fuses them, activations among them, with what is before them.
   Its LayerNormalization, Softmax and Gelu are as fast as a group would be.
2. Shapes are compared at one size of each axis that has a name: two such axes are then the same
   where their sizes are. A kernel refuses a value that is another one's repetition after all.

Depthwise convolutions and their gradients: rules mark the nodes that they write for a result
(:func:`odtpack.autodiff.windows.region`). Passes move and share some afterwards, so a group is
found again from its end: back to the values that have the shape of the kernel's tensors. Whether it
computes what the kernel does is then tried.

Products with matrices of few bits, and their gradients: a group is a product and the nodes that
unpack its second operand, back to the codes and the scales. A product whose first operand is
transposed is a group by itself.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from odtpack.autodiff.context import Context
from odtpack.autodiff.rules.convolution import read_windows
from odtpack.autodiff.windows import Region, Windows, conv_windows
from odtpack.graph.graphs import (
    MARK,
    Dims,
    Ops,
    constant,
    dims_of,
    maker,
    producer,
    reads,
    static_dims,
)
from odtpack.graph.inference import inferred_proto
from odtpack.passes.aliases import VIEWS
from odtpack.passes.compact import all_graphs
from odtpack_runtime.package import native as kernels
from odtpack_runtime.package.native import (
    ELEMENTWISE_OPERATORS,
    FORWARD,
    INPUT_GRADIENT,
    MOST_NODES,
    PRODUCT_NODES,
    REDUCTIONS,
    UNPACKING,
    WEIGHT_GRADIENT,
    is_transposed_product,
    unpacked,
    weight_dims,
)
from odtpack_simulator.memory.execution_order import execution_order

_WORTH: Final = {"Exp", "Log", *REDUCTIONS}
_WIDTHS: Final = range(16, (1 << 14) + 1)
"""Of rows that are worth a kernel and whose registers fit a cache."""
_TRIAL: Final = 64  # sizes are odd multiples: batches can be cut, and layers are seldom so wide
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


_KINDS = {
    "forward": FORWARD, "input gradient": INPUT_GRADIENT, "weight gradient": WEIGHT_GRADIENT,
}  # fmt: skip
_VIEWS = {"Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}


@dataclasses.dataclass(frozen=True)
class Group:
    """Nodes, in order, of which the last computes a result; and what a kernel would read."""

    nodes: list[ir.Node]  # others may read the first ones, too
    read: list[ir.Value]  # tensors of the kernel
    constants: list[ir.Value]  # that nodes read besides, and a body has
    programs: list[list[int]]  # of the kernel, of which one may be right
    fixed: list[ir.Value] = dataclasses.field(default_factory=list)  # constants that it reads, too


def convolution_groups(op: Ops, graph: ir.Graph) -> Iterator[list[Group]]:
    """Each result of a graph: the ways to read its nodes, of which one may be right."""
    order = {node: place for place, node in enumerate(graph)}
    for node in list(graph):
        region = _region(op, node)
        if region is not None and _is_end(node, region):
            found = _convolution_group(node, region, order)
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


def _convolution_group(end: ir.Node, region: Region, order: dict[ir.Node, int]) -> list[Group]:
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
        elif not inside and any(_dims_fit(win, value, role) for role in "wbxy"):
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
    if not _dims_fit(win, end.outputs[0], result) or len(read) not in (2, len(wanted)):
        return []
    found = []
    for some in itertools.permutations(read):
        if all(_dims_fit(win, value, role) for value, role in zip(some, wanted, strict=False)):
            tensors = dict(zip(wanted, some, strict=False)) | {result: end.outputs[0]}
            first = [int(r in tensors and len(tensors[r].shape or ()) == 3) for r in "xy"]
            axes = zip(
                win.size, win.kernel, win.strides, win.dilations, win.before, win.out, strict=True
            )
            lies = weight_dims(win.channels, win.kernel).index(_dims(tensors["w"]))
            program = [_KINDS[kind], *first, lies, win.channels, *itertools.chain(*axes)]
            program.append(len(some) == 3)
            group = sorted(nodes, key=order.__getitem__)
            found.append(Group(group, list(some), places, [[int(n) for n in program]], fixed))
    return found


def _dims_fit(win: Windows, value: ir.Value, role: str) -> bool:
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


_BYTES = (ir.DataType.UINT8, ir.DataType.INT8)
_MOST_FIXED = 8  # elements of a constant that a body has


def product_groups(graph: ir.Graph) -> Iterator[Group]:
    """Each product of a graph with a matrix of few bits; it reads codes, scales and x."""
    order = {node: place for place, node in enumerate(graph)}
    for node in order:
        if node.op_type in PRODUCT_NODES and not node.domain and len(node.inputs) == 2:
            found = _product_group(node, order)
            if found:
                yield found


def _product_group(end: ir.Node, order: dict[ir.Node, int]) -> Group | None:
    x, operand = end.inputs
    nodes, fixed, sized = {end}, dict[ir.Value, None](), dict[ir.Value, None]()
    codes, scales = dict[ir.Value, None](), dict[ir.Value, None]()
    waiting = [operand]
    while waiting:
        value = waiting.pop()
        if value is None or value is x:
            return None
        writer = value.producer()
        if constant(value, _MOST_FIXED) is not None:
            fixed[value] = None
        elif writer is not None and writer in order and writer.op_type in UNPACKING:
            nodes.add(writer)
            (measured,) = writer.inputs if writer.op_type == "Size" else (None,)
            if measured is None:
                waiting += writer.inputs
            elif measured is not x:
                sized[measured] = None
        else:
            (codes if value.dtype in _BYTES else scales)[value] = None
    matrices = [node for node in nodes if node.op_type == "DequantizeLinear"]
    sized = {v: None for v in sized if v.producer() not in nodes}
    if x is None or (len(codes), len(scales), len(matrices)) != (1, 1, 1) or len(sized) > 1:
        return None
    dims = static_dims(matrices[0].outputs[0])
    if dims is None or len(dims) != 2:
        return None
    if {v.dtype for v in (x, *scales, end.outputs[0])} != {ir.DataType.FLOAT}:
        return None
    (stored,), (scale,), reader = codes, scales, matrices[0]
    axis = reader.attributes.get_int("axis", 1) % 2
    signed = stored.dtype == ir.DataType.INT8
    bits = 4 if any(node.op_type == "BitwiseAnd" for node in nodes) else 8
    block = reader.attributes.get_int("block_size", 0)
    if block:
        blocks = (block, 1) if axis == 0 else (1, block)
    else:  # a scale for each place of the axis
        blocks = (1, dims[1]) if axis == 0 else (dims[0], 1)
    programs = [
        [transposed, *dims, *blocks, bits, int(signed), zero]
        for transposed in (1, 0)
        for zero in (1 << bits - 1, 0)
    ]
    read = [stored, scale, x, *sized]
    return Group(sorted(nodes, key=order.__getitem__), read, [*fixed], programs)


_SHORTEST: Final = 16  # rows and columns of a result that is worth a kernel
_DEEP: Final = 96  # rows of the operands from which on ONNX Runtime's own product is slower


def transposed_products(op: Ops, graph: ir.Graph) -> Iterator[ir.Node]:
    """Each product of a graph whose first operand is transposed, as gradients of weights are."""
    # Of the operands' rows, what is not known is taken for many, and a batch for few.
    for node in graph:
        values, dims = (*node.inputs, *node.outputs), dims_of(node.outputs[0]) or (0,)
        if node.op_type != "Gemm" or not is_transposed_product(ir.to_proto(node)):
            continue
        rows = [(dims_of(value) or (None,))[0] for value in node.inputs]
        deep = all(n >= _DEEP if isinstance(n, int) else n not in op.symbols for n in rows)
        large = all(isinstance(dim, int) and dim >= _SHORTEST for dim in dims)
        twice = node.inputs[0] is node.inputs[1]  # a body's inputs are not one value
        numbers = {v and v.dtype for v in values} == {ir.DataType.FLOAT}
        if deep and large and numbers and not twice:
            yield node


@dataclasses.dataclass(frozen=True)
class NormalizationGroup:
    """Nodes, in order, that compute what a body of the kernel ``normalization`` does."""

    nodes: list[ir.Node]
    read: list[ir.Value]
    kept: list[ir.Value]
    program: list[int]
    body: onnx.FunctionProto
    stays: set[ir.Node]  # those of vectors, which others may read besides
    dims: ir.Value | None  # what the first of ``read`` is yet to be reshaped to


_ENDS: Final = {
    kernels.CLIP: "Clip", kernels.RELU: "Relu", kernels.NO_ACTIVATION: "BatchNormalization",
}  # fmt: skip
_STAYS: Final = {
    "deviation", "gain", "gains", "inverse", "means", "share", "steep", "widened",
}  # fmt: skip
_USUAL: Final[dict[str, object]] = {
    "epsilon": float(np.float32(1e-5)), "keepdims": 1, "momentum": None, "training_mode": 0,
}  # fmt: skip


def normalization_groups(graph: ir.Graph) -> Iterator[NormalizationGroup]:
    """Batch normalizations in training mode, their gradients, and results computed again.

    A caller replaces each before it asks for the next: results computed again are those of
    normalizations that are native.
    """
    kinds = (kernels.FORWARD_NORMALIZATION, kernels.NORMALIZATION_GRADIENT, kernels.ACTIVATED)
    for kind, activation in itertools.product(kinds, _ENDS):
        end = "Sub" if kind == kernels.NORMALIZATION_GRADIENT else _ENDS[activation]
        for node in list(graph):
            if node.op_type == end and node.graph is graph and not node.domain:
                found = _normalization_group(node, kind, activation)
                if found and _may_be_one(found, graph):
                    yield found


def _normalization_group(end: ir.Node, kind: int, activation: int) -> NormalizationGroup | None:
    (result,) = end.outputs
    normal, back = _normal(end, kind, activation)
    dims = None if normal is None else dims_of(normal.inputs[0] or result)
    if normal is None or dims is None:
        return None
    if back is not None and activation == kernels.NO_ACTIVATION and end is normal:
        result = back.outputs[0]
    epsilon = np.float32(normal.attributes.get_float("epsilon", 1e-5))
    program = [kind, 0 if back else len(dims), activation, int(epsilon.view(np.uint32))]
    try:
        body = kernels.normalization_body(program)
    except kernels.RefusedError:
        return None
    template = {node.output[0]: node for node in body.node}
    again = back is not None and kind == kernels.ACTIVATED
    if again:
        del template["wide"]  # it was [1, C, N P] before it was computed again
    bound = _unified(template, "dx" if kind == kernels.NORMALIZATION_GRADIENT else "y", result, {})
    if bound is None or (back and not _same_planes(bound, result, back)):
        return None
    if again:
        bound["centered"] = bound.pop("wide")
    named = [bound[name] for name in (*body.input, *body.output)]
    if len({*named}) < len(named) or any(each.dtype != ir.DataType.FLOAT for each in named):
        return None
    if kind == kernels.ACTIVATED and not _of_native(bound["variance"]):
        return None
    nodes = {
        name: maker(bound[name])
        for name, node in template.items()
        if node.op_type not in ("Constant", "Unsqueeze")
    }
    return NormalizationGroup(
        [*nodes.values()], named[: len(body.input)], named[len(body.input) :], program, body,
        {node for name, node in nodes.items() if name in _STAYS},
        back.inputs[1] if again and back else None,
    )  # fmt: skip


def _normal(end: ir.Node, kind: int, activation: int) -> tuple[ir.Node | None, ir.Node | None]:
    """The normalization of a group, and the view of its result as [C, N, P], if there is one."""
    if kind != kernels.NORMALIZATION_GRADIENT and activation == kernels.NO_ACTIVATION:
        readers = [reader for reader, _ in end.outputs[0].uses()]
        view = len(readers) == 1 and readers[0].op_type == "Reshape" and _is_one_sample(end)
        return end, readers[0] if view else None
    value = end.inputs[int(kind == kernels.NORMALIZATION_GRADIENT)]
    back = producer(value, "Reshape")
    normal = producer(value if back is None else back.inputs[0], "BatchNormalization")
    return normal, back


def _is_one_sample(normal: ir.Node) -> bool:
    dims = None if normal.inputs[0] is None else dims_of(normal.inputs[0])
    return dims is not None and len(dims) == 3 and dims[0] == 1


def _same_planes(bound: Mapping[str, ir.Value], result: ir.Value, back: ir.Node) -> bool:
    """Whether what is normalized as [1, C, N P] is [C, N, P] before and afterwards."""
    normal, shape = maker(back.inputs[0] or result), constant(back.inputs[1], 3)
    channels = static_dims(bound["scale"])
    if shape is None or channels is None or shape.shape != (3,) or not _is_one_sample(normal):
        return False
    before = dims_of(bound["centered"]) if "centered" in bound else (*channels, None, shape[2])
    return (
        shape.tolist() == [*channels, -1, max(1, shape[2])]
        and before is not None and before[::2] == (*channels, shape[2])
    )  # fmt: skip


def _unified(
    template: Mapping[str, onnx.NodeProto],
    name: str,
    value: ir.Value | None,
    bound: Mapping[str, ir.Value],
) -> dict[str, ir.Value] | None:
    """Values by their names in a template, one of which is known; None where nodes differ."""
    if value is None or bound.get(name, value) is not value:
        return None
    found, node = {**bound, name: value}, template.get(name)
    if node is None or name in bound:
        return found
    own = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    if node.op_type == "Constant":
        known, wanted = constant(value, _MOST_FIXED), onnx.numpy_helper.to_array(own["value"])
        same = known is not None and known.dtype == wanted.dtype and np.array_equal(known, wanted)
        return found if same else None
    if node.op_type in ("Squeeze", "Unsqueeze"):  # written as a Reshape
        view = producer(value, "Reshape")
        return None if view is None else _unified(template, node.input[0], view.inputs[0], found)
    writer = producer(value, node.op_type)
    if writer is None or len(writer.outputs) != 1 or len(writer.inputs) != len(node.input):
        return None
    given = {
        each.name: float(np.float32(each.value)) if isinstance(each.value, float) else each.value
        for each in writer.attributes.values()
    }
    if {**_USUAL, **given, "momentum": None} != {**_USUAL, **own}:
        return None
    orders = [list(writer.inputs)]
    if node.op_type in ("Add", "And", "Mul"):
        orders.append(orders[0][::-1])
    for inputs in orders:
        several: dict[str, ir.Value] | None = found
        for each, read in zip(node.input, inputs, strict=True):
            several = None if several is None else _unified(template, each, read, several)
        if several is not None:
            return several
    return None


def _of_native(variance: ir.Value) -> bool:
    """Whether a variance, or a view of it, is a native normalization's."""
    view = producer(variance, "Reshape")
    writer = (variance if view is None or view.inputs[0] is None else view.inputs[0]).producer()
    return (
        writer is not None and writer.attributes.get_string("kernel", "") == kernels.NORMALIZATION
    )


def _may_be_one(group: NormalizationGroup, graph: ir.Graph) -> bool:
    """Whether nothing else reads what is computed inside, or stands between the nodes."""
    own = {*group.nodes}
    if any(node.graph is not graph for node in own):
        return False
    for node in own:
        (value,) = node.outputs
        free = value in group.kept or node in group.stays
        if not free and (value.is_graph_output() or not {n for n, _ in value.uses()} <= own):
            return False
    # What was replaced before is not in the order of the graph: all that is read is followed.
    waiting, seen = [value.producer() for value in group.read], set[ir.Node]()
    while waiting:
        writer = waiting.pop()
        if writer in own:
            return False
        if writer is not None and writer not in seen:
            seen.add(writer)
            waiting += [value.producer() for value in reads(writer)]
    return True
