"""Our own step times, on one thread, for comparison between two states of the code.

    pytest benchmarks --benchmark-only --benchmark-autosave
    pytest-benchmark compare

Against the reference system: ``python -m benchmarks.compare_peer``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.workloads import OPTIMIZERS, WORKLOADS
from odtpack_runtime import default_session_options
from tests import packaging_tools

ROUNDS, WARM_UP = 30, 5


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_training_step(
    workload: str, optimizer: str, benchmark: BenchmarkFixture, tmp_path: Path
) -> None:
    """Training model, optimizer and lazy_reset_grad."""
    model, batch = _written(workload, tmp_path)
    folder = packaging_tools.generate(
        model, tmp_path / "package", packaging_tools.OPTIMIZERS[optimizer]
    )
    options = default_session_options(folder / "training_model.onnx", threads=1)
    state, module, update = packaging_tools.open_training(folder, options)
    update.set_learning_rate(1e-4)

    def step() -> float:
        loss = module(*batch)
        update.step()
        module.lazy_reset_grad()
        return float(loss)

    benchmark.group = workload
    loss = benchmark.pedantic(step, rounds=ROUNDS, warmup_rounds=WARM_UP)
    assert np.isfinite(loss)
    assert all(np.isfinite(parameter.data).all() for _, parameter in state.parameters)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_evaluation_step(workload: str, benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """The evaluation model on the same batch."""
    model, batch = _written(workload, tmp_path)
    folder = packaging_tools.generate(model, tmp_path / "package")
    options = default_session_options(folder / "training_model.onnx", threads=1)
    _, module, _ = packaging_tools.open_training(folder, options)
    module.eval()
    benchmark.group = workload
    loss = benchmark.pedantic(module, args=batch, rounds=ROUNDS, warmup_rounds=WARM_UP)
    assert np.isfinite(loss)


def _written(workload: str, folder: Path) -> tuple[onnx.ModelProto, tuple[np.ndarray, np.ndarray]]:
    model, data = WORKLOADS[workload].write(folder)
    with np.load(data) as archive:
        return onnx.load(model), (archive["input"], archive["labels"])
