"""A tree of sizes as nested rectangles, whose areas are the sizes.

Rectangles are laid out in rows that keep them near to squares (Bruls, Huizing and van Wijk,
"Squarified Treemaps", 2000). Across, positions are shares of the width, so that the drawing
stretches with the page; down, they are pixels, so that text keeps its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from odtpack_simulator.reports.drawing.svg import element, percent
from odtpack_simulator.reports.sizes.anatomy import Part
from odtpack_simulator.values.units import format_bytes

WIDTH: Final = 700
"""Pixels of the drawing for which the shapes are chosen: between a phone and a desk."""

_HEAD: Final = 20.0  # pixels of the line with a group's name
_GAP: Final = 2.0
_DEPTH: Final = 3
_LEAST_GROUP: Final = (0.12, 60.0)  # share of the width and pixels that a group needs
_LEAST_TEXT: Final = (0.05, 16.0)
_PHONE: Final = 310  # pixels of the drawing on a narrow phone
_LEAST_NAME: Final = 34.0
_CHARACTER: Final = 6.6  # pixels of a figure


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle: ``x`` and ``width`` as shares of the drawing, ``y`` and ``height`` in pixels."""

    x: float
    y: float
    width: float
    height: float


def treemap(root: Part, height: int) -> Markup:
    """Draw the parts of a tree, three levels deep; hovering shows name and size.

    Args:
        root: The tree; parts without bytes are left out.
        height: Of the drawing, in pixels.
    """
    drawn = _inside(root, Box(0.0, 0.0, 1.0, float(height)), root.nbytes, 0, "")
    label = f"{root.name}: {format_bytes(root.nbytes)} by parts"
    return element("svg", *drawn, class_="treemap", height=height, role="img", aria_label=label)


def _inside(part: Part, box: Box, total: int, depth: int, path: str) -> list[Markup]:
    sizes = [inner.nbytes for inner in part.parts]
    drawn = []
    for inner, place in zip(part.parts, squarify(sizes, box), strict=True):
        drawn += _box(inner, place, total, depth, f"{path}{inner.name}")
    return drawn


def _box(part: Part, box: Box, total: int, depth: int, path: str) -> list[Markup]:
    wide, high = box.width >= _LEAST_GROUP[0], box.height >= _LEAST_GROUP[1]
    group = bool(part.parts) and depth + 1 < _DEPTH and wide and high
    figure = f"{format_bytes(part.nbytes)}, {part.nbytes / total:.1%}"
    children = [
        element("title", f"{path}: {figure}"),
        element("rect", width="100%", height="100%", class_=f"box level-{depth}"),
    ]
    if box.width >= _LEAST_TEXT[0] and box.height >= _LEAST_TEXT[1]:
        name = "name" if depth == 0 else ""
        if box.width * _PHONE < _LEAST_NAME:
            name = f"{name} roomy"
        children.append(element("text", part.name, x=5, y=14, class_=name.strip() or None))
        size = format_bytes(part.nbytes)
        needed = 2 * 5 + _CHARACTER * len(size)
        if not group and box.height >= 2 * _LEAST_TEXT[1] and needed <= box.width * WIDTH:
            # A name that is cut off says something; a figure would say something wrong.
            roomy = "roomy" if needed > box.width * _PHONE else None
            children.append(element("text", size, x=5, y=29, class_=roomy))
    # A drawing of its own cuts off the text that does not fit.
    drawn = [
        element(
            "svg",
            *children,
            x=percent(box.x),
            y=box.y,
            width=percent(box.width),
            height=max(0.0, box.height - _GAP),
        )
    ]
    if group:
        side = 2 * _GAP / WIDTH
        inner = Box(
            box.x + side,
            box.y + _HEAD,
            box.width - 2 * side,
            box.height - _HEAD - 2 * _GAP,
        )
        drawn += _inside(part, inner, total, depth + 1, f"{path} / ")
    return drawn


def squarify(sizes: Sequence[int], box: Box) -> list[Box]:
    """Cut a rectangle into rectangles with areas in proportion to sizes.

    Args:
        sizes: Positive numbers, in descending order.
        box: The rectangle.

    Returns:
        One rectangle for each size.
    """
    found: list[Box] = []
    x, y = box.x * WIDTH, box.y
    width, height = box.width * WIDTH, box.height
    left = float(sum(sizes))
    at = 0
    while at < len(sizes):
        scale = width * height / left
        short = min(width, height)
        count = _row_length([size * scale for size in sizes[at:]], short)
        row = sizes[at : at + count]
        thick = sum(row) * scale / short if short else 0.0
        offset = 0.0
        for size in row:
            length = short * size / sum(row)
            if width >= height:
                found.append(Box(x / WIDTH, y + offset, thick / WIDTH, length))
            else:
                found.append(Box((x + offset) / WIDTH, y, length / WIDTH, thick))
            offset += length
        if width >= height:
            x, width = x + thick, width - thick
        else:
            y, height = y + thick, height - thick
        left -= sum(row)
        at += count
    return found


def _row_length(areas: Sequence[float], short: float) -> int:
    """How many rectangles to put side by side along the short side: as long as they get squarer."""
    best = float("inf")
    total = 0.0
    for count, area in enumerate(areas, 1):
        total += area
        worst = max(
            short**2 * areas[0] / total**2,
            total**2 / (short**2 * area) if short else float("inf"),
        )
        if worst > best:
            return count - 1
        best = worst
    return len(areas)
