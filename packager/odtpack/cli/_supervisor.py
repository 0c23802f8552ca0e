"""Ends a command that a signal does not end by itself, and keeps libraries' text off the terminal.

Python hears a signal between two of its own instructions: not while ONNX Runtime, a checker or a
parser computes for minutes. So the process that the shell starts forks at once, before it has
threads, and only waits: the command runs in the child. A signal is passed on; a child that has not
ended after :data:`GRACE_SECONDS` is killed, with the processes that it started, and the folders
that it leaves are removed.

What libraries write to standard error themselves goes through a pipe to the waiting process, which
makes it safe to show (:func:`odtpack_simulator.values.text.clean`). The command's own
messages go straight to where they belong.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from odtpack_simulator.values.text import clean

GRACE_SECONDS: Final = 1.0
_DRAIN_SECONDS: Final = 0.3
INTERRUPTED: Final = 130  # exit code of a command that Ctrl-C ended
TERMINATED: Final = 143  # and of one that SIGTERM ended
ENDED_BY: Final = {INTERRUPTED: signal.SIGINT, TERMINATED: signal.SIGTERM}


def supervised(command: Callable[[], int], ended: Callable[[int], None]) -> int:
    """Run a command in a child of this process, where the system can fork."""
    # `ended`: Says which signal ended the command. The process that waits calls it, once: the child
    # may be killed while it cleans up.
    if not hasattr(os, "fork") or threading.active_count() > 1:
        return told(command(), ended)
    read, write = os.pipe()
    waiting = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(read)
        _claim_stderr(write)
        _process_control(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != waiting:  # it ended before that
            os._exit(1)
        code = command()
        if code in ENDED_BY:  # all is cleaned up, and to free a large graph takes seconds
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(code)
        return code
    os.close(write)
    return _Waiting(child, read, ended).code()


def told(code: int, ended: Callable[[int], None]) -> int:
    """Say which signal ended a command, if one did; return its exit code."""
    if code in ENDED_BY:
        ended(ENDED_BY[code])
    return code


class _Waiting:
    def __init__(self, child: int, stream: int, ended: Callable[[int], None]) -> None:
        self._child, self._ended = child, ended
        self._asked: int | None = None
        self._killed = False
        self._reader = threading.Thread(target=_show, args=(stream,), daemon=True)
        # Processes whose own parent ends get this one as theirs.
        _process_control(36, 1)  # PR_SET_CHILD_SUBREAPER
        for number in ENDED_BY.values():
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._pass_on)
        signal.signal(signal.SIGALRM, self._kill)

    def code(self) -> int:
        """Wait for the end; return the exit code."""
        self._reader.start()
        _, status = os.waitpid(self._child, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _kill_all(os.getpid())
        self._reader.join(_DRAIN_SECONDS)
        code = os.waitstatus_to_exitcode(status)
        if self._killed and self._asked is not None:
            _without_its_package("files/scratch.py").sweep()
            code = -self._asked
        if code < 0:
            self._ended(-code)
            return 128 - code  # as a shell says it
        return told(code, self._ended)

    def _pass_on(self, number: int, _frame: object) -> None:
        if self._asked is None:
            self._asked = number
            signal.setitimer(signal.ITIMER_REAL, GRACE_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child, number)

    def _kill(self, _number: int, _frame: object) -> None:
        self._killed = True
        _kill_all(self._child)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child, signal.SIGKILL)


def _without_its_package(file: str) -> Any:
    """A module of the runtime that needs nothing else: its package imports ONNX Runtime first."""
    package = importlib.util.find_spec("odtpack_runtime")
    assert package is not None  # noqa: S101 - it is installed with this one
    assert package.origin is not None  # noqa: S101
    path = Path(package.origin).parent / file
    spec = importlib.util.spec_from_file_location(f"odtpack.cli.{path.stem}", path)
    assert spec is not None  # noqa: S101
    assert spec.loader is not None  # noqa: S101
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _claim_stderr(pipe: int) -> None:
    """Give libraries the pipe for standard error, and Python the real one."""
    real = os.dup(2)
    os.dup2(pipe, 2)
    os.close(pipe)
    before = sys.stderr
    sys.stderr = io.TextIOWrapper(
        os.fdopen(real, "wb"),
        encoding=getattr(before, "encoding", "utf-8"),
        errors="backslashreplace",
        line_buffering=True,
    )
    # rich asks it for the width of the terminal.
    sys.__stderr__ = sys.stderr  # type: ignore[misc]


def _show(pipe: int) -> None:
    """Print each line that libraries write, once, safe to show."""
    # No line begins as one of the command's own does: a name with a line break is several lines
    # here.
    log_lines = None
    told: set[str] = set()
    with os.fdopen(pipe, "rb") as stream:
        for line in stream:
            text = line.decode(errors="replace").rstrip("\n")
            if log_lines is None:
                log_lines = _without_its_package("apart/ort_log.py").log_lines
            lines = list(log_lines(text))
            for each in [f"ONNX Runtime says: {words}" for words in lines] or [f"| {text}"]:
                if text.strip() and each not in told:
                    told.add(each)
                    with contextlib.suppress(OSError, ValueError):
                        sys.stderr.write(clean(each) + "\n")
                        sys.stderr.flush()


def _process_control(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value)


def _kill_all(ancestor: int) -> None:
    """Kill every process below another, those that are started meanwhile too."""
    until = time.monotonic() + _DRAIN_SECONDS
    while time.monotonic() < until:
        found = [*_below(ancestor)]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if ancestor == os.getpid():
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
        time.sleep(0.01)


def _below(ancestor: int) -> Iterator[int]:
    """Processes below one, by Linux's list of children; zombies are not among them."""
    for listed in Path(f"/proc/{ancestor}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for pid in map(int, listed.read_text(encoding="ascii").split()):
                yield from _below(pid)
                state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
                if state.rpartition(")")[2].split()[0] != "Z":
                    yield pid
