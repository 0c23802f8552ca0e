"""Our own step times, on one thread, for comparison between two states of the code.

    pytest benchmarks --benchmark-only --benchmark-autosave
    pytest-benchmark compare

Against the reference system: ``python -m benchmarks.compare_peer``.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.workloads import OPTIMIZERS, WORKLOADS
from odtpack_runtime import default_session_options
from tests import packaging_tools

COUNTS = {"rounds": 30, "warmup_rounds": 5}


def _opened(workload: str, optimizer: str, folder: Path) -> tuple[Any, Any, Any, Any]:
    """State, module and optimizer of a workload's package, and a batch."""
    model = WORKLOADS[workload].build()
    packaging_tools.generate(model, folder, packaging_tools.OPTIMIZERS[optimizer])
    options = default_session_options(folder / "training_model.onnx", threads=1)
    batch = packaging_tools.batch(model, WORKLOADS[workload].batch)
    return *packaging_tools.open_training(folder, options), batch


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_training_step(
    workload: str, optimizer: str, benchmark: BenchmarkFixture, tmp_path: Path
) -> None:
    """Training model, optimizer and lazy_reset_grad."""
    state, module, update, batch = _opened(workload, optimizer, tmp_path)
    update.set_learning_rate(1e-4)

    def step() -> float:
        loss = module(*batch)
        update.step()
        module.lazy_reset_grad()
        return float(loss)

    benchmark.group = workload
    assert np.isfinite(benchmark.pedantic(step, **COUNTS))
    assert all(np.isfinite(parameter.data).all() for _, parameter in state.parameters)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_evaluation_step(workload: str, benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """The evaluation model on the same batch."""
    _, module, _, batch = _opened(workload, "sgd", tmp_path)
    module.eval()
    benchmark.group = workload
    assert np.isfinite(benchmark.pedantic(module, args=batch, **COUNTS))
