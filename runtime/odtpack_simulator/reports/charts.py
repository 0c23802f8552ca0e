"""The drawings: with axes (losses, working set, trade-offs), and in a line of a list.

Nothing is shown by colour alone: limits are dashed lines with a letter, and every
figure stands beside its drawing as text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from markupsafe import Markup

from odtpack_simulator.reports import svg
from odtpack_simulator.result import EvaluationPoint
from odtpack_simulator.values.units import Interval, format_bytes, format_number

_LABEL_ROOM: Final = 0.1  # share of a plot kept free above its highest value, for the label
_NEAR: Final = 0.14  # share of a plot in which a label and a line would meet
_LIMITS_WITHIN: Final = 1.7  # times the peak; a limit above that would flatten the drawing
_NAMED_PART: Final = 0.2  # share of a plot that the name of a part needs
_SAME_LINE: Final = 0.09  # share of a plot below which two letters would overlap


def loss_chart(
    losses: Sequence[float | None],
    before: float | None,
    after: float | None,
    held_out: Sequence[EvaluationPoint] = (),
) -> Markup:
    """Training loss per step, its running mean, and the loss on held-out data."""
    count = max(1, len(losses))
    finite = [loss for loss in losses if loss is not None]
    between = [point.loss for point in held_out if point.loss is not None]
    ends = [value for value in (before, after) if value is not None]
    low, high = min([0.0, *finite, *ends, *between]), max([*finite, *ends, *between], default=1.0)
    axis = svg.linear_axis(high + _LABEL_ROOM * (high - low), low=low)
    points = [
        (number_of_step / len(losses), axis.position(loss)) if loss is not None else None
        for number_of_step, loss in enumerate(losses, start=1)
    ]
    marks = [svg.path(points, "series faint" if len(losses) >= 40 else "series")]
    if len(losses) >= 40:  # and the running mean of as many as show a trend
        window = max(5, len(losses) // 20)
        means: list[tuple[float, float] | None] = []
        for index, loss in enumerate(losses):
            recent = [v for v in losses[max(0, index - window + 1) : index + 1] if v is not None]
            at = (index + 1) / len(losses)
            means.append(None if loss is None else (at, axis.position(fmean(recent))))
        marks.append(svg.path(means, "series"))
    curve = [
        (point.step / count, axis.position(point.loss))
        for point in held_out
        if point.loss is not None and point.step <= count
    ]
    if len(curve) > 1:
        marks.append(svg.path(curve, "series second"))
    steps = svg.linear_axis(float(count), count=4)
    layers = [
        svg.horizontal_grid(axis, format_number),
        svg.x_ticks(steps, lambda tick: f"{tick:g}", most=float(count)),
        svg.stretched(*marks),
    ]
    for x, value, when in ((0.0, before, "before"), (1.0, after, "after")):
        if value is not None:
            label = f"held-out {when}: {format_number(value)}"
            layers.append(svg.marked_point(x, axis.position(value), label))
    alt = f"Training loss over {len(losses)} steps"
    if finite:
        alt += f", from {format_number(finite[0])} to {format_number(finite[-1])}"
    return svg.plot(alt, *layers)


@dataclass(frozen=True)
class LimitLine:
    """A dashed line in the timeline: its letter, its bytes, and the devices whose limit it is."""

    letter: str
    limit_bytes: int
    devices: tuple[str, ...]


def limit_lines(
    peak_bytes: int, limits: Sequence[tuple[str, int]]
) -> tuple[list[LimitLine], list[tuple[str, int]]]:
    """Which limits to draw into a timeline, and which are out of its range."""
    # Limits so close that their letters would overlap share a line at the lowest.
    ordered = sorted(limits, key=lambda limit: (limit[1], limit[0]))
    inside = [limit for limit in ordered if limit[1] <= _LIMITS_WITHIN * peak_bytes]
    lines: list[LimitLine] = []
    for device, limit in inside:
        if lines and limit - lines[-1].limit_bytes < _SAME_LINE * peak_bytes:
            last = lines[-1]
            lines[-1] = LimitLine(last.letter, last.limit_bytes, (*last.devices, device))
        else:
            lines.append(LimitLine(chr(ord("A") + len(lines)), limit, (device,)))
    return lines, ordered[len(inside) :]


def timeline_chart(
    live_bytes: Sequence[int],
    limits: Sequence[LimitLine] = (),
    parts: Sequence[tuple[str, int]] = (),
) -> Markup:
    """Working set over the nodes of the step in execution order, with the peak marked."""
    megabytes = [value / 1e6 for value in live_bytes]
    tops = [line.limit_bytes / 1e6 for line in limits]
    room = _LABEL_ROOM * (2 if parts else 1)  # names of parts stand above the label of the peak
    axis = svg.linear_axis((1.0 + room) * max([*megabytes, *tops], default=1.0))
    count = max(1, len(megabytes))
    steps: list[tuple[float, float] | None] = []
    for index, value in enumerate(megabytes):
        y = axis.position(value)
        steps += [(index / count, y), ((index + 1) / count, y)]
    layers = [
        svg.horizontal_grid(axis, lambda value: f"{value:g}"),
        svg.x_ticks(
            svg.linear_axis(float(count), count=4), lambda tick: f"{tick:g}", most=float(count)
        ),
        svg.stretched(svg.path(steps, "area", closed=True), svg.path(steps, "series")),
    ]
    layers += _parts(parts, count)
    alt = "Working set over the nodes of the training step"
    alt += "".join(f", {name} from node {start}" for name, start in parts)
    for line in limits:
        y = axis.position(line.limit_bytes / 1e6)
        layers += [svg.horizontal(y, "limit"), svg.badge(0.985, y, line.letter)]
    if megabytes:
        peak = max(range(len(megabytes)), key=megabytes.__getitem__)
        text = f"peak {format_bytes(live_bytes[peak])}"
        x, y = (peak + 0.5) / count, axis.position(megabytes[peak])
        near = any(-0.02 < axis.position(top) - y < _NEAR for top in tops)
        layers.append(svg.marked_point(x, y, text, beside=near))
        alt += f", {text}"
    for line in limits:
        alt += f", limit {line.letter} {format_bytes(line.limit_bytes)}"
    return svg.plot(alt, *layers)


def _parts(parts: Sequence[tuple[str, int]], count: int) -> list[Markup]:
    """A line where each part but the first begins, and its name in a strip above, if it fits."""
    marks = []
    for index, (name, start) in enumerate(parts):
        end = parts[index + 1][1] if index + 1 < len(parts) else count
        if start:
            marks.append(svg.vertical(start / count, "part"))
        middle = (start + end) / 2 / count
        anchor = "middle"
        if end - start < _NAMED_PART * count:
            # Too narrow for its name: it ends with the part, or begins with the first one.
            middle, anchor = (end / count, "end") if start else (0.0, "start")
        marks.append(svg.words(name, svg.percent(middle), 0, "part-name", anchor, dy="1em"))
    return marks


def curve_chart(
    points: Sequence[tuple[float, float]],
    alt: str,
    *,
    whole: bool = False,
    band: Sequence[tuple[float, float, float]] = (),
) -> Markup:
    """A small drawing of one figure against another, its last point marked with its value."""
    ys = [y for _, y in points]
    low = min([0.0, *ys, *(bottom for _, bottom, _ in band)])
    high = max([*ys, *(top for _, _, top in band)], default=1.0)
    if low == 0.0 and 50.0 < high <= 100.0:  # most likely a percentage of the samples
        vertical_axis = svg.Axis(0.0, 100.0, (0.0, 50.0, 100.0))
    else:
        vertical_axis = svg.linear_axis(high, low=low, count=3)
    most = max([*(x for x, _ in points), *(x for x, _, _ in band)], default=1.0) or 1.0
    ticks = svg.linear_axis(most, count=3)
    shown = svg.Axis(0.0, most, tuple(t for t in ticks.ticks if not whole or t == int(t)))
    drawn = [(shown.position(x), vertical_axis.position(y)) for x, y in points]
    outline = [(x, top) for x, _, top in band] + [(x, low) for x, low, _ in reversed(band)]
    area = [(shown.position(x), vertical_axis.position(y)) for x, y in outline]
    layers = [
        svg.horizontal_grid(vertical_axis, format_number),
        svg.x_ticks(shown, lambda tick: f"{tick:g}", most=most),
        svg.stretched(*([svg.path(area, "area")] if area else []), svg.path(drawn, "series")),
    ]
    if drawn:
        layers.append(
            svg.marked_point(*drawn[-1], format_number(ys[-1]), beside=drawn[-1][1] > 0.8)
        )
    return svg.plot(alt, *layers, style="plot small-plot")


@dataclass(frozen=True)
class ScatterPoint:
    """A numbered point; one that is not filled is drawn as an outline."""

    label: str
    x: float
    y: float
    filled: bool = True


def scatter_chart(points: Sequence[ScatterPoint], alt: str) -> Markup:
    """Numbered points over two linear axes, the filled ones on top."""
    x_axis, y_axis = (
        svg.linear_axis(max(values) + room, low=max(0.0, min(values) - room) if room else 0.0)
        for values, room in (
            (values, 0.15 * (max(values) - min(values)) or 0.05 * abs(values[0]))
            for values in ([point.x for point in points], [point.y for point in points])
        )
    )
    layers = [
        svg.horizontal_grid(y_axis, format_number),
        *(svg.vertical(x_axis.position(tick), "grid") for tick in x_axis.ticks),
        svg.x_ticks(x_axis, format_number),
    ]
    layers += [
        svg.badge(
            x_axis.position(point.x), y_axis.position(point.y), point.label, open_=not point.filled
        )
        for point in sorted(points, key=lambda point: point.filled)
    ]
    told = "; ".join(
        f"{point.label}: {format_number(point.y)} at {format_number(point.x)}" for point in points
    )
    return svg.plot(f"{alt}; {told}", *layers)


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
    scale: svg.Axis,
    *,
    over: bool,
    app: float = 0.0,
    runtime: float = 0.0,
    warning: float | None = None,
) -> Markup:
    """Share of a device's memory limit: bar for predicted, tick for measured, dashes for 100 %."""
    # What the process holds besides the training lies left of it, in the same bar.
    full = scale.position(1.0)
    layers = [svg.rectangle(0.0, full, "track", 3, svg.ROW_HEIGHT - 6)]
    start = 0.0
    training = "bar over" if over else "bar"
    for share, style in ((app, "bar app"), (runtime, "bar library"), (predicted, training)):
        left, right = (min(1.0, scale.position(x)) for x in (start, start + share))
        if share:
            layers.append(svg.rectangle(left, right - left, style, 3, svg.ROW_HEIGHT - 6))
        start += share
    layers.append(svg.vertical(full, "limit"))
    if warning is not None:
        layers.append(svg.vertical(scale.position(warning), "warning-mark"))
    if measured is not None:
        layers.append(svg.vertical(scale.position(app + runtime + measured), "tick-mark"))
    return svg.row(*layers)


