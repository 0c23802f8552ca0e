"""What the shell completes beyond names of commands, options and choices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def devices(incomplete: str) -> list[str]:
    """Shipped profiles whose name, or its part after the vendor, begins so, and profile files."""
    from odtpack_simulator.device.profile import list_profiles

    names = list_profiles()
    found = [name for name in names if name.startswith(incomplete)]
    if "/" not in incomplete:
        short = (name.rpartition("/")[2] for name in names)
        found += [name for name in short if incomplete and name.startswith(incomplete)]
    return found + _files(incomplete, ".toml")


def devices_or_all(incomplete: str) -> list[str]:
    """The same where ``all`` stands for all shipped ones."""
    return [*(["all"] if "all".startswith(incomplete) else []), *devices(incomplete)]


def error_codes(incomplete: str) -> list[str]:
    """Codes of errors."""
    from odtpack_runtime.errors import error_codes as table

    return [code for code in table() if code.startswith(incomplete)]


def reports(incomplete: str) -> list[str]:
    """Formats of reports, and the paths after them."""
    from odtpack_simulator.reports import report_formats

    return _formats(incomplete, report_formats())


def size_reports(incomplete: str) -> list[str]:
    """Formats in which the sizes of a package can be reported."""
    return _formats(incomplete, ("html", "json"))


def _formats(incomplete: str, formats: Sequence[str]) -> list[str]:
    form, colon, path = incomplete.partition(":")
    if not colon:
        return [f"{name}:" for name in formats if name.startswith(form)]
    return [f"{form}:{each}" for each in _files(path, "")] if form in formats else []


def _files(incomplete: str, suffix: str) -> list[str]:
    """Files that begin so, and folders with a slash; a name of a few letters looks into none."""
    folder, slash, name = incomplete.rpartition("/")
    try:
        entries = sorted(Path(folder or ("/" if slash else ".")).iterdir())
    except OSError:
        return []
    return [
        f"{folder}{slash}{entry.name}" + ("/" if entry.is_dir() else "")
        for entry in entries
        if entry.name.startswith(name)
        and not (entry.name.startswith(".") and not name)
        and (entry.is_dir() or entry.name.endswith(suffix))
    ]
