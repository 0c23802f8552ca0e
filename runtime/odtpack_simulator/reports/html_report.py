"""The HTML report: one self-contained file without scripts, for desk and phone, day and night."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from odtpack_simulator.budgets.suggest import suggest_budget
from odtpack_simulator.device.profile import ProfileFigure
from odtpack_simulator.reports.drawing import charts
from odtpack_simulator.reports.formats import ReportFormat
from odtpack_simulator.reports.html.latency import latency_section
from odtpack_simulator.reports.html.learning import interruption_rows, panels
from odtpack_simulator.reports.html.memory import memory_section
from odtpack_simulator.reports.view import campaign, matrix, view
from odtpack_simulator.result.result import SimulationResult
from odtpack_simulator.values.plain_text import clean_lines
from odtpack_simulator.values.units import format_bytes, format_number

TEMPLATES: Final = Path(__file__).parent / "templates"
_NUMBER_WITH_UNIT: Final = re.compile(
    r"(\d) (?=(?:[kMG]?B|µs|ms|s|min|h|%|k?J|Wh|G(?:FLOP|B)/s)(?![\w/]))"
)


def template_environment() -> Environment:
    """The templates of the pages; every value that they print is escaped.

    Drawings are ``Markup`` built by :mod:`odtpack_simulator.reports.drawing.svg`, which escapes
    as well.
    """
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_unbroken,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@dataclass(frozen=True)
class Again:
    """The same measurement judged once more: by which budget, and what a CI job sees of it."""

    result: SimulationResult
    budget: str
    outcome: str


def render_html(result: SimulationResult, *, again: Again | None = None) -> bytes:
    """The report as UTF-8 HTML. The same result gives the same bytes.

    Args:
        result: A judged result.
        again: Another verdict on it, for a section of its own.
    """
    training = result.training
    page = (
        template_environment()
        .get_template("report.html.j2")
        .render(
            result=result,
            view=view,
            words=view.VERDICT_WORDS,
            headline=view.headline(result),
            subject=view.subject_words(result),
            tally=view.tally(result),
            not_validated=view.not_validated_words(result),
            key_figures=view.key_figures(result),
            fixes=view.first_fixes(result),
            again=again,
            checks=view.check_rows(result),
            suggestion=_suggestion(result),
            topics=matrix.TOPICS,
            rows=[(device, matrix.cells(result, device)) for device in result.devices],
            loss_chart=charts.loss_chart(
                training.losses, training.eval_loss_before, training.eval_loss_after, training.curve
            ),
            panels=panels(result),
            memory=memory_section(result),
            latency=latency_section(result),
            campaign=campaign.campaign_rows(result),
            unknown=campaign.unknown_rows(result),
            policy=campaign.policy_words(result),
            interruption=campaign.interruption_words(result.interruption)
            if result.interruption
            else "",
            interruption_rows=interruption_rows(result),
            figure_text=_figure_text,
            format_bytes=format_bytes,
            format_number=format_number,
        )
    )
    return page.encode("utf-8")


def _unbroken(value: object) -> object:
    """Clean text, and keep each number on one line with its unit; drawings pass through."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return _NUMBER_WITH_UNIT.sub("\\1\N{NO-BREAK SPACE}", clean_lines(value))


def _suggestion(result: SimulationResult) -> str:
    """A budget to paste where a judged result has none; empty otherwise."""
    checks = [check for _, check in result.all_checks()]
    if not checks or any(check.budget_location for check in checks):
        return ""
    return suggest_budget(result)


def _figure_text(figure: ProfileFigure) -> str:
    """A profile's figure with bounds and threads: ``129 GFLOPS (78.4 to 143.5), 8 threads``."""
    if figure.value is None:
        return "unknown"
    unit = "" if figure.unit in {None, "1"} else f" {figure.unit}"
    text = f"{figure.value:g}{unit}"
    if figure.low is not None and figure.high is not None:
        text += f" ({figure.low:g} to {figure.high:g})"
    if figure.threads is not None:
        text += f", {figure.threads} thread{'s' if figure.threads > 1 else ''}"
    return text


FORMAT: Final = ReportFormat(
    render=render_html,
    suffix="html",
    to_stdout=False,
    audience="people: one page to open, send, or keep as an artifact of a build",
    written_as="one self-contained file",
)
