"""The drawings inside a line of a list: bars against a limit, intervals, shares, events.

The figures stand beside them as text, so none of them needs colour or a label.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from odtpack_simulator.reports.drawing.axes import Axis
from odtpack_simulator.reports.drawing.plot import ROW_HEIGHT, rectangle, row, vertical, x_label
from odtpack_simulator.reports.drawing.svg import element, percent
from odtpack_simulator.values.units import Interval


@dataclass(frozen=True)
class Bar:
    """A line of a bar list: name, remark, drawing, and the figures as text."""

    name: str
    remark: str
    drawing: Markup
    figure: str
    detail: str
    state: str = ""


def limit_bar(
    predicted: float,
    measured: float | None,
    scale: Axis,
    *,
    over: bool,
    app: float = 0.0,
    runtime: float = 0.0,
    warning: float | None = None,
) -> Markup:
    """Share of a device's memory limit: bar for predicted, tick for measured, dashes for 100 %.

    What the process holds besides the training lies left of it, in the same bar.

    Args:
        predicted: Predicted peak of the training over the limit (1 means exactly the limit).
        measured: Measured peak over the limit, None where none was measured.
        app: What the app holds, over the limit.
        runtime: What ONNX Runtime's library holds, over the limit.
        scale: Common axis of all bars, in shares of the limit.
        over: Whether the replay went over the limit, measured or by being killed.
        warning: Share of the limit from which the system warns the app, a dotted line.
    """
    full = scale.position(1.0)
    layers = [rectangle(0.0, full, "track", 3, ROW_HEIGHT - 6)]
    start = 0.0
    training = "bar over" if over else "bar"
    for share, style in ((app, "bar app"), (runtime, "bar library"), (predicted, training)):
        left, right = (min(1.0, scale.position(x)) for x in (start, start + share))
        if share:
            layers.append(rectangle(left, right - left, style, 3, ROW_HEIGHT - 6))
        start += share
    layers.append(vertical(full, "limit"))
    if warning is not None:
        layers.append(vertical(scale.position(warning), "warning-mark"))
    if measured is not None:
        layers.append(vertical(scale.position(app + runtime + measured), "tick-mark"))
    return row(*layers)


def pair_bar(predicted: float, measured: float | None, most: float) -> Markup:
    """Bar for predicted and tick for measured, as shares of the largest of all rows."""
    scale = Axis(0.0, most or 1.0, ())
    layers = [
        rectangle(0.0, 1.0, "track", 3, ROW_HEIGHT - 6),
        rectangle(0.0, scale.position(predicted), "bar", 3, ROW_HEIGHT - 6),
    ]
    if measured is not None:
        layers.append(vertical(scale.position(measured), "tick-mark"))
    return row(*layers)


def change_bar(change: float, axis: Axis, noise: float | None, *, worse: bool) -> Markup:
    """A bar from no change to ``change``, over a band of what measurements scatter.

    Args:
        change: In the unit of the axis, in which 0 is no change.
        axis: Common axis of all rows.
        noise: Changes up to it can be chance; None where that is unknown or nothing.
        worse: Whether it is a change for the worse.
    """
    zero, end = axis.position(0.0), axis.position(max(axis.low, min(axis.high, change)))
    layers = []
    if noise:
        low, high = (axis.position(max(axis.low, min(axis.high, x))) for x in (-noise, noise))
        layers.append(rectangle(low, high - low, "track", 0, ROW_HEIGHT))
    style = "bar over" if worse else "bar"
    layers.append(rectangle(min(zero, end), abs(end - zero), style, 4, ROW_HEIGHT - 8))
    layers.append(vertical(zero, "tick-mark"))
    return row(*layers)


def interval_bar(
    interval: Interval, axis: Axis, limit: float | None, *, p90: float | None = None
) -> Markup:
    """A whisker from low to high with a dot at the typical value, and a dashed budget.

    Args:
        interval: What is known of the figure.
        axis: Common axis of all rows.
        limit: Budget, if there is one.
        p90: 90th percentile in the typical case, a small diamond.
    """
    low, typical, high = (
        axis.position(value) for value in (interval.low, interval.typical, interval.high)
    )
    middle = ROW_HEIGHT / 2
    layers = [vertical(axis.position(tick), "grid") for tick in axis.ticks]
    layers += [
        element("line", x1=percent(low), x2=percent(high), y1=middle, y2=middle, class_="whisker"),
        *(
            element(
                "line", x1=percent(x), x2=percent(x), y1=middle - 5, y2=middle + 5, class_="whisker"
            )
            for x in (low, high)
        ),
    ]
    if p90 is not None:
        layers.append(shape(axis.position(p90), middle, "M0-5L5 0L0 5L-5 0Z", "diamond"))
    layers.append(element("circle", cx=percent(typical), cy=middle, r=4.5, class_="dot"))
    if limit is not None:
        layers.append(vertical(axis.position(limit), "limit"))
    return row(*layers)


def event_row(events: Sequence[tuple[float, float]], outline: str) -> Markup:
    """Events along a training: a shape where it was ended, a line back to where it resumed.

    Args:
        events: Share of the steps at the end and at the resumption.
        outline: Path of the shape around the origin.
    """
    middle = ROW_HEIGHT / 2
    layers = [
        element("line", x1=0, x2="100%", y1=middle, y2=middle, class_="grid"),
        *(
            element(
                "line",
                x1=percent(back),
                x2=percent(end),
                y1=middle,
                y2=middle,
                class_="whisker",
            )
            for end, back in events
        ),
        *(shape(end, middle, outline, "event") for end, _ in events),
    ]
    return row(*layers)


def shape(x: float, y: float, outline: str, style: str) -> Markup:
    """A path around a point whose x is a share of the width and whose y is in pixels."""
    inner = element("path", d=outline, class_=style)
    return element("svg", inner, x=percent(x), y=y, width=1, height=1, overflow="visible")


def empty_row(axis: Axis) -> Markup:
    """A row of :func:`interval_bar` without a figure: only the grid."""
    return row(*(vertical(axis.position(tick), "grid") for tick in axis.ticks))


def axis_row(axis: Axis, label: Callable[[float], str]) -> Markup:
    """The labels under a stack of rows that share an axis."""
    texts = [
        x_label(axis.position(tick), 12, label(tick), roomy=not axis.is_round(tick))
        for tick in axis.ticks
    ]
    return element("svg", *texts, class_="axis-row", height=18, aria_hidden="true")


def share_bar(share: float, style: str = "bar") -> Markup:
    """A plain bar for a share between 0 and 1."""
    track = rectangle(0.0, 1.0, "track", 3, 8)
    bar = rectangle(0.0, min(1.0, max(0.0, share)), style, 3, 8)
    return element("svg", track, bar, class_="row-chart", height=14, aria_hidden="true")
