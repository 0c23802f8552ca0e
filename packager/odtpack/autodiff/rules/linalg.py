"""Matrix products, sums of products and determinants."""

from __future__ import annotations

import string
from collections import Counter

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.context import Context, Cotangents, vjp
from odtpack.graph.graphs import Ops


def swap_last(op: Ops, value: ir.Value, rank: int) -> ir.Value:
    """Transpose the last two axes."""
    perm = list(range(rank))
    perm[-2:] = perm[-1], perm[-2]
    return op.transpose(value, *perm)


def multiply_axis(op: Ops, value: ir.Value, rank: int, axis: int, matrix: np.ndarray) -> ir.Value:
    """Multiply a constant [old, new] onto one axis: sum over i of value[.., i, ..] matrix[i]."""
    if axis == rank - 2:
        return op.MatMul(op.constant(np.ascontiguousarray(matrix.T)), value)
    last = [i for i in range(rank) if i != axis] + [axis]
    product = op.MatMul(op.transpose(value, *last), op.constant(matrix))
    return op.transpose(product, *(last.index(i) for i in range(rank)))


@vjp("MatMul")
def matmul(ctx: Context) -> Cotangents:
    """dA = dY B^T, dB = A^T dY, summed over the axes that broadcast."""
    op, a, b, dy = ctx.op, ctx.x(0), ctx.x(1), ctx.dy()
    dims_a, dims_b, dims_y = ctx.dims(a), ctx.dims(b), ctx.dims(ctx.y())
    if len(dims_a) == 1 or len(dims_b) == 1:
        return _vector_product(ctx)
    rows, columns = dims_b[-2:]
    if len(dims_b) == 2 and isinstance(rows, int) and isinstance(columns, int):
        return _shared_weight(ctx, rows, columns)
    da = db = None
    if ctx.needs(0):
        product = op.MatMul(dy, swap_last(op, b, len(dims_b)))
        da = op.sum_to(product, (*dims_y[:-1], dims_a[-1]), a)
    if ctx.needs(1):
        product = op.MatMul(swap_last(op, a, len(dims_a)), dy)
        db = op.sum_to(product, (*dims_y[:-2], *dims_b[-2:]), b)
    return [da, db]


def _shared_weight(ctx: Context, rows: int, columns: int) -> Cotangents:
    """The right operand is a matrix: one product over all rows, not one for each sample."""
    # Gemm transposes as it reads, so that no transposed copy is made.
    op, a, b, dy = ctx.op, ctx.x(0), ctx.x(1), ctx.dy()
    da = db = None
    matrix = ctx.rank(a) == 2
    flat_dy = dy if matrix else op.reshape(dy, -1, columns)
    if ctx.needs(0):
        da = op.Gemm(flat_dy, b, transB=1)
        da = da if matrix else op.reshape_like(da, a)
    if ctx.needs(1):
        db = op.Gemm(a if matrix else op.reshape(a, -1, rows), flat_dy, transA=1)
    return [da, db]


def _vector_product(ctx: Context) -> Cotangents:
    """One operand is a vector, which MatMul reads as a row (left) or a column (right)."""
    op, a, b, dy = ctx.op, ctx.x(0), ctx.x(1), ctx.dy()
    dims_a, dims_b, rank = ctx.dims(a), ctx.dims(b), ctx.rank(ctx.y())
    if len(dims_a) == 1 and len(dims_b) == 1:
        return [op.Mul(dy, b), op.Mul(dy, a)]
    if len(dims_a) == 1:  # y[..., n] = sum_k a[k] b[..., k, n]
        row = op.unsqueeze(dy, rank - 1)
        da = op.reduce_sum(op.Mul(b, row), [len(dims_b) - 1], keepdims=False)
        return [op.sum_to(da, dims_b[:-1], a), op.Mul(op.unsqueeze(a, 1), row)]
    column = op.unsqueeze(dy, rank)  # y[..., m] = sum_k a[..., m, k] b[k]
    return [op.Mul(column, b), op.sum_to(op.Mul(a, column), dims_a, b)]


@vjp("Gemm")
def gemm(ctx: Context) -> Cotangents:
    """Y = alpha A' B' + beta C, where ' may transpose."""
    op, a, b, dy = ctx.op, ctx.x(0), ctx.x(1), ctx.dy()
    alpha, beta = ctx.float("alpha", 1.0), ctx.float("beta", 1.0)
    trans_a, trans_b = ctx.int("transA", 0), ctx.int("transB", 0)

    def product(left: ir.Value, right: ir.Value, trans_left: int, trans_right: int) -> ir.Value:
        return op.Gemm(left, right, alpha=alpha, transA=trans_left, transB=trans_right)

    da = db = dc = None
    if ctx.needs(0):
        da = product(b, dy, trans_b, 1) if trans_a else product(dy, b, 0, 1 - trans_b)
    if ctx.needs(1):
        db = product(dy, a, 1, trans_a) if trans_b else product(a, dy, 1 - trans_a, 0)
    if ctx.needs(2):
        dc = op.sum_to(dy, ctx.dims(ctx.y()), ctx.x(2))
        dc = dc if beta == 1 else op.Mul(dc, beta)
    return [da, db, dc]


