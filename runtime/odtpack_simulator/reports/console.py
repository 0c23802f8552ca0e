"""The verdict for a terminal: a table of devices and what to change first, on stderr."""

from typing import Final

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from odtpack_simulator.reports import report_of
from odtpack_simulator.reports.report import (
    NOT_VALIDATED,
    UNKNOWN,
    VERDICT_WORDS,
    AnyResult,
    Cell,
    Report,
    first_fixes,
    name_list,
    not_judged,
)
from odtpack_simulator.values.figure import Verdict
from odtpack_simulator.values.text import clean

_SYMBOLS: Final[dict[Verdict, tuple[str, str]]] = {
    "pass": ("✓", "green"),
    "warn": ("!", "yellow"),
    "fail": ("✗", "bold red"),
    "not judged": ("?", "dim"),
}
_NARROW: Final = 60
_NAME_COLUMNS: Final = 22
_TOPIC_COLUMNS: Final = 17


def print_result(result: AnyResult, console: Console | None = None) -> None:
    """Print headline, device table, and advice for what fails."""
    # `console`: Where to print; by default stderr, in colour only on a terminal and without
    # `NO_COLOR`.
    console = console or Console(stderr=True)
    report = report_of(result)
    console.print(_verdict(report.verdict, report.headline))
    for verdict, text in report.tally:
        console.print(Text("  ") + _verdict(verdict, text))
    if report.summary:
        console.print(Text(clean(report.summary)))
    if report.matrix:
        shown, hidden = _topics(report, console.width)
        console.print(_device_table(report, shown, console.width))
        if hidden:
            console.print(Text(f"Not shown at this width: {', '.join(hidden)}", style="dim"))
    elif not report.topics:
        for name, value, remark in report.key_figures:
            console.print(Text(clean(f"  {name:<24} {value}" + f"   {remark}" * bool(remark))))
    _print_bars(report, console)
    for fix in first_fixes(report):
        where = f" on {fix.devices}" if fix.devices else ""
        console.print(_verdict(fix.state, f"{fix.title}{where}"))
        for line in (clean(fix.message), f"change first: {clean(fix.advice)}"):
            console.print(Padding(Text(line), (0, 0, 0, 2), expand=False))
    for entry in not_judged(report):
        where = f" on {entry.devices}" if entry.devices else ""
        console.print(_verdict("not judged", f"{entry.titles}{where}: {entry.reason}"))
    for what, why in report.unknown:
        console.print(_verdict("not judged", f"{what}: {why}"))
    if not report.all_validated:
        console.print(Text(f"* {NOT_VALIDATED}: times and energy are estimates", style="dim"))


def _device_table(report: Report, shown: list[str], width: int) -> Table:
    """Devices against checks."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("Device", overflow="fold")
    for topic in shown:
        table.add_column(topic, justify="right", no_wrap=width >= _NARROW, overflow="fold")
    for row in report.matrix:
        name = _verdict(row.verdict, row.title + ("" if row.validated else " *"))
        name.append(f"\n  {VERDICT_WORDS[row.verdict]}", style="dim")
        cells = dict(zip(report.topics, row.cells, strict=True))
        table.add_row(name, *(_cell(cells[topic]) for topic in shown))
    return table


def _print_bars(report: Report, console: Console) -> None:
    """The memory of each device's process; devices with the same bar share a line."""
    lines: dict[tuple[str, str], list[str]] = {}
    for title, drawn, words in report.bars:
        lines.setdefault((drawn, words), []).append(title)
    if lines:
        console.print(Text(f"Memory of the process: {report.legend}", style="dim"))
    for (drawn, words), titles in lines.items():
        console.print(Text(f"{drawn}  {clean(name_list(titles))}"))
        console.print(Padding(Text(clean(words), style="dim"), (0, 0, 0, 2), expand=False))


def _topics(report: Report, width: int) -> tuple[list[str], list[str]]:
    """The topics that a terminal of this width has room for, and those that it has none for."""
    # What fails is shown first, then the memory.
    room = max(1, (width - _NAME_COLUMNS) // _TOPIC_COLUMNS)
    columns = {
        topic: [row.cells[place] for row in report.matrix]
        for place, topic in enumerate(report.topics)
    }
    known = [t for t, cells in columns.items() if any(c.figure != UNKNOWN for c in cells)]

    def rank(topic: str) -> int:
        states = {cell.state for cell in columns[topic]}
        return 0 if "fail" in states else 1 if topic == "Memory" else 3 - ("warn" in states)

    first = sorted(known, key=rank)[:room]
    return [t for t in known if t in first], [t for t in known if t not in first]


def _cell(cell: Cell) -> Text:
    symbol, style = _SYMBOLS[cell.state] if cell.state else ("", "")
    shown = f"{symbol} {clean(cell.figure)}".strip()
    text = Text(shown, style="" if cell.state == "pass" else style)
    for more in filter(None, (cell.ends, cell.words if cell.words != "no budget" else "")):
        text.append(f"\n{clean(more)}", style="dim")
    return text


def _verdict(verdict: Verdict, text: str) -> Text:
    symbol, style = _SYMBOLS[verdict]
    return Text(f"{symbol} {clean(text)}", style=style)
