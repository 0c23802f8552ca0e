"""A process killed at any call of the file system leaves the old state or the new one."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packages.killing import ACTIONS
from tests.sweep import split_rows

ROOT = Path(__file__).parents[2]
LEAST_CALLS = {"save a checkpoint": 5, "sign": 5}
EVERY = 4
"""In every run at every fourth call, in the sweep at each."""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize(
    ("action", "every"),
    split_rows(itertools.product(ACTIONS, (EVERY, 1)), lambda _, every: every == EVERY),
)
def test_a_kill_leaves_the_old_or_the_new(tmp_path: Path, action: str, every: int) -> None:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "tests.packages.killing", action, tmp_path, str(every)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    reference, *attempts = map(json.loads, done.stdout.splitlines())
    old, new = reference["old"], reference["new"]
    assert old != new
    states = [attempt["state"] for attempt in attempts]
    assert set(states) == {old, new}
    assert states == sorted(states, key=lambda state: state == new), "once new, it stays new"
    assert states[-1] == new
    assert len(states) > LEAST_CALLS.get(action, 40) / every
    assert {attempt["again"] for attempt in attempts} <= {new, None}
    assert [attempt["rubbish"] for attempt in attempts if attempt["rubbish"]] == []
