"""What every report says of a result, before any format: one object, of a simulation or of a fleet.

:mod:`~odtpack_simulator.reports.simulation` and :mod:`~odtpack_simulator.reports.fleet` make a
:class:`Report`; every format, and the console, draws one.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from odtpack_simulator.figures.metric import CheckKind, worst
from odtpack_simulator.fleet.result import FleetResult
from odtpack_simulator.result import SimulationResult
from odtpack_simulator.values.figure import Check, Verdict, shortened
from odtpack_simulator.values.text import clean, counted
from odtpack_simulator.values.units import format_limit, format_value

AnyResult = SimulationResult | FleetResult
VERDICT_WORDS: Final[dict[Verdict, str]] = {
    "pass": "Pass",
    "warn": "Warning",
    "fail": "Fail",
    "not judged": "Not judged",
}
VERDICT_SYMBOLS: Final[dict[Verdict, str]] = {
    "pass": "✅",
    "warn": "⚠️",
    "fail": "❌",
    "not judged": "❔",
}
NOT_VALIDATED: Final = "not validated on hardware"
UNKNOWN: Final = "–"
MOST_TEXT: Final = 400  # Characters of one text in Markdown
SEVERITY: Final[dict[Verdict, int]] = {"fail": 0, "warn": 1, "not judged": 2, "pass": 3}


@dataclass(frozen=True, kw_only=True)
class ReportFormat:
    """A report format; its name is that of its file, ``<name>_report.py``."""

    render: Callable[[AnyResult], bytes]  # From a result to the bytes of the file
    suffix: str  # Ending of the file in examples, without the dot
    to_stdout: bool = True  # Whether it may go to standard output
    audience: str  # Whom it is for, in Markdown, for the documentation
    written_as: str  # What is written, likewise


@dataclass(frozen=True)
class Suite:
    """The checks of one subject: the package, the federation, or a device."""

    title: str  # What it is called for people
    name: str  # The same for programs
    checks: Sequence[Check]  # Its checks, in stored order
    validated: bool = True  # Whether its profile was compared with the device
    is_device: bool = False  # Whether it is a device
    properties: Sequence[tuple[str, str]] = ()  # Further names and values

    @property
    def note(self) -> str:
        """A remark where its device was never compared with its profile."""
        return "" if self.validated else NOT_VALIDATED


@dataclass(frozen=True)
class Cell:
    """What one device has to say on one topic."""

    state: Verdict | None  # Verdict of its worst check; None where there is nothing to judge
    figure: str  # The figure that stands for the topic
    words: str  # What the check says of it, short: `over 100 ms`, `within 60 s`
    detail: str  # The message of the check, or why there is no figure
    ends: str = ""  # Of a typical value both ends of its interval; of memory what it is that of


@dataclass(frozen=True)
class MatrixRow:
    """A device against the topics of the matrix."""

    title: str
    validated: bool
    verdict: Verdict
    cells: Sequence[Cell]


@dataclass(frozen=True)
class FigureRow:
    """A line of a table of figures, each as (name, figure, remark)."""

    title: str
    validated: bool
    remark: str
    figures: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Table:
    """Figures of several subjects, one line each, under the same names."""

    title: str
    lead: str
    rows: Sequence[FigureRow]
    unknown: str = UNKNOWN


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a report says."""

    result: AnyResult  # What it is of
    of: str  # What was made, in words: `odtpack simulation`
    headline: str  # The verdict in a few words
    tally: Sequence[tuple[Verdict, str]] = ()  # How much does not pass, worst first
    caution: str = ""  # A sentence where verdicts rest on profiles that were never compared
    key_figures: Sequence[tuple[str, str, str]]  # The figures at the top: (name, figure, remark)
    summary: str = ""  # A sentence for the console
    kinds: Mapping[str, CheckKind]  # What is known of each check
    suites: Sequence[Suite]  # The checks, those of the whole first
    topics: Sequence[str] = ()  # Columns of the matrix
    matrix: Sequence[MatrixRow] = ()  # Devices against topics
    tables: Sequence[Table] = ()  # Further figures
    # Memory of each device's process: (title, drawing, words).
    bars: Sequence[tuple[str, str, str]] = ()
    legend: str = ""  # What the characters of a drawing are
    # What has no figure though no check asks for one, and why.
    unknown: Sequence[tuple[str, str]] = ()
    notes: Sequence[tuple[str, str]] = ()  # Further sentences, each with a heading
    advice: str = ""  # What to change first where no check says so

    @property
    def name(self) -> str:
        """The package."""
        return self.result.package.name

    @property
    def made(self) -> str:
        """Of which commit the result is, and when it was made; empty where that is unknown."""
        origin = self.result.origin
        parts = [f"commit {origin.commit[:12]}"] if origin.commit else []
        if origin.date:
            parts.append(origin.date.replace("T", " ").replace("+00:00", " UTC"))
        return ", ".join(parts)

    @property
    def verdict(self) -> Verdict:
        """The verdict of the whole result."""
        return self.result.verdict

    @property
    def all_validated(self) -> bool:
        """Whether every profile was compared with its device."""
        return all(suite.validated for suite in self.suites)

    def checks(self) -> list[tuple[Suite, Check]]:
        """Every check with what it is of, in stored order."""
        return [(suite, check) for suite in self.suites for check in suite.checks]

    def title(self, metric: str) -> str:
        """What a metric is called."""
        kind = self.kinds.get(metric)
        return metric.replace("_", " ").capitalize() if kind is None else kind.title


