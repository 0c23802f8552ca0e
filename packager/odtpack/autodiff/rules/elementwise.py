"""Arithmetic, elementary functions, activations and softmax. ``dy`` is the cotangent of ``y``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.context import INTERNAL_DOMAIN, Context, Cotangents, non_differentiable, vjp
from odtpack.graph.graphs import Ops, constant, dims_of, producer

# Piecewise constant, boolean or integer results: the derivative is zero or undefined.
non_differentiable(
    "And", "Or", "Xor", "Not", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual",
    "IsInf", "IsNaN", "Sign", "Ceil", "Floor", "Round", "BitShift", "BitwiseAnd", "BitwiseNot",
    "BitwiseOr", "BitwiseXor", "BitCast", "Hardmax",
)  # fmt: skip
# Text in, or a number of things out.
non_differentiable(
    "RegexFullMatch", "SequenceLength", "StringConcat", "StringNormalizer", "StringSplit",
    "TfIdfVectorizer",
)  # fmt: skip
non_differentiable("StopGradient", domain=INTERNAL_DOMAIN)


@vjp("StraightThrough", domain=INTERNAL_DOMAIN)
def straight_through(ctx: Context) -> Cotangents:
    return [None, ctx.dy()]


@vjp("Add", broadcasts=True)
def add(ctx: Context) -> Cotangents:
    return [ctx.dy(), ctx.dy()]


@vjp("Sub")
def sub(ctx: Context) -> Cotangents:
    """Summed back here, so that the sign turns after the sum, where there is less to turn."""
    op, dims, dy = ctx.op, dims_of(ctx.y()), ctx.dy()
    return [
        op.sum_to(dy, dims, ctx.x(0)) if ctx.needs(0) else None,
        op.Neg(op.sum_to(dy, dims, ctx.x(1))) if ctx.needs(1) else None,
    ]


@vjp("Mul", broadcasts=True)
def mul(ctx: Context) -> Cotangents:
    op, a, b, dy = ctx.op, ctx.x(0), ctx.x(1), ctx.dy()
    return [op.Mul(dy, b) if ctx.needs(0) else None, op.Mul(dy, a) if ctx.needs(1) else None]


@vjp("Div", broadcasts=True)
def div(ctx: Context) -> Cotangents:
    op, b = ctx.op, ctx.x(1)
    da = op.Div(ctx.dy(), b)  # d(a/b) = da/b - y db/b
    return [da, op.Neg(op.Mul(da, ctx.y())) if ctx.needs(1) else None]


@vjp("Sum", "Mean", broadcasts=True)
def variadic_sum(ctx: Context) -> Cotangents:
    count = len(ctx.node.inputs)
    mean = ctx.node.op_type == "Mean" and count > 1
    return [ctx.op.Mul(ctx.dy(), 1 / count) if mean else ctx.dy()] * count


@vjp("Max", "Min", broadcasts=True)
def extremum(ctx: Context) -> Cotangents:
    """Ties share the cotangent evenly, and a constant takes no share of them."""
    # The first is maximum, and the second clamp_min and clamp_max with a number, of PyTorch's
    # derivatives.yaml. Exporters write both as Max and Min.
    op, y, inputs = ctx.op, ctx.y(), ctx.node.inputs
    fixed = [_number(ctx, index) is not None for index in range(len(inputs))]
    if len(inputs) == 1:
        return ctx.dy()
    hits = [None if fixed[i] else op.Equal(ctx.x(i), y) for i in range(len(inputs))]
    given = [op.cast(hit, ctx.dtype(y)) for hit in hits if hit is not None]
    share = ctx.dy()
    if len(given) > 1:
        count = op.Sum(*given)
        share = op.Div(share, op.Max(count, 1) if any(fixed) else count)
    return [
        None if hit is None or not ctx.needs(i) else _where(ctx, hit, share)
        for i, hit in enumerate(hits)
    ]


def _number(ctx: Context, index: int) -> np.ndarray | None:
    """:meth:`Context.constant`, also of a constant that is only cast, as exporters write bounds."""
    value = ctx.maybe_x(index)
    while (node := producer(value, "Cast", "CastLike", "Identity")) is not None:
        value = node.inputs[0]
    return ctx.constant(index) if value is ctx.maybe_x(index) else constant(value)


def _where(ctx: Context, mask: ir.Value, dy: ir.Value | None = None) -> ir.Value:
    """The cotangent where a mask, boolean or of zeros and ones, holds; 0 elsewhere."""
    # A product is several times faster than a Where, but 0 times infinity is NaN. PyTorch
    # always selects (threshold_backward, clamp_backward).
    op, dy = ctx.op, ctx.dy() if dy is None else dy
    if ctx.unbounded:
        return op.Where(op.cast(mask, ir.DataType.BOOL), dy, 0)
    return op.Mul(op.cast(mask, ctx.dtype(ctx.y())), dy)


@vjp("Pow", broadcasts=True)
def power(ctx: Context) -> Cotangents:
    """dx = e x^(e-1) dy; de = y ln x dy, whose limit at x = 0 is 0 (undefined for x < 0)."""
    op, x, exponent, dy = ctx.op, ctx.x(0), ctx.x(1), ctx.dy()
    dx = dexponent = None
    if ctx.needs(0):
        dx = op.Mul(dy, _power_slope(ctx))
    if ctx.needs(1):
        log = op.Log(op.Where(op.Greater(x, 0), x, 1))
        dexponent = op.cast(op.Mul(dy, op.Mul(ctx.y(), log)), ctx.dtype(exponent))
    return [dx, dexponent]


def _power_slope(ctx: Context) -> ir.Value:
    """e x^(e-1); where e = 0 it is 0 everywhere, and not 0 times infinity at x = 0."""
    op, x, known = ctx.op, ctx.x(0), ctx.constant(1)
    if known is not None and known.size == 1 and known.item() != 0:
        e = float(known.item())
        slope = op.Mul(x if e == 2 else op.Pow(x, e - 1), e)
        return op.Where(op.Equal(x, 0), 0, slope) if ctx.rooted else slope
    exponent = op.cast(ctx.x(1), ctx.dtype(x))
    lower = op.Where(op.Equal(exponent, 0), 1, op.Sub(exponent, 1))
    return op.Mul(op.Pow(x, lower), exponent)


@vjp("Mod", broadcasts=True)
def mod(ctx: Context) -> Cotangents:
    """With fmod=1 the quotient is rounded towards zero, and its slope is zero."""
    # Where there is no remainder, as of a division by zero, nothing flows.
    op, a, b, dy = ctx.op, ctx.x(0), ctx.x(1), ctx.dy()
    if not ctx.needs(1):
        return [dy, None]
    quotient = op.Div(op.Sub(a, ctx.y()), b)
    return [dy, op.Neg(op.Mul(dy, op.Where(op.IsNaN(quotient), 0, quotient)))]


@vjp("Where")
def where(ctx: Context) -> Cotangents:
    op, condition, dy, dims = ctx.op, ctx.x(0), ctx.dy(), dims_of(ctx.y())
    return [
        None,
        op.sum_to(op.Where(condition, dy, 0), dims, ctx.x(1)) if ctx.needs(1) else None,
        op.sum_to(op.Where(condition, 0, dy), dims, ctx.x(2)) if ctx.needs(2) else None,
    ]


@vjp("Cast", "CastLike")
def cast(ctx: Context) -> Cotangents:
    return [ctx.op.cast(ctx.dy(), ctx.dtype(ctx.x())), None]


# The cotangent of x for y = f(x).
_ELEMENTARY: dict[str, Callable[[Ops, ir.Value, ir.Value, ir.Value], ir.Value]] = {
    "Abs": lambda op, x, y, dy: op.Mul(dy, op.Sign(x)),
    "Acos": lambda op, x, y, dy: op.Neg(op.Div(dy, op.Sqrt(op.Sub(1, op.Mul(x, x))))),
    "Acosh": lambda op, x, y, dy: op.Div(dy, op.Sqrt(op.Sub(op.Mul(x, x), 1))),
    "Asin": lambda op, x, y, dy: op.Div(dy, op.Sqrt(op.Sub(1, op.Mul(x, x)))),
    "Asinh": lambda op, x, y, dy: op.Div(dy, op.Sqrt(op.Add(op.Mul(x, x), 1))),
    "Atan": lambda op, x, y, dy: op.Div(dy, op.Add(op.Mul(x, x), 1)),
    "Atanh": lambda op, x, y, dy: op.Div(dy, op.Sub(1, op.Mul(x, x))),
    "Cos": lambda op, x, y, dy: op.Neg(op.Mul(dy, op.Sin(x))),
    "Cosh": lambda op, x, y, dy: op.Mul(dy, op.Sinh(x)),
    "Exp": lambda op, x, y, dy: op.Mul(dy, y),
    "Identity": lambda op, x, y, dy: dy,
    "Log": lambda op, x, y, dy: op.Div(dy, x),
    "Neg": lambda op, x, y, dy: op.Neg(dy),
    "Reciprocal": lambda op, x, y, dy: op.Neg(op.Mul(dy, op.Mul(y, y))),
    "Sigmoid": lambda op, x, y, dy: op.Mul(dy, op.Mul(y, op.Sub(1, y))),
    "Sin": lambda op, x, y, dy: op.Mul(dy, op.Cos(x)),
    "Sinh": lambda op, x, y, dy: op.Mul(dy, op.Cosh(x)),
    "Softplus": lambda op, x, y, dy: op.Mul(dy, op.Sigmoid(x)),
    "Sqrt": lambda op, x, y, dy: op.Div(op.Mul(dy, 0.5), y),
    "Tan": lambda op, x, y, dy: op.Mul(dy, op.Add(op.Mul(y, y), 1)),
    "Tanh": lambda op, x, y, dy: op.Mul(dy, op.Sub(1, op.Mul(y, y))),
}


@vjp(*_ELEMENTARY)
def elementary(ctx: Context) -> Cotangents:
    dx = _ELEMENTARY[ctx.node.op_type](ctx.op, ctx.x(), ctx.y(), ctx.dy())
    return ctx.op.Where(ctx.op.Equal(ctx.y(), 0), 0, dx) if ctx.rooted else dx


@vjp("Relu")
def relu(ctx: Context) -> Cotangents:
    """The mask comes from the output: it is kept anyway."""
    return _where(ctx, ctx.op.heaviside(ctx.y()))


@vjp("Erf")
def erf(ctx: Context) -> Cotangents:
    """Slope 2/sqrt(pi) exp(-x^2)."""
    op, x = ctx.op, ctx.x()
    bell = op.Exp(op.Neg(op.Mul(x, x)))
    return op.Mul(op.Mul(ctx.dy(), 2 / math.sqrt(math.pi)), bell)


@vjp("LeakyRelu")
def leaky_relu(ctx: Context) -> Cotangents:
    op, alpha = ctx.op, ctx.float("alpha", 0.01)
    positive = op.heaviside(_signed_like_input(ctx, alpha))
    if 0 <= alpha <= 1:
        return op.Mul(ctx.dy(), op.Max(positive, alpha))
    return op.Mul(ctx.dy(), op.Add(op.Mul(positive, 1 - alpha), alpha))


def _signed_like_input(ctx: Context, alpha: float) -> ir.Value:
    """The output, which is kept anyway, if it has the input's sign; else the input."""
    return ctx.y() if alpha > 0 else ctx.x()


