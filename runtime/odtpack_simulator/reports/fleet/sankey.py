"""The clients' way as bands: as wide as clients are many, each loss bending off with its name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from markupsafe import Markup

from odtpack_simulator.reports.drawing.svg import element, number, percent
from odtpack_simulator.reports.fleet.view import Stage

_HEIGHT: Final = 0.62
"""Share of the drawing that all clients fill; losses bend off below it."""
_CUT: Final = 3
"""A first stage of more than so many times those that are chosen is cut off."""
_NODE: Final = 0.012
_LINE: Final = 15
"""Pixels from one line of text to the next."""


def sankey_chart(stages: Sequence[Stage]) -> Markup:
    """Stages from left to right, joined by bands; what is lost leaves downwards.

    Args:
        stages: Each with as many as the one before keeps.
    """
    chosen = max((stage.count for stage in stages[1:]), default=0)
    most = min(max((stage.count for stage in stages), default=0), _CUT * chosen) or 1
    columns = len(stages)
    layers: list[Markup] = []
    bands: list[Markup] = []
    texts: list[Markup] = []
    for index, stage in enumerate(stages):
        x = index / columns
        height = _HEIGHT * min(1.0, stage.count / most)
        if index + 1 < columns:
            kept = _HEIGHT * min(1.0, stages[index + 1].count / most)
            end = (index + 1) / columns
            bands.append(_band(x + _NODE, end, kept))
            if height > kept:
                bands.append(_loss(x + _NODE, end, kept, height))
        layers.append(
            element(
                "rect",
                x=percent(x),
                y=0,
                width=percent(_NODE),
                height=percent(max(height, 0.004)),
                class_="sankey-node cut" if stage.count > most else "sankey-node",
            )
        )
        texts += _texts(stage, x)
    alt = "; ".join(
        f"{stage.name}: {stage.count:,}"
        + "".join(f", lost {count:,} {reason}" for reason, count in stage.losses)
        for stage in stages
    )
    drawn = element(
        "svg",
        *bands,
        view_box="0 0 1000 1000",
        preserve_aspect_ratio="none",
        width="100%",
        height="100%",
    )
    return element("svg", drawn, *layers, *texts, class_="plot sankey", role="img", aria_label=alt)


def _texts(stage: Stage, x: float) -> list[Markup]:
    """Name and number above, the losses by name below, the largest first."""
    at = percent(x)
    lines = [
        element("text", stage.name, x=at, y=-24, class_="tick"),
        element("text", f"{stage.count:,}", x=at, y=-8, class_="note strong"),
    ]
    ordered = sorted(stage.losses, key=lambda loss: -loss[1])
    left = x + 0.055
    for place, (reason, count) in enumerate(ordered[:4]):
        words = f"{count:,} {reason}"
        if place == 3 and len(ordered) > 4:
            words = f"{sum(n for _, n in ordered[3:]):,} for {len(ordered) - 3} other reasons"
        lines.append(
            element(
                "text",
                words if len(words) <= 34 else f"{words[:33]}…",
                x=percent(left),
                y=percent(0.76),
                dy=_LINE * place,
                class_="note",
            )
        )
    return lines


def _band(start: float, end: float, height: float) -> Markup:
    """Those that go on: from the top of one stage to that of the next."""
    left, right, bottom = number(1000 * start), number(1000 * end), number(1000 * height)
    return element(
        "path", d=f"M{left} 0L{right} 0L{right} {bottom}L{left} {bottom}Z", class_="flow-kept"
    )


def _loss(start: float, end: float, top: float, bottom: float) -> Markup:
    """Those that do not: a band that bends down."""
    left = number(1000 * start)
    high, low = number(1000 * top), number(1000 * bottom)
    width = min(0.9 * (end - start), 0.35 * (end - start) + (bottom - top) * 0.1)
    inner, outer = number(1000 * (start + 0.35 * (end - start))), number(1000 * (start + width))
    down = number(700)
    return element(
        "path",
        d=(
            f"M{left} {high}C{outer} {high} {outer} {high} {outer} {down}"
            f"L{inner} {down}C{inner} {low} {inner} {low} {left} {low}Z"
        ),
        class_="flow-lost",
    )
