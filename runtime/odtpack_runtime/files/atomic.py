"""Files are written whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from odtpack_runtime.errors import OdtpackError

# The SHA-256 of a file.


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hex; memory does not grow with the file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# Which file a name stands for: whether it is still the one that was read or written.

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


try:
    import fcntl
except ImportError:  # Windows: there a file that is open cannot be replaced in the first place
    fcntl = None  # type: ignore[assignment]


# One process at a time: a lock that the system lifts when its process ends, however it ends.


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until no other process or thread is in a block of the same file or folder."""
    # The lock is on what lies at `path` (flock(2)); no file is made for it, and none is left.
    # `path`: A file or folder that exists. One that cannot be opened, or lies on a file system
    # without locks, is not locked.
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


# Write a file whole or not at all.
#
# The bytes go to a temporary file in the destination's own folder, reach the
# disk (``fsync``), and take the destination's name in one ``rename``; then the
# folder itself is synced, so that the new name survives a power cut. A process
# killed at any moment leaves the old file, or the new one, and never a mixture.
# What such a process leaves under a temporary name is removed by the next
# write to the same destination.

UNSYNCED = "written, but it may not survive a power cut"
"""What is true of a file that took its name in a folder that could not be synced."""

NO_LINKS = frozenset(
    {errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL,
     errno.EMLINK}
)  # fmt: skip
"""How systems refuse a hard link: FAT and exFAT have none, and Android forbids them."""


@contextmanager
def atomic_write(
    path: str | os.PathLike[str], *, mode: int = 0o666, previous: Path | None = None
) -> Iterator[BinaryIO]:
    """Open ``path`` for binary writing; the name changes hands when the block ends well."""
    # `path`: Destination. Its folder must exist. A file of that name is replaced, by one of its
    # permissions, and so is a link to a file; anything else is not.
    # `previous`: Name in the same folder under which the file that is replaced is kept; a file of
    # that name goes. Where the file system has no hard links, `path` does not exist for a moment,
    # and the whole file under this name does.
    # Raises OdtpackError: The folder does not exist, the destination is a folder, or the system
    # refused to write (no permission, no space): an `OSError` of the block counts as such a
    # refusal, any other exception passes through. In every case the temporary file is gone and the
    # destination is untouched, unless the message says that it was written, but may not survive a
    # power cut: then the new file is in place, and its folder could not be synced.
    target = Path(path)
    _refuse_special(target)
    remove_stale(target)
    temporary = temporary_name(target)
    try:
        # The usual mode less the umask is what an ordinary open() gives; mkstemp's
        # 0600 would make a checkpoint unreadable to the app's other processes.
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        try:  # a signal that comes while the file is made is raised once it is there
            descriptor = os.open(temporary, flags, mode)
            with os.fdopen(descriptor, "w+b") as stream:
                take_mode(descriptor, target, most=mode)
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            moved = previous is not None and _keep(target, previous)
            try:
                temporary.replace(target)
            except OSError:
                if moved and previous is not None and not os.path.lexists(target):
                    previous.replace(target)
                raise
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
    except OSError as error:
        raise not_written(target, error) from error
    try:
        sync_folder(target.parent)
    except OSError as error:
        raise not_synced(target, error) from error


def take_mode(descriptor: int, of: Path, most: int = 0o666, least: int = 0) -> None:
    """Give a new file the permissions of the one that it replaces or belongs to, if any."""
    with suppress(OSError, AttributeError):  # a file system without them, or Windows
        os.fchmod(descriptor, of.stat().st_mode & most | least)


def not_synced(target: Path, error: OSError) -> OdtpackError:
    """Return the error for a file that took its name in a folder that could not be synced."""
    what = f"{target} was {UNSYNCED}: {error.strerror or error}."
    return OdtpackError("file-not-written", what, where=str(target))


