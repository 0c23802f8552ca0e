"""Read a small text file that somebody else wrote."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from odtpack_runtime.errors import OdtpackError


def read_bounded(path: Path, *, limit: int, code: str, what: str) -> bytes:
    """The whole content of a regular file of at most ``limit`` bytes.

    Args:
        path: The file.
        limit: Most bytes that are read; more is an error, not a truncation.
        code: Prefix of the error codes, for example ``"profile"``.
        what: What the file is for people, for example ``"device profile"``.

    Raises:
        OdtpackError: Absent, not a regular file, unreadable, or too large.
    """
    if not path.is_file():
        kind = "is not a regular file" if path.exists() else "does not exist"
        raise OdtpackError(
            f"{code}-missing",
            f"the {what} {path.name!r} {kind}",
            where=str(path),
            hint="check the path",
        )
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        text = f"the {what} {path.name!r} cannot be read: {error.strerror}"
        raise OdtpackError(f"{code}-unreadable", text, where=str(path)) from error
    if len(data) > limit:
        text = f"the {what} {path.name!r} is larger than {limit} bytes"
        raise OdtpackError(f"{code}-too-large", text, where=str(path))
    return data


def parse_toml(data: bytes, *, code: str, what: str, where: str) -> dict[str, Any]:
    """Parse TOML 1.0.

    Raises:
        OdtpackError: Not UTF-8, not TOML, or nested too deeply.
    """
    try:
        return tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        text = f"the {what} is not UTF-8 text (byte {error.start})"
        raise OdtpackError(
            f"{code}-malformed", text, where=where, hint="save it as UTF-8"
        ) from error
    except (ValueError, RecursionError) as error:
        detail = str(error) if isinstance(error, ValueError) else "nested too deeply"
        text = f"the {what} is not valid TOML: {detail[:200]}"
        raise OdtpackError(
            f"{code}-malformed", text, where=where, hint="correct it; toml.io shows the syntax"
        ) from error
