"""The figures of a profile as reports show them."""

from __future__ import annotations

from typing import Literal

from odtpack_simulator.values.part import Part
from odtpack_simulator.values.quantities import FigureKind, Quantity, ThreadedQuantity, Unknown


class ProfileFigure(Part):
    """One figure of a profile as a report shows it; null values are unknown."""

    key: str
    value: float | None
    low: float | None = None
    high: float | None = None
    unit: str | None
    threads: int | None = None
    kind: FigureKind | Literal["unknown"]
    source: str


def shown(key: str, figure: Quantity | Unknown | None) -> ProfileFigure:
    """A figure with its key; an unknown one with its reason."""
    if isinstance(figure, Quantity):
        threads = figure.threads if isinstance(figure, ThreadedQuantity) else None
        known = figure.model_dump(exclude={"threads"})
        return ProfileFigure(key=key, threads=threads, **known)
    why = figure.unknown if isinstance(figure, Unknown) else "the profile does not give it"
    return ProfileFigure(key=key, value=None, unit=None, kind="unknown", source=why)
