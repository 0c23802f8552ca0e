"""The WebGPU provider: which kernels it has, and models written with those alone.

What it lacks runs on the processor, between two copies and a wait for the GPU. Shapes stay there:
integers of 64 bits that nothing but sizes is computed from.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from odtpack.autodiff.context import Context
from odtpack.autodiff.rules.pooling import TOO_MANY_TAPS, enlarged
from odtpack.autodiff.rules.reduce import reduced_axes
from odtpack.autodiff.windows import pool_windows
from odtpack.errors import OdtpackError
from odtpack.graph import graphs
from odtpack.graph.graphs import MOST_JOINED, Ops, nodes_of
from odtpack.graph.inference import infer_shapes
from odtpack.ort.kernel_needs import constrained, kernels
from odtpack.passes import finishing

_TABLE: Final = Path(__file__).with_name("webgpu_kernels.json")  # scripts/webgpu_kernels.py
_ON_PROCESSOR = {"Shape", "Size"}  # their results are there; Shape reads no element


@dataclass(frozen=True)
class Lack:
    """A node that the provider leaves to the processor, or that its kernel refuses to run."""

    node: str
    op_type: str
    why: str  # as a sentence goes on: "has no kernel"
    refused: bool


def lacks(model: ir.Model) -> list[Lack]:
    """Nodes that work on data and that the provider has no kernel for; types must be inferred."""
    return [
        Lack(str(node.name), node.op_type, why, _refused(node) != "")
        for node in nodes_of(model.graph)
        if not _is_of_shapes(node) and (why := _why(node, model.graph.opset_imports))
    ]


def lower(model: ir.Model) -> ir.Model:
    """Write nodes that the provider has no kernel for with operators that it has."""
    model = infer_shapes(model)
    op = Ops(model.graph, "webgpu/")
    for node in list(nodes_of(model.graph)):
        write = _WRITERS.get(node.op_type)
        if write is None or node.domain:
            continue
        also = node.op_type in _ALSO and _ALSO[node.op_type](node)
        if not (also or _why(node, model.graph.opset_imports)):
            continue
        results: ir.Value | Sequence[ir.Value] | None = None
        with op.before(node), contextlib.suppress(OdtpackError):  # of sizes that are not known
            results = write(op, Context(node, op, [], []))
        results = [results] if isinstance(results, ir.Value) else results or []
        for old, new in zip(node.outputs, results, strict=False):
            graphs.replace(old, new, [])
        if results and node.graph is not None:
            node.graph.remove(node, safe=True)
    common_passes.RemoveUnusedNodesPass()(model)
    return model


def _is_deep(node: ir.Node) -> bool:
    shape = None if node.inputs[0] is None else node.inputs[0].shape
    return shape is not None and len(shape) > 4


def _is_unusual(node: ir.Node) -> bool:
    return not {*node.attributes.get_strings("activations", [])} <= {"Sigmoid", "Tanh", "Relu"}


def _has_positions(node: ir.Node) -> bool:
    position = node.outputs[1] if len(node.outputs) > 1 else None
    return position is not None and bool(position.uses() or position.is_graph_output())


_LIMITS: Final = (  # what a kernel refuses when it runs (plug-in 0.4.0)
    ({"Conv", "ConvTranspose", "AveragePool", "MaxPool"}, "three axes", _is_deep),
    ({"GRU", "LSTM"}, "such activations", _is_unusual),
    ({"MaxPool"}, "positions", _has_positions),
    ({"Resize"}, "antialias", lambda node: node.attributes.get_int("antialias", 0) != 0),
)


def _refused(node: ir.Node) -> str:
    limits = (what for op_types, what, holds in _LIMITS if node.op_type in op_types and holds(node))
    return next((f"has no kernel for {what}" for what in limits), "")


def _is_of_shapes(node: ir.Node) -> bool:
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    return node.op_type in ("Constant", "Shape") or all(
        v.dtype in (ir.DataType.INT64, None) for v in values
    )


def _why(node: ir.Node, opsets: Mapping[str, int]) -> str:
    """What the provider lacks of a node; nothing if it has a kernel."""
    if node.domain:
        return ""  # not asked for
    opset = opsets[""]
    if not onnx.defs.has(node.op_type, opset):
        return ""
    since = onnx.defs.get_schema(node.op_type, opset).since_version
    kernel = kernels(_TABLE).get(f"{node.op_type};{since}")
    if kernel is None:
        return "has no kernel"
    if refused := _refused(node):
        return refused
    types = [
        tuple(None if v is None or v.dtype is None else v.dtype.name.lower() for v in values)
        for values in (node.inputs, node.outputs)
    ]
    for constraint, kind in constrained("", node.op_type, since, types[0], types[1]):
        if kind not in kernel.get(constraint, (kind,)):
            return f"has no kernel for {kind}"
    return ""


# How each operator that is missing is written.

Writer = Callable[[Ops, Context], ir.Value | Sequence[ir.Value] | None]


def _log_softmax(op: Ops, ctx: Context) -> ir.Value | None:
    axis = ctx.int("axis", -1 if op.opset >= 13 else 1)
    if op.opset < 13 and axis != ctx.rank(ctx.x()) - 1:
        return None
    shifted = op.Sub(ctx.x(), op.reduce_max(ctx.x(), [axis]))
    return op.Sub(shifted, op.Log(op.reduce_sum(op.Exp(shifted), [axis])))


def _max_unpool(op: Ops, ctx: Context) -> ir.Value | None:
    """The cotangent of a pool whose windows tile the plane, as the rule for MaxPool writes it."""
    # Position = [end of the plane] - [elements from the maximum to there]: each element compares
    # its own distance with that of its window, and no position is needed.
    position = ctx.x(1)
    subtract, shape = graphs.producer(position, "Sub"), graphs.producer(ctx.maybe_x(2), "Concat")
    distance = None if subtract is None else graphs.producer(subtract.inputs[1], "Cast")
    known = None if shape is None else graphs.constant(shape.inputs[-1])
    if distance is None or known is None or known.size < 2:
        return None
    sizes = [int(size) for size in known[-2:]]
    for reader in position.consumers():
        if reader.op_type == "Shape":  # what waits for the position waits for the distance
            reader.replace_input_with(0, distance.inputs[0])
    strides = ctx.ints("strides", (1, 1))
    plane = np.arange(sizes[0] * sizes[1], 0, -1, dtype=np.float32).reshape(1, 1, *sizes)
    found = enlarged(op, distance.inputs[0], strides)
    return op.Where(op.Equal(found, op.constant(plane)), enlarged(op, ctx.x(), strides), 0.0)


def _constant_of_shape(op: Ops, ctx: Context) -> ir.Value | None:
    value = ctx.node.attributes.get_tensor("value", None)
    fill = np.zeros(1, np.float32) if value is None else value.numpy()
    if fill.dtype.kind != "f":
        return None
    return op.Expand(op.constant(fill.reshape(())), ctx.x())


_PI: Final = (3.140625, 0.0009670257568359375, 6.277114152908325e-07)
"""Parts of pi, of which multiples of up to some thousand times are exact."""


def _sine(op: Ops, ctx: Context, shift: float) -> ir.Value:
    """Sine (`shift` 0) and cosine (1/2): the kernels' own are good to four digits on some GPUs."""
    # Of the rest r = x - (k + shift) pi, at most pi / 2, by its series.
    x = ctx.x()
    turns = op.Floor(op.Add(op.Mul(x, 1 / math.pi), 0.5 - shift))
    rest = x
    for part in _PI:
        rest = op.Sub(rest, op.Mul(op.Add(turns, shift) if shift else turns, part))
    square = op.Mul(rest, rest)
    series = op.Add(op.Mul(square, -1 / math.factorial(11)), 1 / math.factorial(9))
    for order in (-7, 5, -3, 1):
        series = op.Add(
            op.Mul(square, series), math.copysign(1, order) / math.factorial(abs(order))
        )
    odd = op.Sub(turns, op.Mul(op.Floor(op.Mul(turns, 0.5)), 2.0))
    sign = op.Sub(op.Mul(odd, 2.0), 1.0) if shift else op.Sub(1.0, op.Mul(odd, 2.0))
    return op.Mul(op.Mul(rest, series), sign)


