"""The Markdown report: for a pull request, or for ``$GITHUB_STEP_SUMMARY``.

A comment on GitHub holds 65,536 characters. What does not fit is left out row
by row from the end, least important parts first, and the report says so.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from odtpack_simulator.reports import report_of
from odtpack_simulator.reports.report import (
    MOST_TEXT,
    NOT_VALIDATED,
    SEVERITY,
    UNKNOWN,
    VERDICT_WORDS,
    AnyResult,
    Block,
    CheckRow,
    Report,
    ReportFormat,
    Table,
    check_rows,
    first_fixes,
    fitted,
)
from odtpack_simulator.reports.report import VERDICT_SYMBOLS as _SYMBOLS
from odtpack_simulator.reports.report import markdown_text as _text
from odtpack_simulator.values.figure import shortened
from odtpack_simulator.values.text import clean, counted, markdown_row

MOST_BYTES: Final = 65_000
"""Bytes of the report, counted in UTF-8: never more characters than a comment holds."""
_ESTIMATES: Final = f"\n\\* {NOT_VALIDATED}: times and energy are estimates.\n\n"


def render_markdown(result: AnyResult) -> bytes:
    """The report as UTF-8 in GitHub's Markdown, below 65,536 bytes."""
    return fitted(list(_blocks(report_of(result))), MOST_BYTES).encode("utf-8")


def _blocks(report: Report) -> Iterator[Block]:
    figures = [f"**{_text(name)}** {_text(value)}" for name, value, _ in report.key_figures]
    subject = f"`{_code(report.name)}`{f' ({_text(report.made)})' if report.made else ''}"
    headline = f"## {_SYMBOLS[report.verdict]} {_text(report.headline)}\n\n"
    yield Block(f"{headline}{subject}: {', '.join(figures)}\n\n")
    tally = [f"- {_SYMBOLS[state]} {_text(text)}\n" for state, text in report.tally]
    if tally:
        yield Block("", tally, "\n")
    fixes = [
        f"{place}. **{_text(fix.advice)}**  \n   {_SYMBOLS[fix.state]} {_text(fix.title)}"
        f"{_text(' on ' + fix.devices) if fix.devices else ''}: {_text(fix.message)}\n"
        for place, fix in enumerate(first_fixes(report), start=1)
    ]
    if not fixes and report.advice:
        fixes = [f"1. **{_text(report.advice)}**\n"]
    if fixes:
        yield Block("### What to change first\n\n", fixes, "\n", "suggestions")
    if report.matrix:
        yield _devices(report)
    opened, passed = (
        [_check_row(row) for row in check_rows(report) if (row.state == "pass") is wanted]
        for wanted in (False, True)
    )
    if opened:
        yield _details(f"{counted(len(opened), 'check')} that did not pass", _CHECK_HEAD, opened)
    if report.bars:
        yield _details(
            "Memory of the whole process on each device",
            f"{_text(report.legend)}\n\n| Device | | In words |\n|---|---|---|\n",
            [
                f"| {_text(title)} | `{_code(drawn, pipe=True)}` | {_text(words)} |\n"
                for title, drawn, words in report.bars
            ],
        )
    for table in report.tables:
        yield _table(table)
    for heading, words in report.notes:
        yield _details(heading, "", [f"{_text(words)}\n"])
    if passed:
        yield _details(f"{counted(len(passed), 'check')} that passed", _CHECK_HEAD, passed)


_CHECK_HEAD: Final = (
    "| | Check | Where | Actual | Limit | What was found |\n|---|---|---|--:|--:|---|\n"
)


def _devices(report: Report) -> Block:
    head = "### Devices\n\n| Device | Verdict | " + " | ".join(report.topics) + " |\n"
    head += "|---|---|" + "--:|" * len(report.topics) + "\n"
    rows = []
    for row in sorted(report.matrix, key=lambda row: SEVERITY[row.verdict]):
        words = f"{_SYMBOLS[row.verdict]} {VERDICT_WORDS[row.verdict]}"
        entries = [_text(row.title) + ("" if row.validated else " \\*"), words]
        for cell in row.cells:
            symbol = f"{_SYMBOLS[cell.state]} " if cell.state not in {None, "pass"} else ""
            extra = f"<br>{_text(cell.ends)}" if cell.ends else ""
            extra += f"<br>{_text(cell.words)}" if cell.words and cell.state is not None else ""
            entries.append(f"{symbol}{_text(cell.figure)}{extra}")
        rows.append(f"{markdown_row(entries)}\n")
    return Block(head, rows, "\n" if report.all_validated else _ESTIMATES, "devices")


def _check_row(row: CheckRow) -> str:
    found = _text(row.message)
    if row.advice:
        found += f"<br>Change first: {_text(row.advice)}"
    if row.location:
        found += f"<br>`{_code(row.location)}`"
    state = f"{_SYMBOLS[row.state]} {VERDICT_WORDS[row.state]}"
    texts = map(_text, (row.title, row.device, row.actual, row.limit))
    return f"{markdown_row([state, *texts, found])}\n"


def _table(table: Table) -> Block:
    names = [name for name, _, _ in table.rows[0].figures]
    head = f"{_text(table.lead)}\n\n| | {' | '.join(names)} |\n|---|{'--:|' * len(names)}\n"
    lines = []
    for row in table.rows:
        entries = [
            table.unknown if figure == UNKNOWN else _text(figure) for _, figure, _ in row.figures
        ]
        star = "" if row.validated else " \\*"
        lines.append(f"{markdown_row([f'{_text(row.title)}{star}', *entries])}\n")
    return _details(table.title, head, lines)


def _details(summary: str, head: str, rows: Sequence[str]) -> Block:
    start = f"<details><summary>{_text(summary)}</summary>\n\n{head}"
    return Block(start, rows, "\n</details>\n\n")


def _code(text: str, *, pipe: bool = False) -> str:
    """Text inside backticks, where nothing can be escaped but a pipe in a table."""
    short = shortened(clean(text), MOST_TEXT).replace("`", "'")
    return short.replace("|", "\\|" if pipe else "'")


FORMAT: Final = ReportFormat(
    render=render_markdown,
    suffix="md",
    audience="a comment on a pull request, `$GITHUB_STEP_SUMMARY`",
    written_as="GitHub's Markdown, below 65,536 bytes",
)
