"""Changes several files of a folder together."""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import re
import secrets
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files import atomic

# Replace the files of a folder, all of them or none.
#
# New files are written into a stage, a folder of its own. Where the system can swap two
# folders in one step (Linux, macOS) and the old folder holds nothing else, the stage then
# takes the folder's place. Elsewhere a plan of the moves and removals is written beside
# the folder, and the stage is moved into it: from that moment on the update counts as made, and
# the next write of the folder carries on where a killed process stopped. Whoever only reads
# changes nothing: :func:`check_finished` says that a write is unfinished. A plan that came inside
# of a folder means nothing. See docs/adr/0005-packages-are-replaced-whole.md.

_log = logging.getLogger(__name__)

_INSIDE = ".odtpack-update"
"""Start of the name of a stage that was moved into its folder."""

_MOST_PLAN_BYTES = 2**20
_STAGE_END = r"odtpack-(\d{1,9})-[0-9a-f]{12}"
_STAGE = re.compile(rf"\.(?:.+\.)?{_STAGE_END}")


@dataclass(frozen=True)
class _Plan:
    """What is to be done in a folder; it lies beside it, and says for which folder it is."""

    folder: str  # the folder, absolute
    stage: str  # name of the stage in it; once that is gone there is nothing to do
    last: str  # the file that is removed first and comes last
    remove: tuple[str, ...]  # other files to remove
    move: tuple[str, ...]  # files to move out of the stage

    @classmethod
    def read(cls, path: Path, target: Path) -> _Plan | None:
        """Return the plan at a path, None if it is not one for that folder."""
        try:
            if path.is_symlink() or not path.is_file():
                return None
            with path.open("rb") as stream:
                plan = json.loads(stream.read(_MOST_PLAN_BYTES))
            found = cls(
                plan["folder"], plan["stage"], plan["last"],
                tuple(plan["remove"]), tuple(plan["move"]),
            )  # fmt: skip
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENAMETOOLONG):
                return None
            raise
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        names = (found.stage, found.last, *found.remove, *found.move)
        plain = all(
            isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\:\0")
            for name in names
        )
        ours = plain and found.stage.startswith(_INSIDE) and found.folder == str(target)
        return found if ours else None


@contextmanager
def update_folder(
    folder: str | os.PathLike[str], *, last: str, obsolete: Collection[str] = ()
) -> Iterator[Path]:
    """Yield an empty folder, whose files move to `folder` when the block ends well."""
    # A process killed at any moment leaves the old files or the new ones, or a write that the next
    # call of this function, or finish_update, finishes.
    # `last`: The file that speaks of the others. Where files are moved one by one it is removed
    # first and comes last, so that it never speaks of files that are not there.
    # Raises OdtpackError: `package-not-written`: the system refused. Whatever the block raises
    # passes through, an `OSError` counts as such a refusal. In every case the folder is as it was,
    # unless the message says that it was written, but may not survive a power cut.
    # `update-unfinished`: it refused when the files were already being moved.
    target = Path(folder)
    made: list[Path] = []
    try:
        try:
            target = target.resolve()
        except ValueError as error:  # no folder has such a name
            raise OSError(errno.EINVAL, str(error)) from error
        finish_update(target)
        made = _make_folders(target.parent)
        stage = _make_stage(target)
        try:
            yield stage
            _commit(stage, target, last, obsolete, made)
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    except BaseException as error:
        for parent in reversed(made):
            with suppress(OSError):
                parent.rmdir()  # fails, as it should, if it is not empty
        if isinstance(error, OSError):
            what = f"{str(target)!r} cannot be written: {error.strerror or error}"
            hint = "choose a folder that is writable and has space left (--out DIR)"
            raise OdtpackError("package-not-written", what, hint=hint) from error
        raise


def finish_update(folder: str | os.PathLike[str]) -> None:
    """Finish a write that a killed process left half made; for commands that write the folder."""
    target = Path(folder).resolve()
    if os.path.lexists(_plan_path(target)):
        with atomic.locked(target):
            _finish(target)
    atomic.remove_stale(_plan_path(target))
    with suppress(OSError):
        _remove_stale(target.parent, f".{target.name}.")


