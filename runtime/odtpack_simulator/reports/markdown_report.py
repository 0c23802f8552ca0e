"""The Markdown report: for a pull request, or for ``$GITHUB_STEP_SUMMARY``.

A comment on GitHub holds 65,536 characters. What does not fit is left out row
by row from the end, least important parts first, and the report says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from odtpack_simulator.reports.formats import ReportFormat
from odtpack_simulator.reports.view import device_text, matrix, view
from odtpack_simulator.reports.view.campaign import campaign_rows, interruption_words, policy_words
from odtpack_simulator.reports.view.plain import MOST_TEXT, shortened
from odtpack_simulator.reports.view.plain import VERDICT_SYMBOLS as _SYMBOLS
from odtpack_simulator.reports.view.plain import markdown_text as _text
from odtpack_simulator.reports.view.process_bar import (
    LEGEND,
    ProcessBar,
    mapped_words,
    process_bars,
)
from odtpack_simulator.result.result import SimulationResult
from odtpack_simulator.values.plain_text import clean
from odtpack_simulator.values.units import format_bytes

MOST_BYTES: Final = 65_000
"""Bytes of the report, counted in UTF-8: never more characters than a comment holds."""
_ROOM_FOR_NOTE: Final = 120


@dataclass(frozen=True)
class _Block:
    """A part with rows that may be cut: ``head``, rows, ``tail``."""

    head: str
    rows: Sequence[str]
    tail: str = ""
    what: str = "rows"


def render_markdown(result: SimulationResult) -> bytes:
    """The report as UTF-8 in GitHub's Markdown, below 65,536 bytes."""
    text = ""
    for block in _blocks(result):
        room = MOST_BYTES - len(text.encode("utf-8"))
        text += _fitted(block, room)
    return text.encode("utf-8")


def _fitted(block: _Block, room: int) -> str:
    """The block with as many rows as fit into ``room`` bytes; nothing where its head does not."""
    frame = len((block.head + block.tail).encode("utf-8")) + _ROOM_FOR_NOTE
    if frame > room:
        return ""
    kept: list[str] = []
    for row in block.rows:
        frame += len(row.encode("utf-8"))
        if frame > room:
            break
        kept.append(row)
    left = len(block.rows) - len(kept)
    note = f"\n_{left} more {block.what} left out: a comment holds no more._\n" if left else ""
    return block.head + "".join(kept) + note + block.tail


def _blocks(result: SimulationResult) -> Iterator[_Block]:
    headline = f"## {_SYMBOLS[result.verdict]} {_text(view.headline(result))}\n\n"
    figures = [f"**{_text(name)}** {_text(value)}" for name, value, _ in view.key_figures(result)]
    made = view.subject_words(result)
    subject = f"`{_code(result.package.name)}`{f' ({_text(made)})' if made else ''}"
    yield _Block(f"{headline}{subject}: {', '.join(figures)}\n\n", ())
    tally = [f"- {_SYMBOLS[state]} {_text(text)}\n" for state, text in view.tally(result)]
    if tally:
        yield _Block("", tally, "\n")
    fixes = [
        f"{place}. **{_text(fix.advice)}**  \n   {_SYMBOLS[fix.state]} {_text(fix.title)}"
        f"{_text(' on ' + fix.devices) if fix.devices else ''}: {_text(fix.message)}\n"
        for place, fix in enumerate(view.first_fixes(result), start=1)
    ]
    if fixes:
        yield _Block("### What to change first\n\n", fixes, "\n", "suggestions")
    if result.devices:
        yield _devices(result)
    rows = view.check_rows(result)
    opened = [_check_row(row) for row in rows if row.state != "pass"]
    passed = [_check_row(row) for row in rows if row.state == "pass"]
    if opened:
        yield _details(f"{len(opened)} checks that did not pass", _CHECK_HEAD, opened)
    bars = [_bar_row(bar) for bar in process_bars(result)]
    if bars:
        if mapped := mapped_words(result):
            bars.append(f"\n{_text(mapped)}\n")
        yield _details("Memory of the whole process on each device", _BAR_HEAD, bars)
    yield from _campaign(result)
    if result.interruption is not None:
        words = f"{_text(interruption_words(result.interruption))}\n"
        yield _details("Interruptions", "", [words])
    if passed:
        yield _details(f"{len(passed)} checks that passed", _CHECK_HEAD, passed)


