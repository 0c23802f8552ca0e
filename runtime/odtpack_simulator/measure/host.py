"""The host: what it is, how fast its storage is, and when it is quiet."""

import io
import mmap
import os
import re
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from odtpack_runtime.errors import OdtpackError

_CPUS: Final = Path("/sys/devices/system/cpu")
_CPU_INFO: Final = Path("/proc/cpuinfo")
_PERFORMANCE_SHARE: Final = 0.8
"""Cores whose top clock is at least this share of the fastest one's are performance cores."""

OS_NAMES: Final = {"linux": "linux", "darwin": "macos", "win32": "windows"}


@dataclass(frozen=True, slots=True)
class CoreGroup:
    """Cores with one top clock."""

    cores: int  # Their number; two hardware threads of one core count once
    clock_hz: float | None  # Top clock, or None


@dataclass(frozen=True, slots=True)
class Machine:
    """What the system says."""

    processor: str | None  # Name of the processor, or None
    ram_bytes: int | None  # Memory of the machine, or None
    limit_bytes: int | None  # Memory that this process may use by its control group, or None
    groups: tuple[CoreGroup, ...]  # Cores that this process may use, the fastest group first
    quota: float | None  # Processors that the control group grants, or None for all of them

    @property
    def cores(self) -> int:
        """Cores that this process may use."""
        return sum(group.cores for group in self.groups)

    def training_threads(self) -> int:
        """Threads that a training should use: one per performance core, within the quota."""
        fastest = self.groups[0].clock_hz
        cores = sum(
            group.cores
            for group in self.groups
            if fastest is None
            or group.clock_hz is None
            or group.clock_hz >= _PERFORMANCE_SHARE * fastest
        )
        granted = cores if self.quota is None else max(1, int(self.quota))
        return max(1, min(cores, granted))


def this_machine() -> Machine:
    """Ask the system."""
    quota = _cgroup("cpu.max").split()
    ram = None
    with suppress(AttributeError, ValueError, OSError):  # Windows has no sysconf
        ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _cgroup("memory.max")
    limit_bytes = int(limit) if limit.isdigit() else None
    if limit_bytes is not None and ram is not None and limit_bytes >= ram:
        limit_bytes = None
    return Machine(
        processor=processor_name(),
        ram_bytes=ram,
        limit_bytes=limit_bytes,
        groups=_groups(),
        quota=int(quota[0]) / int(quota[1]) if len(quota) == 2 and quota[0].isdigit() else None,
    )


def processor_name() -> str | None:
    """Name of the processor as the system reports it; None if it does not."""
    name = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(.+)$", _text(_CPU_INFO), re.M)
    return name[1].strip()[:200] if name else None


def clock_hz() -> float | None:
    """Top clock in Hz of the fastest cores that this process may use; None if unknown."""
    return _groups()[0].clock_hz or None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _cgroup(name: str) -> str:
    """A limit of this process's control group (version 2), or of the container's root."""
    path = re.search(r"^0::(/.*)$", _text(Path("/proc/self/cgroup")), re.M)
    root = Path("/sys/fs/cgroup")
    own = root / path[1].lstrip("/") if path else root
    for folder in (own, root):
        if text := _text(folder / name).strip():
            return text
    return ""


def _groups() -> tuple[CoreGroup, ...]:
    usable = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    cores: dict[str, float | None] = {}
    for cpu in usable:
        folder = _CPUS / f"cpu{cpu}"
        siblings = _text(folder / "topology" / "thread_siblings_list").strip() or str(cpu)
        top = _text(folder / "cpufreq" / "cpuinfo_max_freq").strip()
        cores[siblings] = float(top) * 1e3 if top.isdigit() else None
    if not cores:
        return (CoreGroup(os.cpu_count() or 1, None),)
    if all(clock is None for clock in cores.values()):
        # A virtual machine reports the clock of the moment, and no top clock.
        found = re.findall(r"^cpu MHz\s*:\s*([0-9.]+)$", _text(_CPU_INFO), re.M)
        now = [float(mhz) * 1e6 for mhz in found]
        return (CoreGroup(len(cores), max(now) if now else None),)
    clocks = sorted(set(cores.values()), key=lambda clock: -(clock or 0))
    return tuple(
        CoreGroup(sum(known == clock for known in cores.values()), clock) for clock in clocks
    )


BUSY: Final = "this machine was busy"  # Says why a time is not judged, or is uncertain
QUIET_SHARE: Final = 0.02  # Share of its time that a step may wait and still count as undisturbed
ENOUGH_STEPS: Final = 8  # Undisturbed steps from which on the others are left out
_TASKS: Final = Path("/proc/self/task")
_COMPUTING: Final = (1, 2, 3, 6, 7)
"""Fields of the line ``cpu`` in ``/proc/stat`` (proc(5)): user, nice, system, irq and softirq."""
_STEAL: Final = 8


class WaitingClock:
    """Seconds that the threads of this process have waited, from when it is made."""

    # `threads`: How many threads work; the others wait for them.

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._files: list[int] = []
        with suppress(OSError):
            self._files = [
                os.open(task / "schedstat", os.O_RDONLY) for task in sorted(_TASKS.iterdir())
            ]
        self._start = self._waited()

    def seconds(self) -> float:
        """Waited so far, all threads together; on other systems that of the calling one."""
        return self._waited() - self._start

    def close(self) -> None:
        """Close the kernel's files."""
        while self._files:
            os.close(self._files.pop())

    def _waited(self) -> float:
        if not self._files:
            return time.perf_counter() - time.thread_time() if self._threads == 1 else 0.0
        waited = 0
        for file in self._files:
            with suppress(OSError):  # the thread has ended
                waited += int(os.pread(file, 128, 0).split()[1])
        return 1e-9 * waited


def stolen_seconds() -> float:
    """Seconds that the host of this virtual machine gave to others; 0 where it is not counted."""
    return _processor_seconds(_STEAL)


def others_seconds() -> float:
    """Processor seconds of all other programs here so far; 0 where they are not counted."""
    own = os.times()
    everything = _processor_seconds(*_COMPUTING)
    return everything - own.user - own.system if everything else 0.0


def _processor_seconds(*fields: int) -> float:
    """Sum of fields of the line ``cpu`` in ``/proc/stat``."""
    try:
        line = Path("/proc/stat").read_text("ascii").split("\n", 1)[0].split()
        return sum(int(line[field]) for field in fields) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


def load_average() -> float | None:
    """Programs that ran or waited to, over the last minute; None where it is not counted."""
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return None


_CHUNK: Final = 2**20
_SMALL: Final = 4096
_MOST_CACHED: Final = 0.05
"""Share of a file's pages that may be in memory for a read to be one of the medium."""


@dataclass(frozen=True, slots=True)
class StorageTiming:
    """What :func:`measure_storage` found."""

    write: tuple[float, ...]  # Bytes per second of every repetition, `fsync` included
    # Bytes per second of every repetition past the page cache; empty if the cache could not be
    # passed by.
    read: tuple[float, ...]
    sync: tuple[float, ...]  # Seconds of every small write with `fsync`
    cached: str | None  # Why `read` is empty; None if it is not


def measure_storage(
    folder: Path, *, size: int, repeats: int, syncs: int, seconds: float = 20.0
) -> StorageTiming:
    """Write, read and remove files in ``folder``."""
    # `size`: Bytes of the file, a multiple of 1 MiB.
    # `syncs`: Number of small writes.
    # `seconds`: Time after which neither these nor the file are repeated once more.
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
