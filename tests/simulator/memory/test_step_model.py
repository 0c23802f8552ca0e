"""The plan of a package that trains with its step model, against a replay."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from odtpack.build import build_package
from odtpack_runtime.package.package import Package
from odtpack_simulator.memory.arena import session_use
from odtpack_simulator.memory.memory_plan import plan_memory
from odtpack_simulator.replay.job import Job
from odtpack_simulator.replay.replay import run_training_child, with_sessions
from tests import zoo
from tests.packaging_tools import batch


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux")
def test_mobilenet(tmp_path: Path) -> None:
    """Its updates are many: some in parts, and each with an output that only orders nodes."""
    model, size = zoo.mobilenet_v2(), 8
    build_package(model, tmp_path / "p", loss="cross_entropy", step_model="always")
    package = Package.open(tmp_path / "p")
    inputs, labels = batch(model, 5 * size)
    np.save(tmp_path / "input.npy", inputs)
    np.save(tmp_path / "labels.npy", labels)
    job = Job(
        "train", str(package.training_model), str(package.eval_model),
        str(package.optimizer_model), str(package.checkpoint), str(tmp_path),
        {name: str(tmp_path / f"{name}.npy") for name in ("input", "labels")}, len(inputs), size,
        epochs=1, seed=0, full_batches=True, learning_rate=1e-3, threads=1,
    )  # fmt: skip
    use = session_use(package.manifest)
    assert use.step_model
    shapes = {"input": (size, *inputs.shape[1:]), "labels": (size,)}
    plan = plan_memory(package, shapes, **use._asdict())
    measured = run_training_child(with_sessions(job, package, use))
    assert measured.outcome == "completed"
    assert plan.peak.nbytes == pytest.approx(measured.peak_bytes, rel=0.025)
