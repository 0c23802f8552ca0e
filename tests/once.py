"""Folders that all test processes of a run share: the first that needs one makes it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from odtpack_runtime.files.atomic import locked


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that no test changes; its name says what ``make`` makes it of."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # that of all workers
    folder, lock = root / "shared" / name, root / "shared" / f"{name}.lock"
    folder.parent.mkdir(exist_ok=True)
    lock.touch()
    with locked(lock):
        if not lock.read_bytes():
            make(folder)
            lock.write_bytes(b"made")
    return folder
