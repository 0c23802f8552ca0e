"""Schedules of the learning rate: the factor of the initial rate after so many steps.

A schedule is a frozen dataclass and knows no optimizer;
:class:`~odtpack_runtime.training.lr_scheduler.LRScheduler` applies it. All of them begin with a
linear warm-up, after ``s`` steps ``s / warmup_steps`` while ``s < warmup_steps``, so that the very
first step of a warm-up has the rate 0, as in the reference's LinearLRScheduler and in Hugging
Face transformers.
"""

from __future__ import annotations

import abc
import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from odtpack_runtime.errors import OdtpackError

Setting = int | float | tuple[int, ...]

_EXAMPLE = "write for example: cosine:warmup=100,total=1000,floor=0.1"


@dataclass(frozen=True)
class LearningRateSchedule(abc.ABC):
    """The base of all schedules. Counts are of optimizer steps.

    Raises:
        OdtpackError: ``bad-schedule`` if a setting is of another type or out of range.
    """

    kind: ClassVar[str]
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, _plain(getattr(self, each.name)))
        self._require(_is_count(self.warmup_steps), "warmup_steps", "a whole number, 0 or more")

    def factor(self, step: int) -> float:
        """Return the fraction of the initial rate that holds after ``step`` steps."""
        return step / self.warmup_steps if step < self.warmup_steps else self.after(step)

    @abc.abstractmethod
    def after(self, step: int) -> float:
        """Return the factor once the warm-up is over."""

    def settings(self) -> dict[str, Setting]:
        """The fields by name, as :func:`make_schedule` takes them."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def _require(self, good: bool, name: str, bounds: str) -> None:
        if not good:
            raise OdtpackError(
                "bad-schedule",
                f"{name} of the {self.kind} schedule is {getattr(self, name)!r}; it must be "
                f"{bounds}.",
                hint=_EXAMPLE,
            )


@dataclass(frozen=True)
class Constant(LearningRateSchedule):
    """1 after the warm-up."""

    kind: ClassVar[str] = "constant"

    def after(self, step: int) -> float:
        """Return 1."""
        return 1.0


@dataclass(frozen=True)
class _Ending(LearningRateSchedule):
    total_steps: int = field(default=0, metadata={"required": True})

    def __post_init__(self) -> None:
        super().__post_init__()
        good = _is_count(self.total_steps) and self.total_steps >= max(self.warmup_steps, 1)
        self._require(good, "total_steps", "a whole number above 0, and no less than warmup_steps")


@dataclass(frozen=True)
class Linear(_Ending):
    """From 1 in a straight line to 0 at ``total_steps``."""

    kind: ClassVar[str] = "linear"

    def after(self, step: int) -> float:
        """Return (total - step) / (total - warmup), at least 0."""
        if step >= self.total_steps:
            return 0.0
        return (self.total_steps - step) / (self.total_steps - self.warmup_steps)


@dataclass(frozen=True)
class Cosine(_Ending):
    """Half a cosine wave from 1 down to ``floor`` at ``total_steps``, and ``floor`` from then on.

    Source: Loshchilov and Hutter (2017), https://arxiv.org/abs/1608.03983, without restarts.
    """

    kind: ClassVar[str] = "cosine"
    floor: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(_is_number(self.floor) and 0 <= self.floor <= 1, "floor", "from 0 to 1")

    def after(self, step: int) -> float:
        """Return floor + (1 - floor) (1 + cos(pi done)) / 2."""
        done = 1.0
        if step < self.total_steps:
            done = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        wave = (1 + math.cos(math.pi * done)) / 2
        return self.floor + (1 - self.floor) * wave


@dataclass(frozen=True)
class Step(LearningRateSchedule):
    """``gamma`` to the power of the number of whole periods so far."""

    kind: ClassVar[str] = "step"
    period: int = field(default=0, metadata={"required": True})
    gamma: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        good = _is_count(self.period) and self.period > 0
        self._require(good, "period", "a whole number, 1 or more")
        _check_gamma(self, self.gamma)

    def after(self, step: int) -> float:
        """Return gamma^(step // period)."""
        return float(self.gamma ** (step // self.period))


@dataclass(frozen=True)
class MultiStep(LearningRateSchedule):
    """``gamma`` to the power of the number of milestones reached so far."""

    kind: ClassVar[str] = "multistep"
    milestones: tuple[int, ...] = field(default=(), metadata={"required": True})
    gamma: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        good = (
            isinstance(self.milestones, tuple)
            and len(self.milestones) > 0
            and all(_is_count(milestone) for milestone in self.milestones)
            and list(self.milestones) == sorted(self.milestones)
        )
        self._require(good, "milestones", "a rising row of step counts")
        _check_gamma(self, self.gamma)

    def after(self, step: int) -> float:
        """Return gamma^(milestones <= step)."""
        return float(self.gamma ** bisect.bisect_right(self.milestones, step))


SCHEDULES: dict[str, type[LearningRateSchedule]] = {
    kind.kind: kind for kind in (Constant, Linear, Cosine, Step, MultiStep)
}


@dataclass(frozen=True)
class ScheduleSpec:
    """A schedule as a recipe names it: its kind, settings, and perhaps the initial rate.

    ``settings`` may leave out ``total_steps``, which :meth:`schedule` then takes from the run.

    Raises:
        OdtpackError: ``bad-schedule``.
    """

    kind: str
    settings: Mapping[str, Setting]
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        rate = _plain(self.learning_rate)
        object.__setattr__(self, "learning_rate", rate)
        if rate is not None and not (_is_number(rate) and 0 < rate < math.inf):
            what = f"The learning rate of a schedule must be above 0, not {rate}."
            raise OdtpackError("bad-schedule", what)
        self.schedule(2**31)

    def schedule(self, total_steps: int) -> LearningRateSchedule:
        """Return the schedule of a run.

        Args:
            total_steps: Optimizer steps of the run; counts if the settings do not say.

        Raises:
            OdtpackError: ``bad-schedule``, also if the run ends before the warm-up.
        """
        kind = SCHEDULES.get(self.kind)
        settings = dict(self.settings)
        if kind is not None and issubclass(kind, _Ending):
            settings.setdefault("total_steps", total_steps)
        return make_schedule(self.kind, settings)

    @classmethod
    def parse(cls, text: str) -> ScheduleSpec:
        """Read ``KIND`` or ``KIND:key=value,...``, as ``cosine:warmup=100,floor=0.1``.

        Keys are the fields' names, without ``_steps``, and ``lr`` for the initial rate;
        milestones are separated by ``+``.

        Raises:
            OdtpackError: ``bad-schedule``.
        """
        kind, _, rest = text.partition(":")
        settings: dict[str, Setting] = {}
        rate = None
        for part in rest.split(",") if rest else []:
            key, _, value = part.partition("=")
            key = {"warmup": "warmup_steps", "total": "total_steps"}.get(key, key)
            try:
                if key == "lr":
                    rate = float(value)
                elif key == "milestones":
                    settings[key] = tuple(int(each) for each in value.split("+"))
                else:
                    settings[key] = float(value) if key in ("floor", "gamma") else int(value)
            except ValueError:
                what = f"The schedule {text!r} cannot be read at {part!r}."
                raise OdtpackError("bad-schedule", what, hint=_EXAMPLE) from None
        return cls(kind, settings, rate)


def make_schedule(kind: object, settings: Mapping[str, Any]) -> LearningRateSchedule:
    """Make a schedule from its kind and settings, which may come from outside."""
    chosen = SCHEDULES.get(kind) if isinstance(kind, str) else None
    if chosen is None:
        hint = f"choose one of {', '.join(SCHEDULES)}"
        raise OdtpackError("bad-schedule", f"There is no schedule {kind!r:.40}.", hint=hint)
    known = {each.name: each for each in fields(chosen)}
    odd = sorted(settings.keys() - known.keys())
    missing = [
        name
        for name, each in known.items()
        if each.metadata.get("required") and name not in settings
    ]
    if odd or missing:
        what = f"has no setting {odd[0]!r:.40}" if odd else f"needs {missing[0]}"
        hint = f"it has {', '.join(known)}"
        raise OdtpackError("bad-schedule", f"The schedule {kind} {what}.", hint=hint)
    return chosen(**settings)


def _check_gamma(schedule: LearningRateSchedule, gamma: float) -> None:
    schedule._require(_is_number(gamma) and 0 < gamma <= 1, "gamma", "above 0 and at most 1")


def _plain(value: Any) -> Any:
    """NumPy's numbers and arrays, and lists, as Python's own."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return tuple(value) if isinstance(value, list) else value


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_number(value: object) -> bool:
    return type(value) in (int, float)
