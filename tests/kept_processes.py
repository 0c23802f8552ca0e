"""Processes that execute models for a build, kept for the next build of the same test process.

A build asks a process of its own to execute its models, and such a process spends half a second on
its imports, more than most builds of a test. A process that answered every question goes on to the
next build; one that crashed, stalled, was killed, or was started in another environment or folder
does not.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from odtpack_runtime.apart import worker
from odtpack_runtime.apart.worker import Worker

USES = 100
"""Builds for which one process answers: what it keeps of each adds up."""
PARTS = ("_process", "_log", "_lines")


@contextmanager
def kept() -> Iterator[None]:
    """Keep processes inside of the block."""
    free: dict[tuple[object, ...], tuple[int, list[Any]]] = {}
    start, call, close = Worker.start, Worker.call, Worker.close

    def started(self: Worker) -> None:
        if self._process is not None:
            return
        variables = {**os.environ, "PYTEST_CURRENT_TEST": ""}
        replaced = worker.subprocess.Popen, vars(worker.Limits)["of"]
        key = (os.getpid(), *replaced, *sys.path, Path.cwd(), *sorted(variables.items()))
        uses, parts = free.pop(key, (0, []))
        for name, part in zip(PARTS, parts, strict=False):
            setattr(self, name, part)
        if self._process is not None and self._process.poll() is not None:
            close(self)
        if self._process is None:
            uses = 0
            start(self)
        vars(self).update(key=key, uses=uses + 1, asked=False)

    def called(self: Worker, *words: Any, **arguments: Any) -> Any:
        started(self)
        vars(self).update(asked=True)
        try:
            return call(self, *words, **arguments)
        finally:
            # Where no answer came the process has been ended.
            vars(self).update(asked=False)

    def closed(self: Worker) -> None:
        process = self._process
        state = vars(self)
        if process is None or state["asked"] or process.poll() is not None or state["uses"] >= USES:
            close(self)
            return
        if held := free.pop(state["key"], None):
            end(held[1])
        own = [key for key in free if key[0] == os.getpid()]  # a fork's are its parent's as well
        if len(own) >= 2:
            end(free.pop(own[0])[1])
        free[state["key"]] = state["uses"], [getattr(self, name) for name in PARTS]
        self._process = None

    def end(parts: list[Any]) -> None:
        ended = Worker()
        for name, part in zip(PARTS, parts, strict=True):
            setattr(ended, name, part)
        close(ended)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "start", started)
        patch.setattr(Worker, "call", called)
        patch.setattr(Worker, "close", closed)
        yield
    for _, parts in free.values():
        end(parts)
