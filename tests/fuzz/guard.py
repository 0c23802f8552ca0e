"""Read a hostile file under guard: what it may end in, how long, and with how much memory."""

from __future__ import annotations

import re
import signal
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from odtpack_runtime.errors import OdtpackError
from tests.fuzz.readers import READERS

SECONDS = 10
MEMORY_BYTES = 64 * 2**20
"""Beside ten times the file: what reading a sound file of any kind takes, ONNX's schemas and a
build included."""


class DefectError(AssertionError):
    """A reader did what none may do."""


@contextmanager
def deadline(seconds: int) -> Iterator[None]:
    """Interrupt what takes longer: of this process's time, or six times as long by the clock."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise DefectError(f"it took more than {seconds} seconds")

    timers = {
        signal.ITIMER_PROF: (signal.SIGPROF, seconds),
        signal.ITIMER_REAL: (signal.SIGALRM, 6 * seconds),
    }
    before = {number: signal.signal(number, stop) for number, _ in timers.values()}
    for timer, (_, time) in timers.items():
        signal.setitimer(timer, time)
    try:
        yield
    finally:
        for timer in timers:
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def outcome(reader: str, data: bytes, folder: Path) -> str:
    """Let a reader read; return a mark that alike ends share.

    Raises:
        DefectError: An exception that is not an OdtpackError, too long, or too much memory; a
            load of other values than were saved.
    """
    kind = READERS[reader]
    path = folder / f"input{kind.suffix}"
    path.write_bytes(data)
    tracemalloc.reset_peak()
    held = tracemalloc.get_traced_memory()[0]
    try:
        with deadline(SECONDS):
            kind.read(path)
        mark = "read"
    except OdtpackError as error:
        # The kind of message, without what the input put into it.
        words = re.sub("[^a-z ]", "", error.what[:160]).split()
        mark = " ".join([error.code, *(word for word in words if len(word) > 2)])
    except DefectError:
        raise
    except BaseException as error:
        raise DefectError(f"{type(error).__name__}: {str(error)[:500]}") from error
    if tracemalloc.is_tracing():
        used = tracemalloc.get_traced_memory()[1] - held
        if used > 10 * len(data) + MEMORY_BYTES:
            raise DefectError(f"it took {used} bytes of memory for {len(data)}")
    return mark