def check_finished(folder: str | os.PathLike[str]) -> None:
    """Refuse to read a folder whose last write was interrupted; for commands that only read it."""
    # Nothing is changed. What looks like an update and came with the folder is ignored, and
    # reported in the log.
    try:
        target = Path(folder).resolve()
    except ValueError:  # no folder has such a name: whoever reads it says so
        return
    if _unfinished(target):
        with atomic.locked(target):  # who writes it now will be done
            if _unfinished(target):
                what = f"A write of {target} was interrupted, and is not finished."
                raise OdtpackError("update-unfinished", what, where=str(_plan_path(target)))
    if target.is_dir() and (odd := sorted(target.glob(f"{_INSIDE}*"))):
        _log.warning("%s is not part of the package that it lies in, and is ignored", odd[0])


def _unfinished(target: Path) -> bool:
    path = _plan_path(target)
    try:
        plan = _Plan.read(path, target)
    except OSError as error:
        raise OdtpackError(
            "update-unfinished",
            f"It is unknown whether the last write of {target} was finished: "
            f"{error.strerror or error}.",
            where=str(path),
            hint="check the permissions of that file",
        ) from error
    return plan is not None and os.path.lexists(target / plan.stage)


def _plan_path(target: Path) -> Path:
    """Where the plan for a folder lies: beside it."""
    return target.parent / f".{target.name}.odtpack-plan"


def _finish(target: Path) -> None:
    path = _plan_path(target)
    try:
        plan = _Plan.read(path, target)
        if plan is not None and os.path.lexists(target / plan.stage):
            _carry_out(target, plan)
    except OSError as error:
        raise OdtpackError(
            "update-unfinished",
            f"A write of {target} was interrupted, and cannot be finished: "
            f"{error.strerror or error}.",
            where=str(path),
        ) from error
    with suppress(OSError):  # without a stage a plan means nothing
        path.unlink()
        atomic.sync_folder(path.parent)


def is_stage(name: str) -> bool:
    """Whether a file name is that of a stage, which a killed process may leave."""
    return _STAGE.fullmatch(name) is not None