def pair_bar(predicted: float, measured: float | None, most: float) -> Markup:
    """Bar for predicted and tick for measured, as shares of the largest of all rows."""
    scale = svg.Axis(0.0, most or 1.0, ())
    layers = [
        svg.rectangle(0.0, 1.0, "track", 3, svg.ROW_HEIGHT - 6),
        svg.rectangle(0.0, scale.position(predicted), "bar", 3, svg.ROW_HEIGHT - 6),
    ]
    if measured is not None:
        layers.append(svg.vertical(scale.position(measured), "tick-mark"))
    return svg.row(*layers)


def change_bar(change: float, axis: svg.Axis, noise: float | None, *, worse: bool) -> Markup:
    """A bar from no change to ``change``, over a band of what measurements scatter."""
    zero, end = axis.position(0.0), axis.position(max(axis.low, min(axis.high, change)))
    layers = []
    if noise:
        low, high = (axis.position(max(axis.low, min(axis.high, x))) for x in (-noise, noise))
        layers.append(svg.rectangle(low, high - low, "track", 0, svg.ROW_HEIGHT))
    style = "bar over" if worse else "bar"
    layers.append(svg.rectangle(min(zero, end), abs(end - zero), style, 4, svg.ROW_HEIGHT - 8))
    layers.append(svg.vertical(zero, "tick-mark"))
    return svg.row(*layers)