@vjp("ThresholdedRelu")
def thresholded_relu(ctx: Context) -> Cotangents:
    op, alpha = ctx.op, ctx.float("alpha", 1.0)
    return _where(ctx, op.heaviside(op.Sub(ctx.x(), alpha)))


@vjp("Clip")
def clip(ctx: Context) -> Cotangents:
    """The cotangent passes at a bound as in PyTorch's clamp_backward, but not in hardtanh's."""
    # Only two numbers may be those of hardtanh and ReLU6, unless torch.export noted a clamp.
    op, x, y, bounds = ctx.op, ctx.x(), ctx.y(), list[tuple[ir.Value, np.ndarray | None, int]]()
    for index, sign in ((1, 1), (2, -1)):
        bound, known = ctx.maybe_x(index), _number(ctx, index)
        if bound is not None and (known is None or known.item() != -sign * math.inf):
            bounds.append((bound, known, sign))
    dx, call = ctx.dy(), ctx.node.metadata_props.get("pkg.torch.onnx.fx_node", "")
    strict = len(bounds) == 2 and all(known is not None for _, known, _ in bounds)
    if strict and "aten.clamp" not in call:
        (low, known, _), (high, *_) = bounds
        if y.dtype == ir.DataType.FLOAT:
            # Masks of one byte an element are a quarter of the memory traffic of two of y's type.
            # As y is not below the bound, it is not zero where it is above zero.
            above = op.cast(y, ir.DataType.BOOL) if _is_zero(known) else op.Greater(y, low)
            mask = op.And(above, op.Less(y, high))
        else:
            mask = op.Mul(op.heaviside(op.Sub(y, low)), op.heaviside(op.Sub(high, y)))
        dx = _where(ctx, mask)
    elif len(bounds) == 1 and x.dtype == ir.DataType.FLOAT and _is_zero(bounds[0][1]):
        # One pass, as :meth:`Ops.heaviside`, and 1 at zero.
        dx = _where(ctx, op.HardSigmoid(x, alpha=bounds[0][2] * 2.0**126, beta=1.0))
    elif bounds:
        masks = [
            op.GreaterOrEqual(x, bound) if sign > 0 else op.LessOrEqual(x, bound)
            for bound, _, sign in bounds
        ]
        dx = _where(ctx, functools.reduce(op.And, masks))
    return [dx, _clip_bound(ctx, 1), _clip_bound(ctx, 2)]


