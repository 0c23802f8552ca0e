"""Runs a function in a fresh process, arguments and result in JSON; watches a process's memory."""

import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from scripts.harness import ROOT, scratch


def call(
    function: Callable[..., Any],
    *,
    python: str | Path = sys.executable,
    how: dict[str, Any] | None = None,  # for subprocess.run
    environment: dict[str, str] | None = None,  # on top of this process's
    **arguments: Any,
) -> Any:
    """What a function returns in a process of its own; if it fails, a RuntimeError says why."""
    module = function.__module__
    if module == "__main__":
        module = sys.modules["__main__"].__spec__.name
    with scratch() as folder:
        job, result = folder / "job.json", folder / "result.json"
        job.write_text(json.dumps(arguments, default=os.fspath))
        command = [python, "-W", "ignore", "-m", "benchmarks.apart", module, function.__name__]
        done = subprocess.run(
            [*command, job, result], cwd=ROOT, env={**os.environ, **(environment or {})},
            capture_output=True, text=True, errors="replace", check=False, **(how or {}),
        )  # fmt: skip
        if done.returncode or not result.exists():
            said = done.stderr[-2000:] or f"exit code {done.returncode}"
            raise RuntimeError(f"{function.__name__} {arguments}: {said}")
        return json.loads(result.read_text())


class Memory(threading.Thread):
    """Looks at what a process has again and again, until the context ends."""

    def __init__(self, process: int | str = "self", every: float = 0.005) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, float, float]] = []  # seconds, anonymous and resident MiB
        self._process, self._every, self._done = process, every, threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()

    def run(self) -> None:
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


if __name__ == "__main__":
    name, function_name, given, answer = sys.argv[1:]
    found = getattr(importlib.import_module(name), function_name)
    Path(answer).write_text(json.dumps(found(**json.loads(Path(given).read_text()))))
