"""The C++ kit's sessions: one call at a time, closed at any moment, unharmed by a NaN."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from odtpack.build import build_package
from odtpack.optimizers import AdamW, GroupRule
from tests.kits import cpp_kit, models
from tests.kits.cases import CASES, Case
from tests.kits.cpp_kit import run, save_batch

pytestmark = [
    pytest.mark.kits,
    pytest.mark.skipif(cpp_kit.unavailable() is not None, reason=str(cpp_kit.unavailable())),
]
ACCUMULATING = Case(
    models.mlp, CASES["adam"].data, {"accumulation_steps": 4, "outputs": ["output"]}
)
BATCH_NORM_ACCUMULATING = Case(
    CASES["mobilenet_batch_norm"].model, CASES["mobilenet_batch_norm"].data,
    {"accumulation_steps": 4},
)  # fmt: skip


def write_job(case: Case, folder: Path) -> Path:
    """Build a case's package and write its job, with one batch."""
    options = {"loss": "cross_entropy", "self_check": False, **case.build}
    build_package(case.model(), folder / "package", **options)
    inputs = json.loads((folder / "package" / "manifest.json").read_text())["inputs"]
    batch = case.data(np.random.default_rng(4), 8)
    job = {
        "package": "package",
        "learning_rate": 0.01,
        "steps": [save_batch(folder, {i["name"]: a for i, a in zip(inputs, batch, strict=True)})],
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job, default=str))
    return path


def calls(command: str, job: Path, times: int, variant: str = "native") -> None:
    """Run the program; it checks what it did itself."""
    done = run("calls", command, job, times, variant=variant)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-4000:]


def selects(folder: Path) -> bool:
    """Whether the step model says which parameters kept their values."""
    model = onnx.load(folder / "package" / "step_model.onnx")
    return any(output.name == "update.kept" for output in model.graph.output)


@pytest.mark.parametrize("name", ["adam", "step_adamw", "mobilenet_batch_norm"])
def test_a_session_is_closed_while_another_thread_trains(name: str, tmp_path: Path) -> None:
    calls("close", write_job(CASES[name], tmp_path), 20)


@pytest.mark.parametrize("variant", ["native", "sanitized"])
def test_two_threads_never_train_at_once(variant: str, tmp_path: Path) -> None:
    calls("threads", write_job(CASES["adam"], tmp_path), 20, variant)


def test_every_call_after_close_is_refused(tmp_path: Path) -> None:
    calls("closed", write_job(CASES["adam"], tmp_path), 1)


@pytest.mark.parametrize(
    "case",
    [CASES["adam"], CASES["mobilenet_batch_norm"], ACCUMULATING, BATCH_NORM_ACCUMULATING],
    ids=["plain", "running statistics", "accumulating", "accumulating running statistics"],
)
def test_a_batch_with_a_nan_changes_nothing(case: Case, tmp_path: Path) -> None:
    calls("nan", write_job(case, tmp_path), 5)


@pytest.mark.parametrize("name", ["step_adamw", "step_batch_norm", "step_sgd_momentum"])
def test_a_step_model_keeps_its_values_at_a_nan(name: str, tmp_path: Path) -> None:
    job = write_job(CASES[name], tmp_path)
    if not selects(tmp_path):
        pytest.skip("the step model has no output update.kept")
    calls("nan", job, 5)


def test_a_gradient_that_overflows_changes_nothing(tmp_path: Path) -> None:
    calls("gradient", write_job(CASES["adam"], tmp_path), 1)


def test_a_step_model_updates_what_is_finite(tmp_path: Path) -> None:
    job = write_job(CASES["step_sgd"], tmp_path)
    if not selects(tmp_path):
        pytest.skip("the step model has no output update.kept")
    calls("gradient", job, 1)


def test_rates_that_are_negative_or_not_finite_are_refused(tmp_path: Path) -> None:
    update = {"groups": (GroupRule("*bias", 10.0, 0.0),)}
    case = Case(models.mlp, CASES["adam"].data, {"optimizer": AdamW(), **update})
    calls("rates", write_job(case, tmp_path), 1)
