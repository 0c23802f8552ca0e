"""Host CPU, memory and clocks as the operating system reports them. Nothing is timed here.

Linux reports most of it; elsewhere less is known, and what is not known stays None.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_CPUS: Final = Path("/sys/devices/system/cpu")
_CPU_INFO: Final = Path("/proc/cpuinfo")
_PERFORMANCE_SHARE: Final = 0.8
"""Cores whose top clock is at least this share of the fastest one's are performance cores."""

OS_NAMES: Final = {"linux": "linux", "darwin": "macos", "win32": "windows"}


@dataclass(frozen=True, slots=True)
class CoreGroup:
    """Cores with one top clock.

    Attributes:
        cores: Their number; two hardware threads of one core count once.
        clock_hz: Top clock, or None.
    """

    cores: int
    clock_hz: float | None


@dataclass(frozen=True, slots=True)
class Machine:
    """What the system says.

    Attributes:
        processor: Name of the processor, or None.
        ram_bytes: Memory of the machine, or None.
        limit_bytes: Memory that this process may use by its control group, or None.
        groups: Cores that this process may use, the fastest group first.
        quota: Processors that the control group grants, or None for all of them.
    """

    processor: str | None
    ram_bytes: int | None
    limit_bytes: int | None
    groups: tuple[CoreGroup, ...]
    quota: float | None

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
    ram = _ram_bytes()
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


def _ram_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None


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
