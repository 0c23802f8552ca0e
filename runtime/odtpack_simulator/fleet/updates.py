"""What the server makes of updates: it refuses bad ones, averages, and steps."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from odtpack_runtime.checkpoint.parameters import Array
from odtpack_simulator.fleet.local_training import Arrays, mismatch

if TYPE_CHECKING:
    from odtpack_simulator.fleet.fleet_file import FederationTable

MOST_TIMES_MEDIAN: Final = 10.0
"""An update is refused that is so many times as long as the median of its round."""

MOST_TIMES_MODEL: Final = 2.0
"""Where too few answers came to compare them, an update is refused that is so many times as long as
the model's parameters."""

MOST_TIMES_WEIGHT: Final = 3.0
"""An answer counts as at most so many times the median of its round's weights."""

TRIMMED_SHARE: Final = 0.2  # Part of the answers that a trimmed mean leaves out at each end

_ENOUGH_TO_COMPARE: Final = 3


def refusals(
    reference: Mapping[str, Array],
    answers: Sequence[Mapping[str, Array]],
    most_times_median: float = MOST_TIMES_MEDIAN,
    *,
    trainable: Collection[str] | None = None,
    most_times_model: float = MOST_TIMES_MODEL,
    known: Sequence[str | None] = (),
) -> list[str | None]:
    """Why each answer of a round must not be averaged; None for those that may."""
    # `most_times_median`: Longest update, its L2 norm over the trainable parameters, in medians of
    # the round's, of those that changed something. If less than three sound answers did, norms of
    # the parameters that the round began with count (`most_times_model`); there is no limit for a
    # model of zeros.
    # `trainable`: Names of the parameters that are trained, by default all. Each other one, a
    # running statistic, is compared with its own median: its scale is that of the data, not of an
    # update. Where less than three changed it, nothing says how far it may go.
    # `known`: Why each is refused whatever its arrays hold; such answers are not in the median.
    trained = [name for name in reference if trainable is None or name in trainable]
    judged = [("", trained), *((f" of '{n}'", [n]) for n in reference if n not in trained)]
    reasons: list[str | None] = []
    lengths: dict[int, list[float]] = {}
    for arrays, other in itertools.zip_longest(answers, known):
        reason = other or mismatch(reference, arrays)
        if reason is None:
            found = [_distance(reference, arrays, names) for _, names in judged]
            if all(map(math.isfinite, found)):
                lengths[len(reasons)] = found
            else:
                reason = "it holds NaN or infinity, or numbers too large to square"
        reasons.append(reason)
    for place, (of, names) in enumerate(judged):
        changed = [found[place] for found in lengths.values() if found[place]]
        if len(changed) >= _ENOUGH_TO_COMPARE:
            median = statistics.median(changed)
            most = most_times_median * median
            than = f"{most_times_median:g} times the round's median of {median:.3g}"
        elif names is trained:
            own = _norm(reference[name] for name in names)
            most = most_times_model * own or math.inf
            than = (
                f"{most_times_model:g} times that of the model, {own:.3g}, and too few answers "
                "that change something came to compare it with"
            )
        else:
            continue
        for index, found in lengths.items():
            if reasons[index] is None and found[place] > most:
                length = f"{found[place]:.3g}"
                reasons[index] = f"the update{of} has a norm of {length}, more than {than}"
    return reasons


def capped(weights: Sequence[float], most_times_median: float = MOST_TIMES_WEIGHT) -> list[float]:
    """Weights of answers, none of them more than a multiple of their median."""
    # What a client says of its number of samples cannot be checked: one that says a thousand
    # million would own the model.
    if not weights:
        return []
    most = most_times_median * statistics.median(weights)
    return [min(weight, type(weight)(most)) for weight in weights]


def coordinate_median(answers: Sequence[Mapping[str, Array]]) -> Arrays:
    """The median of each element; answers count alike (Yin et al. 2018, arXiv:1803.01498)."""
    # Fewer than half of the answers cannot move an element beyond what the others say.
    return _by_element(answers, lambda stack: np.median(stack, axis=0))