# Sums of products: the cotangent of an operand is again a sum of products.
#
# Y = Einsum(A, B, ..., "a,b->y") gives dA = Einsum(dY, B, ..., "y,b->a"). What that leaves out:
#
# - a label that only this operand has was summed over: its cotangent is constant there;
# - a label along which this operand has length 1 and others are longer is summed over;
# - a label that stands twice in an operand reads a diagonal: beside it the cotangent is zero.


@vjp("Einsum", since=12)
def einsum(ctx: Context) -> Cotangents:
    *terms, output = _terms(ctx)
    return [
        _operand(ctx, terms, output, i) if ctx.needs(i) else None
        for i in range(len(ctx.node.inputs))
    ]


def _operand(ctx: Context, terms: list[str], output: str, i: int) -> ir.Value:
    """Cotangent of operand ``i``."""
    op, x, dims = ctx.op, ctx.x(i), ctx.dims(ctx.x(i))
    sizes = dict(zip(terms[i], dims, strict=True))
    others = [j for j in range(len(terms)) if j != i]
    given = [output, *(terms[j] for j in others)]
    # Labels along which the result, or an operand other than this one, is longer than 1.
    long = {
        label
        for j, term in enumerate(terms)
        for label, dim in zip(term, ctx.dims(ctx.x(j)), strict=True)
        if dim != 1 and (j != i or label in output)
    }
    # A label of length 1 here and longer elsewhere is summed over, and put back as a 1.
    one = {label for label in terms[i] if sizes[label] == 1 and label in long}
    kept = [label for label in dict.fromkeys(terms[i]) if label in "".join(given)]
    kept = [label for label in kept if label not in one]
    factors = [ctx.x(j) for j in others]
    spare = iter(label for label in string.ascii_letters if label not in "".join((*terms, output)))
    result, seen = [], set[str]()
    for axis, label in enumerate(terms[i]):
        if label not in seen:
            seen.add(label)
            result += [label] if label in kept else []
            continue
        twin = next(spare)
        given.append(label + twin)
        size, dtype = dims[axis], ctx.dtype(x)
        if isinstance(size, int):
            identity = op.constant(np.eye(size, dtype=dtype.numpy()))
        else:
            length = op.slice(op.Shape(x), [0], [axis], [axis + 1])
            identity = op.EyeLike(op.zeros(op.Concat(length, length, axis=0), dtype))
        factors.append(identity)
        result.append(twin)
        if label not in kept:  # the identity says where the diagonal is
            kept.append(label)
            before = terms[i][: terms[i].index(label)]
            result.insert(sum(other in kept for other in before), label)
    equation = f"{','.join(given)}->{''.join(result)}"
    dx = op.Einsum(ctx.dy(), *factors, equation=equation)
    first = {label: terms[i].index(label) for label in terms[i]}
    absent = [first[label] for label in first if label not in kept]
    if absent:
        dx = op.unsqueeze(dx, *sorted(absent))
    stretched = any(label not in one for label in first if label not in kept)
    # Where all other operands have length 1 along a label, so has the product.
    narrow = any(label not in output and label not in long for label in kept)
    return op.Expand(dx, op.shape_of(x)) if stretched or narrow else dx


def _terms(ctx: Context) -> list[str]:
    """One label for each axis of every operand and, last, of the result."""
    left, arrow, output = ctx.string("equation", "").replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:  # in alphabetical order what stands once, after what the dots stand for
        counts = Counter(left.replace(",", "").replace(".", ""))
        once = sorted(label for label, count in counts.items() if count == 1)
        output = "..." * ("..." in left) + "".join(once)
    ranks = [ctx.rank(ctx.x(i)) for i in range(len(terms))]
    free = {rank - len(t) + 3 for rank, t in zip(ranks, terms, strict=True) if "..." in t}
    if len(free) > 1:
        raise ctx.unsupported(
            "its dots stand for different numbers of axes, which ONNX Runtime does not load"
        )
    spare = [label for label in string.ascii_letters if label not in left][: max(free, default=0)]
    return [term.replace("...", "".join(spare)) for term in (*terms, output)]


@vjp("Det", since=11)
def det(ctx: Context) -> Cotangents:
    """The slope is the matrix of cofactors, signed determinants without one row and column."""
    # ONNX has no inverse; and unlike y X^-T, cofactors are right for a singular matrix, too.
    op, x, rank = ctx.op, ctx.x(), ctx.rank(ctx.x())
    size = ctx.size(x, rank - 1)
    dy = op.unsqueeze(ctx.dy(), rank - 2, rank - 1)
    if size == 1:
        return dy
    others = np.array([[j for j in range(size) if j != i] for i in range(size)])
    rows = op.Gather(x, op.constant(others), axis=rank - 2)  # [..., i, M - 1, M]
    minors = op.Gather(rows, op.constant(others), axis=rank)  # [..., i, M - 1, j, M - 1]
    minors = op.transpose(minors, *range(rank - 1), rank, rank - 1, rank + 1)
    signs = 1 - 2 * (np.indices((size, size)).sum(0) % 2)
    cofactors = op.Mul(op.Det(minors), op.constant(signs.astype(ctx.dtype(x).numpy())))
    return op.Mul(cofactors, dy)
