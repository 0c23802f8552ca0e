"""Steps are timed with the models that a kit makes them with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odtpack.build import build_package
from odtpack_simulator import simulation
from odtpack_simulator.latency import latency
from odtpack_simulator.latency.latency import HostTiming
from odtpack_simulator.replay.job import Job
from tests import zoo
from tests.simulator.packages import make_profile

SIZES = (300, 900, 3)  # a matrix of more than 2^18 elements


def test_each_device_has_the_times_of_its_kit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_package(zoo.mlp(SIZES), tmp_path / "package", loss="cross_entropy")
    random = np.random.default_rng(0)
    samples = random.standard_normal((24, SIZES[0])).astype(np.float32)
    labels = random.integers(0, SIZES[-1], 24)
    np.savez(tmp_path / "data.npz", input=samples, labels=labels)
    timed: list[tuple[Job, HostTiming]] = []
    measure = latency.measure_host

    def measured(job: Job, **options: Any) -> HostTiming:
        timed.append((job, measure(job, **options)))
        return timed[-1][1]

    monkeypatch.setattr(latency, "measure_host", measured)
    board = make_profile("board", 10**9)  # Linux, where the kit is Python's
    page = make_profile("page", 10**9).model_copy(update={"os": "web"})  # JavaScript's has two
    result = simulation.simulate(
        tmp_path / "package", tmp_path / "data.npz", [board, page],
        batch_size=8, epochs=1, learning_rate=0.01, seed=0,
    )  # fmt: skip
    models = {Path(job.step_model).name if job.step_model else None for job, _ in timed}
    assert models == {"step_model.onnx", None}
    for job, host in timed:
        # A step model splits what it has updated together.
        operators = {cost.op_type for cost in host.host_latency().by_operator}
        assert ("Split" in operators) == (job.step_model is not None)
        assert sum(cost.total_ms for cost in host.host_latency().by_operator) > 0
    times = [device.latency.step_ms for device in result.devices]
    if None in times:
        assert "busy" in str([device.latency.not_judged for device in result.devices])
    else:
        assert times[0] != times[1]
