"""Reports: one result object, one file per format.

To add a format, write ``reports/<name>_report.py`` with ``FORMAT``, a
:class:`~odtpack_simulator.reports.report.ReportFormat`; ``json_report.py`` is the one to
copy from. The command line, its completion and the documentation follow.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Final, cast

from odtpack_runtime.errors import OdtpackError, UnknownNameError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from odtpack_simulator.reports.report import AnyResult, Report, ReportFormat

_SUFFIX: Final = "_report"
STDOUT: Final = Path("-")  # The path that means standard output, for every format that is text


def report_formats() -> list[str]:
    """Names of the formats that :func:`write_report` knows; none is imported."""
    names = (module.name for module in iter_modules(__path__))
    return sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))


def report_format(name: str) -> ReportFormat:
    """The declaration of one of :func:`report_formats`; only its module is imported."""
    return cast("ReportFormat", import_module(f"{__name__}.{name}{_SUFFIX}").FORMAT)


def parse_destination(destination: str, formats: Sequence[str] | None = None) -> tuple[str, Path]:
    """Split ``"html:out/report.html"`` into format and path; ``"json:-"`` has the path ``-``."""
    name, colon, path = destination.partition(":")
    formats = formats or report_formats()
    if name not in formats:
        known = ", ".join(formats)
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
            hint=f"write for example: --report {name}:report.{report_format(name).suffix}",
        )
    if Path(path) == STDOUT and not report_format(name).to_stdout:
        raise OdtpackError(
            "report-not-text",
            f"a report in {name} cannot be written to standard output",
            where=destination[:200],
            hint=f"write for example: --report {name}:report.{report_format(name).suffix}",
        )
    return name, Path(path)


def report_of(result: AnyResult) -> Report:
    """What there is to say of a result, judged or not."""
    from odtpack_simulator.fleet.result import FleetResult
    from odtpack_simulator.reports import fleet, simulation

    if isinstance(result, FleetResult):
        return fleet.fleet_report(result)
    return simulation.simulation_report(result)


def render_report(result: AnyResult, name: str) -> bytes:
    """The report in one of :func:`report_formats` as the bytes of its file."""
    return report_format(name).render(result)


def write_report(result: AnyResult, destination: str) -> Path:
    """Write a report whole or not at all.

    Args:
        result: A judged result of a simulation or of a fleet; one that was not judged shows no
            verdicts.
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
    """Write a file whole or not at all, or to standard output where the path is ``-``."""
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
