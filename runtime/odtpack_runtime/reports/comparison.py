"""A comparison of two results: plain text for a terminal, Markdown for a pull request."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from odtpack_runtime.simulator.compare import Comparison, DeviceComparison, Direction, Figure
from odtpack_runtime.simulator.metric import shortened
from odtpack_runtime.simulator.metrics import titles
from odtpack_runtime.simulator.units import format_value

MAX_COMMENT: Final = 65_536
"""GitHub's limit for a comment, in characters; kept in bytes, of which there are no fewer."""

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]")
# Signs that mean something in Markdown or in the HTML inside of it.
_MARKDOWN: Final = re.compile(r"([\\`*_{}\[\]<>#|~@&$])")
_MARKS: Final[dict[Direction, str]] = {
    "worse": "✗ worse",
    "unknown now": "? unknown now",
    "not compared": "? not compared",
    "better": "✓ better",
    "known now": "+ known now",
    "within noise": "≈ within noise",
    "same": "= same",
}
"""In the order in which rows are shown; a word stands beside every sign."""
_MOST_NAMES: Final = 3


def _change(percent: float) -> str:
    """A change that is many times the base reads as a factor: ``+4.2 %``, ``× 35``."""
    return f"{percent:+.1f} %" if percent < 1000 else f"× {1 + percent / 100:,.0f}"


@dataclass(frozen=True, slots=True)
class _Row:
    where: str
    figure: Figure

    def cells(self) -> tuple[str, ...]:
        figure = self.figure
        change = "–" if figure.change_percent is None else _change(figure.change_percent)
        if figure.noise_percent is not None and figure.noise_percent >= 0.05:
            change += f" (noise ± {figure.noise_percent:.1f} %)"
        return (
            self.where,
            figure.title,
            _shown(figure.base, figure),
            _shown(figure.head, figure),
            change,
            _MARKS[figure.direction],
        )