def _split(op: Ops, ctx: Context) -> Sequence[ir.Value]:
    """A slice for each part, between sums of the sizes."""
    outputs = ctx.node.outputs
    axis, dims = ctx.int("axis", 0), ctx.dims(ctx.x())
    sizes = [ctx.dims(y)[axis] for y in outputs]
    given = graphs.constant(ctx.maybe_x(1))
    if given is not None:
        sizes = [int(size) for size in given]
    if not all(isinstance(size, int) for size in sizes):
        return []
    ends = np.cumsum(np.array(sizes, np.int64)).tolist()
    axis %= len(dims)
    starts = [0, *ends[:-1]]
    return [op.slice(ctx.x(), [axis], [a], [b]) for a, b in zip(starts, ends, strict=True)]


def _sum(op: Ops, ctx: Context) -> ir.Value:
    values = [value for value in ctx.node.inputs if value is not None]
    return functools.reduce(op.Add, values)


def _number(op: Ops, flag: ir.Value) -> ir.Value:
    """1 for true: flags have few kernels there, and on the processor."""
    return op.cast(flag, ir.DataType.FLOAT)


def _max_pool(op: Ops, ctx: Context) -> Sequence[ir.Value]:
    """Positions by comparing with each tap: the kernel returns none."""
    # The processor's would in float64, which ONNX Runtime's web build for WebGPU does not have.
    win = pool_windows(ctx)
    plane = math.prod(win.size)
    is_large = math.prod(win.kernel) > TOO_MANY_TAPS or plane >= 1 << 24  # exact as float32
    if not _has_positions(ctx.node) or is_large:
        return []
    settings = {name: each.value for name, each in ctx.node.attributes.items()}
    in_columns = bool(settings.pop("storage_order", 0))
    x, y = ctx.x(), op.emit("MaxPool", [ctx.x()], **settings)[0]
    lowest = op.constant(np.array(-np.inf, ctx.dtype(x).numpy()))
    padded = op.Pad(x, op.ints(0, 0, *win.before, 0, 0, *win.after), lowest)
    axes = range(win.rank)
    steps = [math.prod(win.size[:i] if in_columns else win.size[i + 1 :]) for i in axes]
    found = op.constant(np.float32(0))
    for tap in reversed(win.taps()):
        inside = np.subtract(tap, win.before) @ steps
        hit = op.Equal(win.tap(op, padded, win.spatial, tap), y)
        found = op.Where(hit, op.constant(np.float32(inside)), found)
    first = functools.reduce(
        np.add.outer, [np.arange(win.out[i]) * win.strides[i] * steps[i] for i in axes]
    )
    position = op.Add(found, op.constant(first.astype(np.float32)[None, None]))
    samples = op.squeeze(op.Gather(op.Shape(y), op.ints(0), axis=0), 0)
    planes = op.Mul(samples, op.constant(np.int64(win.channels * plane)))
    begins = op.Range(op.constant(np.int64(0)), planes, op.constant(np.int64(plane)))
    begins = op.reshape(begins, -1, win.channels, *[1] * win.rank)
    return [y, op.Add(begins, op.cast(position, ir.DataType.INT64))]


