"""A round of checkpoints that devices sent: what is averaged, and what is left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from odtpack.flower import fedavg
from odtpack_runtime import CheckpointState
from odtpack_runtime.errors import OdtpackError
from tests.packages.samples import build, small_model


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return build(tmp_path / "package", small_model())


def moved(package: Path, path: Path, by: float) -> Path:
    """A checkpoint of the package with all parameters moved."""
    state = CheckpointState.load_checkpoint(package / "checkpoint")
    for _, parameter in state.parameters:
        parameter.data = parameter.data + np.float32(by)
    CheckpointState.save_checkpoint(state, path)
    return path


def values(path: Path) -> np.ndarray:
    state = CheckpointState.load_checkpoint(path)
    return np.concatenate([parameter.data.ravel() for _, parameter in state.parameters])


def test_only_sound_answers_are_averaged(package: Path, tmp_path: Path) -> None:
    other = build(tmp_path / "other", small_model(width=(2, 4)))
    (tmp_path / "noise").write_bytes(b"no checkpoint")
    answers = [
        (moved(package, tmp_path / "a", 0.1), 30),
        (moved(package, tmp_path / "nan", np.nan), 30),
        (tmp_path / "noise", 30),
        (moved(package, tmp_path / "b", 0.3), 10),
        (other / "checkpoint", 30),
        (moved(package, tmp_path / "huge", 1e3), 30),
        (moved(package, tmp_path / "none", 0.2), 0),
        (moved(package, tmp_path / "c", 0.1), 40),
    ]
    reasons = fedavg(package, answers, tmp_path / "mean")
    assert [reason is None for reason in reasons] == [
        True, False, False, True, False, False, False, True,
    ]  # fmt: skip
    for index, words in ((1, "NaN"), (4, "should be"), (5, "times the round"), (6, "samples")):
        assert words in str(reasons[index]), reasons
    wanted = values(package / "checkpoint") + 0.125
    np.testing.assert_allclose(values(tmp_path / "mean"), wanted, rtol=1e-5, atol=1e-6)


def test_the_round_begins_where_one_says(package: Path, tmp_path: Path) -> None:
    """A long update from the package's own checkpoint is short from where the round began."""
    begun = moved(package, tmp_path / "begun", 100.0)
    answers = [(moved(package, tmp_path / str(i), 100 + 0.1 * i), 1) for i in range(1, 4)]
    answers.append((moved(package, tmp_path / "stale", 0.1), 1))
    reasons = fedavg(package, answers, tmp_path / "mean", begun=begun)
    assert [reason is None for reason in reasons] == [True, True, True, False]


def test_a_round_without_a_sound_answer_is_an_error(package: Path, tmp_path: Path) -> None:
    answers = [(moved(package, tmp_path / "nan", np.nan), 30)]
    for given in (answers, []):
        with pytest.raises(OdtpackError, match="No answer can be averaged") as caught:
            fedavg(package, given, tmp_path / "mean")
        assert caught.value.code == "fleet-arrays"
    assert not (tmp_path / "mean").exists()
