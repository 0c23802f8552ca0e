from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv-federated"
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}

Play = Callable[..., dict[str, Any]]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    """Plays a job of ``flower_jobs.py`` in the environment of Flower."""
    if not (ENVIRONMENT / ".ready").exists():
        pytest.fail("Flower is not installed in .venv-federated: run make federated")

    def run(**job: Any) -> dict[str, Any]:
        file = tmp_path / "job.json"
        file.write_text(json.dumps(job, default=str))
        paths = [str(ROOT / "packager"), str(ROOT / "runtime"), str(ROOT)]
        done = subprocess.run(
            [
                str(ENVIRONMENT / "bin" / "python"),
                "-W",
                "ignore",
                "-m",
                "tests.federated.flower_jobs",
                str(file),
            ],
            cwd=ROOT,
            env=os.environ | QUIET | {"PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer

    return run
