"""Measure and limit the memory of a process. Linux; elsewhere it says why it cannot.

What counts is anonymous memory: pages of files, among them the libraries', can
be dropped by the system at any time and are shared by processes. The kernel
keeps a high-water mark of all resident pages only (``VmHWM``); it is reset before
each phase (``clear_refs``), and the pages of files, which do not change within a
phase once all of the libraries are mapped, are subtracted after it. The peak repeats
within 0.2 MB where allocations are returned at once, see ``child_environment``,
and where what was freed before counts as free, see ``give_back_memory``.

The limit is ``RLIMIT_DATA``: the kernel refuses memory beyond it, and the
allocation fails, in ONNX Runtime as in Python. ``RLIMIT_AS`` would count the
address space that libraries and thread stacks reserve and never use.
"""

import ctypes
import gc
import mmap
import os
import secrets
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Literal, Self

import onnxruntime

from odtpack_runtime.package.records import SESSION_CONFIG
from odtpack_runtime.session.mapped_weights import give_back_freed_memory
from odtpack_runtime.session.native import choose_kernels

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_MAPS = Path("/proc/self/maps")
_POPULATE_READ = 22  # MADV_POPULATE_READ
_SAMPLING_SECONDS = 0.002
_PROBE_BYTES = 64 * 2**20
_THREAD_STACK = 8 * 2**20
PAGE = 4096
MAPPED_FROM = 4 * PAGE
"""Bytes from which on the child maps an allocation by itself, and returns it when it is freed.

Above it, rounding to pages costs a quarter at most; below it lie few of the
tensors of a training step, which the heap keeps for those that come after them.
"""

_SESSIONS = 3  # training, evaluation, optimizer: each has threads of its own


def child_environment() -> dict[str, str]:
    """Environment variables under which a process's memory is what is alive in it."""
    # From MAPPED_FROM bytes on, glibc's allocator maps every allocation by itself and returns it
    # when it is freed; and the libraries' own thread pools stay out of the way.
    return {
        "MALLOC_MMAP_THRESHOLD_": str(MAPPED_FROM),
        "MALLOC_ARENA_MAX": "1",
        **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    }


def memory_options(threads: int, kernels: str | None = None) -> onnxruntime.SessionOptions:
    """Options under which memory can be measured, predicted and limited."""
    # Arena and memory patterns are off: every tensor is one allocation that goes back to the system
    # when it is freed, so that the resident memory is what is alive, to the page.
    options = onnxruntime.SessionOptions()
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    for key, value in SESSION_CONFIG.items():
        options.add_session_config_entry(key, value)
    choose_kernels(options, kernels)
    return options


def memory_status(file: Path = _STATUS) -> dict[str, int]:
    """Memory figures of a process in bytes, by default of this one."""
    figures = {}
    for line in file.read_text().splitlines():
        key, _, value = line.partition(":")
        if value.endswith("kB"):
            figures[key] = int(value.split()[0]) * 1024
    return figures


def give_back_memory() -> None:
    """Free what refers to itself in a circle, and let what is free go back to the system."""
    # What Android apps do with `mallopt(M_PURGE, 0)`; iOS does it by itself.
    gc.collect()
    give_back_freed_memory()


