"""Losses over embeddings: what belongs together shall lie together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import onnx_ir as ir

from odtpack.errors import OdtpackError
from odtpack.graph.ops import Ops
from odtpack.losses.base import Loss, Target, dims, require_rank, shaped, target_dtype
from odtpack.losses.classification import CrossEntropy
from odtpack.losses.options import check_choice, check_number

_EPSILON = 1e-6
"""Added to every difference, as in PyTorch's pairwise_distance."""
_LEAST = 1e-30  # squared length below which a vector has no direction


@dataclasses.dataclass(frozen=True)
class _Embeddings(Loss):
    def _check(self, predictions: Sequence[ir.Value]) -> None:
        for value in predictions:
            require_rank(self.name, value, "[N, D]", 2, 2)
        widths = {dims(value)[1] for value in predictions}
        if len({width for width in widths if isinstance(width, int)}) > 1:
            shown = ", ".join(repr(value.name) for value in predictions)
            raise OdtpackError(
                "prediction-shape",
                f"{self.name} compares embeddings of one length; those of {shown} differ",
            )


@dataclasses.dataclass(frozen=True)
class TripletMargin(_Embeddings):
    """max(d(anchor, positive) - d(anchor, negative) + margin, 0), embeddings [N, D] each.

    d(a, b) = ||a - b + 1e-6||_p. Source: PyTorch's TripletMarginLoss, after Balntas et al.
    (2016).

    Attributes:
        margin: How much farther the negative shall lie.
        p: Norm of the distance, 1 or 2.
        swap: Where the negative lies nearer to the positive, take that distance.
    """

    name: ClassVar[str] = "triplet_margin"
    reads: ClassVar[tuple[str, ...]] = ("anchor", "positive", "negative")
    margin: float = 1.0
    p: int = 2
    swap: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self.name, "margin", self.margin, above=0)
        check_choice(self.name, "p", self.p, (1, 2))
        check_choice(self.name, "swap", self.swap, (True, False))

    def targets(self, predictions: Sequence[ir.Value]) -> tuple[Target, ...]:
        """None: the three embeddings are all that it needs."""
        self._check(predictions)
        return ()

    def terms(self, op: Ops, *values: ir.Value) -> ir.Value:
        """Write the loss of every triplet."""
        anchor, positive, negative = values
        near = distance(op, anchor, positive, self.p)
        far = distance(op, anchor, negative, self.p)
        if self.swap:
            far = op.Min(far, distance(op, positive, negative, self.p))
        return shaped(op.Relu(op.Add(op.Sub(near, far), self.margin)), dims(anchor)[:1])


@dataclasses.dataclass(frozen=True)
class Contrastive(_Embeddings):
    """t d^2 + (1 - t) max(margin - d, 0)^2, d = ||first - second + 1e-6||, [N, D] each.

    The target t [N] is 1 for a pair that belongs together and 0 for one that does not.
    Source: Hadsell, Chopra and LeCun (2006), without the halves.

    Attributes:
        margin: How far apart a pair that does not belong together shall lie.
    """

    name: ClassVar[str] = "contrastive"
    reads: ClassVar[tuple[str, ...]] = ("first", "second")
    margin: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self.name, "margin", self.margin, above=0)

    def targets(self, predictions: Sequence[ir.Value]) -> tuple[Target, ...]:
        """1 for a pair that belongs together, else 0: [N]."""
        self._check(predictions)
        first = predictions[0]
        return (Target("target", "target", target_dtype(first), dims(first)[:1]),)

    def terms(self, op: Ops, *values: ir.Value) -> ir.Value:
        """Write the loss of every pair."""
        first, second, together = values
        apart = distance(op, first, second, 2)
        short = op.Relu(op.Sub(self.margin, apart))
        attract = op.Mul(together, op.Mul(apart, apart))
        repel = op.Mul(op.Sub(1, together), op.Mul(short, short))
        return shaped(op.Add(attract, repel), dims(first)[:1])


@dataclasses.dataclass(frozen=True)
class InfoNCE(_Embeddings):
    """-log softmax_j(<q_i, k_j> / T)[i]: query i belongs to key i, to none of the others.

    Source: van den Oord, Li and Vinyals (2018); in both directions, Radford et al. (2021).

    Attributes:
        temperature: T.
        normalize: Take embeddings of length 1 (cosine similarity).
        symmetric: Mean of both directions, from queries to keys and back.
    """

    name: ClassVar[str] = "info_nce"
    reads: ClassVar[tuple[str, ...]] = ("queries", "keys")
    temperature: float = 0.07
    normalize: bool = True
    symmetric: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self.name, "temperature", self.temperature, above=0)
        check_choice(self.name, "normalize", self.normalize, (True, False))
        check_choice(self.name, "symmetric", self.symmetric, (True, False))

    def targets(self, predictions: Sequence[ir.Value]) -> tuple[Target, ...]:
        """None: the other samples of the batch are the counterexamples."""
        self._check(predictions)
        return ()

    def terms(self, op: Ops, *values: ir.Value) -> ir.Value:
        """Write the loss of every query."""
        queries, keys = (self._direction(op, value) for value in values)
        size = dims(values[0])[0]
        similarity = op.MatMul(queries, op.transpose(keys, 1, 0))
        logits = shaped(op.Mul(similarity, 1 / self.temperature), (size, size))
        count = op.squeeze(op.slice(op.Shape(queries), [0], [0], [1]), 0)
        own = shaped(op.Range(0, count, 1), (size,))
        forth = CrossEntropy().terms(op, logits, own)
        if not self.symmetric:
            return forth
        back = CrossEntropy().terms(op, shaped(op.transpose(logits, 1, 0), (size, size)), own)
        return shaped(op.Mul(op.Add(forth, back), 0.5), (size,))

    def _direction(self, op: Ops, value: ir.Value) -> ir.Value:
        if not self.normalize:
            return value
        squares = op.reduce_sum(op.Mul(value, value), [1])
        return op.Div(value, op.Sqrt(op.Max(squares, _LEAST)))


def distance(op: Ops, first: ir.Value, second: ir.Value, p: int) -> ir.Value:
    """||first - second + 1e-6||_p over the last axis of [N, D]; slope 0 where it is 0."""
    difference = op.Add(op.Sub(first, second), _EPSILON)
    if p == 1:
        return op.reduce_sum(op.Abs(difference), [1], keepdims=False)
    squares = op.reduce_sum(op.Mul(difference, difference), [1], keepdims=False)
    return op.Sqrt(op.Max(squares, _LEAST))
