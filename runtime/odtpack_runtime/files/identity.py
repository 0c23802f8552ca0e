"""Which file a name stands for: whether it is still the one that was read or written."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

Identity = tuple[int, int, int, int]
"""Device, number on it, size in bytes, and time of the last change in ns."""


def identity_of(status: os.stat_result) -> Identity:
    """Return the identity of a file whose status is known."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def file_identity(path: str | os.PathLike[str]) -> Identity | None:
    """Return the identity of the file at a path, None if there is none or it cannot be seen."""
    with suppress(OSError, ValueError):
        return identity_of(Path(path).stat())
    return None
