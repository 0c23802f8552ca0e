"""The app that memory is held against: ``odtpack-measure``, the C++ kit's program.

It loads the package with its own options, evaluates, trains, evaluates, saves and exports. It is
killed with everything open, and a second process resumes from the file and does the same again.
What counts is resident anonymous memory above what the process had before the package.
"""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.fidelity.models import STEPS, Built
from odtpack_runtime.errors import OdtpackError
from odtpack_simulator.device.kits import Loop
from tests.kits import cpp_kit

_OVER = 3
"""Exit code of the program where memory goes beyond the limit."""
_SECONDS = 600.0

Lives = tuple[dict[str, int], dict[str, int]]
"""Peak in bytes of each phase, in the process that is killed and in the one that resumes."""


class App:
    """A training in the app; use it as a context manager, which keeps its files."""

    def __init__(self, built: Built, batch_size: int, threads: int, loop: Loop = "step") -> None:
        reason = cpp_kit.unavailable()
        if reason is not None:
            raise OdtpackError("kit-missing", f"The app cannot be built: {reason}.")
        self._program = cpp_kit.built("measure")
        self._scratch = tempfile.TemporaryDirectory(prefix="odtpack-app-")
        self._folder = Path(self._scratch.name)
        accumulate = built.case.accumulation_steps
        self._job: dict[str, Any] = {
            "package": str(built.package.path),
            "steps": [cpp_kit.save_batch(self._folder, built.batch(batch_size))],
            "count": STEPS * accumulate,
            "accumulate": accumulate,
            "threads": threads,
            "plain": loop == "train",
            "learning_rate": 1e-4,
            "evaluate_first": True,
            "evaluation": True,
            "save": "saved",
            "wait": "done",
        }
        if built.package.manifest.inference is not None:
            self._job["export"] = "exported.onnx"

    def __enter__(self) -> App:
        return self

    def __exit__(self, *raised: object) -> None:
        self._scratch.cleanup()

    def measure(self) -> Lives:
        """Live both lives without a limit."""
        first = self._live({})
        (self._folder / "saved").rename(self._folder / "resumed from")
        second = self._live({"checkpoint": "resumed from"})
        assert first is not None
        assert second is not None
        return first, second

    def completes(self, limit: int) -> bool:
        """Whether both lives come to their ends within a limit in bytes, after :meth:`measure`."""
        lives: tuple[dict[str, Any], ...] = ({}, {"checkpoint": "resumed from"})
        return all(self._live({**life, "limit_bytes": limit}) is not None for life in lives)

    def _live(self, more: dict[str, Any]) -> dict[str, int] | None:
        """Run the program until it waits, and kill it; None if it went beyond its limit."""
        job, done = self._folder / "job.json", self._folder / "done"
        job.write_text(json.dumps(self._job | more, default=str))
        done.unlink(missing_ok=True)
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen([self._program, job], stdout=output, stderr=errors)
            end = time.monotonic() + _SECONDS
            try:
                while process.poll() is None and not done.exists():
                    assert time.monotonic() < end, "the app does not end"
                    time.sleep(0.01)
            finally:
                process.send_signal(signal.SIGKILL)
                code = process.wait()
            if code == _OVER and "limit_bytes" in more:
                return None
            errors.seek(0)
            assert done.exists(), errors.read()[-2000:]
            output.seek(0)
            found = json.loads(output.read())
        base = found["before_anonymous_bytes"]
        return {
            phase: figures["peak_anonymous_bytes"] - base
            for phase, figures in found["phases"].items()
        }
