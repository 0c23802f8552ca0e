"""Types of a graph: what has no float16 or double kernel is written out, and mixed precision.

In mixed precision activations and gradients are float16 and parameters float32. Casts are written
into the forward graph before it is differentiated: the gradient of a Cast brings float32 gradients
to the parameters. What is computed in which type follows PyTorch's autocast
(https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference): products in float16; what
takes the type of its inputs in float16 where all of them are; all else, as losses, softmax, norms,
sums, powers and exponentials, in float32. A float16 model keeps its types.

The loss is differentiated with a scale as its gradient, as float16 has no numbers below 6e-8, and
gradients of parameters are divided by it in float32. The scale and the number of good steps are
states of the training model, as running statistics are. If a gradient is not finite, and the loss
is, the scale is halved; after :data:`GROWS_AFTER` good steps it is doubled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.autodiff.rules import convolution, pooling
from odtpack.autodiff.windows import Windows, conv_windows, pool_windows
from odtpack.errors import OdtpackError
from odtpack.graph import graphs
from odtpack.graph.graphs import dims_of, nodes_of, static_dims
from odtpack.graph.inference import infer_shapes
from odtpack.graph.ops import Ops
from odtpack.passes.batch_norm import RunningStatistic
from odtpack_runtime.session.graph_signature import LOSS_SCALE_NAMES, UPDATE_SUFFIX

# Runs in float32 what ONNX Runtime, or its gradient, has no float16 kernel for.
#
# - Recurrent layers. The layer's parameters remain float16 in the model.
# - Scatters that add, multiply or take extrema.
# - What reads planes at positions: ONNX Runtime computes those in float32, and so must their
#   gradients, as float16 does not distinguish neighbouring elements beyond 2048.
# - AffineGrid, whose function body ONNX Runtime fails to run in float16.

_WIDENED = {
    "AffineGrid", "DeformConv", "GRU", "GridSample", "LSTM", "MaxRoiPool", "RNN", "RoiAlign",
}  # fmt: skip


def widen(graph: ir.Graph) -> None:
    """Put casts around every such node that reads float16; types must be known."""
    op = Ops(graph, "half/")
    for node in list(graph):
        half = [v is not None and v.dtype == ir.DataType.FLOAT16 for v in node.inputs]
        widened = node.op_type in _WIDENED
        if node.op_type in ("ScatterElements", "ScatterND"):
            widened = node.attributes.get_string("reduction", "none") != "none"
        if node.domain or not any(half) or not widened:
            continue
        with op.before(node):
            operands = [
                op.cast(value, ir.DataType.FLOAT) if narrow and value is not None else value
                for value, narrow in zip(node.inputs, half, strict=True)
            ]
            for value, wide in zip(node.inputs, operands, strict=True):
                if value is not None and wide is not None:
                    wide.shape = value.shape
            for old, new in zip(node.outputs, op.again(node, operands), strict=True):
                if not old.name:
                    new.name = old.name
                    continue
                new.shape = old.shape
                graphs.replace(old, op.cast(new, ir.DataType.FLOAT16), [])
        graph.remove(node, safe=True)


# Writes out what ONNX Runtime has no kernel for in double, with operators that it has one for.
#
# Its convolutions, averages, Erf and most activations take float32 only. The last pass on every
# graph, so that nodes of the model and of its gradient are treated alike.
#
# - Convolutions are matrix products over shifted slices ("taps") of the padded input.
# - Erf is an integral of a smooth function, by Gauss and Legendre's rule:
#   erf(x) = 2 x / sqrt(pi) times the integral of exp(-x^2 t^2) over t from 0 to 1.

Writer = Callable[[Ops, Context], ir.Value]

# From here on erf is 1 to the last digit, and 40 nodes integrate to 15 digits up to here.
_ERF_END, _ERF_NODES = 6.0, 40


def lower(model: ir.Model) -> ir.Model:
    """Rewrite nodes of type DOUBLE; anything else is left as it is."""
    if not any(_is_lowered(node) for node in nodes_of(model.graph)):
        return model
    model = infer_shapes(model)  # of what the gradient added, too
    op = Ops(model.graph, "double/")
    for node in list(nodes_of(model.graph)):
        if _is_lowered(node):
            with op.before(node):
                y = _write(op, node)
            graphs.replace(node.outputs[0], y, [node])
    return model


def _is_lowered(node: ir.Node) -> bool:
    if node.domain and (node.domain, node.op_type) != ("com.microsoft", "Gelu"):
        return False
    index = 2 if node.op_type == "OneHot" else 0  # whose type is that of its values
    if node.op_type not in WRITERS or index >= len(node.inputs):
        return False
    value = node.inputs[index]
    return value is not None and value.dtype == ir.DataType.DOUBLE


def _write(op: Ops, node: ir.Node) -> ir.Value:
    try:
        return WRITERS[node.op_type](op, Context(node, op, [], []))
    except OdtpackError as error:
        dims = (dims_of(value) for value in node.inputs if value is not None)
        sizes = ", ".join(
            "?" if d is None else f"[{', '.join(str(n) if isinstance(n, int) else '?' for n in d)}]"
            for d in dims
        )
        raise OdtpackError(
            "unsupported-in-double",
            f"node {node.name!r} ({node.op_type}, inputs of shape {sizes}): ONNX Runtime has no "
            "float64 kernel for it, and this form of it is not written out with others",
        ) from error


def _conv(op: Ops, ctx: Context) -> ir.Value:
    """Taps side by side [N, G, T C/G, P], and one product with the weight of each group."""
    win, x, w, bias = conv_windows(ctx), ctx.x(), ctx.x(1), ctx.maybe_x(2)
    inner, outer = win.channels // win.groups, win.features // win.groups
    padded = op.pad(x, [0, 0, *win.before], [0, 0, *win.after])
    parts = [
        op.reshape(win.tap(op, padded, win.spatial, tap), -1, win.groups, inner, win.pixels)
        for tap in win.taps()
    ]
    columns = op.Concat(*parts, axis=2)
    weight = op.transpose(op.reshape(w, win.groups, outer, inner, len(parts)), 0, 1, 3, 2)
    weight = op.reshape(weight, win.groups, outer, len(parts) * inner)
    y = op.reshape(op.MatMul(weight, columns), -1, win.features, *win.out)
    return y if bias is None else op.Add(y, op.reshape(bias, -1, *[1] * win.rank))


def _conv_transpose(op: Ops, ctx: Context) -> ir.Value:
    """One product for each group, whose rows are spread over the taps and added up."""
    # ``win`` are the windows of the convolution whose gradient this is, from Y to X.
    win, x, w, bias = convolution.read_windows(ctx), ctx.x(), ctx.x(1), ctx.maybe_x(2)
    taps = win.taps()
    inner, outer = win.features // win.groups, win.channels // win.groups
    weight = op.transpose(op.reshape(w, win.groups, inner, outer * len(taps)), 0, 2, 1)
    samples = op.reshape(x, -1, win.groups, inner, win.pixels)
    product = op.reshape(op.MatMul(weight, samples), -1, win.channels, len(taps), *win.out)
    cut = op.split(product, 2, [1] * len(taps)) if len(taps) > 1 else (product,)
    parts = [
        _placed(op, win, op.reshape(part, -1, win.channels, *win.out), tap)
        for part, tap in zip(cut, taps, strict=True)
    ]
    total = op.Sum(*parts) if len(parts) > 1 else parts[0]
    ends = [b + n for b, n in zip(win.before, win.size, strict=True)]
    y = op.slice(total, win.spatial, win.before, ends)
    return y if bias is None else op.Add(y, op.reshape(bias, -1, *[1] * win.rank))


def _placed(op: Ops, win: Windows, value: ir.Value, tap: tuple[int, ...]) -> ir.Value:
    """One element for each window, at the place in the padded input that a tap reads."""
    lengths = list(win.out)
    for axis, stride in enumerate(win.strides):
        if stride == 1:
            continue
        rank, at = 2 + win.rank, 2 + axis
        after = [0] * (rank + 1)
        after[at + 1] = stride - 1
        wide = op.pad(op.unsqueeze(value, at + 1), [0] * (rank + 1), after)
        lengths[axis] *= stride
        value = op.reshape(wide, -1, win.channels, *lengths)
    spans = win.spans()
    if spans != tuple(lengths):
        value = op.slice(value, win.spatial, [0] * win.rank, spans)
    whole = [b + n + a for b, n, a in zip(win.before, win.size, win.after, strict=True)]
    after = [w - t - s for w, t, s in zip(whole, tap, spans, strict=True)]
    return op.pad(value, [0, 0, *tap], [0, 0, *after])


def _average_pool(op: Ops, ctx: Context) -> ir.Value:
    win = pool_windows(ctx)
    padded = op.pad(ctx.x(), [0, 0, *win.before], [0, 0, *win.after])
    taps = [win.tap(op, padded, win.spatial, tap) for tap in win.taps()]
    share = 1.0 / pooling.counts(ctx, win)
    return op.Mul(op.Sum(*taps), op.constant(share[None, None]))


def _lp_pool(op: Ops, ctx: Context) -> ir.Value:
    win = pool_windows(ctx)
    powers = op.Pow(op.Abs(ctx.x()), float(ctx.int("p", 2)))
    padded = op.pad(powers, [0, 0, *win.before], [0, 0, *win.after])
    total = op.Sum(*(win.tap(op, padded, win.spatial, tap) for tap in win.taps()))
    return op.Pow(total, 1 / ctx.int("p", 2))


def _spatial(ctx: Context) -> range:
    return range(2, ctx.rank(ctx.x()))


def _negative(op: Ops, ctx: Context, below: ir.Value) -> ir.Value:
    """x, and below zero another value."""
    return op.Where(op.Less(ctx.x(), 0.0), below, ctx.x())


def _exp_minus_one(op: Ops, ctx: Context) -> ir.Value:
    return op.Sub(op.Exp(op.Min(ctx.x(), 0.0)), 1.0)


def _erf(op: Ops, value: ir.Value, rank: int) -> ir.Value:
    low, high = (op.constant(np.float64(end)) for end in (-_ERF_END, _ERF_END))
    x = op.Clip(value, low, high)
    nodes, weights = np.polynomial.legendre.leggauss(_ERF_NODES)
    squares = op.unsqueeze(op.Mul(x, x), rank)
    # From [-1, 1] to [0, 1].
    bells = op.Exp(op.Mul(squares, op.constant(-(((nodes + 1) / 2) ** 2))))
    integral = op.MatMul(bells, op.constant(weights / math.sqrt(math.pi)))
    return op.Mul(x, integral)


def _gelu(op: Ops, ctx: Context) -> ir.Value:
    x = ctx.x()
    if ctx.string("approximate", "none") == "tanh":
        cube = op.Mul(op.Mul(x, op.Mul(x, x)), 0.044715)
        bend = op.Tanh(op.Mul(op.Add(x, cube), math.sqrt(2 / math.pi)))
    else:
        bend = _erf(op, op.Mul(x, math.sqrt(0.5)), ctx.rank(x))
    return op.Mul(op.Mul(x, 0.5), op.Add(bend, 1.0))


def _instance_normalization(op: Ops, ctx: Context) -> ir.Value:
    x, rank = ctx.x(), ctx.rank(ctx.x())
    axes, column = range(2, rank), [-1, *[1] * (rank - 2)]
    centered = op.Sub(x, op.reduce_mean(x, axes))
    variance = op.reduce_mean(op.Mul(centered, centered), axes)
    deviation = op.Sqrt(op.Add(variance, ctx.float("epsilon", 1e-5)))
    gain = op.Div(op.reshape(ctx.x(1), *column), deviation)
    return op.Add(op.Mul(centered, gain), op.reshape(ctx.x(2), *column))


def _one_hot(op: Ops, ctx: Context) -> ir.Value:
    indices, depth = (op.cast(ctx.x(index), ir.DataType.INT64) for index in (0, 1))
    hot = op.OneHot(indices, depth, op.ints(0, 1), axis=ctx.int("axis", -1))
    off, on = (op.slice(ctx.x(2), [0], [index], [index + 1]) for index in (0, 1))
    return op.Where(op.Equal(hot, op.ints(1)), on, off)


WRITERS: dict[str, Writer] = {
    "AveragePool": _average_pool,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Elu": lambda op, ctx: _negative(
        op, ctx, op.Mul(_exp_minus_one(op, ctx), ctx.float("alpha", 1.0))
    ),
    "Erf": lambda op, ctx: _erf(op, ctx.x(), ctx.rank(ctx.x())),
    "Gelu": _gelu,
    "GlobalAveragePool": lambda op, ctx: op.reduce_mean(ctx.x(), _spatial(ctx)),
    "GlobalLpPool": lambda op, ctx: op.Pow(
        op.reduce_sum(op.Pow(op.Abs(ctx.x()), float(ctx.int("p", 2))), _spatial(ctx)),
        1 / ctx.int("p", 2),
    ),
    "GlobalMaxPool": lambda op, ctx: op.reduce_max(ctx.x(), _spatial(ctx)),
    "HardSigmoid": lambda op, ctx: op.Min(
        op.Max(op.Add(op.Mul(ctx.x(), ctx.float("alpha", 0.2)), ctx.float("beta", 0.5)), 0.0), 1.0
    ),
    "HardSwish": lambda op, ctx: op.Mul(
        ctx.x(), op.Min(op.Max(op.Add(op.Mul(ctx.x(), 1 / 6), 0.5), 0.0), 1.0)
    ),
    "InstanceNormalization": _instance_normalization,
    "LeakyRelu": lambda op, ctx: op.Where(
        op.Less(ctx.x(), 0.0), op.Mul(ctx.x(), ctx.float("alpha", 0.01)), ctx.x()
    ),
    "LpPool": _lp_pool,
    "Mean": lambda op, ctx: op.Mul(op.Sum(*ctx.node.inputs), 1 / len(ctx.node.inputs)),
    "OneHot": _one_hot,
    "PRelu": lambda op, ctx: op.Where(op.Less(ctx.x(), 0.0), op.Mul(ctx.x(), ctx.x(1)), ctx.x()),
    "Selu": lambda op, ctx: op.Mul(
        _negative(op, ctx, op.Mul(_exp_minus_one(op, ctx), ctx.float("alpha", 1.6732631921768188))),
        ctx.float("gamma", 1.0507010221481323),
    ),
    # max(x, 0) + log(1 + exp(-|x|)), which never overflows.
    "Softplus": lambda op, ctx: op.Add(
        op.Max(ctx.x(), 0.0), op.Log(op.Add(op.Exp(op.Neg(op.Abs(ctx.x()))), 1.0))
    ),
    "Softsign": lambda op, ctx: op.Div(ctx.x(), op.Add(op.Abs(ctx.x()), 1.0)),
}


STATES: Final = dict(zip(LOSS_SCALE_NAMES, (2.0**12, 0.0), strict=True))
"""What a training begins with. It is less than that of ``torch.amp.GradScaler``: a GPU that
overflows in the first steps would differ from the processor, with which it is compared."""

GROWS_AFTER: Final = 2000
_LEAST, _MOST = 2.0**-14, 2.0**24
_LARGEST = 65504

_NARROW = {"Conv", "ConvTranspose", "Einsum", "Gemm", "MatMul", "PRelu"}
_AS_INPUTS = {
    *("Abs", "Add", "AveragePool", "Clip", "Concat", "Dropout", "Elu", "Expand", "Flatten"),
    *("Gather", "Gelu", "GlobalAveragePool", "GlobalMaxPool", "HardSigmoid", "HardSwish"),
    *("Identity", "LeakyRelu", "Max", "MaxPool", "Min", "Mul", "Neg", "Pad", "Relu", "Reshape"),
    *("Sigmoid", "Slice", "Split", "Squeeze", "Sub", "Tanh", "Transpose", "Unsqueeze", "Where"),
}


def narrow(graph: ir.Graph) -> None:
    """Compute in float16 what may be; types must be known, parameters be inputs."""
    op = Ops(graph, "half/")
    halves: dict[ir.Value, ir.Value] = {}
    given = {*graph.inputs, *graph.initializers.values()}

    def made_from(value: ir.Value) -> ir.Value | None:
        """The float16 value that a float32 value is a cast of."""
        cast = graphs.producer(value, "Cast")
        source = None if cast is None else cast.inputs[0]
        return source if source is not None and source.dtype == ir.DataType.FLOAT16 else None

    def half(value: ir.Value) -> ir.Value:
        if value not in halves:
            halves[value] = made_from(value) or op.cast(value, ir.DataType.FLOAT16)
            halves[value].shape = value.shape
        return halves[value]

    def is_wide(value: ir.Value) -> bool:
        if value.const_value is not None:  # as what a mask adds
            return bool(np.abs(value.const_value.numpy()).max(initial=0) > _LARGEST)
        return value not in given and made_from(value) is None

    for node in list(graph):
        floats = [v for v in node.inputs if v is not None and v.dtype == ir.DataType.FLOAT]
        follows = any(map(made_from, floats)) and not any(map(is_wide, floats))
        if not floats or not (node.op_type in _NARROW or (node.op_type in _AS_INPUTS and follows)):
            continue
        with op.before(node):
            operands = [half(value) if value in floats else value for value in node.inputs]
            for old, new in zip(node.outputs, op.again(node, operands), strict=True):
                narrowed = old.dtype == ir.DataType.FLOAT
                if narrowed:
                    new.type, new.shape = ir.TensorType(ir.DataType.FLOAT16), old.shape
                graphs.replace(old, op.cast(new, op.FLOAT) if narrowed else new, [])
        graph.remove(node, safe=True)


class LossScale:
    """Writes a loss scale into a training graph, which has the states as inputs."""

    def __init__(self, op: Ops, graph: ir.Graph) -> None:
        inputs = {str(value.name): value for value in graph.inputs}
        self._op, self._loss = op, graph.outputs[0]
        self._scale, self._good = (inputs[name] for name in STATES)

    def seed(self, plain: ir.Value) -> ir.Value:
        """The gradient of the loss, scaled."""
        op = self._op
        scale = op.cast(self._scale, op.type_of(plain))
        return op.Mul(plain, op.reshape(scale, *static_dims(plain) or ()))

    def unscale(self, gradients: Mapping[ir.Value, ir.Value]) -> dict[ir.Value, ir.Value]:
        """Gradients of parameters as they are without a scale."""
        op, factor = self._op, self._op.reshape(self._op.Div(1.0, self._scale))
        return {parameter: op.Mul(value, factor) for parameter, value in gradients.items()}

    def updates(self, gradients: Iterable[ir.Value]) -> list[RunningStatistic]:
        """What the states become; where the loss is not finite they stay."""
        op = self._op
        sums = [op.reshape(op.ReduceL1(value, keepdims=0), 1) for value in dict.fromkeys(gradients)]
        finite = op.Less(op.ReduceSum(op.join(sums, 0), op.ints(0)), np.inf)
        counts = op.Less(op.reshape(op.Abs(op.cast(self._loss, op.FLOAT)), 1), np.inf)
        # From 1 to the last and on with 1, so that 0 says that a gradient was not finite.
        starts = op.GreaterOrEqual(self._good, float(GROWS_AFTER))
        good = op.Where(finite, op.Add(op.Where(starts, 0.0, self._good), 1.0), 0.0)
        grows = op.GreaterOrEqual(good, float(GROWS_AFTER))
        factor = op.Where(finite, op.Where(grows, 2.0, 1.0), 0.5)
        scale = op.Min(op.Max(op.Mul(self._scale, factor), _LEAST), _MOST)
        news = (op.Where(counts, scale, self._scale), op.Where(counts, good, self._good))
        return [RunningStatistic(name, new) for name, new in zip(STATES, news, strict=True)]


def all_finite(op: Ops, graph: ir.Graph) -> ir.Value | None:
    """Whether all gradients of a training graph are finite, BOOL[1]; None without a loss scale."""
    name = LOSS_SCALE_NAMES[1] + UPDATE_SUFFIX
    good = next((value for value in graph.outputs if value.name == name), None)
    return None if good is None else op.Greater(good, 0.0)
