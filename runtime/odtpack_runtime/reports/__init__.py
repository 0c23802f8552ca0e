"""Reports: one result object, one file per format.

To add a format, write ``reports/<name>_report.py`` with a function from
``SimulationResult`` to bytes, and name it in ``_FORMATS``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from odtpack_runtime.errors import OdtpackError, UnknownNameError

if TYPE_CHECKING:
    from odtpack_runtime.simulator.result import SimulationResult

# Format -> module and function; imported on use, so that JSON needs no template engine.
_FORMATS: Final = {
    "html": ("odtpack_runtime.reports.html_report", "render_html"),
    "json": ("odtpack_runtime.reports.json_report", "render_json"),
}


def report_formats() -> list[str]:
    """Names of the formats that :func:`write_report` knows."""
    return sorted(_FORMATS)


def parse_destination(destination: str) -> tuple[str, Path]:
    """Split ``"html:out/report.html"`` into format and path.

    Raises:
        UnknownNameError: The format is not known; the message lists those that are.
        OdtpackError: No path after the colon.
    """
    name, colon, path = destination.partition(":")
    if name not in _FORMATS:
        known = ", ".join(report_formats())
        raise UnknownNameError(
            "report-format-unknown",
            f"there is no report format {name[:40]!r}; known formats: {known}",
            where=destination[:200],
            hint="write for example: --report html:report.html",
        )
    if not colon or not path:
        raise OdtpackError(
            "report-path-missing",
            f"the report {name!r} needs a path after a colon",
            where=destination[:200],
            hint=f"write for example: --report {name}:report.{name}",
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
            The folder must exist.

    Returns:
        The path written.

    Raises:
        OdtpackError: Unknown format, no path, or a place that cannot be written.
    """
    from odtpack_runtime.atomic import atomic_write

    name, path = parse_destination(destination)
    data = render_report(result, name)
    with atomic_write(path) as stream:
        stream.write(data)
    return path
