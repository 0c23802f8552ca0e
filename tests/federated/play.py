"""Starts jobs of ``flower_jobs.py`` in the environment of Flower."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv-federated"
# "local": else Ray joins a cluster that another program left running on this machine.
SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local"
}  # fmt: skip
# Before a number of seconds and a command, which then ends even where this process is gone.
WITHIN = ("timeout", "--kill-after=10")


def installed() -> bool:
    """Whether ``make federated`` has set the environment up."""
    return (ENVIRONMENT / ".ready").exists()


def play(folder: Path, **job: Any) -> dict[str, Any]:
    """Play a job; its file is written to a folder.

    Raises:
        RuntimeError: It failed; with what it said.
    """
    file = folder / "job.json"
    file.write_text(json.dumps(job, default=str))
    paths = [str(ROOT / "packager"), str(ROOT / "runtime"), str(ROOT)]
    python = str(ENVIRONMENT / "bin" / "python")
    done = subprocess.run(
        [*WITHIN, "600", python, "-W", "ignore", "-m", "tests.federated.flower_jobs", str(file)],
        cwd=ROOT, env=os.environ | SETTINGS | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, check=False, timeout=660,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
