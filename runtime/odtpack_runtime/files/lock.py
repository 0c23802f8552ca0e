"""One process at a time: a lock that the system lifts when its process ends, however it ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: there a file that is open cannot be replaced in the first place
    fcntl = None  # type: ignore[assignment]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until no other process or thread is in a block of the same file or folder.

    The lock is on what lies at ``path`` (flock(2)); no file is made for it, and none is left.

    Args:
        path: A file or folder that exists. One that cannot be opened, or lies on a file system
            without locks, is not locked.
    """
    descriptor = None
    if fcntl is not None:
        try:
            descriptor = os.open(path, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            pass  # what is to be done says itself what is wrong with the path
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)
