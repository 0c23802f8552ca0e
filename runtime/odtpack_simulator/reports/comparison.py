"""A comparison of two results: text for a terminal, Markdown for a pull request, and a page.

With 25 devices a row for each would hide what changed. Devices on which a figure changed alike
share a row, as do checks alike; a figure that does not depend on the device is reported once;
devices whose verdict changed have rows of their own, before the others.
"""

import itertools
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from odtpack_simulator.figures.compare import Change, Comparison, DeviceComparison, Direction
from odtpack_simulator.figures.metric import worst
from odtpack_simulator.figures.simulated import CHECKS
from odtpack_simulator.reports import charts
from odtpack_simulator.reports.charts import Bar
from odtpack_simulator.reports.html_report import render_page
from odtpack_simulator.reports.report import SEVERITY, Block, fitted, markdown_text
from odtpack_simulator.reports.svg import Axis
from odtpack_simulator.values.figure import WORST_FIRST, Check, Verdict, shortened
from odtpack_simulator.values.text import clean, counted, markdown_row
from odtpack_simulator.values.units import format_interval_of, format_percent, format_value

MARKS: Final[dict[Direction, str]] = {
    "worse": "✗ worse",
    "unknown now": "? unknown now",
    "not compared": "? not compared",
    "better": "✓ better",
    "known now": "+ known now",
    "within noise": "≈ within noise",
    "same": "= same",
}
"""In the order in which rows are shown; a word stands beside every sign."""

_CHANGED: Final = ("worse", "better")
_TOLD_BY_VERDICT: Final = (*_CHANGED, "unknown now")
"""Directions that can be the reason of another verdict."""
_NOT_COMPARED: Final = ("not compared", "unknown now", "known now")
_MOST_NAMES: Final = 2
_POINTS: Final = 1.0
_SHARE: Final = 0.2
"""Changes are alike that differ by no more than a point of a percent, or a fifth of themselves."""

_Member = tuple[DeviceComparison, Change]


@dataclass(frozen=True, slots=True)
class Names:
    """Who shares a row: ``shown`` in it, and the others, which a fold may name."""

    shown: str
    others: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """In one line, the others counted."""
        return f"{self.shown} {self.more}" if self.others else self.shown

    @property
    def more(self) -> str:
        """How many others there are, such as ``and 18 others``."""
        return f"and {counted(len(self.others), 'other')}"


@dataclass(frozen=True, slots=True)
class Row:
    """Changes of one metric that changed alike."""

    names: Names  # The package, or the devices
    # How the verdict of the devices changed, such as `pass → fail`; empty where it did not.
    verdicts: str
    title: str  # Name of the metric
    base: str  # Change, or range of figures, before
    head: str  # The same now
    change: str  # In percent, and what of it can be chance
    direction: Direction  # The same of all of them


@dataclass(frozen=True, slots=True)
class CheckLine:
    """Checks of one metric that did not pass for one reason, shown for the worst of them."""

    outcome: str
    names: Names
    title: str
    message: str
    advice: str
    location: str


def rows(comparison: Comparison) -> tuple[list[Row], int]:
    """What changed, the worst first, and how many figures did not change."""
    # Devices whose verdict changed come before everything else.
    present = sum(device.presence == "both" for device in comparison.devices)
    found: list[tuple[tuple[int, int, float], Row]] = []
    same = 0
    by_metric: dict[str, list[_Member]] = {}
    known: dict[str, list[str]] = {}  # metric -> devices of which there is a figure
    for device, figure in comparison.figures():
        if device is not None:
            known.setdefault(figure.metric, []).append(title(device))
        if figure.direction == "same":
            same += 1
        elif device is None:
            found.append((_rank("", [figure]), _row(Names(_whole(comparison)), "", [figure])))
        else:
            by_metric.setdefault(figure.metric, []).append((device, figure))
    for metric, members in by_metric.items():
        having = known[metric]
        for verdicts, group in _groups(members, len(having)):
            names = named([title(device) for device, _ in group], having, present)
            figures = [figure for _, figure in group]
            found.append((_rank(verdicts, figures), _row(names, verdicts, figures)))
    found.sort(key=lambda each: each[0])
    return [row for _, row in found], same


