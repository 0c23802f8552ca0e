"""A comparison of two results as a page: what became worse, drawn from the base to either side."""

from __future__ import annotations

from typing import Final

from markupsafe import Markup

from odtpack_simulator.budgets.compare import Comparison, DeviceComparison, Direction, Figure
from odtpack_simulator.reports.comparison.report import closing, headline, presence, verdicts
from odtpack_simulator.reports.comparison.rows import MARKS, check_lines
from odtpack_simulator.reports.drawing import row_charts
from odtpack_simulator.reports.drawing.axes import Axis
from odtpack_simulator.reports.drawing.row_charts import Bar
from odtpack_simulator.reports.html_report import template_environment
from odtpack_simulator.values.units import format_value

_STATES: Final[dict[Direction, str]] = {
    "worse": "fail",
    "better": "pass",
    "within noise": "warn",
    "unknown now": "not judged",
    "known now": "pass",
    "not compared": "not judged",
}
_LEAST_SCALE: Final = 5.0
_LARGEST_SCALE: Final = 100.0
"""Percent at which a bar ends; the figure beside it gives the rest."""


def render_comparison(comparison: Comparison) -> bytes:
    """The page as UTF-8 HTML. The same comparison gives the same bytes."""
    changed = [pair for pair in comparison.figures() if pair[1].direction != "same"]
    order = list(MARKS)
    changed.sort(key=lambda pair: (order.index(pair[1].direction), -abs(_change(pair[1]))))
    most = max([_LEAST_SCALE, *(abs(_change(figure)) for _, figure in changed)])
    reach = min(_LARGEST_SCALE, most)
    axis = Axis(-reach, reach, (-reach, 0.0, reach))
    page = (
        template_environment()
        .get_template("comparison.html.j2")
        .render(
            headline=headline(comparison),
            verdict=comparison.verdict,
            notes=[*comparison.notes, *presence(comparison)],
            verdicts=verdicts(comparison),
            rows=[_row(device, figure, axis) for device, figure in changed],
            axis=row_charts.axis_row(axis, _tick) if changed else None,
            checks=check_lines(comparison),
            closing=closing(comparison, len(list(comparison.figures())) - len(changed)),
            tool_version=comparison.tool_version,
        )
    )
    return page.encode("utf-8")


def _change(figure: Figure) -> float:
    return figure.change_percent or 0.0


def _row(device: DeviceComparison | None, figure: Figure, axis: Axis) -> Bar:
    base, head = (
        "unknown" if value is None else format_value(value, figure.unit)
        for value in (figure.base, figure.head)
    )
    change = "" if figure.change_percent is None else f"{figure.change_percent:+.1f} %"
    noise = figure.noise_percent
    parts = [change, MARKS[figure.direction].partition(" ")[2]]
    parts += [f"± {noise:.1f} % is noise"] if noise and figure.direction != "not compared" else []
    return Bar(
        f"{figure.title}, {'package' if device is None else device.title}",
        figure.reason or "",
        _drawing(figure, axis),
        f"{base} → {head}",
        ", ".join(filter(None, parts)),
        _STATES.get(figure.direction, "not judged"),
    )


def _drawing(figure: Figure, axis: Axis) -> Markup:
    if figure.change_percent is None:
        return row_charts.empty_row(axis)
    return row_charts.change_bar(
        figure.change_percent, axis, figure.noise_percent, worse=figure.direction == "worse"
    )


def _tick(change: float) -> str:
    return f"{change:+.3g} %" if change else "0 %"