class MemoryMeter:
    """Peak of anonymous memory above where it stood when the meter was made."""

    # What was freed before is given back to the system first. Python that compiles its modules,
    # because their bytecode is not stored, leaves 2 MB of free heap, in which a small training
    # would hide.
    # `files_change`: Pages of files come and go within a phase, as those of mapped weights do, and
    # the kernel's mark counts them. Whoever drops pages does so in dropping. A thread looks again
    # and again in between, for the mark less the pages of files at the next drop may be less than
    # the peak, by what was read after it.
    # `unavailable`: Why nothing can be measured here; None if it can.
    # `peak`: Highest value so far, in bytes.
    # `limit`: Bytes above which the end of a phase raises; None for any.

    def __init__(self, *, files_change: bool = False) -> None:
        self.peak = 0
        self.limit: int | None = None
        self.unavailable: str | None = None
        self._base = self._seen = 0
        self._sampler: _Sampler | None = None
        give_back_memory()
        _map_libraries()
        try:
            self._base = memory_status()["RssAnon"]
        except (OSError, KeyError, ValueError):
            self.unavailable = f"{sys.platform} does not report to a process its anonymous memory"
            return
        self._is_marked = self._reset()
        if files_change or not self._is_marked:
            self._sampler = _Sampler()

    def mark(self) -> int:
        """End a phase: return its peak in bytes and begin the next one."""
        if self.unavailable:
            return 0
        self._look()
        self._reset()
        if self._sampler is not None:
            self._seen = max(self._seen, self._sampler.take())
        above, self._seen = max(0, self._seen - self._base), 0
        self.peak = max(self.peak, above)
        if self.limit is not None and above > self.limit:
            raise MemoryError(f"the watchdog found {above} bytes, above the limit of {self.limit}")
        return above

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """Look before a ``with`` block that drops pages of files: until then they only came."""
        if self.unavailable:
            yield
            return
        self._look()
        yield
        self._reset()

    def _look(self) -> None:
        """Take the kernel's mark; pages of files only came since it was reset."""
        status = memory_status()
        self._seen = max(self._seen, status["RssAnon"])
        if self._is_marked:
            files = status.get("RssFile", 0) + status.get("RssShmem", 0)
            self._seen = max(self._seen, status["VmHWM"] - files)

    def close(self) -> None:
        """Stop measuring."""
        if self._sampler is not None:
            self._sampler.stop()

    @staticmethod
    def _reset() -> bool:
        try:
            _CLEAR.write_text("5")
        except OSError:
            return False
        return True


def _map_libraries() -> None:
    """Have all pages of the libraries mapped, so that none comes within a phase."""
    # A page of a file that comes after a phase's highest moment is subtracted from its mark all the
    # same. How many come depends on how the system's cache keeps the file: 0.9 MB in one folder,
    # and none in another.
    try:
        advise = ctypes.CDLL(None, use_errno=True).madvise
        lines = _MAPS.read_text().splitlines()
    except (OSError, AttributeError):
        return  # Linux has both
    for line in lines:
        bounds, access, _, _, _, *path = line.split(maxsplit=5)
        if access.startswith("r") and path and ".so" in path[0]:
            start, end = (int(each, 16) for each in bounds.split("-"))
            # An older kernel than Linux 5.14 refuses, and nothing is lost.
            advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _POPULATE_READ)


class _Sampler:
    """A thread that looks at memory, where the kernel's mark is not enough."""

    def __init__(self) -> None:
        self._highest = 0
        self._end = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self._end.wait(_SAMPLING_SECONDS):
            self._highest = max(self._highest, memory_status()["RssAnon"])

    def take(self) -> int:
        """The most since the last time."""
        highest, self._highest = self._highest, 0
        return highest

    def stop(self) -> None:
        self._end.set()


def limit_memory(limit_bytes: int, threads: int = 1) -> str | None:
    """Hold this process to ``limit_bytes`` above what it has now."""
    # Stacks of further threads are added: they are reserved whole and hardly used.
    # Returns: None, or the reason why the limit cannot be held here.
    try:
        import resource

        stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
        stacks = _SESSIONS * (threads - 1) * (stack if 0 < stack < 2**30 else _THREAD_STACK)
        ceiling = memory_status()["VmData"] + limit_bytes + stacks
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (ceiling, hard))
    except (ImportError, OSError, KeyError, ValueError) as error:
        return f"{sys.platform} cannot hold a process to a memory limit ({error})"
    try:
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory is not counted
        mmap.mmap(-1, limit_bytes + stacks + _PROBE_BYTES, flags=private).close()
    except (OSError, MemoryError):
        return None
    lift_limit()
    return f"this {sys.platform} kernel does not hold mapped memory to RLIMIT_DATA"


