"""Replays and searches say which steps were not made because something was not finite."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from odtpack.build import build_package
from odtpack.fit.search_context import Trial, train
from odtpack_simulator.figures.judge import judge
from odtpack_simulator.replay.replay import run_training_child
from odtpack_simulator.simulation import simulate
from tests import zoo
from tests.kits.harness import OVERFLOWS
from tests.simulator.factory import make_result
from tests.simulator.packages import Case
from tests.training.test_not_finite import rooted


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """A training each of whose gradients of ``second`` is infinite, and no loss is."""
    build_package(
        rooted(), tmp_path / "package", loss="cross_entropy", step_model="never", self_check=False
    )
    random = np.random.default_rng(1)
    inputs, labels = random.standard_normal((40, 4), np.float32), random.integers(0, 3, 40)
    for name, array in (("input", inputs), ("labels", labels)):
        np.save(tmp_path / f"{name}.npy", array)
    np.savez(tmp_path / "data.npz", input=inputs, labels=labels)
    (tmp_path / "child").mkdir()
    return Case("rooted", tmp_path, 8, inputs, labels)


def test_a_replay(case: Case, tmp_path: Path) -> None:
    job = case.job(tmp_path / "child")
    found = run_training_child(job)
    assert found.steps_done == job.steps > 1
    assert None not in found.losses
    assert found.skipped == job.steps
    # Nothing is counted as made: each is the first.
    assert found.not_finite == "step 1: not finite: gradient of second"


def test_a_search(case: Case, tmp_path: Path) -> None:
    job = case.job(tmp_path / "child")
    found = train(Trial(str(tmp_path / "package"), job.data, job.schedule, 0.01))
    assert found.loss is None
    assert found.problem == (
        f"{job.steps} batches were skipped, the last in step 1: not finite: gradient of second"
    )


def test_a_simulation(case: Case, tmp_path: Path) -> None:
    result = judge(
        simulate(tmp_path / "package", tmp_path / "data.npz", [], epochs=1, batch_size=8, seed=0)
    )
    assert result.training.skipped_batches == len(result.training.losses) > 1
    (check,) = [each for each in result.checks if each.metric == "finite_loss"]
    assert (check.status, check.actual) == ("fail", result.training.skipped_batches)
    assert "gradient of second" in check.message
    assert "a gradient was not finite" in str(check.advice)


@pytest.mark.parametrize(("skipped", "words"), [(1, "1 batch was"), (3, "3 batches were")])
def test_losses_and_gradients_are_counted_once(skipped: int, words: str) -> None:
    result = make_result([])
    update = {"losses": [2.3, None, 2.2], "skipped_batches": skipped, "not_finite": "step 3: why"}
    result = judge(
        result.model_copy(update={"training": result.training.model_copy(update=update)})
    )
    (check,) = [each for each in result.checks if each.metric == "finite_loss"]
    assert check.actual == skipped
    assert check.message.endswith(f"; {words} skipped, the last in step 3: why")


def test_an_overflow_of_mixed_precision_is_no_fault(case: Case, tmp_path: Path) -> None:
    with OVERFLOWS:
        build_package(
            zoo.mlp((4, 5, 3)), tmp_path / "mixed", loss="cross_entropy", precision="mixed",
            self_check=False,
        )  # fmt: skip
    result = judge(
        simulate(tmp_path / "mixed", tmp_path / "data.npz", [], epochs=1, batch_size=8, seed=0)
    )
    assert (result.training.skipped_batches, result.training.overflows) == (0, 1)
    (check,) = [each for each in result.checks if each.metric == "finite_loss"]
    assert (check.status, check.actual) == ("pass", 0)
    assert "1 more only lowered the loss scale" in check.message
