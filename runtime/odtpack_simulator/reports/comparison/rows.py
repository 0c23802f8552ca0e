"""What of a comparison shares a row: devices on which a figure changed alike, and checks alike.

With 25 devices a row for each would hide what changed. A figure that does not depend on the
device is reported once; devices whose verdict changed have rows of their own, before the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from odtpack_simulator.budgets.budget_metric import shortened
from odtpack_simulator.budgets.compare import Comparison, DeviceComparison, Direction, Figure
from odtpack_simulator.budgets.metrics import titles
from odtpack_simulator.reports.view.view import worst
from odtpack_simulator.result.result import Check, CheckUnit, Verdict
from odtpack_simulator.values.plain_text import clean
from odtpack_simulator.values.units import Interval, format_interval, format_value

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

_VERDICTS: Final[tuple[Verdict, ...]] = ("fail", "not judged", "warn", "pass")
_CHANGED: Final = ("worse", "better")
_TOLD_BY_VERDICT: Final = (*_CHANGED, "unknown now")
"""Directions that can be the reason of another verdict."""
_MOST_NAMES: Final = 2
_POINTS: Final = 1.0
_SHARE: Final = 0.2
"""Changes are alike that differ by no more than a point of a percent, or a fifth of themselves."""

_Member = tuple[DeviceComparison, Figure]


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
        return f"and {len(self.others)} other{'s' * (len(self.others) > 1)}"


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one metric that changed alike.

    Attributes:
        names: The package, or the devices.
        verdicts: How the verdict of the devices changed, such as ``pass → fail``; empty where it
            did not.
        title: Name of the metric.
        base: Figure, or range of figures, before.
        head: The same now.
        change: In percent, and what of it can be chance.
        direction: The same of all of them.
    """

    names: Names
    verdicts: str
    title: str
    base: str
    head: str
    change: str
    direction: Direction


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
    """What changed, the worst first, and how many figures did not change.

    Devices whose verdict changed come before everything else.
    """
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
            found.append((_rank("", [figure]), _row(Names("Package"), "", [figure])))
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
    """How verdicts changed, such as ``pass → fail``, and on which devices; the worst first.

    Where all devices changed alike, that is all there is to say of them.
    """
    groups: dict[tuple[Verdict, Verdict], list[str]] = {}
    for device in comparison.devices:
        before, now = device.verdict_before, device.verdict
        if before is not None and now is not None and before != now:
            groups.setdefault((now, before), []).append(title(device))
    order = sorted(groups, key=lambda key: (_VERDICTS.index(key[0]), _VERDICTS.index(key[1])))
    both = sum(device.presence == "both" for device in comparison.devices)
    found = []
    for now, before in order:
        names = groups[now, before]
        every = len(names) == both > _MOST_NAMES
        found.append((f"{before} → {now}", [f"all {both} devices"] if every else names))
    return found


def check_lines(comparison: Comparison) -> list[CheckLine]:
    """What did not pass, the worst first; devices of which the same metric fails share a line."""
    known = titles()
    marked = {device.title: title(device) for device in comparison.devices}
    everyone = [marked[device.title] for device in comparison.devices if device.verdict is not None]
    groups: dict[tuple[int, str, str, str], list[tuple[str | None, Check]]] = {}
    for each in comparison.checks:
        check = each.check
        rank = 2 if check.status == "not judged" else 0 if check.level == "error" else 1
        reason = check.message if check.status == "not judged" else ""
        metric = known.get(check.metric, check.metric)
        key = (rank, metric, check.budget_location or "", reason)
        groups.setdefault(key, []).append((each.device, check))
    words = ("fails", "warning", "not judged")
    lines = []
    for (rank, metric, location, _), members in sorted(groups.items(), key=lambda g: g[0][0]):
        first, check = worst(members)
        devices = [marked.get(device, device) for device, _ in members if device is not None]
        alike = {other.message for _, other in members} == {check.message}
        if first is None:
            names = Names("package")
        elif alike or len(devices) == 1:
            names = named(devices, everyone, len(everyone))
        else:  # the message is that of one device, which is named first
            shown = marked.get(first, first)
            rest = [name for name in devices if name != shown]
            names = Names(_short(shown), tuple(map(_short, rest)))
            if len(devices) == len(everyone):
                names = Names(f"all {len(everyone)} devices, worst {_short(shown)}")
        lines.append(
            CheckLine(words[rank], names, metric, check.message, check.advice or "", location)
        )
    return lines


