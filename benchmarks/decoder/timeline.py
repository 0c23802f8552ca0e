"""A process's memory over time as a drawing, beside the peaks that others published."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from markupsafe import Markup

from odtpack_simulator.reports import svg

WIDTH, HEIGHT = 900, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 64, 56
_STYLE = Markup("""
svg { font: 14px system-ui, "DejaVu Sans", sans-serif; fill: #1c2430; background: #fff; }
.title { font-size: 17px; font-weight: 600; } .tick, .name { fill: #5b6675; font-size: 13px; }
.grid { stroke: #e4e8ee; } .baseline { stroke: #97a1af; }
.area { fill: #dbe7fb; } .series { fill: none; stroke: #2f6fdf; stroke-width: 2; }
.resident { fill: none; stroke: #8a94a3; stroke-width: 1.5; }
.limit { stroke: #1c2430; stroke-width: 1.5; stroke-dasharray: 4 4; }
""")


Sample = tuple[float, float, float]
"""What a process had at a moment: seconds since the first one, anonymous and resident MiB."""


def draw(samples: Sequence[Sample], title: str, published: Sequence[tuple[str, float]]) -> str:
    """An SVG: memory that stays, all that is resident, and a line for what each system has."""
    seconds, anonymous, resident = zip(*samples, strict=True)
    end = seconds[-1] or 1.0
    axis = svg.linear_axis(1.08 * max([*(value for _, value in published), *resident]))
    both = [
        [(at / end, axis.position(value)) for at, value in zip(seconds, values, strict=True)]
        for values in (anonymous, resident)
    ]
    layers = [
        svg.horizontal_grid(axis, lambda tick: f"{tick:g}"),
        svg.x_ticks(svg.linear_axis(end), lambda tick: f"{tick:g}", most=end),
        svg.stretched(
            svg.path(both[0], "area", closed=True), svg.path(both[0], "series"),
            svg.path(both[1], "resident"),
        ),
    ]  # fmt: skip
    for name, value in published:
        layers.append(svg.horizontal(axis.position(value), "limit"))
        layers.append(_beside(axis.position(value), f"{name} {value:,.0f} MB"))
    for name, values in (("anonymous", anonymous), ("resident", resident)):
        layers.append(_beside(axis.position(median(values)), name))
    plot = svg.element(
        "svg", *layers, x=LEFT, y=TOP, width=WIDTH - LEFT - RIGHT, height=HEIGHT - TOP - BOTTOM,
        overflow="visible",
    )  # fmt: skip
    heading = f"{title}: at most {max(anonymous):.0f} MB of anonymous memory"
    return svg.element(
        "svg",
        svg.element("style", _STYLE),
        svg.element("title", heading),
        svg.element("text", heading, x=LEFT, y=26, class_="title"),
        svg.element("text", "MB, the whole process, over seconds", x=LEFT, y=48, class_="name"),
        plot,
        xmlns="http://www.w3.org/2000/svg", view_box=f"0 0 {WIDTH} {HEIGHT}", width=WIDTH,
        height=HEIGHT, role="img",
    )  # fmt: skip


def _beside(y: float, text: str) -> Markup:
    return svg.element(
        "text", text, x="100%", y=svg.percent(1.0 - y), dx=8, dy="0.32em", class_="name"
    )  # fmt: skip
