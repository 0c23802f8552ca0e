"""Annotations for GitHub Actions: workflow commands that a step prints.

GitHub shows at most ten errors and ten warnings of one step and drops the
others without a word; notices are kept to ten as well. Checks of one metric
that stand on one line of the budgets are therefore one annotation for all its
devices, and where there are still more than ten, the last one names the rest.

Sources: ``docs/problem-matchers.md`` of actions/toolkit for the limits (ten
warnings and ten errors of a step, fifty of a job), and the runner's
``ActionCommand`` for what is escaped.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from odtpack_simulator.figures.metric import worst
from odtpack_simulator.reports import report_of
from odtpack_simulator.reports.report import (
    NOT_VALIDATED,
    SEVERITY,
    AnyResult,
    Report,
    ReportFormat,
    Suite,
    location,
    name_list,
)
from odtpack_simulator.values.figure import Check, Verdict, shortened
from odtpack_simulator.values.text import clean

MOST_OF_A_LEVEL: Final = 10
MOST_MESSAGE: Final = 4_000  # Characters of a message; GitHub takes 64 KB, more than is read
_MOST_TITLE: Final = 200
_MOST_DEVICES: Final = 12

Level = Literal["error", "warning", "notice"]
_LEVELS: Final[dict[Verdict, Level]] = {"fail": "error", "warn": "warning", "not judged": "notice"}


@dataclass(frozen=True)
class _Annotation:
    level: Level
    title: str
    lines: tuple[str, ...]
    where: tuple[str, int] | None


def render_github(result: AnyResult) -> bytes:
    """The annotations as lines of UTF-8, worst first, at most ten of a level."""
    # The first is about the whole result: a notice where it passes.
    annotations = _annotations(report_of(result))
    lines = []
    for level in ("error", "warning", "notice"):
        of_level = [annotation for annotation in annotations if annotation.level == level]
        lines += [_command(annotation) for annotation in _at_most(of_level)]
    return "".join(f"{line}\n" for line in lines).encode("utf-8")


def _annotations(report: Report) -> list[_Annotation]:
    groups: dict[tuple[Verdict, str, str | None], list[tuple[Suite, Check]]] = {}
    for suite, check in report.checks():
        if check.state != "pass":
            key = (check.state, check.metric, check.budget_location)
            groups.setdefault(key, []).append((suite, check))
    ordered = sorted(groups.values(), key=lambda members: SEVERITY[members[0][1].state])
    words = [text for _, text in report.tally]
    if not report.all_validated:
        words.append(f"profiles {NOT_VALIDATED}: times are estimates")
    summary = _Annotation("notice", report.headline, tuple(words) or ("odtpack",), None)
    return [summary, *(_of_group(report, members) for members in ordered)]


def _of_group(report: Report, members: list[tuple[Suite, Check]]) -> _Annotation:
    first = members[0][1]
    title = report.title(first.metric)
    names = [suite.title for suite, _ in members if suite.is_device]
    if names:
        title += f": {name_list(names)}"
    lines = []
    for suite, check in members[:_MOST_DEVICES]:
        mark = f" ({suite.note})" if suite.note else ""
        lines.append(f"{suite.title}{mark}: {check.message}" if suite.is_device else check.message)
    if len(members) > _MOST_DEVICES:
        lines.append(f"and {len(members) - _MOST_DEVICES} more devices")
    advice = worst(members, report.kinds, [*SEVERITY])[1].advice
    if advice:
        lines.append(f"Change first: {advice}")
    return _Annotation(_LEVELS[first.state], title, tuple(lines), location(first.budget_location))


def _at_most(annotations: list[_Annotation]) -> list[_Annotation]:
    """Ten of a level; the last of more than ten stands for all that are left."""
    if len(annotations) <= MOST_OF_A_LEVEL:
        return annotations
    rest = annotations[MOST_OF_A_LEVEL - 1 :]
    more = _Annotation(
        rest[0].level,
        f"{len(rest)} more, of which GitHub would show one",
        tuple(annotation.title for annotation in rest),
        None,
    )
    return [*annotations[: MOST_OF_A_LEVEL - 1], more]


def _command(annotation: _Annotation) -> str:
    properties = []
    if annotation.where is not None:
        path, line = annotation.where
        properties += [f"file={_property(_from_root(path))}", f"line={line}"]
    properties.append(f"title={_property(shortened(annotation.title, _MOST_TITLE))}")
    message = shortened("\n".join(clean(line) for line in annotation.lines), MOST_MESSAGE)
    return f"::{annotation.level} {','.join(properties)}::{_data(message)}"


def _from_root(path: str) -> str:
    """The path from the root of the repository, by which GitHub finds the file."""
    # A job may run in a folder below, and may be given absolute paths. What lies outside the
    # repository stays as it is.
    workspace = os.environ.get("GITHUB_WORKSPACE")
    here = Path.cwd()
    found = (each for each in (here, *here.parents) if (each / ".git").exists())
    root = Path(workspace) if workspace else next(found, here)
    full = Path(os.path.abspath(path))  # noqa: PTH100 - Path.absolute keeps "..", GitHub does not
    return full.relative_to(root).as_posix() if full.is_relative_to(root) else path


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(clean(text)).replace(":", "%3A").replace(",", "%2C")


FORMAT: Final = ReportFormat(
    render=render_github,
    suffix="txt",
    audience="annotations beside the lines of the budgets",
    written_as="workflow commands, at most ten of a level",
)