def _is_zero(known: np.ndarray | None) -> bool:
    return known is not None and known.item() == 0


def _clip_bound(ctx: Context, index: int) -> ir.Value | None:
    """A bound receives the cotangents of the elements that it holds."""
    # The output is min(max(x, low), high): where the bounds cross, the upper one holds them all.
    if not ctx.needs(index):
        return None
    op, x, low, high = ctx.op, ctx.x(), ctx.maybe_x(1), ctx.maybe_x(2)
    bound = ctx.x(index)
    raised = x if low is None or index == 1 else op.Max(x, low)
    beyond = op.Sub(bound, x) if index == 1 else op.Sub(raised, bound)
    held = op.Mul(ctx.dy(), op.heaviside(beyond))
    if index == 1 and high is not None:
        held = op.Mul(held, op.heaviside(op.Sub(high, bound)))
    return op.reshape_like(op.reduce_sum(op.reshape(held, -1), [0]), bound)


@vjp("PRelu", broadcasts=True)
def prelu(ctx: Context) -> Cotangents:
    op, x, dy = ctx.op, ctx.x(), ctx.dy()
    return [
        op.Mul(dy, op.Where(op.Greater(x, 0), 1, ctx.x(1))) if ctx.needs(0) else None,
        op.Mul(dy, op.Min(x, 0)) if ctx.needs(1) else None,
    ]


