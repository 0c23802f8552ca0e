"""What a metric declares: how its figure is read from a result, and which way is better."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from odtpack_simulator.device.app import MemoryFit
from odtpack_simulator.values.figure import Check, Figure, Unit, Verdict

Source = TypeVar("Source")
"""What figures of one kind are read from: a result, and one of its devices."""
Scope = Literal["package", "device"]
Better = Literal["lower", "higher"]
Topic = Literal[
    "Memory", "Step", "Finish", "Energy", "Sessions", "Metric", "Package", "Interruptions"
]
"""Where reports show a check: in a column of the device matrix, or in the part of that name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckKind:
    """What reports need to know of a check, with or without a budget."""

    title: str  # Its name for people
    topic: Topic  # Where reports show it
    headline: bool = False  # The figure that stands for its topic is its own
    # `lower` where a limit is the most that is allowed, `higher` for a floor.
    better: Better = "lower"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric(CheckKind, Generic[Source]):
    """One figure of a result that a budget can limit."""

    key: str  # Its key in a budget file
    unit: Unit  # Unit of the figure; the budget file names its own
    scope: Scope  # Whether there is one per package or federation, or one per device
    # Beginning of a sentence about the figure: `{}` is its value, `{kind}` and `{how}` are how it
    # was found.
    words: str
    noun: str = ""  # What a plain number counts, `" sessions"`
    meaning: str  # A sentence for the documentation and the schema
    example: str  # A value in a budget file
    # The figure of a source; its metric, unit and subject are filled in.
    read: Callable[[Source], Figure]
    advise: Callable[[Source, float], str]  # What to change first to reach a limit, given in `unit`
    # How far the figures of base and head may lie apart, in `unit`, by chance alone; None where
    # that is unknown or nothing.
    chance: Callable[[Figure, Figure], float | None] = lambda _base, _head: None
    # How the figure compares with an absolute limit, where a part of it is too close to call.
    fit: Callable[[int, int], MemoryFit] | None = None
    suggested: bool = True  # A suggested budget has it
    below: float | None = None  # Limits must be below this
    most: float | None = None  # A plain number may be this at most, as a share is

    def keeps(self, actual: float, limit: float) -> bool:
        """Whether a figure is within a limit; at the limit is within."""
        return actual >= limit if self.better == "higher" else actual <= limit

    def of(self, source: Source, subject: str | None) -> Figure:
        """The figure of a source; ``subject`` is the device's name."""
        found = self.read(source)
        unit = self.unit if found.unit == "1" else found.unit
        return found.model_copy(update={"metric": self.key, "subject": subject, "unit": unit})

    def describe(self, figure: Figure) -> str:
        """The figure in words, or why it is unknown."""
        if figure.value is None:
            return figure.reason
        noun = self.noun.removesuffix("s") if figure.shown == "1" else self.noun
        text = self.words.format(figure.shown + noun, kind=figure.kind, how=figure.basis.how)
        text += f" ({figure.ends})" if figure.ends else ""
        return f"{text} {figure.reason}" if figure.reason else text


def read_figures(
    metrics: Mapping[str, Metric[Source]], source: Source, subject: str | None = None
) -> list[Figure]:
    """The figures of the whole, or of a device by its name, in the order of the metrics."""
    scope = "package" if subject is None else "device"
    return [metric.of(source, subject) for metric in metrics.values() if metric.scope == scope]


def of_ratio(base: Figure, head: Figure) -> float | None:
    """How much larger or smaller a figure that follows from times may seem by chance."""
    # What is uncertain about a device is the same in base and head, and cancels. What is left is
    # how well the host's times are known: the head's at the end of its interval against the base's
    # at the opposite end of its own, and the larger way of the two.
    if base.noise is None or head.noise is None:
        return None
    if base.noise[1] == 0.0 or head.noise[1] == 0.0:
        return 0.0
    (base_low, base_high), (head_low, head_high) = (
        (low / middle, high / middle) for low, middle, high in (base.noise, head.noise)
    )
    if min(base_low, head_low) <= 0.0:  # the ends of a file lie too far apart for a ratio
        return None
    return base.noise[1] * max(head_high / base_low - 1.0, base_high / head_low - 1.0)


def of_errors(base: Figure, head: Figure) -> float | None:
    """Of two means: the root of the sum of squares of what either leaves open (Welch)."""
    if base.noise is None or head.noise is None:
        return None
    return math.hypot(base.noise[2] - base.noise[1], head.noise[2] - head.noise[1])


def of_repeats(_base: Figure, head: Figure) -> float | None:
    """Within how much a measurement repeats, which the head's figure knows."""
    return None if head.noise is None else head.noise[2] - head.noise[1]


def of_head(base: Figure, head: Figure) -> float | None:
    """How far the head is from the end of its interval that looks at the base."""
    if base.value is None or head.value is None or head.noise is None:
        return None
    low, _, high = head.noise
    return max(0.0, head.value - low if base.value < head.value else high - head.value)


def incomparable(base: Figure, head: Figure) -> str | None:
    """Why the figures of base and head say nothing about the change; None where they do."""
    before, now = base.basis, head.basis
    if before.host != now.host:
        which = before.host if before.host and len(before.host) < 200 else "another processor"
        return f"the baseline was measured on another host ({which}): measure both on one machine"
    if before.profile != now.profile:
        return "the device's profile is another than the baseline's: measure the baseline again"
    if (base.kind, before.how) != (head.kind, now.how):
        said = [each.basis.how[:100] or each.kind for each in (base, head)]
        return f"the baseline's figure is another: {said[0]}, here {said[1]}"
    return None


def chance(metric: Metric[Source], base: Figure, head: Figure) -> float | None:
    """How far two figures may lie apart by chance; None where it is unknown or without bounds."""
    # Times of one and the same training differ by chance alone, however far they lie apart: what
    # made one longer was something else on the machine.
    noise = metric.chance(base, head)
    same = base.basis.training is not None and base.basis.training == head.basis.training
    if same and base.value is not None and head.value is not None:
        noise = max(noise or 0.0, abs(head.value - base.value))
    return noise if noise is not None and math.isfinite(noise) else None


Whose = TypeVar("Whose")


def worst(
    members: Sequence[tuple[Whose, Check]],
    kinds: Mapping[str, CheckKind],
    order: Sequence[Verdict],
) -> tuple[Whose, Check]:
    """The check of one metric whose state comes first in an order, and that is furthest off."""

    def excess(check: Check) -> tuple[float, float]:
        """How far it is off; a killed replay (no figure) is worst, most of all in least room."""
        if check.actual is None or check.limit is None:
            return float("inf"), -(check.limit or 0.0)
        kind = kinds.get(check.metric)
        floor = kind is not None and kind.better == "higher"
        if check.limit <= 0.0:  # a ratio says nothing
            over = check.actual - check.limit
            return (-over if floor else over), 0.0
        ratio = max(0.0, check.actual / check.limit)
        return (1.0 / max(ratio, 1e-12) if floor else ratio), 0.0

    return max(members, key=lambda member: (-order.index(member[1].state), excess(member[1])))
