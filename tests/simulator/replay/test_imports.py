"""What a replay's process loads counts in its memory, and delays each of the replays."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["training_run", "timing_run"])
def test_a_replay_loads_no_more_than_the_app_and_the_clock(module: str) -> None:
    code = (
        f"import sys, odtpack_simulator.replay.child.{module}\n"
        "found = {'onnx', 'onnx_ir', 'pydantic', 'rich', 'typer', 'jinja2'} & set(sys.modules)\n"
        "sys.exit(str(sorted(found)) if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