@dataclass(frozen=True)
class CheckRow:
    """A check as a line of a table; ``note`` says where its device was never compared."""

    state: Verdict
    title: str
    device: str
    actual: str
    limit: str
    message: str
    advice: str | None
    location: str | None
    note: str


def check_rows(report: Report) -> list[CheckRow]:
    """Every check, worst first, else in stored order."""
    rows = [
        CheckRow(
            state=check.state,
            title=report.title(check.metric),
            device=suite.title,
            actual=figure_text(check, check.actual),
            limit=figure_text(check, check.limit, chosen=True),
            message=check.message,
            advice=check.advice,
            location=check.budget_location,
            note=suite.note,
        )
        for suite, check in report.checks()
    ]
    return sorted(rows, key=lambda row: SEVERITY[row.state])


def figure_text(check: Check, value: float | None, *, chosen: bool = False) -> str:
    """A figure of a check, or a limit that somebody chose; a dash where there is none."""
    if value is None:
        return UNKNOWN
    return format_limit(value, check.unit) if chosen else format_value(value, check.unit)


@dataclass(frozen=True)
class FirstFix:
    """One thing to change, with the devices it concerns and the worst of them."""

    state: Verdict
    title: str
    devices: str
    message: str
    advice: str
    note: str


def first_fixes(report: Report) -> list[FirstFix]:
    """What to change first: one entry per failing metric, each from its worst device."""
    groups: dict[str, list[tuple[Suite, Check]]] = {}
    for suite, check in report.checks():
        if check.status == "fail" and check.advice:
            groups.setdefault(check.metric, []).append((suite, check))
    fixes = []
    for metric, members in groups.items():
        suite, check = worst(members, report.kinds, [*SEVERITY])
        names = dict.fromkeys([suite.title, *(each.title for each, _ in members if each.is_device)])
        fixes.append(
            FirstFix(
                state=min((other.state for _, other in members), key=SEVERITY.__getitem__),
                title=report.title(metric),
                devices=name_list([*names]) if suite.is_device else "",
                message=check.message,
                advice=check.advice or "",
                note=next((s.note for s, _ in members if s.note), ""),
            )
        )
    order = {kind.title: place for place, kind in enumerate(report.kinds.values())}
    fixes.sort(key=lambda fix: (SEVERITY[fix.state], order.get(fix.title, len(order)), fix.title))
    folded: dict[tuple[str, str], FirstFix] = {}
    for fix in fixes:  # what the same change would correct stands together
        other = folded.get((fix.advice, fix.devices))
        if other is not None:
            title, message = f"{other.title}; {fix.title}", f"{other.message}; {fix.message}"
            folded[fix.advice, fix.devices] = replace(other, title=title, message=message)
        else:
            folded[fix.advice, fix.devices] = fix
    return [*folded.values()]


@dataclass(frozen=True)
class Open:
    """Checks that could not be judged for one reason, on the same devices."""

    titles: str
    devices: str
    reason: str