def interval_bar(
    interval: Interval, axis: svg.Axis, limit: float | None, *, p90: float | None = None
) -> Markup:
    """A whisker from low to high with a dot at the typical value, and a dashed budget."""
    low, typical, high = map(axis.position, (interval.low, interval.typical, interval.high))
    middle = svg.ROW_HEIGHT / 2
    layers = [svg.vertical(axis.position(tick), "grid") for tick in axis.ticks]
    layers += [_whisker(low, high, middle, middle)]
    layers += [_whisker(x, x, middle - 5, middle + 5) for x in (low, high)]
    if p90 is not None:
        layers.append(shape(axis.position(p90), middle, "M0-5L5 0L0 5L-5 0Z", "diamond"))
    layers.append(svg.element("circle", cx=svg.percent(typical), cy=middle, r=4.5, class_="dot"))
    if limit is not None:
        layers.append(svg.vertical(axis.position(limit), "limit"))
    return svg.row(*layers)


def event_row(events: Sequence[tuple[float, float]], outline: str) -> Markup:
    """Events along a training: a shape where it was ended, a line back to where it resumed."""
    middle = svg.ROW_HEIGHT / 2
    return svg.row(
        svg.element("line", x1=0, x2="100%", y1=middle, y2=middle, class_="grid"),
        *(_whisker(back, end, middle, middle) for end, back in events),
        *(shape(end, middle, outline, "event") for end, _ in events),
    )


