"""Time the storage of a folder: a file written until it is on the medium, and read past the cache.

What a write means is ``fsync``: the rate of a write alone is that of memory. A read
comes from the page cache unless the system is asked to drop the file's pages
(``posix_fadvise`` with ``DONTNEED``), which a file system in memory ignores. So the
kernel is asked which pages are still there (``mincore``) before the read is timed. What
cannot be passed by is the cache of a drive, or of the host of a virtual machine.
"""

from __future__ import annotations

import io
import mmap
import os
import secrets
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from odtpack_runtime.errors import OdtpackError

_CHUNK: Final = 2**20
_SMALL: Final = 4096
_MOST_CACHED: Final = 0.05
"""Share of a file's pages that may be in memory for a read to be one of the medium."""


@dataclass(frozen=True, slots=True)
class StorageTiming:
    """What :func:`measure_storage` found.

    Attributes:
        write: Bytes per second of every repetition, ``fsync`` included.
        read: Bytes per second of every repetition past the page cache; empty if the cache
            could not be passed by.
        sync: Seconds of every small write with ``fsync``.
        cached: Why ``read`` is empty; None if it is not.
    """

    write: tuple[float, ...]
    read: tuple[float, ...]
    sync: tuple[float, ...]
    cached: str | None


def measure_storage(
    folder: Path, *, size: int, repeats: int, syncs: int, seconds: float = 20.0
) -> StorageTiming:
    """Write, read and remove files in ``folder``.

    Args:
        folder: Where checkpoints would be; it must exist and be writable.
        size: Bytes of the file, a multiple of 1 MiB.
        repeats: How often it is written and read, if time allows.
        syncs: Number of small writes, if time allows.
        seconds: Time after which neither is repeated once more.

    Raises:
        OdtpackError: The folder cannot be written, or has no space left.
    """
    chunk = secrets.token_bytes(_CHUNK)  # storage that compresses cannot cheat
    write: list[float] = []
    read: list[float] = []
    reason: str | None = None
    try:
        for _ in _within(seconds, repeats):
            with _temporary(folder) as path:
                write.append(size / _write(path, chunk, size // _CHUNK))
                reason = _drop(path)
                if reason is None:
                    read.append(size / _read(path))
        with _temporary(folder) as path:
            sync = [_write(path, chunk[:_SMALL], 1) for _ in _within(seconds, syncs)]
    except OSError as error:
        raise OdtpackError(
            "storage-not-measured",
            f"the storage of {str(folder)!r} cannot be measured: {error.strerror or error}",
            where=str(folder),
            hint=f"choose a folder with {2 * size // 2**20} MiB of free space",
        ) from error
    return StorageTiming(tuple(write), tuple(read), tuple(sync), None if read else reason)


def spread(values: tuple[float, ...]) -> tuple[float, float, float]:
    """Lowest, median and highest."""
    return min(values), statistics.median(values), max(values)


def _within(seconds: float, times: int) -> Iterator[int]:
    """Count to ``times``, but begin nothing after so many seconds; always once."""
    end = time.perf_counter() + seconds
    for index in range(times):
        if index and time.perf_counter() > end:
            return
        yield index


@contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    path = folder / f".odtpack-measure-{os.getpid()}-{secrets.token_hex(6)}.tmp"
    try:
        yield path
    finally:
        with suppress(OSError):
            path.unlink()


def _write(path: Path, chunk: bytes, count: int) -> float:
    """Seconds until ``count`` chunks are on the medium."""
    start = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(count):
            file.write(chunk)
        os.fsync(file.fileno())
    return time.perf_counter() - start


def _drop(path: Path) -> str | None:
    """Drop a file from the page cache; the reason if it is still there."""
    if sys.platform != "linux":
        return "this system does not report which pages of a file are in memory"
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if _cached_share(file) > _MOST_CACHED:
            return "the file stays in memory although its pages were dropped"
    return None


def _cached_share(file: io.FileIO) -> float:
    """Share of a file's pages that are in memory."""
    import ctypes

    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as pages:
        first = ctypes.c_char.from_buffer(pages)
        count = -(-len(pages) // mmap.PAGESIZE)
        present = (ctypes.c_ubyte * count)()
        length = ctypes.c_size_t(len(pages))
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), length, present)
        del first  # a mapping that is referred to cannot be closed
    if failed:
        raise OSError(ctypes.get_errno(), "the kernel does not report which pages are in memory")
    return sum(page & 1 for page in present) / count


def _read(path: Path) -> float:
    buffer = bytearray(_CHUNK)
    start = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - start
