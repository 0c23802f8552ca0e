"""The verdict for a terminal: a table of devices and what to change first, on stderr."""

from __future__ import annotations

import re
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from odtpack_runtime.reports import view
from odtpack_runtime.simulator.result import DeviceResult, SimulationResult, Verdict
from odtpack_runtime.simulator.units import format_bytes, format_percent

_SYMBOLS: Final[dict[Verdict, tuple[str, str]]] = {
    "pass": ("✓", "green"),
    "warn": ("!", "yellow"),
    "fail": ("✗", "bold red"),
    "not judged": ("?", "dim"),
}
# Control characters of a hostile name could move the cursor or recolour the terminal.
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]")


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
    if result.devices:
        console.print(_device_table(result))
    for fix in view.first_fixes(result):
        where = f" on {fix.devices}" if fix.devices else ""
        console.print(_verdict(fix.state, f"{fix.title}{where}"))
        console.print(Text(f"  {_clean(fix.message)}"))
        console.print(Text(f"  change first: {_clean(fix.advice)}"))
    for text in _not_judged(result):
        console.print(_verdict("not judged", text))
    if any(not device.validated for device in result.devices):
        console.print(Text(f"* {view.NOT_VALIDATED}: times are estimates", style="dim"))


def _device_table(result: SimulationResult) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("Device", overflow="fold")
    for title in ("Peak memory", "Step", "Whole training"):
        table.add_column(title, justify="right", no_wrap=True)
    for device in result.devices:
        name = _verdict(device.verdict, device.title + ("" if device.validated else " *"))
        name.append(f"\n  {view.VERDICT_WORDS[device.verdict]}", style="dim")
        step, finish = view.step_text(device), view.finish_text(device)
        table.add_row(
            name,
            _pair(*_memory(device)),
            _pair(step[0], step[1] if device.latency.step_ms else ""),
            _pair(finish[0], finish[1]),
        )
    return table


def _memory(device: DeviceResult) -> tuple[str, str]:
    """As in the other reports, but narrow enough for a terminal of 80 columns."""
    memory = device.memory
    if memory.outcome == "killed" or not memory.limit_bytes:
        return view.memory_text(device)
    share = format_percent(memory.peak_bytes / memory.limit_bytes)
    return format_bytes(memory.peak_bytes), f"{share} of {format_bytes(memory.limit_bytes)}"


def _not_judged(result: SimulationResult) -> list[str]:
    """Why step times are missing, once per reason with its devices."""
    reasons: dict[str, list[str]] = {}
    for device in result.devices:
        if device.latency.step_ms is None:
            reasons.setdefault(device.latency.not_judged or "", []).append(device.title)
    return [f"times of {', '.join(titles)}: {why}" for why, titles in reasons.items()]


def _verdict(verdict: Verdict, text: str) -> Text:
    symbol, style = _SYMBOLS[verdict]
    return Text(f"{symbol} {_clean(text)}", style=style)


def _pair(figure: str, remark: str) -> Text:
    text = Text(figure)
    if remark:
        text.append(f"\n{remark}", style="dim")
    return text


def _clean(text: str) -> str:
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
