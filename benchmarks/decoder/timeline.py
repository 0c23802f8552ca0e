"""A process's memory over time as a drawing, beside the peaks that others published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Sample:
    """What a process had at a moment: seconds since the first one, and MB (2^20 bytes)."""

    seconds: float
    anonymous: float
    resident: float


def draw(samples: Sequence[Sample], title: str, published: Sequence[tuple[str, float]]) -> str:
    """An SVG: memory that stays, all that is resident, and a line for what each system has."""
    end = samples[-1].seconds or 1.0
    times = svg.linear_axis(end)
    tops = [value for _, value in published]
    axis = svg.linear_axis(1.08 * max([*tops, *(each.resident for each in samples)]))

    def curve(key: str) -> list[tuple[float, float] | None]:
        return [(each.seconds / end, axis.position(getattr(each, key))) for each in samples]

    anonymous = curve("anonymous")
    layers = [
        svg.horizontal_grid(axis, lambda tick: f"{tick:g}"),
        svg.x_ticks(times, lambda tick: f"{tick:g}", most=end),
        svg.stretched(
            svg.path(anonymous, "area", closed=True),
            svg.path(anonymous, "series"),
            svg.path(curve("resident"), "resident"),
        ),
    ]
    for name, value in published:
        layers.append(svg.horizontal(axis.position(value), "limit"))
        layers.append(_beside(axis.position(value), f"{name} {value:,.0f} MB"))
    for name in ("anonymous", "resident"):
        usual = median(getattr(each, name) for each in samples)
        layers.append(_beside(axis.position(usual), name))
    plot = svg.element(
        "svg", *layers, x=LEFT, y=TOP, width=WIDTH - LEFT - RIGHT, height=HEIGHT - TOP - BOTTOM,
        overflow="visible",
    )  # fmt: skip
    peak = max(each.anonymous for each in samples)
    heading = f"{title}: at most {peak:.0f} MB of anonymous memory"
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
