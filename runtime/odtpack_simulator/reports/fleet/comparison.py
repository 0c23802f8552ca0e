"""A comparison of two federations: plain text for a terminal, Markdown for a pull request."""

from __future__ import annotations

from typing import Final

from odtpack_simulator.fleet.outcome.compare import ENOUGH_SEEDS, FleetComparison, FleetFigure
from odtpack_simulator.reports.comparison.report import escape
from odtpack_simulator.values.plain_text import clean
from odtpack_simulator.values.units import format_percent, format_value

_HEADER: Final = ("Figure", "Base", "Head", "Change", "")
_ALIGNED: Final = (1, 2, 3)


def headline(comparison: FleetComparison) -> str:
    """How many figures became worse and better."""
    found = [figure.direction for figure in comparison.figures]
    text = f"{found.count('worse')} worse, {found.count('better')} better of {len(found)} figures"
    if comparison.verdict != comparison.verdict_before:
        text += f"; verdict: {comparison.verdict_before} before, {comparison.verdict} now"
    return text


def render_text(comparison: FleetComparison) -> str:
    """Lines for a terminal or a log, aligned, without colour."""
    lines = [headline(comparison), *(f"  note: {clean(note)}" for note in comparison.notes), ""]
    table = [_HEADER, *(tuple(map(clean, _cells(each, comparison))) for each in comparison.figures)]
    widths = [max(len(line[column]) for line in table) for column in range(len(_HEADER))]
    lines += [
        "  ".join(
            cell.rjust(width) if column in _ALIGNED else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    ]
    return "\n".join([*lines, "", _closing(comparison)]) + "\n"


def render_markdown(comparison: FleetComparison) -> str:
    """Markdown for a comment on GitHub."""
    lines = [f"### odtpack fleet: {escape(headline(comparison))}", ""]
    lines += [f"- {escape(note)}" for note in comparison.notes]
    lines += ["", f"| {' | '.join(_HEADER)} |", "|---|--:|--:|--:|---|"]
    lines += [
        f"| {' | '.join(map(escape, _cells(each, comparison)))} |" for each in comparison.figures
    ]
    return "\n".join([*lines, "", escape(_closing(comparison))]) + "\n"


def _cells(figure: FleetFigure, comparison: FleetComparison) -> tuple[str, ...]:
    title = figure.title
    if figure.metric in ("rounds", "days") and comparison.accuracy is not None:
        title = f"{figure.metric.capitalize()} until {format_percent(comparison.accuracy)}"
    if figure.device is not None:
        title = f"  {figure.device}"
    change = "–"
    if figure.change is not None:
        change = f"{'+' if figure.change > 0 else ''}{_value(figure.change, figure)}"
        if figure.noise is not None:
            change += f" ± {_value(figure.noise, figure)}"
    missing = "never" if figure.metric in ("rounds", "days") else "unknown"
    return (
        title,
        missing if figure.base is None else _value(figure.base, figure),
        missing if figure.head is None else _value(figure.head, figure),
        change,
        figure.direction,
    )


def _value(value: float, figure: FleetFigure) -> str:
    if figure.metric in ("rounds", "days"):
        return f"{value:.3g}"
    sign = "-" if value < 0 else ""
    return sign + format_value(abs(value), figure.unit)


def _closing(comparison: FleetComparison) -> str:
    seeds = comparison.base_seeds, comparison.head_seeds
    if min(seeds) < ENOUGH_SEEDS:
        return (
            f"Seeds: {seeds[0]} and {seeds[1]}. What is chance shows from {ENOUGH_SEEDS} on: "
            f"odtpack fleet run --seeds {ENOUGH_SEEDS}"
        )
    return f"Means over {seeds[0]} and {seeds[1]} seeds; ± is twice the error of the difference."
