"""The drawings of the HTML report, each a function from figures to inline SVG.

Nothing is told by colour alone: limits are dashed lines, measured values are
ticks, estimates are dots with whiskers, and every figure stands beside its
drawing as text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from markupsafe import Markup

from odtpack_runtime.reports.axes import Axis, linear_axis
from odtpack_runtime.reports.svg import element, number, percent
from odtpack_runtime.simulator.units import Interval, format_bytes, format_number

_MAX_POINTS = 600
_LABEL_ROOM = 0.1  # share of a plot kept free above its highest value, for the label
_ROW_HEIGHT = 20


def loss_chart(losses: Sequence[float | None], before: float | None, after: float | None) -> Markup:
    """Training loss per step, its running mean, and the held-out loss before and after."""
    finite = [loss for loss in losses if loss is not None]
    ends = [value for value in (before, after) if value is not None]
    low, high = min([0.0, *finite, *ends]), max([*finite, *ends], default=1.0)
    axis = linear_axis(high + _LABEL_ROOM * (high - low), low=low)
    points = [
        (number_of_step / len(losses), axis.position(loss)) if loss is not None else None
        for number_of_step, loss in enumerate(losses, start=1)
    ]
    marks = [_path(points, "series faint" if len(losses) >= 40 else "series")]
    if len(losses) >= 40:
        marks.append(_path(_running_mean(losses, axis), "series"))
    layers = [_horizontal_grid(axis, format_number), _x_ticks(len(losses))]
    layers.append(_stretched(*marks))
    for x, value, words in ((0.0, before, "before"), (1.0, after, "after")):
        if value is not None:
            label = f"held-out {words}: {format_number(value)}"
            layers.append(_marked_point(x, axis.position(value), label))
    alt = f"Training loss over {len(losses)} steps"
    if finite:
        alt += f", from {format_number(finite[0])} to {format_number(finite[-1])}"
    return _plot(alt, *layers)


def timeline_chart(live_bytes: Sequence[int]) -> Markup:
    """Working set over the nodes of the step in execution order, with the peak marked.

    Args:
        live_bytes: Bytes alive while each node runs.
    """
    megabytes = [value / 1e6 for value in live_bytes]
    axis = linear_axis((1.0 + _LABEL_ROOM) * max(megabytes, default=1.0))
    count = max(1, len(megabytes))
    steps: list[tuple[float, float] | None] = []
    for index, value in enumerate(megabytes):
        y = axis.position(value)
        steps += [(index / count, y), ((index + 1) / count, y)]
    layers = [
        _horizontal_grid(axis, lambda value: f"{value:g}"),
        _x_ticks(len(megabytes)),
        _stretched(_path(steps, "area", closed=True), _path(steps, "series")),
    ]
    alt = "Working set over the nodes of the training step"
    if megabytes:
        peak = max(range(len(megabytes)), key=megabytes.__getitem__)
        text = f"peak {format_bytes(live_bytes[peak])}"
        x = (peak + 0.5) / count
        layers.append(_marked_point(x, axis.position(megabytes[peak]), text))
        alt += f", {text}"
    return _plot(alt, *layers)


def limit_bar(predicted: float, measured: float | None, scale: Axis, *, over: bool) -> Markup:
    """Share of a device's memory limit: bar for predicted, tick for measured, dashes for 100 %.

    Args:
        predicted: Predicted peak over the limit (1 means exactly the limit).
        measured: Measured peak over the limit, None where none was measured.
        scale: Common axis of all bars, in shares of the limit.
        over: Whether the replay went over the limit, measured or by being killed.
    """
    width = scale.position(predicted)
    full = scale.position(1.0)
    style = "bar over" if over else "bar"
    layers = [
        _rect(0.0, full, "track", 3, _ROW_HEIGHT - 6),
        _rect(0.0, width, style, 3, _ROW_HEIGHT - 6),
        _vertical(full, "limit"),
    ]
    if measured is not None:
        layers.append(_vertical(scale.position(measured), "tick-mark"))
    return _row(*layers)


def interval_bar(interval: Interval, axis: Axis, limit: float | None) -> Markup:
    """A whisker from low to high with a dot at the typical value, and a dashed budget."""
    low, typical, high = (
        axis.position(value) for value in (interval.low, interval.typical, interval.high)
    )
    middle = _ROW_HEIGHT / 2
    layers = [_vertical(axis.position(tick), "grid") for tick in axis.ticks]
    layers += [
        element("line", x1=percent(low), x2=percent(high), y1=middle, y2=middle, class_="whisker"),
        *(
            element(
                "line", x1=percent(x), x2=percent(x), y1=middle - 5, y2=middle + 5, class_="whisker"
            )
            for x in (low, high)
        ),
        element("circle", cx=percent(typical), cy=middle, r=4.5, class_="dot"),
    ]
    if limit is not None:
        layers.append(_vertical(axis.position(limit), "limit"))
    return _row(*layers)


def empty_row(axis: Axis) -> Markup:
    """A row of :func:`interval_bar` without a figure: only the grid."""
    return _row(*(_vertical(axis.position(tick), "grid") for tick in axis.ticks))


def axis_row(axis: Axis, label: Callable[[float], str]) -> Markup:
    """The labels under a stack of rows that share an axis."""
    texts = [_x_label(axis.position(tick), 12, label(tick)) for tick in axis.ticks]
    return element("svg", *texts, class_="axis-row", height=18, aria_hidden="true")


def share_bar(share: float, style: str = "bar") -> Markup:
    """A plain bar for a share between 0 and 1."""
    track = _rect(0.0, 1.0, "track", 3, 8)
    bar = _rect(0.0, min(1.0, max(0.0, share)), style, 3, 8)
    return element("svg", track, bar, class_="row-chart", height=14, aria_hidden="true")


def _plot(alt: str, *layers: Markup) -> Markup:
    return element("svg", *layers, class_="plot", role="img", aria_label=alt)


def _row(*layers: Markup) -> Markup:
    return element("svg", *layers, class_="row-chart", height=_ROW_HEIGHT, aria_hidden="true")


def _rect(x: float, width: float, style: str, y: int, height: int) -> Markup:
    return element(
        "rect", x=percent(x), width=percent(width), y=y, height=height, rx=2, class_=style
    )


def _vertical(x: float, style: str) -> Markup:
    return element("line", x1=percent(x), x2=percent(x), y1=0, y2="100%", class_=style)


def _horizontal_grid(axis: Axis, label: Callable[[float], str]) -> Markup:
    lines = []
    for tick in axis.ticks:
        y = percent(1.0 - axis.position(tick))
        style = "baseline" if tick == 0 else "grid"
        lines.append(element("line", x1=0, x2="100%", y1=y, y2=y, class_=style))
        lines.append(
            element("text", label(tick), x=-8, y=y, dy="0.32em", text_anchor="end", class_="tick")
        )
    return Markup("").join(lines)


def _x_ticks(count: int) -> Markup:
    axis = linear_axis(float(max(1, count)), count=4)
    return Markup("").join(
        _x_label(tick / max(1, count), "100%", f"{tick:g}", dy="18")
        for tick in axis.ticks
        if tick <= count
    )


def _x_label(x: float, y: float | str, text: str, dy: str | None = None) -> Markup:
    anchor = "start" if x < 0.02 else "end" if x > 0.97 else "middle"
    return element("text", text, x=percent(x), y=y, dy=dy, text_anchor=anchor, class_="tick")


def _marked_point(x: float, y: float, label: str) -> Markup:
    """A ring with a label that stays inside the drawing."""
    left = x > 0.55
    top = percent(1.0 - y)
    ring = element("circle", cx=percent(x), cy=top, r=4, class_="ring")
    text = element(
        "text",
        label,
        x=percent(x),
        y=top,
        dx=-10 if left else 10,
        dy="-0.6em",
        text_anchor="end" if left else "start",
        class_="note",
    )
    return ring + text


def _stretched(*paths: Markup) -> Markup:
    """Paths in a coordinate system of 1000 x 1000 that fills the plot; strokes keep their width."""
    return element(
        "svg",
        *paths,
        view_box="0 0 1000 1000",
        preserve_aspect_ratio="none",
        width="100%",
        height="100%",
    )


def _path(
    points: Sequence[tuple[float, float] | None], style: str, *, closed: bool = False
) -> Markup:
    """A polyline through points given as shares (y up); None interrupts it."""
    text: list[str] = []
    pen_down = False
    for point in _thinned(points):
        if point is None:
            pen_down = False
            continue
        x, y = number(1000 * point[0]), number(1000 * (1.0 - point[1]))
        text.append(f"{'L' if pen_down else 'M'}{x} {y}")
        pen_down = True
    if closed and text:
        text.append("L1000 1000L0 1000Z")
    return element("path", d="".join(text), class_=style, vector_effect="non-scaling-stroke")


def _thinned(
    points: Sequence[tuple[float, float] | None],
) -> Sequence[tuple[float, float] | None]:
    """At most about ``_MAX_POINTS`` points: lowest and highest of each stretch, in order."""
    if len(points) <= _MAX_POINTS:
        return points
    width = -(-2 * len(points) // _MAX_POINTS)
    kept: list[tuple[float, float] | None] = []
    for start in range(0, len(points), width):
        stretch = points[start : start + width]
        solid = [point for point in stretch if point is not None]
        if len(solid) < len(stretch):
            kept.append(None)
        if solid:
            ends = {min(solid, key=lambda p: p[1]), max(solid, key=lambda p: p[1])}
            kept += sorted(ends)
    return kept


def _running_mean(losses: Sequence[float | None], axis: Axis) -> list[tuple[float, float] | None]:
    window = max(5, len(losses) // 20)
    means: list[tuple[float, float] | None] = []
    for index in range(len(losses)):
        recent = [v for v in losses[max(0, index - window + 1) : index + 1] if v is not None]
        broken = losses[index] is None or not recent
        means.append(None if broken else ((index + 1) / len(losses), axis.position(fmean(recent))))
    return means
