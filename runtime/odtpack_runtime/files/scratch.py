"""Folders for the length of a piece of work, which the next run removes if the owner was killed.

Imports nothing of ours: cli._supervisor loads it before anything else.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

try:
    import fcntl
except ImportError:  # Windows: there a file of a live process cannot be removed
    fcntl = None  # type: ignore[assignment]

_START: Final = "odtpack-"
_LOCK: Final = "owner"
_FILES: Final = "files"


@contextmanager
def scratch_folder(work: str) -> Iterator[str]:
    """Make a folder among the system's temporary ones for the length of a block."""
    # It lies in a folder `odtpack-WORK-...`, beside a file on which a lock (flock(2)), which the
    # system lifts with the process however it ends, says that the owner lives. Folders whose owner
    # does not are removed first.
    sweep()
    with tempfile.TemporaryDirectory(prefix=f"{_START}{work}-") as folder:
        inner, unlocked = Path(folder) / _FILES, Path(folder) / f"{_LOCK}.new"
        inner.mkdir()
        descriptor = os.open(unlocked, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            if fcntl is not None:
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # Only now: nobody finds it without its lock while the owner lives.
                    unlocked.rename(Path(folder) / _LOCK)
            yield str(inner)
        finally:
            os.close(descriptor)


def sweep() -> None:
    """Remove the scratch folders of this user whose owner is gone."""
    with contextlib.suppress(OSError):
        for folder in list(Path(tempfile.gettempdir()).glob(f"{_START}*")):
            if fcntl is not None and _is_left(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_left(folder: Path) -> bool:
    """Whether a folder is one of :func:`scratch_folder`, of this user, and nobody's work."""
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return False
        descriptor = os.open(folder / _LOCK, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return False  # not one of these, or one that is being made or removed
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
