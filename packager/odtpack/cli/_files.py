"""Checks of paths and shares before anything long runs."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from odtpack_runtime.errors import OdtpackError

if TYPE_CHECKING:
    from odtpack_runtime.package import Package
    from odtpack_runtime.simulator.result import SimulationResult

DEFAULT_HOLDOUT = 0.2


def check_writable(path: Path, option: str, *, outside: Package | None = None) -> None:
    """Refuse a destination that cannot be written, before the work whose result it gets.

    Args:
        path: File to be written or replaced.
        option: Option that names it, for the message.
        outside: Package that the file must not change.

    Raises:
        OdtpackError: Its folder is missing or read-only, it is a folder, or it belongs to
            the package.
    """
    folder = path.parent
    if path.is_dir():
        reason, hint = "it is a folder", f"name a file in it: {option} {path / 'NAME'}"
    elif not folder.is_dir():
        reason, hint = f"the folder {str(folder)!r} does not exist", f"mkdir -p {folder}"
    elif not os.access(folder, os.W_OK):
        reason, hint = f"the folder {str(folder)!r} is read-only", "choose another folder"
    elif outside is not None and path.resolve() in _files_of(outside):
        reason = "it is a file of the package, which would no longer be the one that was built"
        hint = "choose a path outside the package"
    else:
        return
    raise OdtpackError(
        "cannot-write", f"{option} {str(path)!r} cannot be written: {reason}", hint=hint
    )


def check_not_input(path: Path, option: str, inputs: Iterable[Path | None]) -> None:
    """Refuse a destination that is one of the files that are read.

    Raises:
        OdtpackError: It is.
    """
    for each in inputs:
        if each is not None and path.resolve() == each.resolve():
            raise OdtpackError(
                "cannot-write",
                f"{option} {str(path)!r} cannot be written: it is read by the same command",
                hint="choose another name",
            )


def check_reports(
    reports: Iterable[str],
    *,
    outside: Package | None = None,
    inputs: Iterable[Path | None] = (),
    judged: Path | None = None,
    as_json: bool = False,
) -> None:
    """Refuse destinations of reports that cannot be written, or would not be read whole.

    Args:
        reports: Each a ``FORMAT:PATH``.
        outside: Package that no report may change.
        inputs: Files that the command reads.
        judged: The result that is judged again: only JSON may take its place.
        as_json: Whether the result goes to standard output as well.

    Raises:
        OdtpackError: Of the first one that is no ``FORMAT:PATH``, or cannot be written.
    """
    from odtpack_runtime.reports import STDOUT, parse_destination

    read = list(inputs)
    taken = {STDOUT: "--json"} if as_json else {}
    for text in reports:
        form, path = parse_destination(text)
        place = path if path == STDOUT else path.resolve()
        if place in taken:
            where = "standard output" if path == STDOUT else repr(str(path))
            raise OdtpackError(
                "report-twice",
                f"{taken[place]} and --report {text[:200]} would both be written to {where}",
                hint="give each a file of its own",
            )
        taken[place] = f"--report {text[:200]}"
        if path != STDOUT:
            check_writable(path, "--report", outside=outside)
            check_not_input(path, "--report", read if form == "json" else [*read, judged])


def write_reports(result: SimulationResult, reports: Iterable[str]) -> None:
    """Write each report and say where it is."""
    from odtpack.cli import _console
    from odtpack_runtime.reports import STDOUT, write_report

    for text in reports:
        written = write_report(result, text)
        if written != STDOUT:
            _console.say(f"wrote {written}")


def _files_of(package: Package) -> set[Path]:
    named = {package.path / entry.path for entry in package.manifest.files.all()}
    return named | set(package.path.glob("*manifest.json"))


def check_share(holdout: float | None, *, other: Path | None = None) -> float:
    """The share of samples to hold out.

    Args:
        holdout: What the user asked for, or None.
        other: Further data to evaluate on, which take the place of held-out samples.

    Raises:
        OdtpackError: Not from 0 to below 1, or both were asked for.
    """
    if holdout is None:
        return DEFAULT_HOLDOUT if other is None else 0.0
    if not math.isfinite(holdout) or not 0 <= holdout < 1:
        raise OdtpackError(
            "bad-holdout",
            f"--holdout is {holdout:g}; it is a share of the samples, from 0 to below 1",
            hint="write for example: --holdout 0.2",
        )
    if other is not None and holdout:
        raise OdtpackError(
            "holdout-and-eval",
            "--holdout and --eval both name data to evaluate on",
            hint="leave one of them out",
        )
    return holdout
