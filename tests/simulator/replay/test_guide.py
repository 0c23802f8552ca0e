"""The guide's program for surviving an interruption, killed and started again."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from odtpack.build import build_package
from odtpack_runtime.checkpoint.format import read_checkpoint
from odtpack_simulator.replay.paired_loss import first_difference
from tests import zoo

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "app-developer.md"

KILLED = """
import os, signal
from odtpack_runtime import CheckpointState, Optimizer
from odtpack_runtime.checkpoint.writer import write_checkpoint
from odtpack_simulator.replay.child.training_run import stopping_write

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

made = 0
step = Optimizer.step

def torn(state, path, include_optimizer_state):
    write_checkpoint(
        path, state.snapshot(include_optimizer_state), open_file=stopping_write(3000, die)
    )

def counted(self):
    global made
    step(self)
    made += 1
    if made == {at} and not {in_save}:
        die()
    if made == {at}:
        CheckpointState.save_checkpoint = torn

Optimizer.step = counted
"""


def run(program: str, folder: Path) -> int:
    return subprocess.run(
        [sys.executable, "-c", program], cwd=folder, check=False, capture_output=True
    ).returncode


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the program begins."""
    folder = tmp_path_factory.mktemp("guide")
    build_package(
        zoo.cnn(size=8, width=(4, 4), hidden=16), folder / "package", loss="cross_entropy"
    )
    random = np.random.default_rng(0)
    images = random.random((800, 1, 8, 8), np.float32)
    np.savez(folder / "digits.npz", input=images, labels=random.integers(0, 10, 800))
    return folder


def test_ends_with_the_same_bits(start: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.M | re.S)
    (program,) = (block for block in blocks if "go on from where the last process" in block)
    shutil.copytree(start, tmp_path / "free")
    assert run(program, tmp_path / "free") == 0
    shutil.copytree(start, tmp_path / "killed")
    # Before the first save, in the first; and, counted from step 20 on, in the last.
    for at, in_save in ((4, False), (10, True), (27, False), (30, True)):
        killed = KILLED.format(at=at, in_save=in_save) + program
        assert run(killed, tmp_path / "killed") == -signal.SIGKILL
        assert bool(list((tmp_path / "killed").glob(".training.ckpt.*.tmp"))) == in_save
    assert run(program, tmp_path / "killed") == 0
    ends = [read_checkpoint(tmp_path / name / "training.ckpt") for name in ("free", "killed")]
    assert ends[0].optimizer is not None
    assert ends[0].optimizer.step == 50 == ends[0].properties["app.step"]
    assert first_difference(*ends) is None
    assert ends[0].properties == ends[1].properties
