"""Arithmetic and elementary functions. ``dy`` is the cotangent of the output ``y``."""

from __future__ import annotations

import math

import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.autodiff.registry import Cotangents, non_differentiable, vjp

# Piecewise constant, boolean or integer results: the derivative is zero or undefined.
non_differentiable(
    "And", "Or", "Xor", "Not", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual",
    "IsInf", "IsNaN", "Sign", "Ceil", "Floor", "Round", "BitShift",
)  # fmt: skip


@vjp("Identity")
def identity(ctx: Context) -> Cotangents:
    return ctx.dy()


@vjp("Add", broadcasts=True)
def add(ctx: Context) -> Cotangents:
    return [ctx.dy(), ctx.dy()]


@vjp("Sub", broadcasts=True)
def sub(ctx: Context) -> Cotangents:
    return [ctx.dy(), ctx.op.Neg(ctx.dy()) if ctx.needs(1) else None]


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
    op, dtype = ctx.op, ctx.y().dtype
    assert dtype is not None
    hits = [op.cast(op.Equal(value, ctx.y()), dtype) for value in ctx.node.inputs]
    if len(hits) == 1:
        return ctx.dy()
    share = op.Div(ctx.dy(), op.Sum(*hits))
    return [op.Mul(hit, share) if ctx.needs(i) else None for i, hit in enumerate(hits)]


@vjp("Pow", broadcasts=True)
def power(ctx: Context) -> Cotangents:
    op, x, exponent, y, dy = ctx.op, ctx.x(0), ctx.x(1), ctx.y(), ctx.dy()
    known = ctx.constant(1)
    dx = dexponent = None
    if ctx.needs(0):
        if known is not None and known.size == 1:
            c = float(known.reshape(-1)[0])
            slope = op.Mul(x, 2.0) if c == 2 else op.Mul(op.Pow(x, c - 1), c)
            dx = op.Mul(dy, slope)
        else:
            assert x.dtype is not None
            e = op.cast(exponent, x.dtype)
            # x^0 has slope 0 everywhere; e x^(e-1) would be 0 * inf at x = 0.
            zero = op.Equal(e, 0)
            slope = op.Mul(op.Pow(x, op.Where(zero, 1, op.Sub(e, 1))), e)
            dx = op.Mul(dy, slope)
    if ctx.needs(1):
        # y ln x, whose limit at x = 0 is 0 (and it is undefined for x < 0).
        log = op.Log(op.Where(op.Greater(x, 0), x, 1))
        dexponent = op.Mul(dy, op.Mul(y, log))
    return [dx, dexponent]


@vjp("Mod", broadcasts=True)
def mod(ctx: Context) -> Cotangents:
    """With fmod=1 the quotient is rounded towards zero, and its slope is zero."""
    op, a, b, dy = ctx.op, ctx.x(0), ctx.x(1), ctx.dy()
    quotient = op.Div(op.Sub(a, ctx.y()), b) if ctx.needs(1) else None
    return [dy, op.Neg(op.Mul(dy, quotient)) if quotient is not None else None]


@vjp("Where")
def where(ctx: Context) -> Cotangents:
    op, condition, dy, dims = ctx.op, ctx.x(0), ctx.dy(), ctx.dims(ctx.y())
    a, b = ctx.x(1), ctx.x(2)
    return [
        None,
        op.sum_to(op.Where(condition, dy, 0), dims, a) if ctx.needs(1) else None,
        op.sum_to(op.Where(condition, 0, dy), dims, b) if ctx.needs(2) else None,
    ]


@vjp("Cast", "CastLike")
def cast(ctx: Context) -> Cotangents:
    dtype = ctx.x().dtype
    assert dtype is not None
    return [ctx.op.cast(ctx.dy(), dtype), None]


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
    return ctx.op.Mul(ctx.dy(), _cosh(ctx))


@vjp("Cosh")
def cosh(ctx: Context) -> Cotangents:
    op, x = ctx.op, ctx.x()
    return op.Mul(ctx.dy(), op.Mul(op.Sub(op.Exp(x), op.Exp(op.Neg(x))), 0.5))


def _cosh(ctx: Context) -> ir.Value:
    """Written out: Cosh has only a float32 kernel."""
    op, x = ctx.op, ctx.x()
    return op.Mul(op.Add(op.Exp(x), op.Exp(op.Neg(x))), 0.5)


@vjp("Tanh")
def tanh(ctx: Context) -> Cotangents:
    op, y = ctx.op, ctx.y()
    return op.Mul(ctx.dy(), op.Sub(1, op.Mul(y, y)))


@vjp("Asin", "Acos")
def arc_sine(ctx: Context) -> Cotangents:
    op, x = ctx.op, ctx.x()
    slope = op.Reciprocal(op.Sqrt(op.Sub(1, op.Mul(x, x))))
    return op.Mul(ctx.dy(), slope if ctx.node.op_type == "Asin" else op.Neg(slope))


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
