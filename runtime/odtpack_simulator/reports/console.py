"""The verdict for a terminal: a table of devices and what to change first, on stderr."""

from __future__ import annotations

from typing import Final

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from odtpack_simulator.reports.view import device_text, matrix, view
from odtpack_simulator.reports.view.process_bar import LEGEND, mapped_words, process_bars
from odtpack_simulator.result.result import SimulationResult, Verdict
from odtpack_simulator.values.plain_text import clean

_SYMBOLS: Final[dict[Verdict, tuple[str, str]]] = {
    "pass": ("✓", "green"),
    "warn": ("!", "yellow"),
    "fail": ("✗", "bold red"),
    "not judged": ("?", "dim"),
}
_NARROW: Final = 60
_NAME_COLUMNS: Final = 22
_TOPIC_COLUMNS: Final = 17


def print_result(result: SimulationResult, console: Console | None = None) -> None:
    """Print headline, device table, and advice for what fails.

    Args:
        result: A judged result.
        console: Where to print; by default stderr, in colour only on a terminal
            and without ``NO_COLOR``.
    """
    console = console or Console(stderr=True)
    console.print(_verdict(result.verdict, view.headline(result)))
    for verdict, text in view.tally(result):
        console.print(Text("  ") + _verdict(verdict, text))
    learned = view.learned_words(result)
    if learned:
        console.print(Text(clean(learned).replace(" %", "\N{NO-BREAK SPACE}%")))
    if result.devices:
        console.print(_device_table(result, console.width))
        _print_bars(result, console)
    for fix in view.first_fixes(result):
        where = f" on {fix.devices}" if fix.devices else ""
        console.print(_verdict(fix.state, f"{fix.title}{where}"))
        for line in (clean(fix.message), f"change first: {clean(fix.advice)}"):
            console.print(Padding(Text(line), (0, 0, 0, 2)))
    for text in _not_judged(result):
        console.print(_verdict("not judged", text))
    if any(not device.validated for device in result.devices):
        console.print(Text(f"* {view.NOT_VALIDATED}: times and energy are estimates", style="dim"))


def _device_table(result: SimulationResult, width: int) -> Table:
    """Devices against checks; a narrow terminal shows what fails first, not every topic."""
    shown = _topics(result, width)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("Device", overflow="fold")
    for topic in shown:
        table.add_column(topic, justify="right", no_wrap=width >= _NARROW, overflow="fold")
    for device in result.devices:
        name = _verdict(device.verdict, device.title + ("" if device.validated else " *"))
        name.append(f"\n  {view.VERDICT_WORDS[device.verdict]}", style="dim")
        cells = dict(zip(matrix.TOPICS, matrix.cells(result, device), strict=True))
        table.add_row(name, *(_cell(cells[topic]) for topic in shown))
    return table


def _print_bars(result: SimulationResult, console: Console) -> None:
    """The memory of each device's process; devices with the same bar share a line."""
    lines: dict[tuple[str, str], list[str]] = {}
    for bar in process_bars(result):
        words = f"{bar.words()}; {bar.kit}" if bar.kit else bar.words()
        lines.setdefault((bar.drawn(), words), []).append(bar.title)
    if lines:
        console.print(Text(f"Memory of the process: {LEGEND}", style="dim"))
    for (drawn, words), titles in lines.items():
        console.print(Text(f"{drawn}  {clean(view.name_list(titles))}"))
        console.print(Padding(Text(clean(words), style="dim"), (0, 0, 0, 2)))
    if words := mapped_words(result):
        console.print(Text(words, style="dim"))


def _topics(result: SimulationResult, width: int) -> list[str]:
    """The topics that a terminal of this width has room for, in the order of the matrix."""
    room = max(1, (width - _NAME_COLUMNS) // _TOPIC_COLUMNS)
    rows = [matrix.cells(result, device) for device in result.devices]
    known = [
        topic
        for place, topic in enumerate(matrix.TOPICS)
        if any(row[place].figure != device_text.UNKNOWN for row in rows)
    ]
    bad = {
        topic: any(row[matrix.TOPICS.index(topic)].state in {"fail", "warn"} for row in rows)
        for topic in known
    }
    first = sorted(known, key=lambda topic: not bad[topic])[:room]
    return [topic for topic in matrix.TOPICS if topic in first]


def _cell(cell: matrix.Cell) -> Text:
    symbol, style = _SYMBOLS[cell.state] if cell.state else ("", "")
    text = Text(
        f"{symbol} {clean(cell.figure)}".strip(), style="" if cell.state == "pass" else style
    )
    if cell.ends:
        text.append(f"\n{clean(cell.ends)}", style="dim")
    if cell.words and cell.words != "no budget":
        text.append(f"\n{clean(cell.words)}", style="dim")
    return text


def _not_judged(result: SimulationResult) -> list[str]:
    """Why checks were not judged, and why times are missing that no budget asks for."""
    texts = []
    for entry in view.not_judged(result):
        where = f" on {entry.devices}" if entry.devices else ""
        texts.append(f"{entry.titles}{where}: {entry.reason}")
    reasons: dict[tuple[str, str], list[str]] = {}
    for device in result.devices:
        if device.latency.step_ms is None:
            what, why = "times", device.latency.not_judged or ""
        elif device_text.finish_interval(device) is None:
            what, why = "finish", device_text.finish(device)[1]
        else:
            continue
        if not any(c.status == "not judged" and c.message == why for c in device.checks):
            reasons.setdefault((what, why), []).append(device.title)
    return texts + [
        f"{what} of {', '.join(titles)}: {why}" for (what, why), titles in reasons.items()
    ]


def _verdict(verdict: Verdict, text: str) -> Text:
    symbol, style = _SYMBOLS[verdict]
    return Text(f"{symbol} {clean(text)}", style=style)
