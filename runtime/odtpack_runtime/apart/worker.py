"""Work in a process of its own, with limits."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from odtpack_runtime.apart.ort_log import log_lines
from odtpack_runtime.errors import OdtpackError, says_refused, too_large

# Whether processes that are waited for do not go on: silent for too long, or stopped.

STOPPED_SECONDS: Final = 30.0
"""How long a process may be stopped (SIGSTOP) before what waits for it gives up."""


class Watch:
    """Measures the silence of processes, and how long they have been stopped."""

    # `silence`: seconds that they may be silent.

    def __init__(self, silence: float) -> None:
        self._silence = silence
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
            if now - start >= STOPPED_SECONDS:
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


# The parent's side: starts the process, asks it, holds it to its limits, and ends it.
#
# ONNX Runtime computes what a model says, and a model may say that it goes on for ever, takes all
# memory, or crashes a kernel. So a build asks a process of its own: one for all that it asks,
# started at the first question, or ahead of it by :meth:`Worker.start`. A question is the name of a
# function and arguments that JSON holds; the answer is what the function returns, or its error.

SILENCE_SECONDS: Final = 120.0
"""How long a question may take between two signs of life, of which each training step is one."""
_BYTES_PER_SECOND: Final = 2**24  # more for large files, which are read, optimized and converted
_MEMORY_BYTES: Final = 4 * 2**30
_TIMES_FILES: Final = 16  # parameters, gradients, two moments, copies that a session packs
_POLL_SECONDS: Final = 0.5
_SHOWN: Final = 4000  # bytes of the process's last words


@dataclass(frozen=True)
class Limits:
    """What a question may take."""

    seconds: float = SILENCE_SECONDS  # longest silence
    memory: int = _MEMORY_BYTES  # bytes beyond what the process holds before it

    @classmethod
    def of(cls, files: Iterable[str | os.PathLike[str]]) -> Limits:
        """Return limits in proportion to the files that a question is about."""
        nbytes = sum(Path(file).stat().st_size for file in files if Path(file).is_file())
        return cls(
            SILENCE_SECONDS + nbytes / _BYTES_PER_SECOND, _MEMORY_BYTES + _TIMES_FILES * nbytes
        )


class Worker:
    """A process that answers questions one after the other."""

    def __init__(self, on_log: Callable[[str], None] | None = None) -> None:
        self._on_log = on_log
        self._told: set[str] = set()
        self.seconds: dict[str, float] = {}  # of the processor, by function
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._lines: queue.Queue[bytes | None] = queue.Queue()

    def start(self) -> None:
        """Start the process, if it does not run; it gets ready while this one goes on."""
        if self._process is not None:
            return
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - close() closes it
        search = [path for path in sys.path if path]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "odtpack_runtime.apart"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(search)},
            # Ctrl-C reaches this process, which ends the other.
            start_new_session=os.name == "posix",
        )
        self._lines = queue.Queue()
        threading.Thread(
            target=_read, args=(self._process.stdout, self._lines), daemon=True
        ).start()

    def call(self, function: str, /, limits: Limits = Limits(), **arguments: Any) -> Any:
        """Call a function in the process."""
        # `function`: `module:name`; the module is imported there.
        # Raises OdtpackError: What the function raised; `models-crash` if the process ended,
        # `models-memory` if memory was refused to it, `models-stall` if it was silent for too long
        # or somebody stopped it.
        self.start()
        process = self._process
        assert process is not None  # noqa: S101 - it was started
        assert process.stdin is not None  # noqa: S101 - it is a pipe
        request = {"function": function, "arguments": arguments, "memory": limits.memory}
        try:
            with suppress(OSError):  # it has ended, as its output will say
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
            message = self._answer(process, limits)
        except BaseException:
            self.close()
            raise
        if "error" in message:
            raise OdtpackError(**message["error"])
        for line in log_lines(message["log"]):
            if self._on_log is not None and line not in self._told:
                self._told.add(line)
                self._on_log(line)
        self.seconds[function] = self.seconds.get(function, 0.0) + message["seconds"]
        return message["result"]

    def _answer(self, process: subprocess.Popen[bytes], limits: Limits) -> dict[str, Any]:
        watch = Watch(limits.seconds)
        while True:
            try:
                line = self._lines.get(timeout=min(_POLL_SECONDS, limits.seconds))
            except queue.Empty:
                if reason := watch.overdue([process.pid]):
                    what = f"A step on the models did not finish: {reason}."
                    raise OdtpackError("models-stall", what) from None
                continue
            if line is None:
                raise self._crashed(process, limits)
            watch.heard()
            try:
                message = json.loads(line)
            except ValueError:
                raise self._crashed(process, limits) from None
            if "alive" not in message:
                return dict(message)

    def _crashed(self, process: subprocess.Popen[bytes], limits: Limits) -> OdtpackError:
        process.kill()
        code = process.wait()
        assert self._log is not None  # noqa: S101 - it was started
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - _SHOWN))
        words = self._log.read().decode(errors="replace")
        if says_refused(words) or "BFCArena" in words:
            return too_large(limits.memory)
        import onnxruntime

        what = f"ONNX Runtime {onnxruntime.__version__} crashed on the models (exit code {code})."
        return OdtpackError("models-crash", what)

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):  # what was not written yet
                    stream.close()
        process.wait()
        if self._log is not None:
            self._log.close()


def _read(stream: IO[bytes], lines: queue.Queue[bytes | None]) -> None:
    with suppress(OSError, ValueError):  # closed by the other thread
        for line in stream:
            lines.put(line)
    lines.put(None)


_current: ContextVar[Worker | None] = ContextVar("worker", default=None)


@contextmanager
def worker(on_log: Callable[[str], None] | None = None, *, start: bool = False) -> Iterator[Worker]:
    """Share one process among all that is asked inside of the block, those of blocks in it too."""
    # `start`: start it now, as it will surely be asked.
    shared = _current.get()
    if shared is not None:
        yield shared
        return
    own = Worker(on_log)
    token = _current.set(own)
    try:
        if start:
            own.start()
        yield own
    finally:
        _current.reset(token)
        own.close()


def call(function: str, /, limits: Limits = Limits(), **arguments: Any) -> Any:
    """Call a function in the shared process, or in one for this call; see :meth:`Worker.call`."""
    with worker() as shared:
        return shared.call(function, limits, **arguments)
