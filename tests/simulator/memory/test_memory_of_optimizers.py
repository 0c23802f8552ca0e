"""The plan knows what every optimizer keeps, and a real run agrees."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odtpack.build import build_package
from odtpack.optimizers import SGD, Adafactor, AdamW, Lion, Optimizer
from odtpack_runtime.package.package import Package
from odtpack_simulator.memory.memory_plan import plan_memory
from odtpack_simulator.replay.job import Job
from odtpack_simulator.replay.replay import run_training_child
from tests import zoo
from tests.packaging_tools import batch

SIZES = (784, 512, 512, 10)
VECTOR = 4 * sum(a * b + -(-b // 16) * 16 for a, b in itertools.pairwise(SIZES))
"""Bytes of all parameters, gaps included."""
# One float a row and a column of every matrix; for a bias one, and as many as it has elements.
FACTORS = sum(
    4 * (-(-n // 16) * 16)
    for a, b in itertools.pairwise(SIZES)
    for n in (b, a, 1, b)
)  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux")
@pytest.mark.parametrize(
    ("optimizer", "update", "accumulate", "state"),
    [
        (SGD(momentum=0.9), {"clip_norm": 1.0}, 1, VECTOR),
        (Lion(), {}, 1, VECTOR),
        (AdamW(weight_decay=0.1), {"clip_norm": 1.0, "decay_vectors": False}, 3, 2 * VECTOR),
        (Adafactor(), {}, 1, FACTORS),
    ],
    ids=["momentum", "lion", "adamw", "adafactor"],
)
def test_predicted_and_measured(
    optimizer: Optimizer, update: dict[str, Any], accumulate: int, state: int, tmp_path: Path
) -> None:
    model = zoo.mlp(SIZES)
    build_package(
        model, tmp_path / "p", loss="cross_entropy", optimizer=optimizer, **update,
        accumulation_steps=accumulate,
    )  # fmt: skip
    package = Package.open(tmp_path / "p")
    x, labels = batch(model, 200)
    for name, array in (("input", x), ("labels", labels)):
        np.save(tmp_path / f"{name}.npy", array)
    job = Job(
        task="train",
        training_model=str(package.training_model),
        eval_model=str(package.eval_model),
        optimizer_model=str(package.optimizer_model),
        checkpoint=str(package.checkpoint),
        folder=str(tmp_path),
        accumulation_steps=accumulate,
        data={name: str(tmp_path / f"{name}.npy") for name in ("input", "labels")},
        samples=200,
        batch_size=32,
        epochs=1,
        seed=3,
        full_batches=False,
        learning_rate=0.001,
        threads=1,
    )
    plan = plan_memory(package, {"input": (32, 784), "labels": (32,)})
    phase = next(phase for phase in plan.phases if phase.name == "optimizer step")
    assert sum(item.nbytes for item in phase.items if item.kind == "optimizer_state") == state
    measured = run_training_child(job).peak_bytes
    assert measured is not None
    assert abs(plan.peak.nbytes - measured) <= 0.15 * measured
