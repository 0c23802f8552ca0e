"""A checkpoint that comes to harm costs what was trained since the save before it, and no more."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest

from odtpack_runtime import CheckpointState
from odtpack_runtime.checkpoint import writer
from odtpack_runtime.checkpoint.format import CheckpointData, OptimizerState, read_checkpoint
from odtpack_runtime.errors import OdtpackError
from tests.runtime.checkpoint_samples import assert_same


def content(step: int, size: int = 50) -> CheckpointData:
    weight = np.full(size, step, np.float32)
    moments = {"w": [weight / 2, weight / 4]}
    return CheckpointData({"w": weight}, {}, optimizer=OptimizerState(step, 0.5, moments))


def save(path: Path, step: int, size: int = 50, *, keep: bool = True) -> None:
    state = CheckpointState(content(step, size))
    CheckpointState.save_checkpoint(state, path, include_optimizer_state=True, keep_previous=keep)


def step_of(state: CheckpointState) -> int:
    assert state.optimizer is not None
    assert set(state.parameters["w"].data) == {state.optimizer.step}
    return state.optimizer.step


def harm(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(np.float32([5, 5]).tobytes()) + 2] ^= 4
    path.write_bytes(data)


@pytest.fixture(params=["one file", "external data"])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if request.param == "external data":
        monkeypatch.setattr(writer, "EXTERNAL_DATA_THRESHOLD", 64)
    return tmp_path / "trained.ckpt"


def harm_values(path: Path) -> None:
    data = Path(f"{path}.data")
    harm(data if data.exists() else path)


def test_two_saves_are_kept(path: Path) -> None:
    for step in range(1, 6):
        save(path, step)
        if step > 1:
            assert_same(read_checkpoint(Path(f"{path}.previous")), content(step - 1))
        assert step_of(CheckpointState.load_checkpoint(path)) == step
    names = {entry.name for entry in path.parent.iterdir()}
    assert {name.removesuffix(".data") for name in names} == {
        "trained.ckpt", "trained.ckpt.previous"
    }  # fmt: skip


def test_a_damaged_one_falls_back(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(path, 3)
    save(path, 5)
    harm_values(path)
    with caplog.at_level(logging.WARNING):
        state = CheckpointState.load_checkpoint(path)
    assert step_of(state) == 3
    assert state.recovered == caplog.messages[0]
    assert "not what was saved: 'w'" in state.recovered
    assert "trained.ckpt.previous, of optimizer step 3" in state.recovered
    assert "2 optimizer steps made since are lost" in state.recovered
    # The next save replaces the damaged file; the good one is not rotated away for it.
    state.parameters["w"].data[:] = 4
    state.optimizer = content(4).optimizer
    CheckpointState.save_checkpoint(state, path, True, keep_previous=True)
    assert step_of(CheckpointState.load_checkpoint(path)) == 4
    assert step_of(CheckpointState.load_checkpoint(Path(f"{path}.previous"))) == 3
    CheckpointState.save_checkpoint(state, path, True, keep_previous=True)
    assert step_of(CheckpointState.load_checkpoint(Path(f"{path}.previous"))) == 4


def test_a_missing_one_falls_back(path: Path) -> None:
    """As where the file system has no hard links, between two renames."""
    save(path, 3)
    save(path, 5)
    path.unlink()
    state = CheckpointState.load_checkpoint(path)
    assert step_of(state) == 3
    assert "There is no checkpoint" in str(state.recovered)


def test_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    for step in (1, 2, 3):
        save(tmp_path / "c", step)
    assert step_of(CheckpointState.load_checkpoint(tmp_path / "c")) == 3
    assert step_of(CheckpointState.load_checkpoint(tmp_path / "c.previous")) == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_both_damaged_is_one_error(path: Path) -> None:
    save(path, 5)
    save(path, 5)
    for name in {path, Path(f"{path}.previous")}:
        name.write_bytes(name.read_bytes()[:-1])
    with pytest.raises(OdtpackError, match="save before it is of no use either") as caught:
        CheckpointState.load_checkpoint(path)
    assert caught.value.code == "checkpoint-corrupt"


def test_nothing_is_kept_unless_asked(tmp_path: Path) -> None:
    save(tmp_path / "c", 1, keep=False)
    save(tmp_path / "c", 5, keep=False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
    harm(tmp_path / "c")
    with pytest.raises(OdtpackError, match="not what was saved"):
        CheckpointState.load_checkpoint(tmp_path / "c")


def test_data_move_in_and_out_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "EXTERNAL_DATA_THRESHOLD", 1000)
    sizes = [50, 300, 400, 50, 60, 300, 300, 500, 300, 50]
    for step, size in enumerate(sizes, 1):
        save(tmp_path / "c", step, size)
        assert_same(read_checkpoint(tmp_path / "c"), content(step, size))
        if step > 1:
            before = content(step - 1, sizes[step - 2])
            assert_same(read_checkpoint(tmp_path / "c.previous"), before)
            external = before.trainable["w"].nbytes * 3 > 1000
            assert (tmp_path / "c.previous.data").exists() == external
