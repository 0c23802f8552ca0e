"""How long this process waited for a processor, as the kernel's run queues count it.

A thread that is ready to run and does not run waits: another program has the core.
Linux counts that time for every thread (``/proc/PID/task/TID/schedstat``, second
number: Documentation/scheduler/sched-stats.rst), and for a virtual machine as a whole
(``steal`` in ``/proc/stat``). Elsewhere, wall time less processor time stands for it
where one thread works.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

BUSY: Final = "this machine was busy"
"""Says why a time is not judged, or is uncertain."""
QUIET_SHARE: Final = 0.02
"""Share of its time that a step may wait and still count as undisturbed."""
ENOUGH_STEPS: Final = 8
"""Undisturbed steps from which on the others are left out."""
_TASKS: Final = Path("/proc/self/task")
_COMPUTING: Final = (1, 2, 3, 6, 7)
"""Fields of the line ``cpu`` in ``/proc/stat`` (proc(5)): user, nice, system, irq and softirq."""
_STEAL: Final = 8


class WaitingClock:
    """Seconds that the threads of this process have waited, from when it is made.

    Args:
        threads: How many threads work; the others wait for them.
    """

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
        if self._files:
            return 1e-9 * sum(_second_number(file) for file in self._files)
        return time.perf_counter() - time.thread_time() if self._threads == 1 else 0.0


def _second_number(file: int) -> int:
    try:
        return int(os.pread(file, 128, 0).split()[1])
    except OSError:  # the thread has ended
        return 0


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
