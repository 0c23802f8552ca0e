"""What drawings are made of: frames, grids, labels, paths, and marks at shares of an axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from markupsafe import Markup

from odtpack_simulator.reports.drawing.axes import Axis
from odtpack_simulator.reports.drawing.svg import element, number, percent

MAX_POINTS: Final = 600
ROW_HEIGHT: Final = 20


def plot(alt: str, *layers: Markup, style: str = "plot") -> Markup:
    """A drawing with axes, and what it shows in words for those who do not see it."""
    return element("svg", *layers, class_=style, role="img", aria_label=alt)


def row(*layers: Markup) -> Markup:
    """A drawing in one line of a list, whose figures stand beside it as text."""
    return element("svg", *layers, class_="row-chart", height=ROW_HEIGHT, aria_hidden="true")


def rectangle(x: float, width: float, style: str, y: int, height: int) -> Markup:
    """A bar from ``x`` on, in shares of the drawing's width and pixels of its height."""
    return element(
        "rect", x=percent(x), width=percent(width), y=y, height=height, rx=2, class_=style
    )


def vertical(x: float, style: str) -> Markup:
    """A line over the whole height."""
    return element("line", x1=percent(x), x2=percent(x), y1=0, y2="100%", class_=style)


def horizontal(y: float, style: str) -> Markup:
    """A line over the whole width, ``y`` upwards."""
    top = percent(1.0 - y)
    return element("line", x1=0, x2="100%", y1=top, y2=top, class_=style)


def horizontal_grid(axis: Axis, label: Callable[[float], str]) -> Markup:
    """Lines at the ticks of a vertical axis, with labels left of the drawing."""
    lines = []
    for tick in axis.ticks:
        y = axis.position(tick)
        lines.append(horizontal(y, "baseline" if tick == 0 else "grid"))
        lines.append(
            element(
                "text",
                label(tick),
                x=-8,
                y=percent(1.0 - y),
                dy="0.32em",
                text_anchor="end",
                class_="tick",
            )
        )
    return Markup("").join(lines)


def x_ticks(axis: Axis, label: Callable[[float], str], *, most: float | None = None) -> Markup:
    """Labels under a drawing; ``most`` is the value at its right end if not the axis's own."""
    end = axis.high if most is None else most
    return Markup("").join(
        x_label(
            axis.position(tick) if most is None else tick / end,
            "100%",
            label(tick),
            dy="18",
            roomy=not axis.is_round(tick),
        )
        for tick in axis.ticks
        if tick <= end
    )


def x_label(
    x: float, y: float | str, text: str, dy: str | None = None, *, roomy: bool = False
) -> Markup:
    """A tick's label that stays inside the drawing; a roomy one is left out on small screens."""
    anchor = "start" if x < 0.02 else "end" if x > 0.97 else "middle"
    style = "tick roomy" if roomy else "tick"
    return element("text", text, x=percent(x), y=y, dy=dy, text_anchor=anchor, class_=style)


def marked_point(x: float, y: float, label: str, *, beside: bool = False) -> Markup:
    """A ring with a label above it, or beside it, that stays inside the drawing."""
    left = x > 0.55
    top = percent(1.0 - y)
    ring = element("circle", cx=percent(x), cy=top, r=4, class_="ring")
    text = element(
        "text",
        label,
        x=percent(x),
        y=top,
        dx=-10 if left else 10,
        dy="1.3em" if beside else "-0.6em",
        text_anchor="end" if left else "start",
        class_="note",
    )
    return ring + text


def badge(x: float, y: float, text: str, *, open_: bool = False) -> Markup:
    """A numbered disc at a point, distinguished by its text and not by its colour."""
    top = percent(1.0 - y)
    of = " open" if open_ else ""
    disc = element("circle", cx=percent(x), cy=top, r=9, class_=f"badge-disc{of}")
    return disc + element(
        "text",
        text,
        x=percent(x),
        y=top,
        dy="0.35em",
        text_anchor="middle",
        class_=f"badge-text{of}",
    )


def stretched(*paths: Markup) -> Markup:
    """Paths in a coordinate system of 1000 x 1000 that fills the plot; strokes keep their width."""
    return element(
        "svg",
        *paths,
        view_box="0 0 1000 1000",
        preserve_aspect_ratio="none",
        width="100%",
        height="100%",
    )


def path(
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
    """At most about ``MAX_POINTS`` points: lowest and highest of each stretch, in order."""
    if len(points) <= MAX_POINTS:
        return points
    width = -(-2 * len(points) // MAX_POINTS)
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
