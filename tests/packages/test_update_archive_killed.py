"""A process that is killed while it applies an update leaves the old package or the new one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from odtpack.update.update_archive import write_update
from odtpack_runtime.files.folder_update import is_stage
from tests.packages.kill_apply import held
from tests.packages.samples import build, small_model, with_values


@pytest.mark.skipif(os.name != "posix", reason="fork and SIGKILL")
@pytest.mark.parametrize(("way", "others"), [("swap", True), ("no-swap", False)])
def test_killed_at_every_call(tmp_path: Path, way: str, others: bool) -> None:
    old = build(tmp_path / "old")
    new = build(tmp_path / "new", with_values(small_model(hidden=4)), nominal=True)
    write_update(old, new, tmp_path / "update")
    if others:
        for folder in (old, new):
            (folder / "notes.txt").write_text("mine")
    words = [*(str(path) for path in (old, tmp_path / "update", tmp_path / "work")), way]
    done = subprocess.run(
        [sys.executable, "-m", "tests.packages.kill_apply", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    attempts = [json.loads(line) for line in done.stdout.splitlines()]
    # Opening, filling and syncing each of the new package's files is three calls at least.
    assert len(attempts) > 3 * 6
    assert [attempt["killed"] for attempt in attempts] == [True] * (len(attempts) - 1) + [False]
    before, after = held(old), held(new)
    for attempt in attempts:
        assert attempt["left"] in (before, after)
        assert attempt["after"] == after
        # Killed after the swap it leaves its stage, which the next update removes.
        assert [name for name in attempt["beside"] if not is_stage(name)] == ["package"]
    assert attempts[0]["left"] == before
    assert attempts[-1]["left"] == after
