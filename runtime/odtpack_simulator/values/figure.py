"""A figure: every number that is judged, compared, suggested from or shown, and its check."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Final, Literal

from pydantic import Field

from odtpack_simulator.values.part import Part
from odtpack_simulator.values.units import format_interval_of, format_value

Text = Annotated[str, Field(max_length=4000)]
Unit = Literal["B", "ms", "s", "J", "%", "share", "1"]
"""Of a figure: ``share`` is from 0 to 1 and read as a percentage, ``1`` a plain number."""
FigureKind = Literal["counted", "measured", "predicted", "published"]
Verdict = Literal["pass", "warn", "fail", "not judged"]
CheckStatus = Literal["pass", "fail", "not judged"]
CheckLevel = Literal["error", "warn"]
WORST_FIRST: Final[tuple[Verdict, ...]] = ("fail", "not judged", "warn", "pass")


class Basis(Part):
    """What two figures must have in common to be compared; null where it does not matter.

    Attributes:
        how: What the figure is of, or how it was found, where there is more than one way.
        host: The machine whose times it follows from.
        profile: Digest of the device profile that it rests on.
        training: What was trained and how: times of one training differ by chance alone.
    """

    how: Text = ""
    host: Text | None = None
    profile: Text | None = None
    training: Text | None = None


class Figure(Part):
    """One number of a result, with its unit and how well it is known.

    Attributes:
        metric: Key of its metric.
        subject: Name of the device; null for the whole package or federation.
        value: The figure; null if unknown.
        low: Low end of an estimate. With ``low`` and without ``high``, ``value`` is a lower bound.
        high: High end of an estimate.
        unit: Unit of value, low, high and noise.
        kind: Counted in files or graphs, measured, predicted from measurements, or published.
        basis: What another figure must have in common with it to be compared.
        noise: Low end, middle and high end of where chance alone may have put it.
        reason: Why the value is unknown; of a known one, what to say with it.
    """

    metric: Text = ""
    subject: Text | None = None
    value: float | None
    low: float | None = None
    high: float | None = None
    unit: Unit = "1"
    kind: FigureKind = "counted"
    basis: Basis = Basis()
    noise: tuple[float, float, float] | None = None
    reason: Text = ""

    @property
    def shown(self) -> str:
        """The value with its unit, for people; a dash if unknown."""
        return "–" if self.value is None else format_value(self.value, self.unit)

    @property
    def ends(self) -> str:
        """Both ends of the estimate, for people; empty where they are one or unknown."""
        if self.low is None or self.high is None or self.low == self.high:
            return ""
        return format_interval_of(self.low, self.high, self.unit)


class Check(Part):
    """One assertion over a figure.

    ``actual`` and ``limit`` stand in ``unit``. ``baseline`` is what ``limit`` was computed from,
    where a budget says by how much a figure may grow ("+5 %").
    """

    metric: Text
    limit: float | None = None
    actual: float | None = None
    baseline: float | None = None
    unit: Unit = "1"
    level: CheckLevel = "error"
    status: CheckStatus
    message: Text
    advice: Text | None = None
    budget_location: Text | None = None

    @property
    def state(self) -> Verdict:
        """Status and level as one verdict."""
        return "warn" if self.status == "fail" and self.level == "warn" else self.status


def worst_of(verdicts: Iterable[Verdict]) -> Verdict:
    """``fail`` before ``not judged`` before ``warn`` before ``pass``, which nothing is as well."""
    found = set(verdicts)
    return next((verdict for verdict in WORST_FIRST if verdict in found), "pass")


def verdict_of(checks: Iterable[Check]) -> Verdict:
    """The verdict that follows from checks."""
    return worst_of(check.state for check in checks)


def listed(words: Sequence[str]) -> str:
    """Words in a sentence: ``a, b and c``."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def shortened(text: str, most: int = 1000) -> str:
    """Text of a result in a sentence: names and reasons of a file may be of any length."""
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"
