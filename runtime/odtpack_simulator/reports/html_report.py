"""The HTML report: one self-contained file without scripts, for desk and phone, day and night."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from odtpack_simulator.fleet.result import FleetResult
from odtpack_simulator.reports import report_of
from odtpack_simulator.reports.report import (
    NOT_VALIDATED,
    VERDICT_WORDS,
    AnyResult,
    ReportFormat,
    check_rows,
    first_fixes,
)
from odtpack_simulator.result import SimulationResult
from odtpack_simulator.values.text import clean_lines, counted
from odtpack_simulator.values.units import format_bytes, format_duration, format_number

TEMPLATES: Final = Path(__file__).parent / "templates"
_NUMBER_WITH_UNIT: Final = re.compile(
    r"(\d) (?=(?:[kMG]?B|µs|ms|s|min|h|%|k?J|Wh|G(?:FLOP|B)/s)(?![\w/]))"
)


def render_page(template: str, **values: Any) -> bytes:
    """A page as UTF-8 HTML; every value that it prints is escaped."""
    # Drawings are `Markup` built by svg, which escapes as well.
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_unbroken,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shared = {
        "words": VERDICT_WORDS,
        "not_validated": NOT_VALIDATED,
        "counted": counted,
        "format_bytes": format_bytes,
        "format_duration": format_duration,
        "format_number": format_number,
    }
    return environment.get_template(template).render(**shared, **values).encode("utf-8")


def _unbroken(value: object) -> object:
    """Clean text, and keep each number on one line with its unit; drawings pass through."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return _NUMBER_WITH_UNIT.sub("\\1\N{NO-BREAK SPACE}", clean_lines(value))


@dataclass(frozen=True)
class Again:
    """The same measurement judged once more: by which budget, and what a CI job sees of it."""

    result: SimulationResult
    budget: str
    outcome: str


def render_html(result: AnyResult, *, again: Again | None = None) -> bytes:
    """The report as UTF-8 HTML. The same result gives the same bytes."""
    report = report_of(result)
    if isinstance(result, FleetResult):
        from odtpack_simulator.reports.fleet import fleet_sections

        template, sections = "fleet.html.j2", fleet_sections(result)
    else:
        from odtpack_simulator.reports.simulation_page import simulation_sections

        template, sections = "report.html.j2", simulation_sections(result)
    if again is not None:
        other = report_of(again.result)
        sections["again_rows"] = [row for row in check_rows(other) if row.location]
        sections["again_headline"] = other.headline
    return render_page(
        template,
        result=result,
        report=report,
        fixes=first_fixes(report),
        checks=check_rows(report),
        again=again,
        **sections,
    )


FORMAT: Final = ReportFormat(
    render=render_html,
    suffix="html",
    to_stdout=False,
    audience="people: one page to open, send, or keep as an artifact of a build",
    written_as="one self-contained file",
)
