"""What a server does with answers: refuse those that would spoil the model, average the others."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from odtpack_runtime.checkpoint.layout import Array
from odtpack_simulator.fleet.local_training import Arrays, mismatch

MOST_TIMES_MEDIAN: Final = 10.0
"""An update is refused that is so many times as long as the median of its round."""

_ENOUGH_TO_COMPARE: Final = 3


def refusals(
    reference: Mapping[str, Array],
    answers: Sequence[Mapping[str, Array]],
    most_times_median: float = MOST_TIMES_MEDIAN,
) -> list[str | None]:
    """Why each answer of a round must not be averaged; None for those that may.

    Args:
        reference: The parameters that the round began with.
        answers: The parameters of each answer.
        most_times_median: Longest update, its L2 norm over all parameters, in medians of the
            round's. Rounds of less than three sound answers have no such limit.
    """
    reasons: list[str | None] = []
    lengths: dict[int, float] = {}
    for index, arrays in enumerate(answers):
        reason = mismatch(reference, arrays)
        if reason is None:
            length = _length(reference, arrays)
            if math.isfinite(length):
                lengths[index] = length
            else:
                reason = "it holds NaN or infinity, or numbers too large to square"
        reasons.append(reason)
    if len(lengths) >= _ENOUGH_TO_COMPARE:
        median = statistics.median(lengths.values())
        for index, length in lengths.items():
            if length > most_times_median * median:
                reasons[index] = (
                    f"the update has a norm of {length:.3g}, more than {most_times_median:g} times "
                    f"the round's median of {median:.3g}"
                )
    return reasons


def weighted_mean(answers: Sequence[Mapping[str, Array]], weights: Sequence[float]) -> Arrays:
    """The mean of parameters, by weight; the same bits as Flower's FedAvg in the same order.

    Args:
        answers: The parameters of each answer, at least one.
        weights: Samples of each, as McMahan et al. 2017 (arXiv:1602.05629) weigh them.
    """
    total = sum(weights)
    mean: Arrays = {}
    for arrays, weight in zip(answers, weights, strict=True):
        share = weight / total
        for name, array in arrays.items():
            part = array * share
            mean[name] = mean[name] + part if name in mean else part
    return {name: np.asarray(array) for name, array in mean.items()}


def discounted(
    answer: Mapping[str, Array],
    begun: Mapping[str, Array],
    current: Mapping[str, Array],
    staleness: int,
) -> Arrays:
    """What an answer from an older model comes to in the current one.

    Its update is discounted by ``1 / sqrt(1 + staleness)`` (Nguyen et al. 2022, arXiv:2106.06639).

    Args:
        answer: Parameters after the client's training.
        begun: Those that it began with.
        current: Those of the model now.
        staleness: How often the model has changed in between; with 0 the answer is itself.
    """
    if not staleness:
        return dict(answer)
    share = 1 / math.sqrt(1 + staleness)
    return {
        name: np.asarray(current[name] + share * (array - begun[name]), array.dtype)
        for name, array in answer.items()
    }


def _length(reference: Mapping[str, Array], arrays: Mapping[str, Array]) -> float:
    total = 0.0
    for name, array in reference.items():
        with np.errstate(over="ignore", invalid="ignore"):
            change = np.subtract(arrays[name], array, dtype=np.float64).ravel()
            total += float(np.dot(change, change))
    return math.sqrt(total) if math.isfinite(total) else math.nan