def lift_limit() -> None:
    """Undo :func:`limit_memory`, so that the end can be reported."""
    try:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    except (ImportError, OSError, ValueError):
        return


# Hold a child process to a memory limit, by the strictest way that this system permits.
#
# Three ways, in this order:
#
# - `cgroup`: the parent makes a control group (version 2) and the child moves into it before it
#   loads the package. Memory from then on is charged to the group; at its `memory.max`, with no
#   swap, the kernel ends the child. The group is removed when the child is gone.
# - `rlimit`: `RLIMIT_DATA` in the child; an allocation beyond it fails.
# - `watchdog`: the parent looks at the child's anonymous memory every few milliseconds and ends it
#   beyond the limit. A peak between two looks may pass.
#
# Being ended is a result. Limiter is the parent's side of all three, and hold_memory the child's.

# As in a result. That module would bring its schemas' machinery into the child, whose memory
# is measured.
LimitMethod = Literal["cgroup", "rlimit", "watchdog"]
METHODS: Final[tuple[LimitMethod, ...]] = ("cgroup", "rlimit", "watchdog")

_VARIABLE: Final = "ODTPACK_CHILD_CGROUP"
_LOOK_SECONDS: Final = 0.005
_MOUNTS: Final = Path("/proc/self/mountinfo")
_MEMBERSHIP: Final = Path("/proc/self/cgroup")
_GONE_SECONDS: Final = 2.0


