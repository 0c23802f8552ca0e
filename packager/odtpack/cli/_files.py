"""Checks of paths and shares before anything long runs."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from odtpack.cli import _console
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.atomic import remove_stale, temporary_name, write_whole

if TYPE_CHECKING:
    from odtpack.recipe import Recipe
    from odtpack_runtime.package.package import Package
    from odtpack_simulator.reports.report import AnyResult

DEFAULT_HOLDOUT = 0.2


def find_recipe(recipe: Path | None, *, wanted: bool) -> Recipe | None:
    """Read the recipe of a command; by default ``recipe.toml`` in the current folder."""
    from odtpack.recipe import read_recipe

    if recipe is None and wanted and (usual := Path("recipe.toml")).is_file():
        _console.status(f"using {usual}")
        recipe = usual
    return None if recipe is None else read_recipe(recipe)


def check_writable(
    path: Path, option: str, inputs: Iterable[Path | None], *, outside: Package | None = None
) -> None:
    """Refuse a destination that cannot be written, or is read by the same command."""
    # A file is created beside it and removed again: permissions do not say everything.
    try:
        reason, hint = _objection(path, option, outside)
    except OSError as error:  # the name is too long, or the folder is not readable
        reason, hint = error.strerror or str(error), "choose another path"
    if reason:
        text = f"{option} {str(path)!r} cannot be written: {reason}"
        raise OdtpackError("cannot-write", text, hint=hint)
    check_not_input(path, option, inputs)


def _objection(path: Path, option: str, outside: Package | None) -> tuple[str, str]:
    """Why a file cannot be written, and what to do; an empty reason where it can."""
    folder = path.parent
    if path.is_dir():
        return "it is a folder", f"name a file in it: {option} {path / 'NAME'}"
    if path.exists() and not path.is_file():
        return "it is not an ordinary file, which could be replaced", "name another file"
    if not folder.is_dir():
        if reason := _obstacle(folder):
            return reason, "choose another folder"
        return f"the folder {str(folder)!r} does not exist", f"mkdir -p {shlex.quote(str(folder))}"
    if outside is not None and path.resolve() in _files_of(outside):
        reason = "it is a file of the package, which must stay as it was built"
        return reason, "choose a path outside the package"
    return _inside_package(folder) or _refusal(path), "choose another folder"


def check_creatable(folder: Path, option: str) -> None:
    """Refuse a folder that cannot be made or written to, before the work whose results it gets."""
    try:
        reason = _obstacle(folder) or _inside_package(folder)
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        text = f"{option} {str(folder)!r} cannot be made a folder: {reason}"
        raise OdtpackError("cannot-write", text)


def _obstacle(folder: Path) -> str:
    """Why nothing can be created below a folder that may not exist; empty where it can."""
    # Of a relative path without any part that exists it is the current folder.
    nearest = next((each for each in (folder, *folder.parents) if os.path.lexists(each)), Path())
    if not nearest.is_dir():
        return f"{str(nearest)!r} is not a folder"
    return _refusal(nearest / (folder.name or "new"))


def _inside_package(folder: Path) -> str:
    """Why a folder takes no further file, if it is a package or lies in one; else empty."""
    from odtpack_runtime.package.manifest import Manifest
    from odtpack_runtime.package.package import MANIFEST_NAME, read_manifest

    whole = folder.resolve()
    for each in (whole, *whole.parents):
        with suppress(OdtpackError):  # there is none, or it is something else's
            Manifest.from_json(read_manifest(each / MANIFEST_NAME), str(each))
            return f"{each} is a package: a further file in it would not pass odtpack verify"
    return ""


def _refusal(path: Path) -> str:
    """Why no file can be created beside a path; empty where it can. The file is removed again."""
    remove_stale(path)  # also what a killed process left of this very check
    probe = temporary_name(path)
    try:
        os.close(os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        probe.unlink()
    except OSError as error:
        text = f"no file can be created in the folder {str(path.parent)!r}"
        return f"{text}: {error.strerror or error}"
    return ""


def check_not_input(path: Path, option: str, inputs: Iterable[Path | None]) -> None:
    """Refuse a destination that is one of the files that are read."""
    for each in inputs:
        if each is not None and path.resolve() == each.resolve():
            what = f"{option} {str(path)!r} cannot be written: it is read by the same command"
            raise OdtpackError("cannot-write", what, hint="choose another name")


def check_reports(
    reports: Iterable[str],
    *,
    outside: Package | None = None,
    inputs: Iterable[Path | None] = (),
    judged: Path | None = None,
    badges: Iterable[Path] = (),
    formats: Sequence[str] | None = None,
) -> None:
    """Refuse destinations of reports that cannot be written, or would not be read whole."""
    from odtpack_simulator.reports import STDOUT, parse_destination

    read = list(inputs)
    taken = {STDOUT: "--json"} if _console.wants_json.get() else {}
    destinations = [("--report", text, *parse_destination(text, formats)) for text in reports]
    destinations += [("--badge", str(path), "badge", path) for path in badges]
    for option, text, form, path in destinations:
        place = path if path == STDOUT else path.resolve()
        if place in taken:
            where = "standard output" if path == STDOUT else repr(str(path))
            what = f"{taken[place]} and {option} {text[:200]} would both be written to {where}"
            raise OdtpackError("report-twice", what)
        taken[place] = f"{option} {text[:200]}"
        if path != STDOUT:
            inputs = read if form == "json" else [*read, judged]
            check_writable(path, option, inputs, outside=outside)


def write_reports(result: AnyResult, reports: Iterable[str]) -> None:
    """Write each report and say where it is."""
    from odtpack_simulator.reports import STDOUT, write_report

    for text in reports:
        written = write_report(result, text)
        if written != STDOUT:
            _console.wrote(written)


def write_file(path: Path, content: bytes) -> None:
    """Write a file, and say so."""
    write_whole(path, content)
    _console.wrote(path)


def write_text(text: str, out: Path | None) -> None:
    """Write the result of a command to a file, or print it as it is."""
    if out is not None:
        write_file(out, text.encode())
    else:
        _console.print_plain(text)


def _files_of(package: Package) -> set[Path]:
    named = {package.path / entry.path for entry in package.manifest.files.all()}
    return named | set(package.path.glob("*manifest.json"))


def check_share(holdout: float | None, *, other: Path | None = None) -> float:
    """The share of samples to hold out."""
    if holdout is None:
        return DEFAULT_HOLDOUT if other is None else 0.0
    if not math.isfinite(holdout) or not 0 <= holdout < 1:
        what = f"--holdout is {holdout:g}; it is a share of the samples, from 0 to below 1"
        raise OdtpackError("bad-holdout", what)
    if other is not None and holdout:
        raise OdtpackError("holdout-and-eval", "--holdout and --eval both name data to evaluate on")
    return holdout
