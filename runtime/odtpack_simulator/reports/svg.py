"""What drawings are made of: elements as text, axes, frames, grids, paths and marks.

Positions along an axis are percentages of the drawing, text and strokes are in
pixels. A drawing therefore stretches with the page while its labels stay
readable, on a phone as on a desk.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup, escape

from odtpack_simulator.values.text import clean

Attribute = str | float | int | None

# SVG writes two of its attributes in camel case; HTML parsers restore them only there.
_CAMEL: Final = {"view_box": "viewBox", "preserve_aspect_ratio": "preserveAspectRatio"}


def element(tag: str, *children: Markup | str, **attributes: Attribute) -> Markup:
    """One element; strings among the children are escaped, ``Markup`` is not."""
    # Attributes: `class_` means `class`, other underscores become hyphens, None leaves the
    # attribute out, floats are written with three decimals.
    parts = [tag]
    for name, value in attributes.items():
        if value is not None:
            text = number(value) if isinstance(value, float) else str(value)
            key = _CAMEL.get(name, name.rstrip("_").replace("_", "-"))
            parts.append(f'{key}="{escape(clean(text))}"')
    safe = (child if isinstance(child, Markup) else clean(child) for child in children)
    inner = Markup("").join(escape(child) for child in safe)
    # Attributes and children were escaped one by one; only the fixed names of tags are not.
    return Markup(f"<{' '.join(parts)}>{inner}</{tag}>")  # noqa: S704


def words(
    text: str, x: Attribute, y: Attribute, style: str, anchor: str = "middle", **more: Attribute
) -> Markup:
    """Text at a point."""
    return element("text", text, x=x, y=y, **more, text_anchor=anchor, class_=style)


def number(value: float) -> str:
    """A short decimal: at most three places, no trailing zeros, no exponent."""
    return f"{value:.3f}".rstrip("0").rstrip(".") or "0"


def percent(share: float) -> str:
    """A position or length along the drawing: ``0.25`` gives ``25%``."""
    return f"{number(100.0 * share)}%"


@dataclass(frozen=True)
class Axis:
    """A range of values and where its ticks stand."""

    low: float  # Value at position 0
    high: float  # Value at position 1, above `low`
    ticks: tuple[float, ...]  # Values to label, ascending, inside the range
    logarithmic: bool = False  # Positions follow the logarithm; `low` is positive then

    def position(self, value: float) -> float:
        """Share of the axis at which a value stands, 0 to 1; values outside stop at the ends."""
        if self.logarithmic:
            value = max(value, self.low)
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, share))

    def is_round(self, tick: float) -> bool:
        """Whether a tick is one to keep where there is little room: a power of ten."""
        if not self.logarithmic:
            return True
        exponent = math.log10(tick)
        return abs(exponent - round(exponent)) < 1e-9


def linear_axis(high: float, *, low: float = 0.0, count: int = 5) -> Axis:
    """An axis over ``low`` to ``high`` in about ``count`` steps of 1, 2, 2.5 or 5 times 10^n."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        low, high, span = min(low, high), min(low, high) + 1.0, 1.0
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    start, stop = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(step * index for index in range(start, stop + 1))
    return Axis(ticks[0], ticks[-1], ticks)


def log_axis(low: float, high: float) -> Axis:
    """A logarithmic axis with room at both ends and at most six round ticks where possible."""
    low, high = max(low, 1e-9) / 1.3, max(high, 1e-9) * 1.3
    densities = ((1.0, 1.5, 2.0, 3.0, 5.0, 7.0), (1.0, 2.0, 3.0, 5.0), (1.0, 2.0, 5.0), (1.0, 3.0))
    for multiples in (*densities, (1.0,)):
        exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        values = [multiple * 10.0**exponent for exponent in exponents for multiple in multiples]
        ticks = tuple(value for value in values if low <= value <= high)
        if len(ticks) <= 6:
            break
    return Axis(low, high, ticks, logarithmic=True)


def duration_label(milliseconds: float) -> str:
    """A tick label without needless digits: ``50 ms``, ``2 s``."""
    if milliseconds < 1.0:
        return f"{milliseconds * 1e3:.3g} µs"
    if milliseconds < 1e3:
        return f"{milliseconds:.3g} ms"
    return f"{milliseconds / 1e3:.3g} s"


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
        lines.append(words(label(tick), -8, percent(1.0 - y), "tick", "end", dy="0.32em"))
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
    return words(text, percent(x), y, "tick roomy" if roomy else "tick", anchor, dy=dy)


def marked_point(x: float, y: float, label: str, *, beside: bool = False) -> Markup:
    """A ring with a label above it, or beside it, that stays inside the drawing."""
    left = x > 0.55
    top = percent(1.0 - y)
    ring = element("circle", cx=percent(x), cy=top, r=4, class_="ring")
    dx, dy, anchor = (
        -10 if left else 10,
        "1.3em" if beside else "-0.6em",
        "end" if left else "start",
    )
    return ring + words(label, percent(x), top, "note", anchor, dx=dx, dy=dy)


def badge(x: float, y: float, text: str, *, open_: bool = False) -> Markup:
    """A numbered disc at a point, distinguished by its text and not by its colour."""
    top = percent(1.0 - y)
    of = " open" if open_ else ""
    disc = element("circle", cx=percent(x), cy=top, r=9, class_=f"badge-disc{of}")
    return disc + words(text, percent(x), top, f"badge-text{of}", dy="0.35em")


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


def _thinned(points: Sequence[tuple[float, float] | None]) -> Sequence[tuple[float, float] | None]:
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
            kept += sorted({min(solid, key=lambda p: p[1]), max(solid, key=lambda p: p[1])})
    return kept