@vjp("HardSigmoid")
def hard_sigmoid(ctx: Context) -> Cotangents:
    """Slope alpha strictly between the output's bounds 0 and 1."""
    op, y = ctx.op, ctx.y()
    inside = op.heaviside(op.Mul(y, op.Sub(1, y)))
    return op.Mul(ctx.dy(), op.Mul(inside, ctx.float("alpha", 0.2)))


@vjp("Elu")
def elu(ctx: Context) -> Cotangents:
    """Slope 1 above zero, alpha e^x = y + alpha below."""
    op, alpha = ctx.op, ctx.float("alpha", 1.0)
    positive = op.Greater(_signed_like_input(ctx, alpha), 0)
    return op.Mul(ctx.dy(), op.Where(positive, 1, op.Add(ctx.y(), alpha)))


@vjp("Selu")
def selu(ctx: Context) -> Cotangents:
    """Slope gamma above zero, gamma alpha e^x = y + gamma alpha below."""
    op, alpha = ctx.op, ctx.float("alpha", 1.6732631921768188)
    gamma = ctx.float("gamma", 1.0507010221481323)
    below = op.Add(ctx.y(), alpha * gamma)
    return op.Mul(ctx.dy(), op.Where(op.Greater(ctx.x(), 0), gamma, below))


@vjp("Softsign")
def softsign(ctx: Context) -> Cotangents:
    """y = x / (1 + |x|), slope 1 / (1 + |x|)^2."""
    op = ctx.op
    scale = op.Add(op.Abs(ctx.x()), 1)
    return op.Div(ctx.dy(), op.Mul(scale, scale))


@vjp("HardSwish")
def hard_swish(ctx: Context) -> Cotangents:
    """x * clip(x/6 + 1/2, 0, 1): slope 0, x/3 + 1/2, 1 in the three parts."""
    op, x = ctx.op, ctx.x()
    inner = op.Add(op.Mul(x, 1 / 3), 0.5)
    upper = op.Where(op.Less(x, 3), inner, 1)
    return op.Mul(ctx.dy(), op.Where(op.Greater(x, -3), upper, 0))


