"""What private training (DP-SGD) promises, by the accountant of Google's ``dp-accounting``."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from odtpack.errors import OdtpackError

if TYPE_CHECKING:
    from odtpack_runtime import Optimizer

_PROPERTY = "odtpack.private_steps"
"""Property of a checkpoint: JSON, for each kind of steps the noise multiplier, the sampling rate
and how many there were."""


class PrivateSteps(NamedTuple):
    """Steps of one kind."""

    noise_multiplier: float
    """Standard deviation of the noise as a multiple of the clipping norm."""
    sampling_rate: float
    """Probability with which each sample is in each batch, above 0 and at most 1."""
    steps: int


def epsilon(noise_multiplier: float, sampling_rate: float, steps: int, delta: float) -> float:
    """Return the epsilon that steps with private gradients keep, for one sample more or less.

    By Rényi differential privacy of the Gaussian mechanism under Poisson sampling (Mironov,
    Talwar and Zhang, 2019): each sample is in each batch with the same probability, independently.

    Args:
        noise_multiplier: As of :class:`PrivateSteps`.
        sampling_rate: As well.
        steps: As well.
        delta: Probability that the guarantee fails, between 0 and 1.

    Returns:
        An upper bound; infinity without noise.

    Raises:
        OdtpackError: A number is out of range (``bad-argument``), or ``dp-accounting`` is not
            installed (``privacy-not-installed``).
    """
    return epsilon_of([PrivateSteps(noise_multiplier, sampling_rate, steps)], delta)


def epsilon_of(parts: Iterable[PrivateSteps], delta: float) -> float:
    """Return the epsilon of steps of several kinds together, as :func:`epsilon` does of one."""
    made = [part for part in parts if _checked(part) and part.steps]
    check_delta(delta)
    try:
        import dp_accounting
        from dp_accounting.rdp import RdpAccountant
    except ImportError as error:
        raise OdtpackError(
            "privacy-not-installed",
            "the epsilon of private training is computed by dp-accounting, which is not installed",
        ) from error
    if not made:
        return 0.0
    if any(part.noise_multiplier == 0 for part in made):
        return math.inf
    accountant = RdpAccountant()
    # It warns of each order whose divergence rounding makes negative, of which it takes 0.
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        for part in made:
            gaussian = dp_accounting.GaussianDpEvent(part.noise_multiplier)
            event = dp_accounting.PoissonSampledDpEvent(part.sampling_rate, gaussian)
            accountant.compose(event, part.steps)
        return float(accountant.get_epsilon(delta))
    finally:
        log.setLevel(level)


def check_delta(delta: float) -> None:
    """Refuse a delta that is not between 0 and 1 (``bad-argument``)."""
    if not 0 < delta < 1:
        what = f"delta is {delta:g}; it must be above 0 and below 1"
        hint = "it is the probability that the guarantee fails: pass for example --delta 1e-5"
        raise OdtpackError("bad-argument", what, hint=hint)


def _checked(part: PrivateSteps) -> bool:
    for name, value, good in (
        ("noise_multiplier", part.noise_multiplier, 0 <= part.noise_multiplier < math.inf),
        ("sampling_rate", part.sampling_rate, 0 < part.sampling_rate <= 1),
        ("steps", part.steps, part.steps >= 0),
    ):
        if not good:
            raise OdtpackError("bad-argument", f"{name} is {value:g}, which is out of range")
    return True


class PrivateRecord:
    """How the private steps of a training were made; kept in its checkpoints.

    Args:
        optimizer: The optimizer of a private training.
        sampling_rate: That of the steps from now on.
    """

    def __init__(self, optimizer: Optimizer, sampling_rate: float) -> None:
        self._optimizer, self._rate = optimizer, sampling_rate
        self._begun, self._before = optimizer.step_count, _read(optimizer)

    def steps(self) -> list[PrivateSteps] | None:
        """The steps of the training, None if some were made without a record."""
        privacy = self._optimizer.privacy
        if self._before is None or privacy is None:
            return None
        made = self._optimizer.step_count - self._begun
        kind = privacy.noise_multiplier, self._rate
        *others, last = self._before or [PrivateSteps(*kind, 0)]
        if last[:2] == kind:
            return [*others, PrivateSteps(*kind, last.steps + made)]
        return [*others, last, PrivateSteps(*kind, made)]

    def keep(self) -> None:
        """Make them a property of the state, for its next save."""
        if (steps := self.steps()) is not None:
            self._optimizer.checkpoint_state.properties[_PROPERTY] = json.dumps(steps)


def _read(optimizer: Optimizer) -> list[PrivateSteps] | None:
    text = dict(optimizer.checkpoint_state.properties).get(_PROPERTY, "[]")
    try:
        found = [
            PrivateSteps(float(n), float(r), int(made)) for n, r, made in json.loads(str(text))
        ]
        whole = all(_checked(each) for each in found)
    except (ValueError, TypeError, OverflowError, RecursionError, OdtpackError):
        return None
    return found if whole and sum(p.steps for p in found) == optimizer.step_count else None
