"""A comparison of two results: plain text for a terminal, Markdown for a pull request."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from odtpack_simulator.budgets.budget_metric import shortened
from odtpack_simulator.budgets.compare import Comparison
from odtpack_simulator.reports.comparison.rows import (
    MARKS,
    CheckLine,
    Names,
    Row,
    check_lines,
    rows,
    transitions,
)
from odtpack_simulator.values.plain_text import clean

MAX_COMMENT: Final = 65_536
"""GitHub's limit for a comment, in characters; kept in bytes, of which there are no fewer."""

# Signs that mean something in Markdown or in the HTML inside of it.
_MARKDOWN: Final = re.compile(r"([\\`*_{}\[\]<>#|~@&$])")
_HEADER: Final = ("Device", "Figure", "Base", "Head", "Change", "")
_FIGURES: Final = (2, 3, 4)  # columns that are aligned to the right
_MOST_NAMES: Final = 50  # in a fold, or in a sentence


def headline(comparison: Comparison) -> str:
    """How many figures became worse and better, and what the budgets say."""
    counts = [figure.direction for _, figure in comparison.figures()]
    worse, better = counts.count("worse"), counts.count("better")
    text = f"{worse} worse, {better} better of {len(counts)} figures"
    match comparison.verdict:
        case None:
            return text
        case "fail":
            return f"Over budget: {text}"
        case "pass":
            return f"Within budget: {text}"
        case "warn":
            return f"Within budget, with warnings: {text}"
        case "not judged":
            return f"Not all budgets could be judged: {text}"