def not_judged(report: Report) -> list[Open]:
    """Why checks could not be judged, one entry per reason and set of devices, in stored order."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for suite, check in report.checks():
        if check.status == "not judged":
            reason = check.message
            if check.actual is not None:
                # The figure stands before the reason, and differs from device to device.
                reason = reason.partition("; ")[2] or reason
            if reason.startswith("the profile gives no"):
                reason = reason.partition(": ")[0]
            named = reasons.setdefault((reason, report.title(check.metric)), [])
            named += [suite.title] if suite.is_device else []
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (reason, title), devices in reasons.items():
        groups.setdefault((reason, tuple(devices)), []).append(title)
    return [
        Open(", ".join(titles), name_list(devices), reason)
        for (reason, devices), titles in groups.items()
    ]


def tally(
    whole: Sequence[Check], devices: Sequence[Verdict], name: str = "", noun: str = ""
) -> list[tuple[Verdict, str]]:
    """How many devices have each verdict but ``pass``, worst first, and what the whole does."""
    # `noun`: What is counted where it is not devices: a check.
    words: dict[Verdict, tuple[str, str]] = {
        "fail": ("fails", "fail"),
        "warn": ("has a warning", "have a warning"),
        "not judged": ("could not be judged", "could not be judged"),
    }
    found: list[tuple[Verdict, str]] = []
    states: list[Verdict] = ["pass", *(check.state for check in whole)]
    state = min(states, key=SEVERITY.__getitem__)
    if state != "pass":
        full = " in full" if state == "not judged" else ""
        found.append((state, f"{name} itself {words[state][0]}{full}"))
    for verdict, (one, many) in words.items():
        if count := list(devices).count(verdict):
            what = counted(count, noun) if noun else f"{count}"
            found.append((verdict, f"{what} {one if count == 1 else many}"))
    return found


def caution(validated: Sequence[bool]) -> str:
    """A sentence where verdicts rest on profiles that were not compared with the device."""
    total, open_ones = len(validated), list(validated).count(False)
    if not open_ones:
        return ""
    who = "The profile is" if total == 1 else "The profiles are"
    if open_ones < total:
        who = f"{open_ones} of {total} profiles {'is' if open_ones == 1 else 'are'}"
    return f"{who} {NOT_VALIDATED}: times and energy are estimates."


def name_list(names: Sequence[str]) -> str:
    """The first three names, and how many there are more."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def location(text: str | None) -> tuple[str, int] | None:
    """File and line of a ``budget_location`` such as ``ci/budgets.toml:12``."""
    path, colon, line = (text or "").rpartition(":")
    if not colon or not path or not re.fullmatch(r"[0-9]{1,9}", line):
        return None
    return path, int(line)


def markdown_text(text: str, most: int = MOST_TEXT) -> str:
    """Text that Markdown, HTML and GitHub's mentions, references and links leave alone."""
    short = shortened(clean(text), most)
    entities = short.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    escaped = re.sub(r"([\\`*_\[\]|~$])", r"\\\1", entities)
    # A zero-width space between a sign and a name breaks what GitHub would link or notify.
    return re.sub(r"(@|#(?=\w)|:(?=//)|\bwww(?=\.))", "\\1\N{ZERO WIDTH SPACE}", escaped)


@dataclass(frozen=True)
class Block:
    """A part of a Markdown text with rows that may be cut: ``head``, rows, ``tail``."""

    # `whole` parts are never cut: there is room for them before there is any for rows.
    head: str
    rows: Sequence[str] = ()
    tail: str = ""
    what: str = "rows"
    whole: bool = False


def fitted(blocks: Sequence[Block], limit: int) -> str:
    """Blocks as text of at most ``limit`` bytes: what does not fit is left out and counted."""
    # A comment on GitHub holds so much. Rows are left out from the end of each part, and parts from
    # the end of the text.
    note_room = 120
    held = sum(len((b.head + b.tail).encode()) for b in blocks if b.whole)
    text, used = "", 0
    for block in blocks:
        frame = len((block.head + block.tail).encode())
        if block.whole:
            text, used, held = text + block.head + block.tail, used + frame, held - frame
            continue
        room = limit - used - held - frame - note_room
        if room < 0:
            continue
        kept = 0
        while kept < len(block.rows) and (size := len(block.rows[kept].encode())) <= room:
            room -= size
            kept += 1
        left = len(block.rows) - kept
        note = f"\n_{left} more {block.what} left out: a comment holds no more._\n" if left else ""
        part = block.head + "".join(block.rows[:kept]) + note + block.tail
        text, used = text + part, used + len(part.encode())
    return text.encode()[:limit].decode(errors="ignore")
