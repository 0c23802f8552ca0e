"""Whether processes that are waited for do not go on: silent for too long, or stopped."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Final

STOPPED_SECONDS: Final = 30.0
"""How long a process may be stopped (SIGSTOP) before what waits for it gives up."""


class Watch:
    """Measures the silence of processes, and how long they have been stopped.

    Args:
        silence: Seconds that they may be silent.
        stopped: Seconds that one may be stopped; :data:`STOPPED_SECONDS` if None.
    """

    def __init__(self, silence: float, stopped: float | None = None) -> None:
        self._silence = silence
        self._stopped = STOPPED_SECONDS if stopped is None else stopped
        self._heard = time.monotonic()
        self._stopped_since: dict[int, float] = {}

    def heard(self) -> None:
        """Note a sign of life."""
        self._heard = time.monotonic()

    def overdue(self, processes: Iterable[int]) -> str:
        """Why these children are not to be waited for any longer; empty if they are."""
        now = time.monotonic()
        since = self._stopped_since
        self._stopped_since = {pid: since.get(pid, now) for pid in processes if is_stopped(pid)}
        for pid, start in self._stopped_since.items():
            if now - start >= self._stopped:
                return (
                    f"process {pid} was stopped (SIGSTOP), and not continued in {_s(now - start)}"
                )
        if now - self._heard >= self._silence:
            return f"it was silent for {_s(self._silence)}"
        return ""


def is_stopped(child: int) -> bool:
    """Whether a signal stopped a child of this process; False where the system does not tell."""
    if not hasattr(os, "waitid"):
        return False
    try:
        state = os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    except OSError:  # it has ended
        return False
    return state is not None and state.si_pid == child


def _s(seconds: float) -> str:
    return f"{seconds:.3g} s"
