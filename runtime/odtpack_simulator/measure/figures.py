"""Figures of a device profile as they are written: rounded, with kind and source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from odtpack_simulator.measure.host import spread

Figure = dict[str, Any]


def rounded(value: float) -> float:
    """To four significant digits."""
    return float(f"{value:.4g}")


def unknown(why: str) -> Figure:
    """A figure that is unknown."""
    return {"unknown": why}


def known(value: float, unit: str, kind: str, source: str) -> Figure:
    """A figure without bounds."""
    return {"value": rounded(value), "unit": unit, "kind": kind, "source": source}


def repeated(values: Sequence[float], factor: float, unit: str, source: str) -> Figure:
    """A measured figure: the median of its repetitions, between the lowest and the highest.

    Args:
        values: One per repetition, at least one.
        factor: What the values are divided by to be in ``unit``.
        unit: Of the figure.
        source: How it was measured.
    """
    low, middle, high = spread(tuple(value / factor for value in values))
    figure = known(middle, unit, "measured", source)
    return figure | {"low": rounded(low), "high": rounded(high)}


def whole_mebibytes(count: int, kind: str, source: str) -> Figure:
    """A size in whole MiB, rounded down: a limit must not be more than what is there."""
    return {"value": float(count // 2**20), "unit": "MiB", "kind": kind, "source": source}
