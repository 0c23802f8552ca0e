"""Asks the reference system, which lives in ``.venv-peer``, to do a job in a fresh process.

    from tests.peer import client

    if client.peer_available() is None:
        client.generate(model="model.onnx", folder="artifacts")
        client.bench(folder="artifacts", inputs="batch.npz")["peak_bytes"]

Each function takes the keyword arguments of the function of that name in ``peer_worker.py`` and
returns its result. Paths may be ``pathlib.Path``. A process takes seconds to start, because the
reference imports torch; ``run_jobs`` does several jobs in one.
"""

from __future__ import annotations

import json
import os
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
    jobs: list[dict[str, Any]],
    *,
    timeout_seconds: float = 300,
    environment: dict[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Runs jobs of ``peer_worker.py`` one after the other in one fresh process.

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
        work.write_text(json.dumps({"jobs": given, "result": result}, default=os.fspath))
        # The worker must see its own packages only.
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        try:
            done = subprocess.run(
                [ENVIRONMENT / "bin" / "python", "-W", "ignore", WORKER, work],
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                timeout=timeout_seconds,
                env=inherited | (environment or {}),
            )
        except subprocess.TimeoutExpired as error:
            raise PeerError("timeout", f"no answer within {timeout_seconds:g} s") from error
        if not result.exists():
            raise PeerError("crash", f"exit code {done.returncode}\n{done.stderr[-2000:]}")
        answers: list[dict[str, Any]] = json.loads(result.read_text())
    if "error" in answers[-1]:
        error_answer = answers[-1]["error"]
        raise PeerError(error_answer["type"], error_answer["message"])
    return answers
