"""Arithmetic and elementary functions. ``dy`` is the cotangent of the output ``y``."""

from __future__ import annotations

import math

import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.autodiff.registry import INTERNAL_DOMAIN, Cotangents, non_differentiable, vjp
from odtpack.graph.graphs import dims_of

# Piecewise constant, boolean or integer results: the derivative is zero or undefined.
non_differentiable(
    "And",
    "Or",
    "Xor",
    "Not",
    "Equal",
    "Greater",
    "GreaterOrEqual",
    "Less",
    "LessOrEqual",
    "IsInf",
    "IsNaN",
    "Sign",
    "Ceil",
    "Floor",
    "Round",
    "BitShift",
    "BitwiseAnd",
    "BitwiseNot",
    "BitwiseOr",
    "BitwiseXor",
    "BitCast",
)
# Text in, or a number of things out.
non_differentiable(
    "RegexFullMatch", "SequenceLength", "StringConcat", "StringNormalizer", "StringSplit",
    "TfIdfVectorizer",
)  # fmt: skip
non_differentiable("StopGradient", domain=INTERNAL_DOMAIN)


@vjp("Identity")
def identity(ctx: Context) -> Cotangents:
    return ctx.dy()


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
    """Ties share the cotangent evenly, as PyTorch and the reference do."""
    op, y = ctx.op, ctx.y()
    if len(ctx.node.inputs) == 1:
        return ctx.dy()
    hits = [op.cast(op.Equal(value, y), ctx.dtype(y)) for value in ctx.node.inputs]
    share = op.Div(ctx.dy(), op.Sum(*hits))
    return [op.Mul(hit, share) if ctx.needs(i) else None for i, hit in enumerate(hits)]


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
        return op.Mul(x if e == 2 else op.Pow(x, e - 1), e)
    exponent = op.cast(ctx.x(1), ctx.dtype(x))
    lower = op.Where(op.Equal(exponent, 0), 1, op.Sub(exponent, 1))
    return op.Mul(op.Pow(x, lower), exponent)


@vjp("Mod", broadcasts=True)
def mod(ctx: Context) -> Cotangents:
    """With fmod=1 the quotient is rounded towards zero, and its slope is zero.

    Where there is no remainder, as of a division by zero, nothing flows.
    """
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


@vjp("Neg")
def neg(ctx: Context) -> Cotangents:
    return ctx.op.Neg(ctx.dy())


@vjp("Abs")
def absolute(ctx: Context) -> Cotangents:
    return ctx.op.Mul(ctx.dy(), ctx.op.Sign(ctx.x()))


@vjp("Reciprocal")
def reciprocal(ctx: Context) -> Cotangents:
    op, y = ctx.op, ctx.y()
    return op.Neg(op.Mul(ctx.dy(), op.Mul(y, y)))


@vjp("Sqrt")
def sqrt(ctx: Context) -> Cotangents:
    return ctx.op.Div(ctx.op.Mul(ctx.dy(), 0.5), ctx.y())


@vjp("Exp")
def exp(ctx: Context) -> Cotangents:
    return ctx.op.Mul(ctx.dy(), ctx.y())


@vjp("Log")
def log(ctx: Context) -> Cotangents:
    return ctx.op.Div(ctx.dy(), ctx.x())


@vjp("Erf")
def erf(ctx: Context) -> Cotangents:
    """Slope 2/sqrt(pi) exp(-x^2)."""
    op, x = ctx.op, ctx.x()
    bell = op.Exp(op.Neg(op.Mul(x, x)))
    return op.Mul(op.Mul(ctx.dy(), 2 / math.sqrt(math.pi)), bell)


@vjp("Sin")
def sin(ctx: Context) -> Cotangents:
    return ctx.op.Mul(ctx.dy(), ctx.op.Cos(ctx.x()))


@vjp("Cos")
def cos(ctx: Context) -> Cotangents:
    return ctx.op.Neg(ctx.op.Mul(ctx.dy(), ctx.op.Sin(ctx.x())))


@vjp("Tan")
def tan(ctx: Context) -> Cotangents:
    op, y = ctx.op, ctx.y()
    return op.Mul(ctx.dy(), op.Add(op.Mul(y, y), 1))


@vjp("Sinh")
def sinh(ctx: Context) -> Cotangents:
    return ctx.op.Mul(ctx.dy(), ctx.op.Cosh(ctx.x()))


@vjp("Cosh")
def cosh(ctx: Context) -> Cotangents:
    return ctx.op.Mul(ctx.dy(), ctx.op.Sinh(ctx.x()))


@vjp("Tanh")
def tanh(ctx: Context) -> Cotangents:
    op, y = ctx.op, ctx.y()
    return op.Mul(ctx.dy(), op.Sub(1, op.Mul(y, y)))


@vjp("Asin", "Acos")
def arc_sine(ctx: Context) -> Cotangents:
    op, x = ctx.op, ctx.x()
    dx = op.Div(ctx.dy(), op.Sqrt(op.Sub(1, op.Mul(x, x))))
    return dx if ctx.node.op_type == "Asin" else op.Neg(dx)


@vjp("Atan")
def arc_tangent(ctx: Context) -> Cotangents:
    op, x = ctx.op, ctx.x()
    return op.Div(ctx.dy(), op.Add(op.Mul(x, x), 1))


@vjp("Asinh")
def area_sine(ctx: Context) -> Cotangents:
    op, x = ctx.op, ctx.x()
    return op.Div(ctx.dy(), op.Sqrt(op.Add(op.Mul(x, x), 1)))


@vjp("Acosh")
def area_cosine(ctx: Context) -> Cotangents:
    op, x = ctx.op, ctx.x()
    return op.Div(ctx.dy(), op.Sqrt(op.Sub(op.Mul(x, x), 1)))


@vjp("Atanh")
def area_tangent(ctx: Context) -> Cotangents:
    op, x = ctx.op, ctx.x()
    return op.Div(ctx.dy(), op.Sub(1, op.Mul(x, x)))
