"""Reports on a federation: one result, one function per format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from odtpack_runtime.errors import OdtpackError, UnknownNameError

if TYPE_CHECKING:
    from odtpack_simulator.fleet.outcome.result import FleetResult

SUFFIXES: Final = {"html": "html", "json": "json", "junit": "xml", "markdown": "md"}
"""Format -> ending of its file in examples."""


def check_destination(text: str) -> tuple[str, Path]:
    """Split ``"html:fleet.html"`` into format and path.

    Raises:
        UnknownNameError: The format is not known.
        OdtpackError: No path after the colon, or a page for standard output.
    """
    name, _, path = text.partition(":")
    if name not in SUFFIXES:
        known = ", ".join(SUFFIXES)
        raise UnknownNameError(
            "report-format-unknown",
            f"there is no report format {name[:40]!r} for fleets; known formats: {known}",
            where=text[:200],
        )
    hint = f"write for example: --report {name}:fleet.{SUFFIXES[name]}"
    if not path:
        raise OdtpackError(
            "report-path-missing",
            f"the report {name!r} needs a path after a colon",
            where=text[:200],
            hint=hint,
        )
    if name == "html" and path == "-":
        raise OdtpackError(
            "report-not-text",
            "html is not text for a terminal, it is not written to standard output",
            where=text[:200],
            hint=hint,
        )
    return name, Path(path)


def render_fleet_report(result: FleetResult, name: str) -> bytes:
    """The report in one of :data:`SUFFIXES` as the bytes of its file."""
    from odtpack_simulator.reports.fleet.page import render_page
    from odtpack_simulator.reports.fleet.text import render_junit, render_markdown

    renderers: dict[str, Callable[[FleetResult], bytes]] = {
        "html": render_page,
        "json": lambda each: each.to_json().encode("utf-8"),
        "junit": render_junit,
        "markdown": render_markdown,
    }
    return renderers[name](result)