@vjp("Gelu")
@vjp("Gelu", domain=INTERNAL_DOMAIN)
def gelu(ctx: Context) -> Cotangents:
    """x Phi(x); slope Phi(x) + x phi(x). With approximate="tanh" see the tanh formula."""
    op, x, dy = ctx.op, ctx.x(), ctx.dy()
    if ctx.string("approximate", "none") == "tanh":
        # y = x/2 (1 + t), t = tanh(c (x + k x^3))
        c, k = math.sqrt(2 / math.pi), 0.044715
        square = op.Mul(x, x)
        t = op.Tanh(op.Mul(op.Mul(x, op.Add(op.Mul(square, k), 1)), c))
        inner = op.Mul(op.Add(op.Mul(square, 3 * k), 1), c / 2)
        slope = op.Add(
            op.Add(op.Mul(t, 0.5), 0.5), op.Mul(op.Mul(x, op.Sub(1, op.Mul(t, t))), inner)
        )
        return op.Mul(dy, slope)
    # x phi(x) = u exp(-u^2 - ln(pi) / 2), u = x / sqrt(2): the constants cost no passes.
    u = op.Mul(x, math.sqrt(0.5))
    density = op.Exp(op.Sub(-math.log(math.pi) / 2, op.Mul(u, u)))
    erf = op.Erf(u)
    if erf.dtype == ir.DataType.FLOAT:  # in one pass, whose clip never acts
        distribution = op.HardSigmoid(erf, alpha=0.5, beta=0.5)
    else:
        distribution = op.Add(op.Mul(erf, 0.5), 0.5)
    return op.Mul(dy, op.Add(distribution, op.Mul(u, density)))


def _softmax_axes(ctx: Context) -> Sequence[int]:
    """The axes of a distribution: one, or before opset 13 all from ``axis`` on."""
    if ctx.op.opset >= 13:
        return [ctx.axis(default=-1)]
    return range(ctx.axis(default=1), ctx.rank(ctx.y()))


def _kept(ctx: Context, y: ir.Value) -> ir.Value:
    """``y``, with zeros for the NaN of rows that the model discards."""
    # A row whose scores are all masked with -inf is NaN, and its cotangent is zero.
    return ctx.op.Where(ctx.op.IsNaN(y), 0, y) if ctx.discarded else y


@vjp("Softmax")
def softmax(ctx: Context) -> Cotangents:
    """dx = y (dy - sum(y dy))."""
    op, axes, y, dy = ctx.op, _softmax_axes(ctx), _kept(ctx, ctx.y()), ctx.dy()
    return op.Mul(y, op.Sub(dy, op.reduce_sum(op.Mul(y, dy), axes)))


@vjp("LogSoftmax")
def log_softmax(ctx: Context) -> Cotangents:
    """dx = dy - exp(y) sum(dy)."""
    op, axes, dy = ctx.op, _softmax_axes(ctx), ctx.dy()
    return op.Sub(dy, op.Mul(_kept(ctx, op.Exp(ctx.y())), op.reduce_sum(dy, axes)))


@vjp("Dropout", since=12)
def dropout(ctx: Context) -> Cotangents:
    """dy mask / (1 - ratio); the identity where the node does not train."""
    op, training = ctx.op, ctx.constant(2)
    if ctx.maybe_x(2) is None or (training is not None and not training.item()):
        return [ctx.dy(), None, None]
    dtype = ctx.dtype(ctx.x())
    kept = op.cast(ctx.extra_output(1, ir.DataType.BOOL, ctx.dims(ctx.x())), dtype)
    return [op.Mul(ctx.dy(), op.Mul(kept, _dropout_scale(ctx, dtype))), None, None]


def _dropout_scale(ctx: Context, dtype: ir.DataType) -> ir.Value | float:
    """1 / (1 - ratio); 1 where ``training_mode`` turns out false when the model runs."""
    op, ratio, known, training = ctx.op, ctx.maybe_x(1), ctx.constant(1), ctx.constant(2)
    if ratio is not None and known is None:
        scale: ir.Value | float = op.Reciprocal(op.Sub(1, op.cast(ratio, dtype)))
    else:
        scale = 1 / (1 - (0.5 if known is None else known.item()))
    if training is not None:
        return scale
    if isinstance(scale, float):
        scale = op.constant(np.asarray(scale, dtype.numpy()))
    return op.Where(ctx.x(2), scale, 1)
