"""The memory of processes while they run."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path


class Memory:
    """Looks at what a process has again and again, until the context ends."""

    def __init__(self, process: int | str = "self", every: float = 0.005) -> None:
        self.samples: list[tuple[float, float, float]] = []  # seconds, anonymous and resident MiB
        self._process, self._every, self._done = process, every, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        start, page = time.monotonic(), os.sysconf("SC_PAGESIZE") / 2**20
        with Path(f"/proc/{self._process}/statm").open("rb", buffering=0) as statm:
            while not self._done.wait(self._every):
                statm.seek(0)
                try:
                    _, resident, shared, *_ = (page * int(pages) for pages in statm.read().split())
                except (ProcessLookupError, ValueError):  # it ended just now
                    return
                if resident:
                    self.samples.append((time.monotonic() - start, resident - shared, resident))

    def peaks(self) -> dict[str, float]:
        """The highest of each."""
        _, anonymous, resident = map(max, zip(*self.samples, strict=True))
        return {"anonymous": anonymous, "resident": resident}