def _whisker(x1: float, x2: float, y1: float, y2: float) -> Markup:
    return svg.element(
        "line", x1=svg.percent(x1), x2=svg.percent(x2), y1=y1, y2=y2, class_="whisker"
    )


def shape(x: float, y: float, outline: str, style: str) -> Markup:
    """A path around a point whose x is a share of the width and whose y is in pixels."""
    inner = svg.element("path", d=outline, class_=style)
    return svg.element("svg", inner, x=svg.percent(x), y=y, width=1, height=1, overflow="visible")


def empty_row(axis: svg.Axis) -> Markup:
    """A row of :func:`interval_bar` without a figure: only the grid."""
    return svg.row(*(svg.vertical(axis.position(tick), "grid") for tick in axis.ticks))


def axis_row(axis: svg.Axis, label: Callable[[float], str]) -> Markup:
    """The labels under a stack of rows that share an axis."""
    texts = [
        svg.x_label(axis.position(tick), 12, label(tick), roomy=not axis.is_round(tick))
        for tick in axis.ticks
    ]
    return svg.element("svg", *texts, class_="axis-row", height=18, aria_hidden="true")


def share_bar(share: float, style: str = "bar") -> Markup:
    """A plain bar for a share between 0 and 1."""
    track = svg.rectangle(0.0, 1.0, "track", 3, 8)
    bar = svg.rectangle(0.0, min(1.0, max(0.0, share)), style, 3, 8)
    return svg.element("svg", track, bar, class_="row-chart", height=14, aria_hidden="true")
