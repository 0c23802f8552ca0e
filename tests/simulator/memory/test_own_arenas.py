"""A kit that cannot share an arena: the plan against a replay whose sessions have one each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from odtpack_simulator.memory.memory_plan import plan_arenas, plan_memory
from odtpack_simulator.replay.replay import hold
from odtpack_simulator.simulation import _with_default_options
from tests.simulator.packages import Case


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
def test_plan_and_replay_agree(name: str, case: Callable[[str], Case], tmp_path: Path) -> None:
    """Over both lives: the one that begins, and the one that goes on from what that saved."""
    this = case(name)
    planned = plan_memory(this.package, this.shapes, sharing="own")
    shared = plan_memory(this.package, this.shapes)
    assert planned.peak.nbytes >= shared.peak.nbytes
    measured = hold(this.job(tmp_path, sharing="own"))
    assert measured.outcome == "completed"
    assert measured.peak_bytes is not None
    assert planned.peak.nbytes == pytest.approx(measured.peak_bytes, rel=0.05, abs=4e5)
    resuming = {peak.phase: peak for peak in planned.phase_peaks(measured.phase_peaks)}["resuming"]
    assert resuming.measured_bytes == pytest.approx(resuming.predicted_bytes, rel=0.1, abs=4e5)


def test_options_of_onnx_runtime(case: Callable[[str], Case], tmp_path: Path) -> None:
    """With memory patterns a session keeps a block for a whole run, beside its arena."""
    this = case("transformer")  # its data are too few to evaluate
    package = _with_default_options(this.package, tmp_path / "package")
    plan = plan_arenas(package, this.shapes).plan(package.manifest.session, evaluates=False)
    assert plan.peak.nbytes > 1.05 * plan_memory(this.package, this.shapes).peak.nbytes
    job = dataclasses.replace(
        this.job(tmp_path, sharing="own"), training_model=str(package.training_model),
        eval_model=str(package.eval_model), optimizer_model=str(package.optimizer_model),
    )  # fmt: skip
    measured = hold(job)
    assert measured.outcome == "completed"
    assert "evaluation" not in measured.phase_peaks
    assert plan.peak.nbytes == pytest.approx(measured.peak_bytes, rel=0.02)


def test_a_limit_between_the_two_is_refused_to_own_arenas_only(
    case: Callable[[str], Case], tmp_path: Path
) -> None:
    this = case("cnn")
    peaks = {}
    for own in (False, True):
        folder = tmp_path / str(own)
        folder.mkdir()
        peaks[own] = hold(this.job(folder, sharing="own" if own else None)).peak_bytes
    low, high = peaks[False], peaks[True]
    assert low is not None
    assert high is not None
    limit = (low + high) // 2
    assert high - low > 600_000  # more than a limit can be off by
    for own, outcome in ((False, "completed"), (True, "killed")):
        job = this.job(tmp_path / str(own), sharing="own" if own else None, limit_bytes=limit)
        assert hold(job).outcome == outcome
