"""The report on a federation as Markdown and as JUnit's XML."""

from __future__ import annotations

from typing import Final

from odtpack_simulator.fleet.outcome.judge import TITLES
from odtpack_simulator.fleet.outcome.result import FleetResult
from odtpack_simulator.reports.fleet import view
from odtpack_simulator.reports.junit_report import junit_document, junit_suite
from odtpack_simulator.reports.view.plain import VERDICT_SYMBOLS as SYMBOLS
from odtpack_simulator.reports.view.plain import markdown_text as escaped

_MOST_ROWS: Final = 60


def render_junit(result: FleetResult) -> bytes:
    """The report as UTF-8 XML: one suite, a case per check."""
    suite = junit_suite("Federation", "fleet", [], result.checks, note="", titles=TITLES)
    return junit_document(f"odtpack fleet of {result.package.path}", [suite])


def render_markdown(result: FleetResult) -> bytes:
    """The report as UTF-8 in GitHub's Markdown."""
    lines = [f"## {SYMBOLS[result.verdict]} {escaped(view.headline(result))}", ""]
    figures = [f"**{escaped(name)}** {escaped(text)}" for name, text, _ in view.key_figures(result)]
    lines += [", ".join(figures), "", f"**Change first:** {escaped(view.advice(result))}", ""]
    lines += ["| | Check | Actual | Limit | What was found |", "|---|---|--:|--:|---|"]
    lines += [
        f"| {SYMBOLS[row.state]} {row.words} | {escaped(row.title)} | {row.actual} | {row.limit} | "
        f"{escaped(row.message)} |"
        for row in view.check_rows(result)
    ]
    lines += ["", "| Clients, over all rounds | | lost on the way |", "|---|--:|---|"]
    for stage in view.stages(result):
        losses = ", ".join(f"{count:,} {reason}" for reason, count in stage.losses)
        lines.append(f"| {stage.name} | {stage.count:,} | {escaped(losses)} |")
    rows = view.device_rows(result)
    lines += ["", "| Device | " + " | ".join(name for name, _, _ in rows[0][2]) + " |"]
    lines.append("|---|" + "--:|" * len(rows[0][2]))
    for title, validated, figures_of in rows[:_MOST_ROWS]:
        entries = [
            escaped(text) + (f"<br>{escaped(more)}" if more else "") for _, text, more in figures_of
        ]
        star = "" if validated else " \\*"
        lines.append(f"| {escaped(title)}{star} | {' | '.join(entries)} |")
    if any(not validated for _, validated, _ in rows):
        lines += ["", "\\* not validated on hardware: times and energy are estimates."]
    lines += [f"- Not counted: {escaped(text)}" for text in result.unknown]
    return ("\n".join(lines) + "\n").encode("utf-8")