def _reduce_log_sum(op: Ops, ctx: Context) -> ir.Value | None:
    axes = reduced_axes(ctx)
    if axes is None:
        return None
    return op.Log(op.reduce_sum(ctx.x(), axes, bool(ctx.int("keepdims", 1))) if axes else ctx.x())


def _tanh(op: Ops, ctx: Context) -> ir.Value | None:
    """Of the number of a step: near 0 the kernel is good to four digits only."""
    if not _is_of_step(ctx.node):
        return None
    x = ctx.x()
    near = op.Clip(x, 0.0, 0.5)
    square, series = op.Mul(near, near), op.constant(np.array(62 / 2835, ctx.dtype(x).numpy()))
    for term in (-17 / 315, 2 / 15, -1 / 3, 1.0):  # Taylor's: less than 1e-8 is left at 1/4
        series = op.Add(op.Mul(series, square), term)
    power = op.Exp(op.Mul(x, -2.0))
    far = op.Div(op.Sub(1.0, power), op.Add(power, 1.0))
    is_far = op.Clip(op.Mul(op.Sub(x, 0.25), 1e9), 0.0, 1.0)
    return op.Add(op.Mul(op.Mul(near, series), op.Sub(1.0, is_far)), op.Mul(far, is_far))


def _is_of_step(node: ir.Node) -> bool:
    """Whether a node reads the product of a whole number and a constant."""
    product = graphs.producer(node.inputs[0], "Mul")
    cast = None if product is None else graphs.producer(product.inputs[0], "Cast")
    factor = None if product is None else graphs.constant(product.inputs[1], largest=1)
    step = None if cast is None else cast.inputs[0]
    return factor is not None and step is not None and step.dtype == ir.DataType.INT64


def _conv_transpose(op: Ops, ctx: Context) -> ir.Value | None:
    """With a second output channel in each group: with one the kernel's result is wrong."""
    if not _has_single_outputs(ctx.node):
        return None
    settings = {name: each.value for name, each in ctx.node.attributes.items()}
    weight = op.Concat(ctx.x(1), op.Mul(ctx.x(1), 0.0), axis=1)
    y = op.slice(op.ConvTranspose(ctx.x(), weight, **settings), [1], [0], [_END], [2])
    bias = ctx.maybe_x(2)
    shape = op.ints(1, -1, *[1] * (ctx.rank(ctx.x()) - 2))
    return y if bias is None else op.Add(y, op.Reshape(bias, shape))


_END: Final = np.iinfo(np.int64).max


