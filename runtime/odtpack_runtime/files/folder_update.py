"""Replace the files of a folder, all of them or none.

New files are written into a stage, a folder of its own. Where the system can swap two
folders in one step (Linux, macOS) and the old folder holds nothing else, the stage then
takes the folder's place. Elsewhere the stage is moved into the folder under the name
:data:`UPDATE_NAME`, with a plan of what is to be moved and removed: from that moment on the
update counts as made, and the next process to open the folder carries on where a killed process
stopped. See docs/adr/0005-packages-are-replaced-whole.md.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.atomic import atomic_write, is_running, sync_folder
from odtpack_runtime.files.lock import locked

UPDATE_NAME = ".odtpack-update"
_PLAN_NAME = "plan.json"
_MOST_PLAN_BYTES = 2**20
_STAGE_END = r"odtpack-(\d{1,9})-[0-9a-f]{12}"
_STAGE = re.compile(rf"\.(?:.+\.)?{_STAGE_END}")


@contextmanager
def update_folder(
    folder: str | os.PathLike[str], *, last: str, obsolete: Collection[str] = ()
) -> Iterator[Path]:
    """Yield an empty folder, whose files take their place in ``folder`` when the block ends well.

    A process killed at any moment leaves the old files or the new ones; after it,
    :func:`finish_update` must have been called before the files are read.

    Args:
        folder: Destination; made if it does not exist. Files of other names stay.
        last: The file that speaks of the others. Where files are moved one by one it is
            removed first and comes last, so that it never speaks of files that are not there.
        obsolete: Files to remove, unless the block wrote them.

    Yields:
        The stage, to be filled with plain files.

    Raises:
        OdtpackError: ``package-not-written``: the system refused. Whatever the block raises
            passes through, an ``OSError`` counts as such a refusal. In every case the folder
            is as it was.
    """
    target = Path(folder).resolve()
    made: list[Path] = []
    try:
        finish_update(target)
        made = _make_folders(target.parent)
        stage = _make_stage(target)
        try:
            yield stage
            _commit(stage, target, last, obsolete)
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    except BaseException as error:
        for parent in reversed(made):
            with suppress(OSError):
                parent.rmdir()  # fails, as it should, if it is not empty
        if isinstance(error, OSError):
            raise _not_written(target, error) from error
        raise


def finish_update(folder: str | os.PathLike[str]) -> None:
    """Carry on with an update that a killed process left half made; nothing if there is none.

    Raises:
        OdtpackError: ``update-unfinished``: the folder cannot be written, or what lies in it
            is not an update.
    """
    target = Path(folder)
    if os.path.lexists(target / UPDATE_NAME):
        with locked(target):
            _finish(target)


def _finish(target: Path) -> None:
    update = target / UPDATE_NAME
    if not os.path.lexists(update):  # another process carried on with it
        return
    try:
        if update.is_symlink():
            raise ValueError("it is a link")
        if (update / _PLAN_NAME).is_file():
            _carry_out(update, target, *_read_plan(update / _PLAN_NAME))
            (update / _PLAN_NAME).unlink()
        update.rmdir()
        sync_folder(target)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise OdtpackError(
            "update-unfinished",
            f"An update of {target} was interrupted, and cannot be finished: {reason}.",
            where=str(update),
        ) from error


def remove_stages(folder: Path) -> None:
    """Remove what processes that were killed in the middle of an update left of it."""
    _remove_stale(folder.parent, f".{folder.name}.")
    _remove_stale(folder, ".")


def is_stage(name: str) -> bool:
    """Whether a file name is that of a stage, which a killed process may leave."""
    return _STAGE.fullmatch(name) is not None


def _not_written(folder: Path, error: OSError) -> OdtpackError:
    return OdtpackError(
        "package-not-written",
        f"the package cannot be written to {str(folder)!r}: {error.strerror or error}",
        hint="choose a folder that is writable and has space left (--out DIR)",
    )


def _make_folders(folder: Path) -> list[Path]:
    """Make a folder and those above it; return the new ones, outermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()][::-1]
    for path in missing:
        path.mkdir(exist_ok=True)
    return missing


def _make_stage(target: Path) -> Path:
    """Make the stage: beside the folder if it can then take its place, else inside of it."""
    mark = f"odtpack-{os.getpid()}-{secrets.token_hex(6)}"
    _remove_stale(target.parent, f".{target.name}.")
    if not target.exists() or _may_be_swapped(target):
        stage = target.with_name(f".{target.name}.{mark}")
        try:
            stage.mkdir()
            return stage
        except OSError:
            if not target.exists():
                raise
    _remove_stale(target, ".")
    stage = target / f".{mark}"
    stage.mkdir()
    return stage