def transitions(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """How verdicts changed, such as ``pass → fail``, and on which devices; the worst first."""
    # Where all devices changed alike, that is all there is to say of them.
    groups: dict[tuple[Verdict, Verdict], list[str]] = {}
    for device in comparison.devices:
        before, now = device.verdict_before, device.verdict
        if before is not None and now is not None and before != now:
            groups.setdefault((now, before), []).append(title(device))
    order = sorted(groups, key=lambda key: (WORST_FIRST.index(key[0]), WORST_FIRST.index(key[1])))
    both = sum(device.presence == "both" for device in comparison.devices)
    found = []
    for now, before in order:
        names = groups[now, before]
        every = len(names) == both > _MOST_NAMES
        found.append((f"{before} → {now}", [f"all {both} devices"] if every else names))
    return found


def check_lines(comparison: Comparison) -> list[CheckLine]:
    """What did not pass, the worst first; devices of which the same metric fails share a line."""
    marked = {device.title: title(device) for device in comparison.devices}
    everyone = [marked[device.title] for device in comparison.devices if device.verdict is not None]
    groups: dict[tuple[int, str, str, str], list[tuple[str | None, Check]]] = {}
    for each in comparison.checks:
        check = each.check
        rank = 2 if check.status == "not judged" else 0 if check.level == "error" else 1
        reason = check.message if check.status == "not judged" else ""
        key = (rank, each.title, check.budget_location or "", reason)
        groups.setdefault(key, []).append((each.device, check))
    words = ("fails", "warning", "not judged")
    lines = []
    for (rank, metric, location, _), members in sorted(groups.items(), key=lambda g: g[0][0]):
        first, check = worst(members, CHECKS, [*SEVERITY])
        devices = [marked.get(device, device) for device, _ in members if device is not None]
        alike = {other.message for _, other in members} == {check.message}
        if first is None:
            names = Names(_whole(comparison).lower())
        elif alike or len(devices) == 1:
            names = named(devices, everyone, len(everyone))
        else:  # the message is that of one device, which is named first
            head = marked.get(first, first)
            names = Names(_short(head), tuple(_short(name) for name in devices if name != head))
            if len(devices) == len(everyone):
                names = Names(f"all {len(everyone)} devices, worst {_short(head)}")
        lines.append(
            CheckLine(words[rank], names, metric, check.message, check.advice or "", location)
        )
    return lines


def named(names: Sequence[str], everyone: Sequence[str], total: int) -> Names:
    """A few devices by their names; many by those that are missing, or by the first of them."""
    if len(names) <= _MOST_NAMES:
        return Names(", ".join(map(_short, names)))
    missing = [name for name in everyone if name not in names]
    if not missing:
        some = "" if len(everyone) == total else " that have it"
        return Names(f"all {len(everyone)} devices{some}")
    if len(missing) <= _MOST_NAMES and len(names) > 2 * len(missing):
        return Names(f"all but {', '.join(map(_short, missing))} ({len(names)} devices)")
    return Names(_short(names[0]), tuple(map(_short, names[1:])))


def title(device: DeviceComparison) -> str:
    """The device's title, with a mark where its profile was never validated."""
    return device.title if device.validated else f"{device.title} *"


def _short(name: str) -> str:
    return shortened(clean(name), 100)


def _groups(members: list[_Member], devices: int) -> Iterator[tuple[str, list[_Member]]]:
    """Members of one metric that share a row, each group with how its verdict changed."""
    values = [(change.base, change.head, change.direction) for _, change in members]
    common, count = Counter(values).most_common(1)[0]
    if count > 1 and 2 * count > devices:  # it does not depend on the device
        both = list(zip(members, values, strict=True))
        yield "", [member for member, value in both if value == common]
        members = [member for member, value in both if value != common]
    parts: dict[tuple[str, Direction], list[_Member]] = {}
    for device, figure in members:
        before, now = device.verdict_before, device.verdict
        counts = before != now and figure.direction in _TOLD_BY_VERDICT
        verdicts = f"{before} → {now}" if counts else ""
        parts.setdefault((verdicts, figure.direction), []).append((device, figure))
    for (verdicts, direction), part in parts.items():
        for group in _alike(part) if direction in _CHANGED else [part]:
            yield verdicts, group


def _alike(members: list[_Member]) -> Iterator[list[_Member]]:
    """Members whose changes in percent lie close together, the largest change first."""
    unknown = [member for member in members if member[1].change_percent is None]
    if unknown:
        yield unknown
    group: list[_Member] = []
    largest = 0.0
    for member in sorted(members, key=lambda each: -abs(each[1].change_percent or 0.0)):
        change = member[1].change_percent
        if change is None:
            continue
        if group and abs(largest - change) > max(_POINTS, _SHARE * abs(largest)):
            yield group
            group = []
        if not group:
            largest = change
        group.append(member)
    if group:
        yield group


def _rank(verdicts: str, figures: Sequence[Change]) -> tuple[int, int, float]:
    """Changed verdicts first, the worst of them before others; then by direction and change."""
    place = len(WORST_FIRST)
    if verdicts:
        place = next(i for i, v in enumerate(WORST_FIRST) if verdicts.endswith(f"→ {v}"))
    largest = max(abs(figure.change_percent or 0.0) for figure in figures)
    return place, list(MARKS).index(figures[0].direction), -largest


def _row(names: Names, verdicts: str, figures: Sequence[Change]) -> Row:
    first = figures[0]
    changes = [f.change_percent for f in figures if f.change_percent is not None]
    change = "–"
    if changes:  # one that is many times the base reads as a factor: "+4.2 %", "× 35"
        ends = sorted((min(changes), max(changes)), key=abs)
        first_, last = (f"{p:+.1f} %" if p < 1000 else f"× {1 + p / 100:,.0f}" for p in ends)
        change = last if first_ == last else f"{first_.removesuffix(' %')} to {last}"
    noise = max((f.noise_percent or 0.0 for f in figures), default=0.0)
    if noise >= 0.05:
        change += f" (noise ± {noise:.{0 if noise >= 100 else 1}f} %)"
    base, head = (
        _range(values, first) for values in ([f.base for f in figures], [f.head for f in figures])
    )
    return Row(names, verdicts, first.title, base, head, change, first.direction)


def _range(values: Iterable[float | None], of: Change) -> str:
    known = [value for value in values if value is not None]
    if not known:  # what is unknown is neither better nor worse, unless it never happens
        word = "not finite" if of.metric == "final_loss" else "never"
        return word if of.direction in _CHANGED else "unknown"
    low, high = min(known), max(known)
    if format_value(low, of.unit) == format_value(high, of.unit):
        return format_value(low, of.unit)
    return format_interval_of(low, high, of.unit)


def _whole(comparison: Comparison) -> str:
    return "Package" if comparison.of == "simulation" else "Federation"


MAX_COMMENT: Final = 65_536
"""GitHub's limit for a comment, in characters; kept in bytes, of which there are no fewer."""
_HEADER: Final = ("Device", "Figure", "Base", "Head", "Change", "")
_RIGHT: Final = (2, 3, 4)  # columns that are aligned to the right
_UNBROKEN: Final = 100_000  # columns where nothing is a terminal
_MOST_LISTED: Final = 50  # in a fold, or in a sentence


def headline(comparison: Comparison) -> str:
    """How many figures became worse and better, and what the budgets say."""
    counts = [figure.direction for _, figure in comparison.figures()]
    worse, better = counts.count("worse"), counts.count("better")
    open_ = [f", {n} {each}" for each in _NOT_COMPARED if (n := counts.count(each))]
    figures = counted(sum(each not in _NOT_COMPARED for each in counts), "figure")
    text = f"{worse} worse, {better} better of {figures} compared{''.join(open_)}"
    if comparison.verdict is None:
        return text
    said = {
        "fail": "Over budget",
        "pass": "Within budget",
        "warn": "Within budget, with warnings",
        "not judged": "Not all budgets could be judged",
    }[comparison.verdict]
    return f"{said}: {text}"


def render_text(comparison: Comparison, width: int = _UNBROKEN) -> str:
    """Lines for a log, or for a terminal of a width, aligned, without colour."""
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
        if sum(widths) + 2 * len(widths) - 2 > width:  # a figure takes two lines
            for where, title_, base, head, *rest in table[1:]:
                lines += [f"{where}: {title_}", f"  {base} → {head}  {'  '.join(rest)}"]
            table = []
        for line in table:
            cells = [
                cell.rjust(wide) if column in _RIGHT else cell.ljust(wide)
                for column, (cell, wide) in enumerate(zip(line, widths, strict=True))
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
    wrap = textwrap.TextWrapper(
        width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(itertools.chain(*(wrap.wrap(line) or [""] for line in lines))) + "\n"


def render_markdown(comparison: Comparison, *, limit: int = MAX_COMMENT) -> str:
    """Markdown for a comment on GitHub; the only HTML in it are folds with names of devices."""
    changed, same = rows(comparison)
    checks = check_lines(comparison)
    name = "odtpack" if comparison.of == "simulation" else "odtpack fleet"
    head = [f"### {name}: {escape(headline(comparison))}", ""]
    notes = [escape(note) for note in (*comparison.notes, *presence(comparison))]
    told = [f"**{escape(how)}**: {escape(names)}" for how, names in verdicts(comparison)]
    for heading, lines in (("Verdict changed", told), ("Notes", notes)):
        head += [f"**{heading}**", "", *(f"- {line}" for line in lines), ""] if lines else []
    end = ["", *map(escape, closing(comparison, same))]
    text = ""
    for fold in (_fold, _counted):
        blocks = [Block("\n".join(head) + "\n", whole=True)]
        if checks:
            lines = [f"{_check(check, fold)}\n" for check in checks]
            blocks.append(Block("**Checks that did not pass**\n\n", lines, "\n", "checks"))
        if changed:
            table = f"{markdown_row(_HEADER)}\n|---|---|---:|---:|---:|---|\n"
            lines = [
                markdown_row([fold(row.names), *(escape(cell) for cell in _cells(row, "")[1:])])
                + "\n"
                for row in changed
            ]
            blocks.append(Block(table, lines, what="changes"))
        blocks.append(Block("\n".join(end) + "\n", whole=True))
        text = "".join(b.head + "".join(b.rows) + b.tail for b in blocks)
        if len(text.encode()) <= limit:
            return text
    return fitted(blocks, limit)


def _cells(row: Row, where: str) -> tuple[str, ...]:
    mark = MARKS[row.direction]
    last = f"{mark} ({row.verdicts})" if row.verdicts else mark
    return where, row.title, row.base, row.head, row.change, last


def _check(check: CheckLine, fold: Callable[[Names], str]) -> str:
    place = f" ({escape(check.location)})" if check.location else ""
    first = f" Change first: {escape(check.advice)}" if check.advice else ""
    where = f"{escape(check.title)}, {escape(check.names.shown)}"
    others = fold(Names("", check.names.others)) if check.names.others else ""
    return f"- **{check.outcome}** {where}: {escape(check.message)}{place}.{first}{others}"


def _fold(names: Names) -> str:
    """In one line, with the others to be unfolded."""
    if not names.others:
        return escape(names.shown)
    summary = f"<summary>{names.more}</summary>"
    listed = escape(_listed(names.others))
    return f"{escape(names.shown)} <details>{summary}{listed}</details>".lstrip()


def _counted(names: Names) -> str:
    return escape(names.text) if names.shown else f" The same of {names.more.removeprefix('and ')}."


def verdicts(comparison: Comparison) -> list[tuple[str, str]]:
    """How verdicts changed, with the names of the devices in one line."""
    found = [(how, clean(_listed(names))) for how, names in transitions(comparison)]
    before, now = comparison.verdict_before, comparison.verdict
    whole = before is not None and now is not None and before != now
    return [*([(f"{before} → {now}", f"the {_whole(comparison).lower()}")] * whole), *found]


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
    if comparison.accuracy is not None:
        until = format_percent(comparison.accuracy)
        lines.append(f"Rounds and time are counted until an accuracy of {until}.")
    if same:
        lines.append(f"{same} figures are the same.")
    reasons = [f.reason for _, f in comparison.figures() if f.direction == "not compared"]
    reasons += [f.reason for _, f in comparison.figures() if f.direction == "unknown now"]
    lines += [f"Not compared: {clean(reason)}." for reason in dict.fromkeys(filter(None, reasons))]
    if any(not device.validated for device in comparison.devices):
        lines.append("* not validated on hardware: times, energy and sessions are estimates.")
    return lines


def escape(text: str) -> str:
    """Text that Markdown shows as it is: a list of names may be long."""
    return markdown_text(text, 6_000)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(shortened(name, 100) for name in names[:_MOST_LISTED])
    more = len(names) - _MOST_LISTED
    return f"{shown} and {more} more" if more > 0 else shown


_STATES: Final[dict[Direction, str]] = {
    "worse": "fail",
    "better": "pass",
    "within noise": "warn",
    "unknown now": "not judged",
    "known now": "pass",
    "not compared": "not judged",
}
_LEAST_SCALE: Final = 5.0
_LARGEST_SCALE: Final = 100.0  # Percent at which a bar ends; the figure beside it gives the rest


def render_comparison(comparison: Comparison) -> bytes:
    """The page as UTF-8 HTML. The same comparison gives the same bytes."""
    changed = [pair for pair in comparison.figures() if pair[1].direction != "same"]
    order = list(MARKS)
    sizes = {id(figure): abs(figure.change_percent or 0.0) for _, figure in changed}
    changed.sort(key=lambda pair: (order.index(pair[1].direction), -sizes[id(pair[1])]))
    reach = min(_LARGEST_SCALE, max([_LEAST_SCALE, *sizes.values()]))
    axis = Axis(-reach, reach, (-reach, 0.0, reach))
    return render_page(
        "comparison.html.j2",
        comparison=comparison,
        headline=headline(comparison),
        notes=[*comparison.notes, *presence(comparison)],
        verdicts=verdicts(comparison),
        rows=[_bar(comparison, device, figure, axis) for device, figure in changed],
        axis=charts.axis_row(axis, lambda at: f"{at:+.3g} %" if at else "0 %") if changed else None,
        checks=check_lines(comparison),
        closing=closing(comparison, len(list(comparison.figures())) - len(changed)),
    )


def _bar(
    comparison: Comparison, device: DeviceComparison | None, figure: Change, axis: Axis
) -> Bar:
    base, head = (_range([value], figure) for value in (figure.base, figure.head))
    percent, noise = figure.change_percent, figure.noise_percent
    change, drawing = "", charts.empty_row(axis)
    if percent is not None:
        change = f"{percent:+.1f} %"
        drawing = charts.change_bar(percent, axis, noise, worse=figure.direction == "worse")
    parts = [change, MARKS[figure.direction].partition(" ")[2]]
    parts += [f"± {noise:.1f} % is noise"] if noise and figure.direction != "not compared" else []
    return Bar(
        f"{figure.title}, {_whole(comparison).lower() if device is None else device.title}",
        figure.reason or "",
        drawing,
        f"{base} → {head}",
        ", ".join(filter(None, parts)),
        _STATES.get(figure.direction, "not judged"),
    )