_CHECK_HEAD: Final = (
    "| | Check | Where | Actual | Limit | What was found |\n|---|---|---|--:|--:|---|\n"
)

_BAR_HEAD: Final = (
    f"{_text(LEGEND)}\n\n| Device | | App | ONNX Runtime | Training | Limit | Kit |\n"
    "|---|---|--:|--:|--:|--:|---|\n"
)


def _bar_row(bar: ProcessBar) -> str:
    limit = "unknown" if bar.limit is None else format_bytes(bar.limit)
    figures = [*map(format_bytes, (bar.app, bar.runtime, bar.training)), limit, bar.kit]
    drawn = bar.drawn().replace("|", "\\|")
    return f"| {_text(bar.title)} | `{drawn}` | {' | '.join(map(_text, figures))} |\n"


def _devices(result: SimulationResult) -> _Block:
    head = "### Devices\n\n| Device | Verdict | " + " | ".join(matrix.TOPICS) + " |\n"
    head += "|---|---|" + "--:|" * len(matrix.TOPICS) + "\n"
    order = ["fail", "warn", "not judged", "pass"]
    rows = []
    for device in sorted(result.devices, key=lambda device: order.index(device.verdict)):
        mark = "" if device.validated else " \\*"
        words = f"{_SYMBOLS[device.verdict]} {view.VERDICT_WORDS[device.verdict]}"
        entries = [f"{_text(device.title)}{mark}", words]
        for cell in matrix.cells(result, device):
            symbol = f"{_SYMBOLS[cell.state]} " if cell.state not in {None, "pass"} else ""
            extra = f"<br>{_text(cell.ends)}" if cell.ends else ""
            extra += f"<br>{_text(cell.words)}" if cell.words and cell.state is not None else ""
            entries.append(f"{symbol}{_text(cell.figure)}{extra}")
        rows.append(f"| {' | '.join(entries)} |\n")
    tail = "\n"
    if any(not device.validated for device in result.devices):
        tail = f"\n\\* {view.NOT_VALIDATED}: times and energy are estimates.\n\n"
    return _Block(head, rows, tail, "devices")


def _check_row(row: view.CheckRow) -> str:
    found = _text(row.message)
    if row.advice:
        found += f"<br>Change first: {_text(row.advice)}"
    if row.location:
        found += f"<br>`{_code(row.location)}`"
    state = f"{_SYMBOLS[row.state]} {view.VERDICT_WORDS[row.state]}"
    entries = (state, _text(row.title), _text(row.device), _text(row.actual), _text(row.limit))
    return f"| {' | '.join(entries)} | {found} |\n"


def _campaign(result: SimulationResult) -> Iterator[_Block]:
    rows = campaign_rows(result)
    if not rows:
        return
    names = [name for name, _, _ in rows[0].figures]
    head = f"{_text(policy_words(result))}\n\n| Device | {' | '.join(names)} |\n"
    head += "|---|" + "--:|" * len(names) + "\n"
    lines = []
    for row in rows:
        entries = [
            _text(figure) if figure != device_text.UNKNOWN else "not judged"
            for _, figure, _ in row.figures
        ]
        lines.append(f"| {_text(row.title)} | {' | '.join(entries)} |\n")
    yield _details("The whole training on each device", head, lines)


def _details(summary: str, head: str, rows: Sequence[str]) -> _Block:
    start = f"<details><summary>{_text(summary)}</summary>\n\n{head}"
    return _Block(start, rows, "\n</details>\n\n")


def _code(text: str) -> str:
    """Text inside backticks, where nothing can be escaped: without backticks and pipes."""
    return re.sub(r"[`|]", "'", shortened(clean(text), MOST_TEXT))


FORMAT: Final = ReportFormat(
    render=render_markdown,
    suffix="md",
    audience="a comment on a pull request, `$GITHUB_STEP_SUMMARY`",
    written_as="GitHub's Markdown, below 65,536 bytes",
)