def _make_folders(folder: Path) -> list[Path]:
    """Make a folder and those above it; return the new ones, outermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()][::-1]
    for path in missing:
        path.mkdir(exist_ok=True)
    return missing


def _make_stage(target: Path) -> Path:
    """Make the stage: beside the folder if it can then take its place, else inside of it."""
    if not target.exists() or _may_be_swapped(target):
        try:
            return stage_beside(target)
        except OSError:
            if not target.exists():
                raise
    _remove_stale(target.parent, f".{target.name}.")
    _remove_stale(target, ".")
    stage = target / f".{_mark()}"
    stage.mkdir()
    return stage


def stage_beside(target: Path) -> Path:
    """Make a stage beside a file or folder; those of processes that no longer run are removed."""
    _remove_stale(target.parent, f".{target.name}.")
    stage = target.with_name(f".{target.name}.{_mark()}")
    stage.mkdir()
    return stage


def _mark() -> str:
    return f"odtpack-{os.getpid()}-{secrets.token_hex(6)}"


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
        if match and not atomic.is_running(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def _commit(
    stage: Path, target: Path, last: str, obsolete: Collection[str], made: Sequence[Path]
) -> None:
    names = sorted(path.name for path in stage.iterdir())
    for name in names:
        with (stage / name).open("rb") as stream:
            os.fsync(stream.fileno())
    atomic.sync_folder(stage)
    if not target.exists():
        stage.rename(target)
        _settle(target, [target.parent, *(parent.parent for parent in reversed(made))])
        return
    for name in names:
        if (target / name).is_dir():
            raise IsADirectoryError(None, f"{name!r} is a folder there")
    found = {path.name for path in target.iterdir() if path != stage}
    if stage.parent != target and found <= {*names, *obsolete, last}:
        stage.chmod(target.stat().st_mode & 0o7777)
        if _exchange(stage, target):
            _settle(target, [target.parent])
            return  # the stage is the old folder now, and goes
    with atomic.locked(target):
        _finish(target)  # what another process began since
        removed = tuple(sorted(set(obsolete) - {*names, last}))
        plan = _Plan(str(target), f"{_INSIDE}-{secrets.token_hex(6)}", last, removed, tuple(names))
        replaces = any(os.path.lexists(target / name) for name in (*names, *removed, last))
        try:
            atomic.write_whole(_plan_path(target), json.dumps(asdict(plan)).encode())
        except OdtpackError as error:
            if not replaces and stage.parent == target:  # nothing is there that could be lost
                _carry_out(target, replace(plan, stage=stage.name))
                return
            with suppress(OSError):  # it may be there, and not durable
                _plan_path(target).unlink()
            raise OdtpackError(
                "package-not-written",
                f"{str(target)!r} cannot be replaced atomically: the recovery plan cannot be "
                f"written beside it: {error.__cause__ or error.what}",
                hint="make the folder above writable, or choose another folder (--out DIR)",
            ) from error
        try:
            _move_inside(stage, target, plan.stage)
        except BaseException:
            if not os.path.lexists(target / plan.stage):
                _plan_path(target).unlink(missing_ok=True)
            raise
        _finish(target)


def _settle(target: Path, folders: Iterable[Path]) -> None:
    """Make what took its place durable."""
    try:
        for folder in folders:
            atomic.sync_folder(folder)
    except OSError as error:
        what = f"{str(target)!r} was {atomic.UNSYNCED}: {error.strerror or error}"
        raise OdtpackError("package-not-written", what) from error


def _move_inside(stage: Path, target: Path, name: str) -> None:
    """Move a stage into its folder, which is the moment from which on the files are replaced."""
    try:
        stage.rename(target / name)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        inside = target / f".{_mark()}"
        try:
            inside.mkdir()
            for path in sorted(stage.iterdir()):
                with path.open("rb") as source, atomic.atomic_write(inside / path.name) as stream:
                    shutil.copyfileobj(source, stream)
            inside.rename(target / name)
        finally:
            shutil.rmtree(inside, ignore_errors=True)


def _carry_out(target: Path, plan: _Plan) -> None:
    """Remove and move what is still there; repeating it gives the same result."""
    # A file system may make renames durable in another order than theirs, hence the syncs: the last
    # file is there only with the others, and the stage goes when it is empty for good.
    stage = target / plan.stage
    if stage.is_symlink():
        raise OSError(errno.ELOOP, "it is a link")
    if plan.stage.startswith(_INSIDE):  # it came from beside the folder
        atomic.sync_folder(target.parent)
    atomic.sync_folder(target)
    if plan.last not in plan.move or os.path.lexists(stage / plan.last):
        (target / plan.last).unlink(missing_ok=True)
        atomic.sync_folder(target)
    for name in plan.remove:
        (target / name).unlink(missing_ok=True)
    for names in ([name for name in plan.move if name != plan.last], [plan.last]):
        for name in names:
            if os.path.lexists(stage / name):
                (stage / name).replace(target / name)
        atomic.sync_folder(target)
        atomic.sync_folder(stage)
    shutil.rmtree(stage)
    _settle(target, [target])


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


# Replace files that belong together, in a folder that holds other things as well.


@contextmanager
def staged_beside(target: Path) -> Iterator[Path]:
    """Yield a folder beside a file, for what is to take its place; it goes afterwards."""
    try:
        stage = stage_beside(target)
    except OSError as error:
        raise atomic.not_written(target, error) from error
    try:
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def replace_together(target: Path, first: Path, others: Sequence[Path]) -> list[Path]:
    """Let a file take its name, and then those that were made from it."""
    # Several names cannot change at one instant. The old others go first: at any moment, also after
    # a kill or a power cut, those that are there were made from the first one that is there.
    # `first`: the new file; on the same file system, as are the others.
    # Raises OdtpackError: `file-not-written`. The old files are there, unless the message says what
    # was written.
    folder, names = target.parent, [path.name for path in others]

    def sync() -> None:
        atomic.sync_folder(first.parent)
        atomic.sync_folder(folder)

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
        sync()
        first.replace(target)
    except OSError as error:
        for old, name in away:
            with suppress(OSError):
                old.replace(name)
        raise atomic.not_written(target, error) from error
    try:
        sync()
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
        sync()
    except OSError as error:
        raise atomic.not_synced(target, error) from error
    return [folder / name for name in names]
