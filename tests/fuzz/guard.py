"""Read a hostile file under guard: what it may end in, how long, and with how much memory."""

import re
import signal
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from odtpack_runtime.errors import OdtpackError
from tests.fuzz.readers import READERS, Reader

SECONDS = 10
TRACING = 6
"""How many times as long reading takes at most while its memory is traced."""
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
    for timer, (_, limit) in timers.items():
        signal.setitimer(timer, limit)
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
    if not tracemalloc.is_tracing():
        return _end(kind, path, SECONDS)
    tracemalloc.reset_peak()
    held, began = tracemalloc.get_traced_memory()[0], time.process_time()
    mark = _end(kind, path, TRACING * SECONDS)
    used = tracemalloc.get_traced_memory()[1] - held
    if used > 10 * len(data) + MEMORY_BYTES:
        raise DefectError(f"it took {used} bytes of memory for {len(data)}")
    if time.process_time() - began > SECONDS:
        tracemalloc.stop()
        try:
            return _end(kind, path, SECONDS)
        finally:
            tracemalloc.start(1)
    return mark


def _end(kind: Reader, path: Path, seconds: int) -> str:
    try:
        with deadline(seconds):
            kind.read(path)
    except OdtpackError as error:
        # The kind of message, without what the input put into it.
        words = re.sub("[^a-z ]", "", error.what[:160]).split()
        return " ".join([error.code, *(word for word in words if len(word) > 2)])
    except DefectError:
        raise
    except BaseException as error:
        raise DefectError(f"{type(error).__name__}: {str(error)[:500]}") from error
    return "read"
