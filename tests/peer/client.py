"""Asks the reference system, which lives in ``.venv-peer``, to do a job in a process of its own.

    from tests.peer import client

    if client.peer_available() is None:
        client.generate(model="model.onnx", folder="artifacts")
        client.bench(folder="artifacts", inputs="batch.npz")["peak_bytes"]

Each function takes the keyword arguments of the function of that name in ``peer_worker.py`` and
returns its result. Paths may be ``pathlib.Path``. The reference imports torch, which takes seconds:
one process has done so, and forks for every call. What measures memory, or wants an environment of
its own, gets one that is really fresh.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import selectors
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv-peer"
WORKER = Path(__file__).with_name("peer_worker.py")


class PeerError(RuntimeError):
    """The reference raised, crashed or took too long.

    Attributes:
        kind: Name of the exception that the reference raised, ``"crash"`` or ``"timeout"``.
        message: Its message, or the end of what the process wrote.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


def peer_available() -> str | None:
    """None where the reference can be run, otherwise the reason why it cannot."""
    if not (ENVIRONMENT / ".ready").exists():
        return "the reference system is not installed (run: make peer)"
    if not Path("/proc/self/clear_refs").exists():
        return "the reference system is driven on Linux only"
    return None


def generate(**arguments: Any) -> dict[str, Any]:
    """Artifacts for a model file: ``model``, ``folder``, ``requires_grad``, ``loss`` and so on."""
    return run_job("generate", **arguments)


def train(**arguments: Any) -> dict[str, Any]:
    """Steps with the artifacts in ``folder``: ``losses``, ``eval_loss``, files as asked for."""
    return run_job("train", **arguments)


def load(**arguments: Any) -> dict[str, Any]:
    """``parameters`` and ``properties`` of the file ``checkpoint``."""
    return run_job("load", **arguments)


def bench(**arguments: Any) -> dict[str, Any]:
    """Times (``train_ms``, ``optimizer_ms``, one per step) and ``peak_bytes`` on one thread."""
    return run_job("bench", **arguments)


def run_job(command: str, **arguments: Any) -> dict[str, Any]:
    """Runs one job; ``timeout_seconds`` and ``environment`` are those of ``run_jobs``."""
    options = {
        name: arguments.pop(name)
        for name in ("timeout_seconds", "environment")
        if name in arguments
    }
    return run_jobs([{"command": command, **arguments}], **options)[0]


def run_jobs(
    jobs: list[dict[str, Any]], *, timeout_seconds: float = 300,
    environment: dict[str, str] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Runs jobs of ``peer_worker.py`` one after the other in a process of their own.

    Args:
        jobs: ``command`` (``generate``, ``train``, ``load`` or ``bench``) and its arguments;
            those that are None are left to their defaults.
        timeout_seconds: Longest time the process may take.
        environment: Variables set for the process on top of this one's.

    Returns:
        The result of each job.

    Raises:
        PeerError: The reference raised, crashed or took too long.
    """
    with tempfile.TemporaryDirectory() as scratch:
        work, result = Path(scratch, "work.json"), Path(scratch, "result.json")
        given = [{k: v for k, v in job.items() if v is not None} for job in jobs]
        work.write_text(json.dumps({"jobs": given, "result": result}, default=os.path.abspath))
        if environment is not None or any(job["command"] == "bench" for job in jobs):
            _run_afresh(work, result, timeout_seconds, environment or {})
        else:
            _run_forked(work, result, timeout_seconds)
        answers: list[dict[str, Any]] = json.loads(result.read_text())
    if "error" in answers[-1]:
        error_answer = answers[-1]["error"]
        raise PeerError(error_answer["type"], error_answer["message"])
    return answers


def _command(word: str | Path) -> dict[str, Any]:
    """How the worker is started, with a file of work or ``fork``."""
    # The worker must see its own packages only.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    interpreter = ENVIRONMENT / "bin" / "python"
    return {"args": [interpreter, "-W", "ignore", WORKER, word], "env": inherited}


def _run_afresh(
    work: Path, result: Path, timeout_seconds: float, environment: dict[str, str]
) -> None:
    how = _command(work)
    how["env"] |= environment
    try:
        done = subprocess.run(
            **how, capture_output=True, text=True, errors="replace", check=False,
            timeout=timeout_seconds,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise _took_too_long(timeout_seconds) from error
    if not result.exists():
        raise _crashed(done.returncode, done.stderr)


def _run_forked(work: Path, result: Path, timeout_seconds: float) -> None:
    worker = _Forking.shared(ENVIRONMENT, WORKER)
    code = worker.run(work, timeout_seconds)
    if code is None:
        raise _took_too_long(timeout_seconds)
    if not result.exists():
        raise _crashed(code, worker.said())


def _took_too_long(seconds: float) -> PeerError:
    return PeerError("timeout", f"no answer within {seconds:g} s")


def _crashed(code: int, said: str) -> PeerError:
    return PeerError("crash", f"exit code {code}\n{said[-2000:]}")


class _Forking:
    """A worker that has imported the reference, and forks for each file of work."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the worker
        self._process = subprocess.Popen(
            **_command("fork"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            start_new_session=True,
        )  # fmt: skip
        atexit.register(self.end)

    @classmethod
    @functools.cache
    def shared(cls, environment: Path, worker: Path) -> _Forking:
        """The one of this process for an environment and a worker."""
        return cls()

    def run(self, work: Path, timeout_seconds: float) -> int | None:
        """Returns the exit code of the process that did the work; None if it took too long."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.write(f"{work}\n".encode())
            stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            answered = selector.select(timeout_seconds)
        line = stdout.readline() if answered else b""
        if not line:
            self.end()
            return self._process.returncode if answered else None
        return int(line)

    def said(self) -> str:
        """What it, and those that it forked, wrote as errors."""
        if not self._errors.closed:
            self._errors.seek(0)
            self._said = self._errors.read().decode(errors="replace")
        return self._said

    def end(self) -> None:
        """End it, and what it has forked; the next call starts another."""
        if self._errors.closed:
            return
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self.said()  # which is asked for afterwards, too
        self._errors.close()
        _Forking.shared.cache_clear()
        atexit.unregister(self.end)