def render_text(comparison: Comparison) -> str:
    """Lines for a terminal or a log, aligned, without colour."""
    lines = [headline(comparison)]
    lines += [f"  note: {clean(note)}" for note in comparison.notes]
    lines += [f"  {line}" for line in presence(comparison)]
    changes = [f"  {how}: {names}" for how, names in verdicts(comparison)]
    lines += ["", "Verdict changed:", *changes] if changes else []
    changed, same = rows(comparison)
    if changed:
        table = [_HEADER, *(tuple(map(clean, _cells(row, row.names.text))) for row in changed)]
        widths = [max(len(line[column]) for line in table) for column in range(len(_HEADER))]
        lines.append("")
        for line in table:
            cells = [
                cell.rjust(width) if column in _FIGURES else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
    checks = check_lines(comparison)
    lines += ["", *closing(comparison, same)]
    if any(names.others for names in [*(r.names for r in changed), *(c.names for c in checks)]):
        lines.append("Each device by itself: --format json")
    for check in checks:
        where = f"{check.names.text}, {check.title}"
        lines += ["", f"{check.outcome}: {clean(where)}: {clean(check.message)}"]
        lines += [f"  change first: {clean(check.advice)}"] if check.advice else []
        lines += [f"  in: {clean(check.location)}"] if check.location else []
    return "\n".join(lines) + "\n"


def render_markdown(comparison: Comparison, *, limit: int = MAX_COMMENT) -> str:
    """Markdown for a comment on GitHub; the only HTML in it are folds with names of devices.

    Args:
        comparison: What to show.
        limit: Most bytes. What does not fit is left out and counted: first the names in folds,
            then rows, the least important first, then checks.
    """
    changed, same = rows(comparison)
    checks = check_lines(comparison)
    head = [f"### odtpack: {escape(headline(comparison))}", ""]
    notes = [escape(note) for note in (*comparison.notes, *presence(comparison))]
    changes = [f"**{escape(how)}**: {escape(names)}" for how, names in verdicts(comparison)]
    for heading, lines in (("Verdict changed", changes), ("Notes", notes)):
        head += [f"**{heading}**", "", *(f"- {line}" for line in lines), ""] if lines else []
    head += ["**Checks that did not pass**", ""] if checks else []
    table = [_line(_HEADER), "|---|---|---:|---:|---:|---|"] if changed else []
    end = ["", *map(escape, closing(comparison, same))]
    parts = _Parts(head, [], table, [], end)
    for fold in (_fold, _counted):
        parts = replace(
            parts,
            checks=[_check(check, fold) for check in checks],
            rows=[
                _line([fold(row.names), *(escape(cell) for cell in _cells(row, "")[1:])])
                for row in changed
            ],
        )
        text = parts.text(len(checks), len(changed))
        if len(text.encode()) <= limit:
            return text
    return _fitted(parts, limit)


def _cells(row: Row, where: str) -> tuple[str, ...]:
    mark = MARKS[row.direction]
    last = f"{mark} ({row.verdicts})" if row.verdicts else mark
    return where, row.title, row.base, row.head, row.change, last


def _check(check: CheckLine, fold: Callable[[Names], str]) -> str:
    place = f" ({escape(check.location)})" if check.location else ""
    first = f" Change first: {escape(check.advice)}" if check.advice else ""
    where = f"{escape(check.title)}, {escape(check.names.shown)}"
    others = fold(replace(check.names, shown="")) if check.names.others else ""
    return f"- **{check.outcome}** {where}: {escape(check.message)}{place}.{first}{others}"


def _fold(names: Names) -> str:
    """In one line, with the others to be unfolded."""
    if not names.others:
        return escape(names.shown)
    others = escape(_listed(names.others))
    summary = f"<summary>{names.more}</summary>"
    return f"{escape(names.shown)} <details>{summary}{others}</details>".lstrip()


def _counted(names: Names) -> str:
    return escape(names.text) if names.shown else f" The same of {names.more.removeprefix('and ')}."


@dataclass(frozen=True, slots=True)
class _Parts:
    """The lines of a comment, part by part."""

    head: list[str]
    checks: list[str]
    table: list[str]
    rows: list[str]
    end: list[str]

    def text(self, few_checks: int, few_rows: int) -> str:
        """With so many of the checks and rows; the rest is counted."""
        lines = [*self.head, *self.checks[:few_checks]]
        if few_checks < len(self.checks):
            lines.append(f"- and {len(self.checks) - few_checks} more checks that did not pass")
        lines += [""] if self.checks else []
        lines += [*self.table, *self.rows[:few_rows]] if few_rows else []
        if few_rows < len(self.rows):
            lines += ["", f"and {len(self.rows) - few_rows} more changes"]
        return "\n".join([*lines, *self.end]) + "\n"


def _fitted(parts: _Parts, limit: int) -> str:
    """The parts as text of at most ``limit`` bytes: first rows are left out, then checks."""

    def fits(few_checks: int, few_rows: int) -> bool:
        return len(parts.text(few_checks, few_rows).encode()) <= limit

    few_rows = _most(len(parts.rows), lambda count: fits(len(parts.checks), count))
    if few_rows is not None:
        return parts.text(len(parts.checks), few_rows)
    few_checks = _most(len(parts.checks), lambda count: fits(count, 0))
    if few_checks is not None:
        return parts.text(few_checks, 0)
    return parts.text(0, 0).encode()[:limit].decode(errors="ignore")


def _most(total: int, fits: Callable[[int], bool]) -> int | None:
    """The largest count up to ``total`` that fits; None where not even 0 does."""
    if not fits(0):
        return None
    low, high = 0, total
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def escape(text: str) -> str:
    """Return text that Markdown shows as it is; control characters are replaced."""
    return _MARKDOWN.sub(r"\\\1", clean(text))


def verdicts(comparison: Comparison) -> list[tuple[str, str]]:
    """How verdicts changed, with the names of the devices in one line."""
    return [(how, clean(_listed(names))) for how, names in transitions(comparison)]


def presence(comparison: Comparison) -> list[str]:
    """Devices that only one of the results has."""
    lines = []
    for presence, text in (("new", "only in the head"), ("removed", "only in the base")):
        names = [device.title for device in comparison.devices if device.presence == presence]
        if names:
            lines.append(f"{text}: {clean(_listed(names))}")
    return lines


def closing(comparison: Comparison, same: int) -> list[str]:
    """What is the same, what was not compared and why, and what was never validated."""
    lines = []
    if same:
        lines.append(f"{same} figures are the same.")
    reasons = [f.reason for _, f in comparison.figures() if f.direction == "not compared"]
    reasons += [f.reason for _, f in comparison.figures() if f.direction == "unknown now"]
    lines += [f"Not compared: {clean(reason)}." for reason in dict.fromkeys(filter(None, reasons))]
    if any(not device.validated for device in comparison.devices):
        lines.append("* not validated on hardware: times, energy and sessions are estimates.")
    return lines


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(shortened(name, 100) for name in names[:_MOST_NAMES])
    more = len(names) - _MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
