"""One page about many results: the trend of each device and budget."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from markupsafe import Markup

from odtpack_simulator.figures.simulated import ALWAYS, CHECKS, METRICS
from odtpack_simulator.reports import svg
from odtpack_simulator.reports.badge import headroom, in_words
from odtpack_simulator.reports.charts import Bar
from odtpack_simulator.reports.html_report import render_page
from odtpack_simulator.result import SimulationResult
from odtpack_simulator.values.figure import WORST_FIRST, Check, shortened
from odtpack_simulator.values.units import format_limit, format_percent, format_value

_SHOWN: Final = frozenset({*METRICS, *(key for key in ALWAYS if ALWAYS[key].topic == "Memory")})
"""Budgets, and what a device's own limits are about."""

_HEIGHT: Final = 44
_ROOM: Final = 0.12  # of a drawing, above and below its lines


def render_history(results: Sequence[SimulationResult]) -> bytes:
    """The page as UTF-8 HTML; the oldest result first, those without a date before all others."""
    # Within a minute they stand as they were given.
    ordered = sorted(results, key=lambda each: _minute(each) or "")
    # Of each subject its checks in every result, by metric; None where a result has none.
    trends: dict[str, dict[str, list[Check | None]]] = {}
    for index, result in enumerate(ordered):
        for device, check in result.all_checks():
            if check.limit is None or check.metric not in _SHOWN:
                continue
            own = trends.setdefault("The package" if device is None else device.title, {})
            trend = own.setdefault(check.metric, [None] * len(ordered))
            # The worst check of a metric, of several limits.
            both = [each for each in (trend[index], check) if each is not None]
            trend[index] = min(both, key=lambda each: WORST_FIRST.index(each.state))
    subjects = [
        (title, [_row(metric, checks) for metric, checks in own.items()])
        for title, own in trends.items()
    ]
    return render_page(
        "history.html.j2",
        count=len(ordered),
        subjects=subjects,
        hosts=len({each.host.cpu for each in ordered}),
        results=[
            {
                "made": _minute(each) or ("not a date" if each.origin.date else "unknown"),
                "commit": (each.origin.commit or "unknown")[:10],
                "package": shortened(each.package.path, 100),
                "host": shortened(each.host.cpu, 100),
                "verdict": each.verdict,
                "open": ", ".join(
                    dict.fromkeys(
                        CHECKS[check.metric].title if check.metric in CHECKS else check.metric
                        for _, check in each.all_checks()
                        if check.state == each.verdict != "pass"
                    )
                ),
            }
            for each in ordered
        ],
        tool_version=ordered[-1].tool_version,
    )


def _minute(result: SimulationResult) -> str | None:
    """When a result was made, in UTC and to the minute; None if that is unknown or no date."""
    try:
        made = datetime.fromisoformat(result.origin.date or "")
    except ValueError:
        return None
    try:
        made = made.replace(tzinfo=UTC) if made.tzinfo is None else made.astimezone(UTC)
    except OverflowError:  # the first or last day that there is
        return None
    return f"{made:%Y-%m-%d %H:%M}".zfill(16)  # C libraries write small years shorter


def _row(metric: str, checks: Sequence[Check | None]) -> Bar:
    there = [each for each in checks if each is not None]
    last, known = there[-1], [each for each in there if each.actual is not None]
    figure, detail = "unknown", []
    if last.actual is not None:
        figure = format_value(last.actual, last.unit)
        left = headroom(last)
        detail += [] if left is None else [in_words(last, left)]
        first = known[0].actual
        if first and len(known) > 1:
            change = (last.actual - first) / abs(first)
            sign = "+" if change > 0 else "−"
            detail.append(f"{sign}{format_percent(abs(change))} in all" if change else "unchanged")
    if checks[-1] is None:
        detail.append("not in the last result")
    kind = "at least" if CHECKS[metric].better == "higher" else "at most"
    limit = format_limit(last.limit, last.unit) if last.limit is not None else "unknown"
    remark, drawing = f"{kind} {limit}", _drawing(checks)
    return Bar(CHECKS[metric].title, remark, drawing, figure, ", ".join(detail), last.state)


def _drawing(checks: Sequence[Check | None]) -> Markup:
    """Figures as a line with a dot for each result, and their limits as a dashed one."""
    values = [None if each is None else each.actual for each in checks]
    limits = [None if each is None else each.limit for each in checks]
    there = [value for value in (*values, *limits) if value is not None]
    low, high = min(there), max(there)
    span = (high - low) or abs(high) or 1.0
    axis = svg.Axis(low - _ROOM * span, high + _ROOM * span, ())
    steps = max(1, len(checks) - 1)

    def points(of: Sequence[float | None]) -> list[tuple[float, float] | None]:
        return [
            None if value is None else (0.02 + 0.96 * index / steps, axis.position(value))
            for index, value in enumerate(of)
        ]

    drawn = points(values)
    dots = [
        svg.element(
            "circle",
            cx=svg.percent(point[0]),
            cy=svg.percent(1.0 - point[1]),
            r=3.5,
            class_=f"dot is-{check.state.replace(' ', '-')}",
        )
        for point, check in zip(drawn, checks, strict=True)
        if point is not None and check is not None
    ]
    lines = svg.stretched(svg.path(points(limits), "limit line"), svg.path(drawn, "series"))
    return svg.element("svg", lines, *dots, class_="row-chart", height=_HEIGHT, aria_hidden="true")