def named(names: Sequence[str], everyone: Sequence[str], total: int) -> Names:
    """A few devices by their names; many by those that are missing, or by the first of them.

    Args:
        names: The devices.
        everyone: All that have the figure.
        total: Number of all devices.
    """
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
    values = Counter(map(_figures, members))
    common, count = values.most_common(1)[0]
    if count > 1 and 2 * count > devices:  # it does not depend on the device
        yield "", [member for member in members if _figures(member) == common]
        members = [member for member in members if _figures(member) != common]
    parts: dict[tuple[str, Direction], list[_Member]] = {}
    for device, figure in members:
        before, now = device.verdict_before, device.verdict
        counts = before != now and figure.direction in _TOLD_BY_VERDICT
        verdicts = f"{before} → {now}" if counts else ""
        parts.setdefault((verdicts, figure.direction), []).append((device, figure))
    for (verdicts, direction), part in parts.items():
        for group in _alike(part) if direction in _CHANGED else [part]:
            yield verdicts, group


def _figures(member: _Member) -> tuple[float | None, float | None, Direction]:
    _, figure = member
    return figure.base, figure.head, figure.direction


def _alike(members: list[_Member]) -> Iterator[list[_Member]]:
    """Members whose changes in percent lie close together, the largest change first."""
    unknown = [member for member in members if member[1].change_percent is None]
    if unknown:
        yield unknown
    known = [(figure.change_percent, device, figure) for device, figure in members]
    ranked = sorted(
        ((change, (device, figure)) for change, device, figure in known if change is not None),
        key=lambda each: -abs(each[0]),
    )
    group: list[_Member] = []
    largest = 0.0
    for change, member in ranked:
        if group and abs(largest - change) > max(_POINTS, _SHARE * abs(largest)):
            yield group
            group = []
        if not group:
            largest = change
        group.append(member)
    if group:
        yield group


def _rank(verdicts: str, figures: Sequence[Figure]) -> tuple[int, int, float]:
    """Changed verdicts first, the worst of them before others; then by direction and change."""
    place = len(_VERDICTS)
    if verdicts:
        place = next(i for i, v in enumerate(_VERDICTS) if verdicts.endswith(f"→ {v}"))
    largest = max(abs(figure.change_percent or 0.0) for figure in figures)
    return place, list(MARKS).index(figures[0].direction), -largest


def _row(names: Names, verdicts: str, figures: Sequence[Figure]) -> Row:
    first = figures[0]
    changes = [f.change_percent for f in figures if f.change_percent is not None]
    change = _change_range(changes) if changes else "–"
    noise = max((f.noise_percent or 0.0 for f in figures), default=0.0)
    if noise >= 0.05:
        change += f" (noise ± {noise:.{0 if noise >= 100 else 1}f} %)"
    return Row(
        names=names,
        verdicts=verdicts,
        title=first.title,
        base=_range((figure.base for figure in figures), first.unit),
        head=_range((figure.head for figure in figures), first.unit),
        change=change,
        direction=first.direction,
    )


def _range(values: Iterable[float | None], unit: CheckUnit) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "unknown"
    low, high = min(known), max(known)
    if format_value(low, unit) == format_value(high, unit):
        return format_value(low, unit)
    return format_interval(Interval(low=low, typical=low, high=high), unit)


def _change_range(percents: Sequence[float]) -> str:
    """A change that is many times the base reads as a factor: ``+4.2 %``, ``× 35``."""
    low, high = min(percents), max(percents)
    if abs(high) < abs(low):
        low, high = high, low
    first, last = (f"{p:+.1f} %" if p < 1000 else f"× {1 + p / 100:,.0f}" for p in (low, high))
    return first if first == last else f"{first.removesuffix(' %')} to {last}"
