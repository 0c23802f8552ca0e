"""The other side: the process that answers. It imports what it is asked for, and no more."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, TextIO

from odtpack_runtime.errors import OdtpackError, out_of_memory, too_large

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_MOST_LOG: Final = 2**20
_channel: TextIO | None = None


def main() -> int:
    """Answer questions until the parent closes the pipe."""
    global _channel  # noqa: PLW0603 - one process, one channel
    _channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is not a message
    die_with_parent()
    import onnxruntime  # noqa: F401 - now, while the parent has other things to do

    for line in sys.stdin.buffer:
        request = json.loads(line)
        forget_log()
        started = time.process_time()
        try:
            module, _, name = request["function"].partition(":")
            with _limited(request["memory"]):
                function = getattr(importlib.import_module(module), name)
                found = function(**request["arguments"])
            seconds = time.process_time() - started
            message: dict[str, Any] = {"result": found, "log": _log(), "seconds": seconds}
        except Exception as error:
            own = _as_own(error, request["memory"])
            names = ("code", "what", "where", "hint")
            message = {"error": {name: getattr(own, name) for name in names}}
        _send(message)
    return 0


def alive() -> None:
    """Tell the parent, if there is one, that something was done: a step, a model was loaded."""
    if _channel is not None:
        _send({"alive": True})


def forget_log() -> None:
    """Drop what ONNX Runtime has logged: it was about sizes that were only tried."""
    if _channel is not None:
        os.ftruncate(2, 0)
        os.lseek(2, 0, os.SEEK_SET)


def die_with_parent() -> None:
    """Ask Linux to end this process when its parent ends, however that ends."""
    if sys.platform != "linux":
        return  # elsewhere the next message finds the pipe closed
    import ctypes
    import signal

    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _send(message: dict[str, Any]) -> None:
    assert _channel is not None  # noqa: S101 - only in the child
    _channel.write(json.dumps(message) + "\n")
    _channel.flush()


def _as_own(error: Exception, memory: int) -> OdtpackError:
    if out_of_memory(error):
        return too_large(memory)
    if isinstance(error, OdtpackError):
        return error
    words = str(error).splitlines()
    what = f"A run of the models failed: {type(error).__name__}: {(words or ['?'])[0]}"
    return OdtpackError("models-crash", what)


def _log() -> str:
    size = os.fstat(2).st_size
    with open(os.dup(2), "rb") as stream:  # noqa: PTH123 - a descriptor
        stream.seek(max(0, size - _MOST_LOG))
        return stream.read().decode(errors="replace")


@contextmanager
def _limited(nbytes: int) -> Iterator[None]:
    """Let the process take so much more memory than it holds, where the system can hold it to."""
    if resource is None or sys.platform != "linux":
        yield
        return
    with open("/proc/self/statm", encoding="ascii") as stream:  # noqa: PTH123
        held = int(stream.read().split()[5]) * resource.getpagesize()  # data and stack
    before = resource.getrlimit(resource.RLIMIT_DATA)
    physical = os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()
    most = held + min(nbytes, physical)
    if before[1] != resource.RLIM_INFINITY:
        most = min(most, before[1])
    resource.setrlimit(resource.RLIMIT_DATA, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
