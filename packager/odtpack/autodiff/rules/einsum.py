"""Sums of products: the cotangent of an operand is again a sum of products.

Y = Einsum(A, B, ..., "a,b->y") gives dA = Einsum(dY, B, ..., "y,b->a"). What that leaves out:

- a label that only this operand has was summed over: its cotangent is constant there;
- a label along which this operand has length 1 and others are longer is summed over;
- a label that stands twice in an operand reads a diagonal: beside it the cotangent is zero.
"""

from __future__ import annotations

import string
from collections import Counter

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.autodiff.registry import Cotangents, vjp


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
    long = _long_labels(ctx, terms, output, i)
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
        factors.append(_identity(ctx, x, axis))
        result.append(twin)
        if label not in kept:  # the identity says where the diagonal is
            kept.append(label)
            result.insert(_place(terms[i], kept, label), label)
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


def _place(term: str, kept: list[str], label: str) -> int:
    """How many of the kept labels stand before the first of ``label``."""
    return sum(other in kept for other in term[: term.index(label)])


def _long_labels(ctx: Context, terms: list[str], output: str, i: int) -> set[str]:
    """Labels along which the result, or an operand other than ``i``, is longer than 1."""
    return {
        label
        for j, term in enumerate(terms)
        for label, dim in zip(term, ctx.dims(ctx.x(j)), strict=True)
        if dim != 1 and (j != i or label in output)
    }


def _identity(ctx: Context, x: ir.Value, axis: int) -> ir.Value:
    """The identity matrix of the size of an axis."""
    op, dtype, size = ctx.op, ctx.dtype(x), ctx.dims(x)[axis]
    if isinstance(size, int):
        return op.constant(np.eye(size, dtype=dtype.numpy()))
    length = op.slice(op.Shape(x), [0], [axis], [axis + 1])
    return op.EyeLike(op.zeros(op.Concat(length, length, axis=0), dtype))


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
