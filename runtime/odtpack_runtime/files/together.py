"""Replace files that belong together, in a folder that holds other things as well."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.atomic import UNSYNCED, sync_folder
from odtpack_runtime.files.folder_update import stage_beside


@contextmanager
def staged_beside(target: Path) -> Iterator[Path]:
    """Yield a folder beside a file, for what is to take its place; it goes afterwards.

    Raises:
        OdtpackError: ``file-not-written``.
    """
    try:
        stage = stage_beside(target)
    except OSError as error:
        raise _not_written(target, error) from error
    try:
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def replace_together(target: Path, first: Path, others: Sequence[Path]) -> list[Path]:
    """Let a file take its name, and then those that were made from it.

    Several names cannot change at one instant. The old others go first: at any moment, also
    after a kill or a power cut, those that are there were made from the first one that is there.

    Args:
        target: The name of the first.
        first: The new file; on the same file system, as are the others.
        others: The new files that were made from it; each gets its own name beside ``target``.

    Returns:
        The new paths of the others.

    Raises:
        OdtpackError: ``file-not-written``. The old files are there, unless the message says
            what was written.
    """
    folder, names = target.parent, [path.name for path in others]
    away: list[tuple[Path, Path]] = []
    try:
        for path in (first, *others):
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
        for path in others:
            old = path.with_name(f"{path.name}.old")
            if (folder / path.name).is_file():
                (folder / path.name).replace(old)
                away.append((old, folder / path.name))
        _sync(first.parent, folder)
        first.replace(target)
    except OSError as error:
        for old, name in away:
            with suppress(OSError):
                old.replace(name)
        raise _not_written(target, error) from error
    try:
        _sync(first.parent, folder)
        for path in others:
            path.replace(folder / path.name)
    except OSError as error:
        missing = [name for name in names if not (folder / name).exists()]
        raise OdtpackError(
            "file-not-written",
            f"{target} was written, and {', '.join(missing) or 'its folder'} was not: "
            f"{error.strerror or error}.",
            where=str(folder),
        ) from error
    try:
        _sync(first.parent, folder)
    except OSError as error:
        raise OdtpackError(
            "file-not-written", f"{target} was {UNSYNCED}: {error.strerror or error}.",
            where=str(target),
        ) from error  # fmt: skip
    return [folder / name for name in names]


def _sync(*folders: Path) -> None:
    """Make renames from one folder into another durable."""
    for folder in folders:
        sync_folder(folder)


def _not_written(target: Path, error: OSError) -> OdtpackError:
    return OdtpackError(
        "file-not-written",
        f"{target} could not be written: {error.strerror or error}.",
        where=str(target),
    )
