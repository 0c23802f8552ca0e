from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from odtpack_runtime import CheckpointState, LinearLRScheduler, Module, OdtpackError, Optimizer
from tests.runtime import models


def open_optimizer(files: models.Files, checkpoint: Path | None = None) -> Optimizer:
    state = CheckpointState.load_checkpoint(checkpoint or files.checkpoint)
    return Optimizer(files.sgd, Module(files.training, state))


@pytest.mark.parametrize(
    ("warmup", "total", "expected"),
    [
        (2, 6, [0, 0.1, 0.2, 0.15, 0.1, 0.05, 0, 0]),
        (0, 4, [0.2, 0.15, 0.1, 0.05, 0, 0]),
        (1, 2, [0, 0.2, 0, 0]),
        (3, 3, [0, 0.2 / 3, 0.4 / 3, 0, 0]),
        (0, 1, [0.2, 0, 0]),
    ],
)
def test_warm_up_and_decay(
    regression: models.Files, warmup: int, total: int, expected: list[float]
) -> None:
    optimizer = open_optimizer(regression)
    scheduler = LinearLRScheduler(optimizer, warmup, total, 0.2)
    seen = [optimizer.get_learning_rate()]
    for _ in expected[1:]:
        optimizer.step()
        scheduler.step()
        seen.append(optimizer.get_learning_rate())
    np.testing.assert_allclose(seen, expected, rtol=1e-6, atol=1e-9)


def test_a_resumed_run_stays_on_the_line(regression: models.Files, tmp_path: Path) -> None:
    optimizer = open_optimizer(regression)
    scheduler = LinearLRScheduler(optimizer, 2, 10, 0.2)
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    module_state = CheckpointState.load_checkpoint(regression.checkpoint)
    module_state.optimizer = optimizer._state
    CheckpointState.save_checkpoint(module_state, tmp_path / "c", include_optimizer_state=True)
    resumed = open_optimizer(regression, tmp_path / "c")
    assert resumed.get_learning_rate() == optimizer.get_learning_rate()
    LinearLRScheduler(resumed, 2, 10, 0.2)
    assert resumed.get_learning_rate() == optimizer.get_learning_rate()


@pytest.mark.parametrize(("warmup", "total"), [(5, 4), (-1, 4), (0, 0), (0, -1)])
def test_schedules_that_make_no_sense(regression: models.Files, warmup: int, total: int) -> None:
    optimizer = open_optimizer(regression)
    with pytest.raises(OdtpackError) as caught:
        LinearLRScheduler(optimizer, warmup, total, 0.2)
    assert caught.value.code == "bad-schedule"
    assert optimizer.get_learning_rate() == float(np.float32(0.001))
    with pytest.raises(OdtpackError):
        LinearLRScheduler(optimizer, 0, 4, float("nan"))