_HEADER: Final = ("Device", "Figure", "Base", "Head", "Change", "")


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
    lines += [f"  note: {_clean(note)}" for note in comparison.notes]
    lines += [f"  {line}" for line in _presence(comparison)]
    changed, same = _rows(comparison)
    if changed:
        table = [_HEADER, *(tuple(map(_clean, row.cells())) for row in changed)]
        widths = [max(len(row[column]) for row in table) for column in range(len(_HEADER))]
        lines.append("")
        for row in table:
            cells = [
                cell.rjust(width) if 2 <= column <= 4 else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
    lines += ["", *_closing(comparison, same)]
    for mark, where, message, advice, location in _check_lines(comparison):
        lines += ["", f"{mark}: {where}: {message}"]
        lines += [f"  change first: {advice}"] if advice else []
        lines += [f"  in: {location}"] if location else []
    return "\n".join(lines) + "\n"


def render_markdown(comparison: Comparison, *, limit: int = MAX_COMMENT) -> str:
    """Markdown for a comment, without HTML.

    Args:
        comparison: What to show.
        limit: Most bytes. Rows that do not fit are left out, the least important first, and
            counted.
    """
    head = [f"### odtpack: {escape(headline(comparison))}", ""]
    head += [f"- {escape(note)}" for note in (*comparison.notes, *_presence(comparison))]
    head += [""] if len(head) > 2 else []
    changed, same = _rows(comparison)
    checks = []
    for mark, where, message, advice, location in _check_lines(comparison):
        place = f" ({escape(location)})" if location else ""
        first = f" Change first: {escape(advice)}" if advice else ""
        checks.append(f"- **{escape(mark)}** {escape(where)}: {escape(message)}{place}.{first}")
    table = [_line(_HEADER), "|---|---|---:|---:|---:|---|"] if changed else []
    rows = [_line([escape(cell) for cell in row.cells()]) for row in changed]
    end = ["", *map(escape, _closing(comparison, same))]
    return _fitted((head, checks, table, rows, end), limit)


def _fitted(parts: tuple[list[str], ...], limit: int) -> str:
    """The parts as text of at most ``limit`` bytes: first rows are left out, then checks."""
    head, checks, table, rows, end = parts

    def text(few_checks: int, few_rows: int) -> str:
        lines = [*head, *checks[:few_checks]]
        if few_checks < len(checks):
            lines.append(f"- and {len(checks) - few_checks} more checks that did not pass")
        lines += [""] if checks else []
        lines += [*table, *rows[:few_rows]] if few_rows else []
        if few_rows < len(rows):
            lines += ["", f"and {len(rows) - few_rows} more changes"]
        return "\n".join([*lines, *end]) + "\n"

    def fits(few_checks: int, few_rows: int) -> bool:
        return len(text(few_checks, few_rows).encode()) <= limit

    few_rows = _most(len(rows), lambda count: fits(len(checks), count))
    if few_rows is not None:
        return text(len(checks), few_rows)
    few_checks = _most(len(checks), lambda count: fits(count, 0))
    if few_checks is not None:
        return text(few_checks, 0)
    return text(0, 0).encode()[:limit].decode(errors="ignore")


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
    return _MARKDOWN.sub(r"\\\1", _clean(text))


def _rows(comparison: Comparison) -> tuple[list[_Row], int]:
    """What changed, the worst first, and how many figures did not.

    Devices on which a metric changed in the same way share a row.
    """
    groups: dict[tuple[object, ...], list[tuple[DeviceComparison | None, Figure]]] = {}
    same = 0
    for device, figure in comparison.figures():
        if figure.direction == "same":
            same += 1
            continue
        key = (device is None, figure.metric, figure.base, figure.head, figure.direction)
        groups.setdefault(key, []).append((device, figure))
    both = sum(device.presence == "both" for device in comparison.devices)
    rows = []
    for members in groups.values():
        names = [device.title + _mark(device) for device, _ in members if device is not None]
        where = "Package" if not names else f"all {both} devices"
        if names and (len(names) < both or len(names) <= _MOST_NAMES):
            where = _named(names)
        rows.append(_Row(where, members[0][1]))
    order = list(_MARKS)
    return sorted(
        rows,
        key=lambda row: (order.index(row.figure.direction), -abs(row.figure.change_percent or 0.0)),
    ), same


def _presence(comparison: Comparison) -> list[str]:
    lines = []
    for presence, text in (("new", "only in the head"), ("removed", "only in the base")):
        names = [device.title for device in comparison.devices if device.presence == presence]
        if names:
            lines.append(f"{text}: {_clean(_named(names, most=20))}")
    return lines


def _closing(comparison: Comparison, same: int) -> list[str]:
    lines = []
    if same:
        lines.append(f"{same} figures are the same.")
    reasons = [f.reason for _, f in comparison.figures() if f.direction == "not compared"]
    reasons += [f.reason for _, f in comparison.figures() if f.direction == "unknown now"]
    lines += [f"Not compared: {_clean(reason)}." for reason in dict.fromkeys(filter(None, reasons))]
    if any(not device.validated for device in comparison.devices):
        lines.append("* not validated on hardware: times, energy and sessions are estimates.")
    return lines


def _check_lines(comparison: Comparison) -> list[tuple[str, str, str, str, str]]:
    """What did not pass: verdict, where, message, advice and place in the budget file.

    The worst first; devices of which the same is said share an entry.
    """
    names = titles()
    groups: dict[tuple[int, str, str, str, str], list[str]] = {}
    for each in comparison.checks:
        check = each.check
        worst = 2 if check.status == "not judged" else 0 if check.level == "error" else 1
        title = names.get(check.metric, check.metric)
        key = (worst, title, check.message, check.advice or "", check.budget_location or "")
        groups.setdefault(key, []).append(each.device or "package")
    words = ("fails", "warning", "not judged")
    lines = []
    for key, devices in sorted(groups.items(), key=lambda item: item[0][0]):
        worst, title, message, hint, location = key
        where = _clean(f"{_named(devices)}, {title}")
        lines.append((words[worst], where, _clean(message), _clean(hint), _clean(location)))
    return lines


def _named(names: Sequence[str], most: int = _MOST_NAMES) -> str:
    shown = ", ".join(shortened(name, 100) for name in names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def _mark(device: DeviceComparison) -> str:
    return "" if device.validated else " *"


def _shown(value: float | None, figure: Figure) -> str:
    return "unknown" if value is None else format_value(value, figure.unit)


def _clean(text: str) -> str:
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def _line(cells: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(cells)} |"