def _has_single_outputs(node: ir.Node) -> bool:
    """Whether each group has several input channels and one output channel (plug-in 0.4.0)."""
    group = node.attributes.get_int("group", 1)
    shape = None if node.inputs[1] is None else node.inputs[1].shape
    return group > 1 and shape is not None and shape[1] == 1 and shape[0] != group


def _mat_mul(op: Ops, ctx: Context) -> ir.Value | None:
    """By a frozen matrix as it is stored: ONNX Runtime would transpose and quantize it again."""
    matrix, (*outer, depth) = _unpacked(ctx.node), ctx.dims(ctx.x())
    width = None if matrix is None else ctx.dims(matrix)[0]
    if matrix is None or not outer or not isinstance(depth, int) or not isinstance(width, int):
        return None
    rows = op.Reshape(ctx.x(), op.ints(-1, depth))
    shape = op.Concat(op.slice(op.Shape(ctx.x()), [0], [0], [-1]), op.ints(width), axis=0)
    return op.Reshape(op.Gemm(rows, matrix, transB=1), shape)


def _unpacked(node: ir.Node) -> ir.Value | None:
    """The stored matrix, of which a product reads the transpose."""
    transpose = graphs.producer(node.inputs[1], "Transpose")
    if transpose is None or list(transpose.attributes.get_ints("perm", [1, 0])) != [1, 0]:
        return None
    matrix = transpose.inputs[0]
    return matrix if graphs.producer(matrix, "DequantizeLinear") else None


def _where(op: Ops, ctx: Context) -> ir.Value | None:
    """Of token numbers, which are on the processor: Not would take the flags to the provider."""
    opposite = graphs.producer(ctx.x(), "Not")
    return None if opposite is None else op.Where(opposite.inputs[0], ctx.x(2), ctx.x(1))


def _is_inexact(node: ir.Node) -> bool:
    first = node.inputs[0]
    return first is not None and first.dtype == ir.DataType.FLOAT


def _is_many(node: ir.Node) -> bool:
    """Whether a node has more buffers than every adapter binds."""
    return max(len(node.inputs), len(node.outputs)) > MOST_JOINED


_ALSO: dict[str, Callable[[ir.Node], bool]] = {
    "Concat": _is_many,
    "ConvTranspose": _has_single_outputs,
    "Cos": _is_inexact,
    "MatMul": lambda node: _unpacked(node) is not None,
    "ReduceLogSum": lambda node: True,  # plug-in 0.4.0 computes it wrong
    "Sin": _is_inexact,
    "Split": _is_many,
    "Tan": _is_inexact,
    "Tanh": _is_of_step,
}
"""Nodes that are written otherwise though they have a kernel."""

_WRITERS: dict[str, Writer] = {
    **{
        name: finishing.WRITERS[name]
        for name in ("GlobalLpPool", "InstanceNormalization", "LpPool", "Selu", "Softsign")
    },
    "Concat": lambda op, ctx: op.join(
        [value for value in ctx.node.inputs if value is not None], ctx.int("axis", 0)
    ),
    "ConstantOfShape": _constant_of_shape,
    "ConvTranspose": _conv_transpose,
    "LogSoftmax": _log_softmax,
    "MatMul": _mat_mul,
    "MaxPool": _max_pool,
    "MaxUnpool": _max_unpool,
    "Cos": lambda op, ctx: _sine(op, ctx, 0.5),
    "Mean": lambda op, ctx: op.Mul(_sum(op, ctx), 1 / len(ctx.node.inputs)),
    "ReduceLogSum": _reduce_log_sum,
    "Not": lambda op, ctx: op.Less(_number(op, ctx.x()), 0.5),
    "Or": lambda op, ctx: op.Greater(op.Add(_number(op, ctx.x()), _number(op, ctx.x(1))), 0.5),
    "Sign": lambda op, ctx: op.Sub(
        op.cast(op.Greater(ctx.x(), 0), op.type_of(ctx.x())),
        op.cast(op.Less(ctx.x(), 0), op.type_of(ctx.x())),
    ),
    "Sin": lambda op, ctx: _sine(op, ctx, 0.0),
    # Size would read the tensor; the sizes of its axes are on the processor.
    "Size": lambda op, ctx: op.ReduceProd(op.Shape(ctx.x()), keepdims=0),
    "Split": _split,
    "Sum": _sum,
    "Tanh": _tanh,
    "Tan": lambda op, ctx: op.Div(_sine(op, ctx, 0.0), _sine(op, ctx, 0.5)),
    "Where": _where,
    "Xor": lambda op, ctx: op.Equal(op.Add(_number(op, ctx.x()), _number(op, ctx.x(1))), 1.0),
}