def write_whole(path: str | os.PathLike[str], content: bytes, *, mode: int = 0o666) -> None:
    """Write some bytes as :func:`atomic_write` does."""
    with atomic_write(path, mode=mode) as stream:
        stream.write(content)


def not_written(target: Path, error: OSError) -> OdtpackError:
    """Return the error for a file that the system does not let one write."""
    what = f"{target} could not be written: {error.strerror or error}."
    return OdtpackError("file-not-written", what, where=str(target))


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read; a pipe, whose opening would wait for a writer, is an OSError."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))

    try:
        stream = open(path, "rb", opener=opener)  # noqa: SIM115 - Path.open has no opener
    except ValueError as error:  # no file has such a name
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise OSError(errno.EINVAL, "it is not an ordinary file", str(path))
    return stream


def _refuse_special(target: Path) -> None:
    """Refuse to replace what is not a file, such as a device or a pipe."""
    try:
        kind = target.stat().st_mode
    except OSError:  # there is nothing, or the write says what is wrong
        return
    except ValueError as error:  # no file has such a name
        raise not_written(target, OSError(errno.EINVAL, str(error))) from error
    if stat.S_ISDIR(kind):
        what = f"{target} is a folder and not a file."
        raise OdtpackError("path-is-a-folder", what, where=str(target))
    if not stat.S_ISREG(kind):
        raise OdtpackError(
            "file-not-written",
            f"{target} could not be written: it is not an ordinary file, which could be replaced.",
            where=str(target),
            hint="name another file",
        )


def refuse_link(path: Path) -> None:
    """Refuse to save to a link: it would be replaced, and what it leads to stay as it is."""
    if path.is_symlink():
        what = f"{path} is a link, and nothing is saved through a link or in its place."
        hint = "remove the link, or name the file that it leads to"
        raise OdtpackError("file-not-written", what, where=str(path), hint=hint)


def start_writing(stream: BinaryIO, start: int) -> int:
    """Let the disk write what a stream got since ``start``; wait for nothing."""
    # Otherwise a system keeps what is written in memory until `fsync`, and the disk rests while the
    # rest of the file is computed. It is a hint: what it does not reach, `fsync` does.
    # `start`: offset from which on the disk was not yet asked to write, in bytes.
    # Returns the offset up to which it was asked.
    stream.flush()
    end = stream.tell()
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            # Linux begins to write the pages; only those that are on the disk already are dropped.
            os.posix_fadvise(stream.fileno(), start, end - start, os.POSIX_FADV_DONTNEED)
    return end


def temporary_name(target: Path) -> Path:
    """A new name, in the same folder, for the file that will take the name of ``target``."""
    return target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(6)}.tmp")


def _keep(target: Path, previous: Path) -> bool:
    """Give a file, if there is one, a second name, so that one of the two always exists."""
    # Returns whether it lost its own name, because the file system has no hard links.
    if not target.exists():
        return False
    link = temporary_name(target)
    try:
        try:
            os.link(target, link)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            target.replace(previous)
            return True
        link.replace(previous)
    finally:
        link.unlink(missing_ok=True)  # two names of one file: the rename did nothing
    return False


def sync_folder(folder: Path) -> None:
    """Make renames and removals inside ``folder`` durable, where the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that syncs no folders
            raise
    finally:
        os.close(descriptor)


def remove_stale(target: Path) -> None:
    """Remove temporary files that processes which no longer run left for ``target``."""
    if os.name != "posix":  # os.kill(pid, 0) asks nothing elsewhere: on Windows it kills
        return
    name = re.compile(re.escape(f".{target.name}.") + r"(\d{1,9})-[0-9a-f]{12}\.tmp")
    with suppress(OSError):
        for entry in target.parent.iterdir():
            match = name.fullmatch(entry.name)
            if match and not is_running(int(match[1])):
                with suppress(OSError):
                    entry.unlink()


def is_running(pid: int) -> bool:
    """Whether a process exists. Only for POSIX systems: elsewhere the question would end it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
