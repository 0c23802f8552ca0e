"""Shows the difference between two packages: tables for a terminal, or Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from odtpack.errors import some
from odtpack.update.diff import PackageDiff, ParameterChange, ParameterSpec, Verdict
from odtpack_simulator.values.text import clean
from odtpack_simulator.values.units import format_bytes

# Signs that mean something in Markdown or in the HTML inside of it.
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|~@&$])")
_MOST_NAMES = 10


@dataclass(frozen=True, slots=True)
class Section:
    """A titled table, or lines where it has no header."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    figures: str = ""


def headline(verdict: Verdict) -> str:
    """Say the verdict in one sentence."""
    if verdict.level == "incompatible":
        return "incompatible: a trained checkpoint cannot be used with the new package"
    how = (
        "can be used unchanged"
        if verdict.opens_as_is
        else "can be used after its parameters are copied to the new one"
    )
    if verdict.level == "parameters only":
        how = how.replace("unchanged", "once its optimizer state is removed")
        return f"parameters only: a trained checkpoint {how}, without its optimizer state"
    return f"compatible: a trained checkpoint {how}, with its optimizer state"


def sections(diff: PackageDiff) -> Iterator[Section]:
    """Yield what there is to say, the most important first."""
    yield Section("Trained checkpoints", (), tuple(_verdict_lines(diff.verdict)))
    yield Section("App", (), tuple(_app_lines(diff)))
    rows = [
        (
            file.file,
            _size(file.old_size),
            _size(file.new_size),
            _change(file.old_size, file.new_size),
        )
        for file in diff.files
        if file.changed
    ]
    rows.append(
        ("together", _size(diff.old_size), _size(diff.new_size),
         _change(diff.old_size, diff.new_size))
    )  # fmt: skip
    yield Section("Files", ("File", "Old", "New", "Change"), tuple(rows), "Old,New,Change")
    if diff.operators:
        yield Section(
            "Operators",
            ("Model", "Domain", "Added", "Removed"),
            tuple(
                (change.model, change.domain, ", ".join(change.added), ", ".join(change.removed))
                for change in diff.operators
            ),
        )
    for title, changes in (("Settings", diff.settings), ("Versions", diff.versions)):
        if changes:
            yield Section(
                title,
                (title[:-1], "Old", "New"),
                tuple((item.name, _json(item.old), _json(item.new)) for item in changes),
            )
    if diff.parameters:
        yield Section(
            "Parameters",
            ("Parameter", "Old", "New", "Elements that differ", "Largest change"),
            tuple(_parameter_row(item) for item in diff.parameters),
            "Elements that differ,Largest change",
        )


def markdown(diff: PackageDiff) -> str:
    """Return the difference as Markdown for a comment, without HTML."""
    lines = [f"**{escape(headline(diff.verdict))}**", ""]
    for section in sections(diff):
        lines += [f"### {section.title}", ""]
        if section.header:
            flush = section.figures.split(",")
            rules = ("---:" if title in flush else "---" for title in section.header)
            lines += [_row(section.header), f"| {' | '.join(rules)} |"]
            lines += [_row([escape(cell) for cell in row]) for row in section.rows]
        else:
            lines += [f"- {escape(row[0])}" for row in section.rows]
        lines.append("")
    return "\n".join(lines)


def plain(diff: PackageDiff) -> str:
    """Return the difference as text in columns."""
    lines = [clean(headline(diff.verdict))]
    for section in sections(diff):
        rows = [[clean(cell) for cell in row] for row in (section.header, *section.rows) if row]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines.append(section.title.lower())
        cells = (
            (f"{cell:<{size}}" for cell, size in zip(row, widths, strict=True)) for row in rows
        )
        lines += [f"  {'  '.join(row)}".rstrip() for row in cells]
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """Return text that Markdown shows as it is; control characters are replaced."""
    return _MARKDOWN.sub(r"\\\1", clean(text))


def _verdict_lines(verdict: Verdict) -> Iterator[tuple[str]]:
    for problem in verdict.problems:
        yield (f"'{problem.parameter}': {problem.why}",)
    for reason in verdict.reset_reasons:
        yield (f"the optimizer starts afresh: {reason}",)
    if verdict.level != "incompatible" and not verdict.opens_as_is:
        yield (f"carried over: {_names(verdict.carry_over)}",)
    if verdict.starts_fresh:
        yield (f"from the new checkpoint, and trained from there: {_names(verdict.starts_fresh)}",)
    if verdict.new_frozen_values:
        yield (f"from the new checkpoint only: {_names(verdict.new_frozen_values)}",)
    for note in verdict.notes:
        yield (note,)
    if verdict.opens_as_is and not verdict.reset_reasons and not verdict.notes:
        yield ("nothing to do",)


def _app_lines(diff: PackageDiff) -> Iterator[tuple[str]]:
    app = diff.app
    yield ("calls must change" if app.calls_change else "calls stay as they are",)
    for call in app.calls:
        yield (call,)
    if app.reduced_runtime_rebuild:
        yield (
            f"a reduced build of ONNX Runtime must be made again for {_names(app.reduced_runtime)}",
        )
    else:
        yield ("a reduced build of ONNX Runtime has all operators",)
    if app.newer_onnxruntime_needed:
        yield (
            f"ONNX Runtime {app.new_minimum_onnxruntime} or newer is needed, and was "
            f"{app.old_minimum_onnxruntime}",
        )


def _parameter_row(item: ParameterChange) -> tuple[str, ...]:
    differ = "" if item.changed_elements is None else f"{item.changed_elements} of {item.elements}"
    largest = "" if item.largest_change is None else f"{item.largest_change:.3g}"
    if item.changed_elements and item.largest_change is None:
        largest = "not finite"
    return item.name, _spec(item.old), _spec(item.new), differ, largest


def _spec(spec: ParameterSpec | None) -> str:
    if spec is None:
        return "none"
    computed = f", computed in {spec.model_dtype}" if spec.model_dtype else ""
    return f"{spec.dtype}[{', '.join(map(str, spec.shape))}] {spec.role}{computed}"


def _names(names: Sequence[str]) -> str:
    return some(names, _MOST_NAMES) or "none"


def _json(value: object) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)


def _size(size: int | None) -> str:
    return "none" if size is None else format_bytes(size)


def _change(old: int | None, new: int | None) -> str:
    if old is None or new is None:
        return "added" if old is None else "removed"
    if old == new:
        return "same size"
    sign = "+" if new > old else "-"
    share = f" ({sign}{abs(new - old) / old:.1%})" if old else ""
    return f"{sign}{format_bytes(abs(new - old))}{share}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
