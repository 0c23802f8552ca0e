"""Rewrites a finished graph: what ONNX Runtime would misread, keep long or has no kernel for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.autodiff.rules import convolution, pooling
from odtpack.autodiff.windows import Windows, conv_windows, pool_windows
from odtpack.errors import OdtpackError
from odtpack.graph import graphs
from odtpack.graph.graphs import Ops, dims_of, maker, nodes_of, operand, producer, subgraphs, typed
from odtpack.graph.inference import infer_shapes
from odtpack_runtime.session.graph_signature import RESET_NAME

# Keeps ONNX Runtime from fusing a normalization whose epsilon it does not read.
#
# Where a model writes a layer or an RMS normalization out, ONNX Runtime makes one kernel of
#
#     Div(d, Sqrt(Add(ReduceMean(Pow(d, 2)), epsilon)))
#
# Before 1.32 it takes epsilon from the second operand of the Add if that is a constant, and 1e-5
# otherwise; of a vector it takes the first element. At the exponent it does not look to this day.
# Epsilon is no constant where it is a parameter of the package. Written as a Sub of its negative
# the sum is the same number, and is not fused.


def keep_epsilon(op: Ops, graph: ir.Graph) -> None:
    """Rewrite every sum that would be misread, in subgraphs too."""
    for add in list(nodes_of(graph)):
        if add.op_type != "Add" or add.domain:
            continue
        if not any(user.op_type == "Sqrt" for user in add.outputs[0].consumers()):
            continue
        for variance, epsilon in (add.inputs, reversed(add.inputs)):
            mean = producer(variance, "ReduceMean")
            if mean is None or epsilon is None:
                continue
            value: ir.Value | None = epsilon
            while (cast := producer(value, "Cast", "Identity")) is not None:
                value = cast.inputs[0]
            power = producer(mean.inputs[0], "Pow")
            squares = power is None or graphs.is_scalar(power.inputs[1], 2.0)
            if squares and epsilon is add.inputs[1] and graphs.scalar(value) is not None:
                continue  # the fused kernel computes what these nodes do
            with op.before(add):
                total = op.Sub(variance, op.Neg(epsilon))
            graphs.replace(add.outputs[0], total, [add])
            break


# Keeps ONNX Runtime from removing a Dropout in training mode.
#
# It removes a Dropout whose mask nothing reads, whatever its mode, if one node computes all that it
# reads. No gradient reads the mask where nothing below is trained. Before 1.18 it also makes one
# node, with one mask, of two that read the same values. So
#
#     y = Dropout(x, ratio, training)         on = Squeeze(Equal(reset, reset))
#     z = Dropout(x, ratio, training)         t  = Equal(training, on)  y = Dropout(x, r, t)
#                                       ->    r  = Where(t, ratio, ratio)
#                                             t2 = Equal(t, on)         z = Dropout(x, r2, t2)
#                                             r2 = Where(t2, ratio, ratio)
#
# These are scalars, which all nodes of a graph share. Those of the graph around a subgraph are not
# computed by a node of it, so that each subgraph has its own. With t alone a Dropout of an input of
# the graph would still be removed, and what reads y would read t.
#
# Equal(t, on) is t, as And(t, on) is. WebGPU has a kernel of And and none of Dropout: there t would
# be copied back from it.


def keep_dropout(op: Ops, graph: ir.Graph) -> None:
    """Let nodes compute ratio and mode where that is needed, in subgraphs too."""
    reset = next((value for value in graph.inputs if value.name == RESET_NAME), None)
    on: ir.Value | None = None
    alike: Counter[tuple[ir.Value | float | None, ...]] = Counter()
    modes: dict[tuple[ir.Graph | None, ir.Value], list[ir.Value]] = {}
    ratios: dict[tuple[ir.Value, ir.Value], ir.Value] = {}
    for node in () if reset is None else list(nodes_of(graph)):
        if node.op_type != "Dropout" or not graphs.draws(node):
            continue
        # Equal constants become one value later.
        settings = (0.5 if node.inputs[1] is None else node.inputs[1], node.inputs[2])
        values = (node.inputs[0], *map(_known, settings))
        number = alike[values]
        alike[values] += 1
        is_masked = any(mask.uses() or mask.is_graph_output() for mask in node.outputs[1:])
        if is_masked and not number:
            continue
        if on is None:
            with op.before(graph[0]):
                on = op.squeeze(op.Equal(reset, reset), 0)
        with op.before(node):
            ratio = op.constant(np.float32(0.5)) if node.inputs[1] is None else node.inputs[1]
            training = operand(node, 2)
            chain = modes.setdefault((node.graph, training), [training])
            while len(chain) <= number + 1:
                chain.append(op.Equal(chain[-1], on))
            read = ratio, chain[number + 1]
            if read not in ratios:
                ratios[read] = op.Where(read[1], ratio, ratio)
        node.replace_input_with(1, ratios[read])
        node.replace_input_with(2, read[1])


def _known(setting: ir.Value | float | None) -> ir.Value | float | None:
    number = graphs.scalar(setting) if isinstance(setting, ir.Value) else None
    return setting if number is None else number


# Unpacks a weight of few bits for each node that reads it, when that node is at work.
#
# A weight W = DequantizeLinear(codes, scales) is read by the forward pass and by the gradient of
# its input. As one value it would lie in float32 from the one to the other, and with it all other
# weights. Each reader gets a chain of nodes of its own:
#
#     y  = MatMul(x, W)               y  = MatMul(x, DequantizeLinear(codes, scales * one(x)))
#     dx = MatMul(dy, W^T)       ->   dx = MatMul(dy, Transpose(DequantizeLinear(codes,
#                                                                        scales * one(dy))))
#
# one(v) is 1, computed from the number of v's elements. So ONNX Runtime neither merges the chains,
# which read different scales, nor runs one before v is there, nor takes MatMulNBits in its place,
# which would round x to 8 bits.

SMALLEST = 256  # elements from which on it pays to store a weight in few bits and unpack it late


def unpack_late(op: Ops, graph: ir.Graph, chains: set[ir.Value] | None = None) -> None:
    """Give each reader of an unpacked weight its own chain."""
    # chains: Those of the main graph, where ``graph`` lies inside it.
    chains = find_chains(graph) if chains is None else chains
    if not chains:
        return
    readers = [
        (node, index, value)
        for node in graph
        if not any(output in chains for output in node.outputs)
        for index, value in enumerate(node.inputs)
        if value is not None and value in chains
    ]
    for body in [body for node in graph for body in subgraphs(node)]:
        unpack_late(op.inside(body), body, chains)
    ones: dict[ir.Value, ir.Value] = {}
    made: dict[ir.Value, dict[ir.Value, ir.Value]] = {}  # by what they wait for
    for node, index, value in readers:
        computed = (v for v in node.inputs if v is not None and not v.is_initializer())
        late = next((v for v in computed if v not in chains), None)
        # A product of integers may take the place of the reader of what is dequantized.
        if late is None or producer(late, "DequantizeLinear") is not None:
            continue
        with op.before(node):
            if late not in ones:
                # Size is an integer; the least of it and 1 is 1.
                count = op.Min(op.Size(late), 1)
                ones[late] = op.cast(count, ir.DataType.FLOAT)
            copy = _copy(op, value, chains, ones[late], made.setdefault(late, {}))
        node.replace_input_with(index, copy)


def find_chains(graph: ir.Graph) -> set[ir.Value]:
    """Values that follow from stored codes and other constants alone."""
    found: set[ir.Value] = set()
    constants = {v for v in graph.initializers.values() if not v.is_graph_input()}
    for node in graph:
        inputs = [value for value in node.inputs if value is not None]
        if not inputs or node.domain or not constants.issuperset(inputs):
            continue
        constants.update(node.outputs)
        codes = inputs[0].const_value
        large = codes is not None and codes.size >= SMALLEST
        starts = node.op_type == "DequantizeLinear" and large
        if starts or not found.isdisjoint(inputs):
            found.update(node.outputs)
    return found


def _copy(
    op: Ops, value: ir.Value, chains: set[ir.Value], one: ir.Value, made: dict[ir.Value, ir.Value]
) -> ir.Value:
    """The chain that ends in a value, once more, with its scales times one."""
    if value not in chains:
        return value
    if value not in made:
        node = maker(value)
        inputs = [
            None if each is None else _copy(op, each, chains, one, made) for each in node.inputs
        ]
        if node.op_type == "DequantizeLinear" and inputs[1] is not None:
            inputs[1] = op.Mul(inputs[1], op.cast(one, op.type_of(inputs[1])))
        for old, new in zip(node.outputs, op.again(node, inputs), strict=True):
            made[old] = typed(new, old)
    return made[value]


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


def lower_doubles(model: ir.Model) -> ir.Model:
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
