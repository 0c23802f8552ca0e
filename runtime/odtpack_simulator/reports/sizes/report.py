"""The report on sizes: where the bytes of a package go, as a page or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from markupsafe import Markup

from odtpack_runtime.errors import OdtpackError
from odtpack_simulator.reports import parse_destination, write_out
from odtpack_simulator.reports.drawing.svg import element, percent
from odtpack_simulator.reports.html_report import template_environment
from odtpack_simulator.reports.sizes.anatomy import Part
from odtpack_simulator.values.units import format_bytes

_LEAST_SHARE: Final = 0.002
_MOST_PARTS: Final = 24
_DEPTH: Final = 4


def write_size_report(root: Part, destination: str) -> Path:
    """Write a report whole or not at all.

    Args:
        root: A package, see :func:`odtpack_simulator.reports.sizes.anatomy.package_anatomy`.
        destination: Format and path, ``"html:sizes.html"`` or ``"json:sizes.json"``.

    Returns:
        The path written.

    Raises:
        OdtpackError: Unknown format, no path, or a place that cannot be written.
    """
    name, path = parse_destination(destination)
    if name == "html":
        data = render_size_html(root)
    elif name == "json":
        data = (json.dumps(root.as_dict(), indent=1) + "\n").encode()
    else:
        raise OdtpackError(
            "report-format-unknown",
            f"sizes are reported as html or json, not as {name}",
            where=destination[:200],
            hint="write for example: --report html:sizes.html",
        )
    return write_out(data, path)


def render_size_html(root: Part) -> bytes:
    """The page as UTF-8 HTML. The same tree gives the same bytes."""
    environment = template_environment()
    page = environment.get_template("size.html.j2").render(
        root=root,
        files=[(part, list(_rows(_shown(part), root.nbytes, 0))) for part in root.parts],
        share=lambda part: f"{part.nbytes / root.nbytes:.1%}",
        bar=lambda part: _bar(part.nbytes / root.nbytes),
        format_bytes=format_bytes,
    )
    return page.encode("utf-8")


def _shown(part: Part) -> Part:
    return part.collapsed(int(part.nbytes * _LEAST_SHARE), _MOST_PARTS, _DEPTH)


def _rows(part: Part, total: int, depth: int) -> Iterator[tuple[int, Part, str]]:
    """Every part below one, with its depth and its share of the file."""
    for inner in part.parts:
        yield depth, inner, f"{inner.nbytes / part.nbytes:.1%}"
        yield from _rows(inner, total, depth + 1)


def _bar(share: float) -> Markup:
    return element(
        "svg",
        element("rect", class_="track", width="100%", height=8, rx=2),
        element("rect", class_="bar", width=percent(share), height=8, rx=2),
        class_="row-chart",
        height=8,
        aria_hidden="true",
    )