def _may_be_swapped(target: Path) -> bool:
    """Whether another folder may take this one's place: no process may be working in it."""
    status, parent = target.stat(), target.parent.stat()
    ours = not hasattr(os, "geteuid") or status.st_uid == os.geteuid()
    here = Path.cwd().resolve()
    standing = target == here or target in here.parents
    return status.st_dev == parent.st_dev and ours and not standing


def _remove_stale(folder: Path, start: str) -> None:
    """Remove stages of processes that no longer run."""
    if os.name != "posix":
        return
    name = re.compile(re.escape(start) + _STAGE_END)
    for path in folder.iterdir() if folder.is_dir() else ():
        match = name.fullmatch(path.name)
        if match and not is_running(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def _commit(stage: Path, target: Path, last: str, obsolete: Collection[str]) -> None:
    names = sorted(path.name for path in stage.iterdir())
    for name in names:
        with (stage / name).open("rb") as stream:
            os.fsync(stream.fileno())
    sync_folder(stage)
    if not target.exists():
        stage.rename(target)
        sync_folder(target.parent)
        return
    for name in names:
        if (target / name).is_dir():
            raise IsADirectoryError(None, f"{name!r} is a folder there")
    found = {path.name for path in target.iterdir() if path != stage}
    if stage.parent != target and found <= {*names, *obsolete, last}:
        stage.chmod(target.stat().st_mode & 0o7777)
        if _exchange(stage, target):
            sync_folder(target.parent)
            return  # the stage is the old folder now, and goes
    removed = [last, *sorted(set(obsolete) - {*names, last})]
    moved = sorted(names, key=lambda name: name == last)
    with atomic_write(stage / _PLAN_NAME) as stream:
        stream.write(json.dumps({"remove": removed, "move": moved}).encode())
    with locked(target):
        _finish(target)  # what another process moved in since
        try:
            stage.rename(target / UPDATE_NAME)
        except OSError:  # another file system
            inside = target / f".odtpack-{os.getpid()}-{secrets.token_hex(6)}"
            try:
                _copy(stage, inside)
                inside.rename(target / UPDATE_NAME)
            finally:
                shutil.rmtree(inside, ignore_errors=True)
        sync_folder(target)
        _finish(target)


def _copy(stage: Path, inside: Path) -> None:
    inside.mkdir()
    for path in sorted(stage.iterdir()):
        with path.open("rb") as source, atomic_write(inside / path.name) as stream:
            shutil.copyfileobj(source, stream)


def _read_plan(path: Path) -> tuple[list[str], list[str]]:
    """Read what is to be removed and moved: plain names, also in a file by a stranger."""
    with path.open("rb") as stream:
        data = stream.read(_MOST_PLAN_BYTES + 1)
    try:
        plan = json.loads(data[:_MOST_PLAN_BYTES])
        removed, moved = list(plan["remove"]), list(plan["move"])
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError("its plan cannot be read") from None
    for name in (*removed, *moved):
        plain = isinstance(name, str) and name not in ("", ".", "..", UPDATE_NAME)
        if not plain or set(name) & set("/\\:\0"):
            raise ValueError(f"its plan names {name!r}")
    return removed, moved


def _carry_out(update: Path, target: Path, removed: Sequence[str], moved: Sequence[str]) -> None:
    """Remove and move what is still there: the same end however often it begins anew."""
    if any((update / name).exists() for name in moved):
        for name in removed:
            # The last of the moved files is removed first, unless it is already the new one.
            (target / name).unlink(missing_ok=True)
    for name in moved:
        if os.path.lexists(update / name):
            (update / name).replace(target / name)
    sync_folder(target)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders in one step; return whether the system could."""
    at_current_folder, swap = -100, 2
    if os.name != "posix":
        return False
    library = ctypes.CDLL(None)
    one, other = os.fsencode(first), os.fsencode(second)
    if sys.platform == "linux" and hasattr(library, "renameat2"):
        # renameat2(2) with RENAME_EXCHANGE
        code = library.renameat2(at_current_folder, one, at_current_folder, other, swap)
    elif sys.platform == "darwin" and hasattr(library, "renamex_np"):
        code = library.renamex_np(one, other, swap)  # RENAME_SWAP
    else:
        return False
    return bool(code == 0)