class Limiter:
    """The parent's side: makes the group, watches, and cleans up."""

    # Use it as a context manager around the life of one child.
    # `methods`: Ways to try; those that this system does not permit are passed over.

    def __init__(self, limit_bytes: int | None, methods: Sequence[LimitMethod] = METHODS) -> None:
        self._limit = limit_bytes
        self._group: Path | None = None
        self._watch: _Watchdog | None = None
        if limit_bytes is not None and "cgroup" in methods:
            with suppress(OSError):
                self._group = make_group(limit_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """Stop watching and remove the group; the child must be gone."""
        if self._watch is not None:
            self._watch.stop()
        if self._group is not None:
            remove_group(self._group)

    @property
    def environment(self) -> dict[str, str]:
        """What the child needs in its environment to find its group."""
        return {} if self._group is None else {_VARIABLE: str(self._group)}

    def take(self, pid: int, message: dict[str, Any]) -> None:
        """Act on the child's ``limit`` message: watch it if it asks for that."""
        if message.get("method") == "watchdog" and self._limit is not None:
            self._watch = _Watchdog(pid, int(message["base_bytes"]), self._limit)

    def ended(self) -> str:
        """How the child was ended by a limit, for people; empty if it was not."""
        if self._watch is not None and self._watch.seen:
            return f"ended by the watchdog at {self._watch.seen / 1e6:.1f} MB"
        if self._group is not None:
            with suppress(OSError, ValueError):
                events = (self._group / "memory.events").read_text().split()
                if int(dict(zip(events[::2], events[1::2], strict=True)).get("oom_kill", 0)):
                    return "ended by the kernel at the limit of its control group"
        return ""


def methods_for(methods: Sequence[LimitMethod], *, arena: bool) -> list[LimitMethod]:
    """Those of the ways that count what is resident."""
    # With an arena `RLIMIT_DATA` does not: it refuses address space, and an arena takes up to twice
    # of that, which is never touched. A watchdog then misses nothing that lasts, for an arena gives
    # nothing back.
    return [method for method in methods if not (arena and method == "rlimit")]


def hold_memory(
    limit_bytes: int, threads: int = 1, methods: Sequence[LimitMethod] = METHODS
) -> dict[str, Any]:
    """Hold this process to ``limit_bytes`` above what it has now: the child's side."""
    # Returns: Content of the `limit` message: `method` (null if the limit is not held), `problem`
    # (null, or why not), and `base_bytes` for the watchdog: the anonymous memory of this process
    # now.
    problems = []
    group = os.environ.get(_VARIABLE)
    if "cgroup" in methods and group is not None:
        try:
            (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
        except OSError as error:
            problems.append(f"no control group: {error.strerror or error}")
        else:
            return {"method": "cgroup", "problem": None}
    if "rlimit" in methods:
        problem = limit_memory(limit_bytes, threads)
        if problem is None:
            return {"method": "rlimit", "problem": None}
        problems.append(problem)
    if "watchdog" in methods:
        base = anonymous_bytes(os.getpid())
        if base is not None:
            return {"method": "watchdog", "problem": None, "base_bytes": base}
        problems.append(f"{sys.platform} does not report the memory of a process")
    return {"method": None, "problem": "; ".join(problems) or "no way to hold it was permitted"}


def anonymous_bytes(pid: int, proc: Path = Path("/proc")) -> int | None:
    """Anonymous memory of a process in bytes; None if it is gone or the system does not say."""
    with suppress(OSError, ValueError):
        return memory_status(proc / str(pid) / "status").get("RssAnon")
    return None


class _Watchdog:
    """A thread that ends a process beyond a limit."""

    # `seen`: Anonymous memory above its base, in bytes, at which it was ended; 0 if it was not.

    def __init__(self, pid: int, base: int, limit: int) -> None:
        self.seen = 0
        self._pid, self._base, self._limit = pid, base, limit
        # A number may pass to another process; what a descriptor names may not.
        self._descriptor = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(_LOOK_SECONDS):
            now = anonymous_bytes(self._pid)
            if now is None:
                return
            if now - self._base > self._limit:
                self.seen = now - self._base
                with suppress(OSError):
                    if self._descriptor is None:
                        os.kill(self._pid, signal.SIGKILL)
                    else:
                        signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
                return

    def stop(self) -> None:
        self._end.set()
        self._thread.join()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def make_group(limit_bytes: int, *, mounts: Path = _MOUNTS, membership: Path = _MEMBERSHIP) -> Path:
    """Make a control group (version 2) with a limit; the caller removes it."""
    # It is made inside this process's own group, or else beside it, wherever memory is controlled
    # and this user may write.
    # `limit_bytes`: Its `memory.max`; its `memory.swap.max` is 0.
    # `mounts`: Says where control groups of version 2 are mounted.
    entries = (line.partition(" - ") for line in mounts.read_text().splitlines())
    found = (fields.split()[4] for fields, _, kind in entries if kind.split()[:1] == ["cgroup2"])
    root = next(map(Path, found), None)
    own = next(
        (line[3:] for line in membership.read_text().splitlines() if line.startswith("0::")), None
    )
    if root is None or own is None:
        raise OSError("control groups of version 2 are not mounted")
    inside = root / own.lstrip("/")
    problem: OSError = OSError("memory is not controlled here")
    for place in dict.fromkeys((inside, inside.parent)):
        try:
            delegated = (place / "cgroup.subtree_control").read_text().split()
            if place.is_relative_to(root) and "memory" in delegated:
                return _group_in(place, limit_bytes)
        except OSError as error:
            problem = error
    raise problem


def _group_in(place: Path, limit_bytes: int) -> Path:
    group = place / f"odtpack-{os.getpid()}-{secrets.token_hex(4)}"
    group.mkdir()
    try:
        # "r+": in a group without these files the kernel would refuse to make them.
        with (group / "memory.max").open("r+") as stream:
            stream.write(str(limit_bytes))
        with suppress(FileNotFoundError), (group / "memory.swap.max").open("r+") as stream:
            stream.write("0")
    except OSError:
        remove_group(group)
        raise
    return group


def remove_group(group: Path) -> None:
    """Remove a control group whose processes have ended; the kernel may need a moment."""
    waiting = threading.Event()
    for _ in range(int(_GONE_SECONDS / 0.01)):
        try:
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            waiting.wait(0.01)
        else:
            return
