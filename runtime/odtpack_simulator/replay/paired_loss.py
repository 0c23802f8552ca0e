"""Compares results: losses, accuracy and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from odtpack_runtime.checkpoint.format import CheckpointData
from odtpack_runtime.checkpoint.parameters import Array
from odtpack_runtime.package.manifest import Manifest

if TYPE_CHECKING:
    from odtpack_simulator.result import HeldOutFall


# The metric of a classifier: the share of labels that the highest score names.


def accuracy_inputs(manifest: Manifest) -> tuple[int | None, int | None]:
    """Indices of the evaluation's output with a score per class and of the labels, if any."""
    roles = [item.role for item in manifest.inputs]
    classes = manifest.class_count
    if "labels" not in roles or classes is None:
        return None, None
    labels = roles.index("labels")
    rank = len(manifest.inputs[labels].shape)
    for index, output in enumerate(manifest.all_outputs):
        scores = output.dtype.startswith("float") and len(output.shape) == rank + 1
        if output.role == "prediction" and scores and output.shape[1] == classes:
            return index, labels
    return None, None


# Compare two checkpoints bit by bit.


def first_difference(one: CheckpointData, other: CheckpointData) -> str | None:
    """What two checkpoints disagree on, bit by bit; None if on nothing."""
    # Parameters, running statistics and other frozen values, and of the optimizer its step count,
    # learning rate and moments are compared.
    left, right = _arrays(one), _arrays(other)
    if left.keys() != right.keys():
        return f"{min(left.keys() ^ right.keys())}, which one of them lacks"
    for name, array in left.items():
        if array.shape != right[name].shape or not np.array_equal(_bits(array), _bits(right[name])):
            return name
    for name in ("step", "learning_rate"):
        if getattr(one.optimizer, name, None) != getattr(other.optimizer, name, None):
            return f"the optimizer's {name.replace('_', ' ')}"
    return None


def _arrays(data: CheckpointData) -> dict[str, Array]:
    moments = data.optimizer.moments if data.optimizer else {}
    return {
        **{f"parameter '{name}'": array for name, array in data.trainable.items()},
        **{f"'{name}', which is not trained": array for name, array in data.frozen.items()},
        **{
            f"moment {index} of '{name}'": moment
            for name, own in moments.items()
            for index, moment in enumerate(own)
        },
    }


def _bits(array: Array) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


# Did the loss on held-out samples fall, or do these samples only scatter?
#
# Each group of held-out samples is evaluated before and after training, and judged by its own
# difference: how hard a group is cancels out. With w_i the sizes of m groups and d_i their losses
# before minus after, the fall is the weighted mean ``d = sum(w_i d_i) / sum(w_i)``, its standard
# error (Cochran, Sampling Techniques, 3rd ed. 1977, section 6.4; that of a plain mean where all
# groups are of one size)::
#
#     s = sqrt(m / (m - 1) * sum(w_i^2 (d_i - d)^2)) / sum(w_i)
#
# and each end of ``d -+ t s``, with t the 95 % point of Student's distribution of m - 1 degrees
# of freedom (Student 1908, The probable error of a mean, Biometrika 6, 1-25), is passed by chance
# in one of twenty samples.

GROUPS: Final = 64  # Groups to aim at: more of them narrow the interval by less than 2 %

_MOST_GROUPS: Final = 2 * GROUPS

FEWEST_GROUPS: Final = 5
"""With fewer, not even a fall in every group shows anything: 2^-4 is more than 5 %."""

ENOUGH_GROUPS: Final = 30  # From here on a fall that does not show is taken for none

CONFIDENCE: Final = 0.95


Groups = tuple[list[float | None], list[int]]
"""Mean loss of each group of samples, null where it is not finite, and how many they are."""


def held_out_fall(before: Sequence[Groups], after: Sequence[Groups]) -> HeldOutFall | None:
    """The mean fall of a loss, with the interval that chance leaves open."""
    # `after`: The same after training. The smallest groups that both have are compared.
    # Returns: None without two groups, or where a loss is not finite.
    both = list(zip(before, after, strict=False))
    if not both:
        return None
    (first, sizes), (last, _) = both[-1]
    falls = [b - a for b, a in zip(first, last, strict=True) if b is not None and a is not None]
    count = len(falls)
    if count < max(2, len(sizes)):
        return None
    difference, weight = np.array(falls, np.float64), np.array(sizes, np.float64)
    total = float(weight.sum())
    fall = float(weight @ difference) / total
    scatter = float(np.square(weight * (difference - fall)).sum())
    half = student_t(count - 1) * math.sqrt(count / (count - 1) * scatter) / total
    from odtpack_simulator.result import HeldOutFall  # not needed where it trains

    return HeldOutFall(
        groups=count, samples=sum(sizes), fall=fall, low=fall - half, high=fall + half
    )


def finer_groups(
    held_out: int,
    batch: int,
    whole: float | None,
    evaluate: Callable[[int], tuple[Sequence[float], Sequence[int]]],
) -> list[Groups]:
    """Groups of about ``held_out / GROUPS`` samples; none where batches are as small, or unlike."""
    # None too where the groups' losses do not make up that of all samples, as with labels that are
    # ignored or weighted, or negatives from the batch.
    # `whole`: Mean loss of the held-out samples in batches of `batch`.
    # `evaluate`: Losses and sizes of the held-out samples in batches of so many.
    size = max(1, held_out // GROUPS)
    if size >= batch or whole is None or not math.isfinite(whole):
        return []
    losses, sizes = evaluate(size)
    same = math.isclose(np.average(losses, weights=sizes), whole, rel_tol=1e-3, abs_tol=1e-6)
    return [pooled(losses, sizes)] if same else []


def pooled(losses: Sequence[float], sizes: Sequence[int]) -> Groups:
    """The losses as those of not too many groups, each of neighbours."""
    values, weights = np.array(losses, np.float64), np.array(sizes, np.int64)
    parts = np.array_split(np.arange(len(sizes)), min(_MOST_GROUPS, len(sizes)))
    means = (float(np.average(values[part], weights=weights[part])) for part in parts)
    return (
        [mean if math.isfinite(mean) else None for mean in means],
        [int(weights[part].sum()) for part in parts],
    )


def student_t(freedom: int) -> float:
    """The 95 % point of Student's distribution, by bisection of its distribution function."""
    # For a whole number n of degrees of freedom that is a finite sum, with `x = atan(t / sqrt(n))`
    # (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4).
    low, high = 0.0, 7.0  # that of one degree of freedom is 6.31
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _below(middle, freedom) < CONFIDENCE else (low, middle)
    return high


def _below(t: float, freedom: int) -> float:
    """Probability of a value below ``t``, which is not negative."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = freedom % 2
    term, total = (math.cos(angle), 0.0) if odd else (1.0, 0.0)
    for index in range(1 + odd, freedom, 2):
        total += term
        term *= square * index / (index + 1)
    inside = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return (1 + inside) / 2
