"""Text: what of it is safe to show, paths in reports, TOML on a line, small files from outside.

Imports nothing large.
"""

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import tomli_w

# Text from outside made safe to show: on a terminal, in a CI job's log, in every report.

# Control characters (line breaks and ANSI sequences among them), invisible characters and those
# that change the reading order, and what XML does not allow.
_CONTROL: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff"
    "\ufeff\ufff9-\ufffb\ufffe\uffff\U000e0000-\U000e007f]"
)
# What a CI job's log carries out: "::error ::" at the start of a line, which a terminal's width may
# make of any place, "##[error]" and "##vso[task...]" anywhere.
_COMMAND: Final = re.compile(
    r"^(\s*):(?=:)|#(?=#\w*\[)|:(?=:(?:add|debug|echo|endgroup|error|group|internal|notice|remove|save|set"
    r"|stop|warning)(?:-[a-z-]+)?(?: |::))",
    re.IGNORECASE,
)
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


def clean(text: str) -> str:
    """The text in one line, with a replacement for each character that controls or reorders."""
    # Line breaks become spaces. What is left neither begins a line nor a workflow command, moves no
    # cursor and hides nothing. It still has to be escaped for the format that it goes to.
    flat = _CONTROL.sub(_REPLACEMENT, text.replace("\n", " "))
    return _COMMAND.sub(lambda found: (found[1] or "") + _REPLACEMENT, flat)


def clean_lines(text: str) -> str:
    """:func:`clean` each line of a text that has lines of its own, whose parts are clean."""
    return "\n".join(map(clean, text.split("\n")))


def counted(count: int, noun: str) -> str:
    """A number with what it counts: ``1 step``, ``1,200 steps``."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def markdown_row(cells: Iterable[str]) -> str:
    """A line of a table in Markdown; the cells are escaped already."""
    return f"| {' | '.join(cells)} |"


# Paths as reports show them.


def shown_path(path: Path) -> str:
    """Return a path without the folders above the working one: their names may be a person's."""
    # One that lies elsewhere is its last part.
    if not path.is_absolute():
        return str(path)
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else path.name or str(path)


def last_part(path: str) -> str:
    """The name at the end of a path, of this system or another."""
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1] or path


# Keys and values of TOML on one line, for files whose layout is part of what people read.
#
# The text of a value is tomli-w's. It has no comments and gives every list and table lines of its
# own, so what stands on which line is ours.


def toml_value(value: object) -> str:
    """Return a value as TOML: lists and tables in one line."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{toml_key(k)} = {toml_value(v)}' for k, v in value.items())} }}"
    return _escaped(tomli_w.dumps({"k": value}).removeprefix("k = ").removesuffix("\n"))


def toml_key(*parts: str) -> str:
    """Return a key, in quotes where it must be; several parts are joined by dots."""
    return ".".join(_escaped(tomli_w.dumps({part: 0}).removesuffix(" = 0\n")) for part in parts)


def _escaped(text: str) -> str:
    """Text of TOML in which nothing hides or reorders what people read."""
    # Half a pair of surrogates has no escape either: whoever writes it says what is wrong.
    return _CONTROL.sub(
        lambda found: found[0] if 0xD800 <= ord(found[0]) < 0xE000 else f"\\U{ord(found[0]):08X}",
        text,
    )


# Small text files from outside.


def read_bounded(path: Path, *, limit: int, code: str, what: str) -> bytes:
    """The whole content of a regular file of at most ``limit`` bytes."""
    # `limit`: Most bytes that are read; more is an error, not a truncation.
    from odtpack_runtime.errors import OdtpackError

    if not path.is_file():
        kind = "is not a regular file" if path.exists() else "does not exist"
        name = path.name or str(path)
        raise OdtpackError(f"{code}-missing", f"the {what} {name!r} {kind}", where=str(path))
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(min(size, limit) + 1)  # reading sets aside what is asked for
    except OSError as error:
        text = f"the {what} {path.name!r} cannot be read: {error.strerror}"
        raise OdtpackError(f"{code}-unreadable", text, where=str(path)) from error
    if len(data) > limit:
        text = f"the {what} {path.name!r} is larger than {limit} bytes"
        raise OdtpackError(f"{code}-too-large", text, where=str(path))
    return data


def parse_toml(data: bytes, *, code: str, what: str, where: str) -> dict[str, Any]:
    """Parse TOML 1.0."""
    from odtpack_runtime.errors import OdtpackError

    try:
        return tomllib.loads(data.decode("utf-8-sig"))  # editors on Windows write a mark
    except UnicodeDecodeError as error:
        text = f"the {what} is not UTF-8 text (byte {error.start})"
        raise OdtpackError(
            f"{code}-malformed", text, where=where, hint="save it as UTF-8"
        ) from error
    except (ValueError, RecursionError) as error:
        detail = str(error) if isinstance(error, ValueError) else "nested too deeply"
        text = f"the {what} is not valid TOML: {detail[:200]}"
        raise OdtpackError(f"{code}-malformed", text, where=where) from error


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """Line of each table header and of each key in it, for messages."""
    # Only `[table]` and `[[table]]` headers and `key = value` lines are recognised, with bare and
    # quoted keys; a key written otherwise, as inside of `{ }`, has no line. Tables of an array are
    # counted from `"0"`.
    lines: dict[tuple[str, ...], int] = {}
    counts: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), start=1):
        if line.lstrip().startswith("["):
            table = _header_path(line)
            if line.lstrip().startswith("[["):
                index = counts[table] = counts.get(table, -1) + 1
                table = (*table, str(index))
            lines.setdefault(table, number)
        elif (match := _KEY.match(line)) and (path := _header_path(f"{match[1]} = 0")):
            lines.setdefault((*table, *path), number)
    return lines


def nearest_line(lines: Mapping[tuple[str, ...], int], path: tuple[str, ...]) -> int | None:
    """Line of a key, or of what it stands in, such as ``"acme/one" = { sessions = 3 }``."""
    found = (lines.get(path[:depth]) for depth in range(len(path), 0, -1))
    return next((line for line in found if line), None)


_PART = r"(?:[A-Za-z0-9_-]+|\"[^\"]{0,1000}\"|'[^']{0,1000}')"
_KEY = re.compile(rf"\s*({_PART}(?:\s*\.\s*{_PART})*)\s*=")


def _header_path(line: str) -> tuple[str, ...]:
    try:
        content: Any = tomllib.loads(line)
    except (ValueError, RecursionError):
        return ()
    path: list[str] = []
    while isinstance(content, dict) and len(content) == 1:
        key, content = next(iter(content.items()))
        path.append(key)
    return tuple(path)
