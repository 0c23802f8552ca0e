"""Starts ``worker.py`` in fresh processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

# With glibc's default the blocks below a moving threshold come from a heap that only shrinks at
# its end, and the peak depends on the order of earlier frees. With a fixed threshold every large
# tensor is mapped and unmapped by itself: slower, but the peak is what the program holds.
MALLOC = {"default": {}, "mmap": {"MALLOC_MMAP_THRESHOLD_": "65536"}}


def measure(command: str, *, malloc: str, **job: Any) -> dict[str, Any]:
    """Run a command of the worker with its arguments; ``malloc`` is a key of :data:`MALLOC`.

    Raises:
        RuntimeError: The process failed; with the end of what it wrote.
    """
    with tempfile.TemporaryDirectory() as scratch:
        work, result = Path(scratch, "job.json"), Path(scratch, "result.json")
        content = {"command": command, "result": result, **job}
        work.write_text(json.dumps(content, default=os.fspath))
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.worker", work], cwd=ROOT, capture_output=True,
            text=True, errors="replace", check=False, env=os.environ | MALLOC[malloc],
        )  # fmt: skip
        if done.returncode or not result.exists():
            raise RuntimeError(f"{command} {job}: exit {done.returncode}\n{done.stderr[-2000:]}")
        answer: dict[str, Any] = json.loads(result.read_text())
    return answer
