"""Reports: one result object, one file per format.

To add a format, write ``reports/<name>_report.py`` with a function from
``SimulationResult`` to bytes, and name it in ``_FORMATS``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from odtpack_runtime.errors import OdtpackError, UnknownNameError

if TYPE_CHECKING:
    from odtpack_simulator.result.result import SimulationResult

# Format -> module and function; imported on use, so that JSON needs no template engine.
_FORMATS: Final = {
    "github": ("odtpack_simulator.reports.github_report", "render_github"),
    "html": ("odtpack_simulator.reports.html_report", "render_html"),
    "json": ("odtpack_simulator.reports.json_report", "render_json"),
    "junit": ("odtpack_simulator.reports.junit_report", "render_junit"),
    "markdown": ("odtpack_simulator.reports.markdown_report", "render_markdown"),
}
_SUFFIXES: Final = {"github": "txt", "junit": "xml", "markdown": "md"}
STDOUT: Final = Path("-")
"""The path that means standard output, for every format but HTML."""


def report_formats() -> list[str]:
    """Names of the formats that :func:`write_report` knows."""
    return sorted(_FORMATS)


def parse_destination(destination: str) -> tuple[str, Path]:
    """Split ``"html:out/report.html"`` into format and path; ``"json:-"`` has the path ``-``.

    Raises:
        UnknownNameError: The format is not known; the message lists those that are.
        OdtpackError: No path after the colon, or a page for standard output.
    """
    name, colon, path = destination.partition(":")
    if name not in _FORMATS:
        known = ", ".join(report_formats())
        raise UnknownNameError(
            "report-format-unknown",
            f"there is no report format {name[:40]!r}; known formats: {known}",
            where=destination[:200],
        )
    if not colon or not path:
        raise OdtpackError(
            "report-path-missing",
            f"the report {name!r} needs a path after a colon",
            where=destination[:200],
            hint=f"write for example: --report {name}:report.{_SUFFIXES.get(name, name)}",
        )
    if name == "html" and Path(path) == STDOUT:
        raise OdtpackError(
            "report-not-text",
            "an HTML report is a page for a browser, it is not written to standard output",
            where=destination[:200],
        )
    return name, Path(path)


def render_report(result: SimulationResult, name: str) -> bytes:
    """The report in one of :func:`report_formats` as the bytes of its file."""
    module, function = _FORMATS[name]
    render = cast("Callable[[SimulationResult], bytes]", getattr(import_module(module), function))
    return render(result)


def write_report(result: SimulationResult, destination: str) -> Path:
    """Write a report whole or not at all.

    Args:
        result: A judged result; one that was not judged shows no verdicts.
        destination: Format and path, ``"html:report.html"`` or ``"json:report.json"``.
            The folder must exist. ``-`` as the path is standard output.

    Returns:
        The path written.

    Raises:
        OdtpackError: Unknown format, no path, or a place that cannot be written.
    """
    name, path = parse_destination(destination)
    return write_out(render_report(result, name), path)


def write_out(data: bytes, path: Path) -> Path:
    """Write a file whole or not at all, or to standard output where the path is ``-``.

    Raises:
        OdtpackError: A place that cannot be written.
    """
    from odtpack_runtime.files.atomic import atomic_write

    if path == STDOUT:
        # As bytes: the formats are UTF-8 whatever the terminal's encoding.
        sys.stdout.flush()
        buffer = getattr(sys.stdout, "buffer", None)
        if buffer is None:
            sys.stdout.write(data.decode("utf-8"))
        else:
            buffer.write(data)
        sys.stdout.flush()
        return path
    with atomic_write(path) as stream:
        stream.write(data)
    return path