def trimmed_mean(answers: Sequence[Mapping[str, Array]], share: float = TRIMMED_SHARE) -> Arrays:
    """The mean of each element without its highest and its lowest values, of the same paper."""
    # `share`: Part of the answers that is left out at each end, below a half, rounded up.
    cut = min(math.ceil(share * len(answers)), (len(answers) - 1) // 2)
    return _by_element(
        answers, lambda stack: np.sort(stack, axis=0)[cut : len(stack) - cut].mean(axis=0)
    )


def _by_element(answers: Sequence[Mapping[str, Array]], of: Callable[[Array], Array]) -> Arrays:
    return {
        name: np.asarray(of(np.stack([arrays[name] for arrays in answers])), array.dtype)
        for name, array in answers[0].items()
    }


ROBUST: Final[Mapping[str, Callable[[Sequence[Mapping[str, Array]]], Arrays]]] = {
    "median": coordinate_median,
    "trimmed_mean": trimmed_mean,
}
"""Aggregates that a minority of answers cannot move far, by name."""


def weighted_mean(answers: Sequence[Mapping[str, Array]], weights: Sequence[float]) -> Arrays:
    """The mean of parameters, by weight; the same bits as Flower's FedAvg in the same order."""
    # `weights`: Samples of each, as McMahan et al. 2017 (arXiv:1602.05629) weigh them.
    total = sum(weights)
    mean: Arrays = {}
    for arrays, weight in zip(answers, weights, strict=True):
        share = float(weight / total)  # one of NumPy would decide the type of the product
        for name, array in arrays.items():
            part = array * share
            mean[name] = mean[name] + part if name in mean else part
    return {name: np.asarray(array) for name, array in mean.items()}


def discounted(
    answer: Mapping[str, Array],
    begun: Mapping[str, Array],
    current: Mapping[str, Array],
    staleness: int,  # How often the model has changed in between; with 0 the answer is itself
    trainable: Collection[str],  # Names of the parameters that have updates
) -> Arrays:
    """What an answer from an older model comes to in the current one."""
    # Its update is discounted by `1 / sqrt(1 + staleness)` (Nguyen et al. 2022, arXiv:2106.06639).
    # The others are averaged with the current ones, as an update could make a running variance
    # negative.
    if not staleness:
        return dict(answer)
    share = 1 / math.sqrt(1 + staleness)
    return {
        name: np.asarray(
            current[name] + share * (array - begun[name])
            if name in trainable
            else (1 - share) * current[name] + share * array,
            array.dtype,
        )
        for name, array in answer.items()
    }


def _distance(begun: Mapping[str, Array], arrays: Mapping[str, Array], names: list[str]) -> float:
    """The L2 norm of an update of some parameters; NaN if it is not finite."""
    return _norm(np.subtract(arrays[n], begun[n], dtype=np.float64) for n in names)


def _norm(arrays: Iterable[Array]) -> float:
    """The L2 norm of arrays together; NaN if it is not finite."""
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for array in arrays:
            vector = np.asarray(array, np.float64).ravel()
            total += float(np.dot(vector, vector))
    return math.sqrt(total) if math.isfinite(total) else math.nan


_BETA_1: Final = 0.9
_BETA_2: Final = 0.99
_TAU: Final = 1e-3
_RATES: Final = {"fedavg": 1.0, "fedavgm": 1.0, "fedadam": 0.1}
_KEPT: Final = {"fedavg": (), "fedavgm": ("momentum",), "fedadam": ("first", "second")}


@dataclass(frozen=True)
class ServerOptimizer:
    """A strategy's step, once per round."""

    kind: str  # `fedavg`, `fedavgm` or `fedadam`
    rate: float  # Learning rate of the server
    momentum: float  # Of `fedavgm`
    # Names of the parameters that it steps. The others become the mean: a step beyond it could make
    # the running variance of a batch normalization negative.
    trainable: Collection[str]

    @classmethod
    def of(cls, table: FederationTable, trainable: Collection[str]) -> ServerOptimizer:
        """What a fleet file asks for."""
        rate, momentum = table.server_learning_rate, table.server_momentum
        return cls(
            table.strategy,
            _RATES[table.strategy] if rate is None else rate,
            0.9 if momentum is None else momentum,
            trainable,
        )

    def begin(self, arrays: Mapping[str, Array]) -> Arrays:
        """Its state before the first round: zeros."""
        return {
            f"{what}.{name}": np.zeros_like(array)
            for what in _KEPT[self.kind]
            for name, array in arrays.items()
            if name in self.trainable
        }

    def step(
        self, begun: Mapping[str, Array], mean: Arrays, state: Mapping[str, Array], number: int
    ) -> tuple[Arrays, Arrays]:
        """The parameters after a round, and the state."""
        # `number`: Number of the round, from 1.
        if self.kind == "fedavg":
            return mean, {}
        new: Arrays = {}
        kept: Arrays = {}
        for name, old in begun.items():
            if name not in self.trainable:
                new[name] = mean[name]
                continue
            if self.kind == "fedavgm":
                momentum = self.momentum * state[f"momentum.{name}"] + (old - mean[name])
                kept[f"momentum.{name}"] = np.asarray(momentum)
                new[name] = np.asarray(old - self.rate * momentum)
                continue
            change = mean[name] - old
            first = _BETA_1 * state[f"first.{name}"] + (1 - _BETA_1) * change
            second = _BETA_2 * state[f"second.{name}"] + (1 - _BETA_2) * change**2
            kept[f"first.{name}"], kept[f"second.{name}"] = np.asarray(first), np.asarray(second)
            # Flower counts the rounds of this correction from 2.
            corrected = math.sqrt(1 - _BETA_2 ** (number + 1)) / (1 - _BETA_1 ** (number + 1))
            new[name] = np.asarray(old + self.rate * corrected * first / (np.sqrt(second) + _TAU))
        return new, kept
