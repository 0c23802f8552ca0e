"""Hold a child process to a memory limit, by the strictest way that this system permits.

Three ways, in this order:

- ``cgroup``: the parent makes a control group (version 2) and the child moves into it
  before it loads the package. Memory from then on is charged to the group; at its
  ``memory.max``, with no swap, the kernel ends the child. The group is removed when the
  child is gone.
- ``rlimit``: ``RLIMIT_DATA`` in the child; an allocation beyond it fails.
- ``watchdog``: the parent looks at the child's anonymous memory every few milliseconds and
  ends it beyond the limit. A peak between two looks may pass.

Being ended is a result. :class:`Limiter` is the parent's side of all three, and
:func:`hold_memory` the child's.
"""

import os
import secrets
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal, Self

from odtpack_simulator.memory.process_memory import limit_memory, memory_status

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
    # Where control groups of version 2 are mounted.
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
