"""Read a small text file from outside."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from odtpack_runtime.errors import OdtpackError


def read_bounded(path: Path, *, limit: int, code: str, what: str) -> bytes:
    """The whole content of a regular file of at most ``limit`` bytes."""
    # `limit`: Most bytes that are read; more is an error, not a truncation.
    if not path.is_file():
        kind = "is not a regular file" if path.exists() else "does not exist"
        raise OdtpackError(f"{code}-missing", f"the {what} {path.name!r} {kind}", where=str(path))
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
