"""A replay follows the recipe of the package: schedule, accumulation and element type."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx.parser
import pytest

from odtpack.build import build_package
from odtpack_runtime import OdtpackError
from odtpack_runtime.package.package import Package
from odtpack_runtime.training.schedules import Cosine, ScheduleSpec
from odtpack_simulator.figures import advice
from odtpack_simulator.memory.memory_plan import plan_memory
from odtpack_simulator.replay.job import SamplePlan
from odtpack_simulator.simulation import simulate
from tests.packaging_tools import open_training
from tests.simulator.packages import make_profile

SAMPLES, BATCH, ACCUMULATE, EPOCHS, SEED, RATE = 50, 4, 3, 2, 5, 0.02
SPEC = ScheduleSpec("cosine", {"warmup_steps": 2, "floor": 0.1}, RATE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float64 package with accumulation and a schedule, and its data."""
    folder = tmp_path_factory.mktemp("recipe")
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        net (double[batch, 5] x) => (double[batch, 3] y) {
            hidden = MatMul (x, w)
            bent = Tanh (hidden)
            y = MatMul (bent, v)
        }"""
    )
    random = np.random.default_rng(1)
    for name, shape in {"w": (5, 7), "v": (7, 3)}.items():
        tensor = onnx.numpy_helper.from_array(random.standard_normal(shape), name)
        model.graph.initializer.append(tensor)
    build_package(
        model, folder / "package", loss="mse", schedule=SPEC,
        accumulation_steps=ACCUMULATE,
    )  # fmt: skip
    np.savez(
        folder / "data.npz",
        x=random.standard_normal((SAMPLES, 5)),
        target=random.standard_normal((SAMPLES, 3)),
    )
    return folder


def expected_losses(folder: Path, rate: float) -> list[float]:
    """Mean loss of the batches of each step, at the rates that the schedule's formula gives."""
    _, module, optimizer = open_training(folder / "package")
    data = np.load(folder / "data.npz")
    steps = EPOCHS * 4  # 40 samples are 10 batches: three steps of three, and one of one
    schedule = Cosine(warmup_steps=2, floor=0.1, total_steps=steps)
    losses = []
    for epoch in range(EPOCHS):
        batches = list(SamplePlan(SAMPLES, BATCH, EPOCHS, SEED).training_batches(epoch))
        assert len(batches) == 10
        for start in range(0, 10, ACCUMULATE):
            group = batches[start : start + ACCUMULATE]
            optimizer.set_learning_rate(rate * schedule.factor(len(losses)))
            losses.append(float(np.mean([module(data["x"][i], data["target"][i]) for i in group])))
            optimizer.step()
            module.lazy_reset_grad()
    assert len(losses) == steps
    return losses


@pytest.mark.parametrize("rate", [None, 0.3])
def test_losses_are_those_of_the_recipe(folder: Path, rate: float | None) -> None:
    result = simulate(
        folder / "package", folder / "data.npz", [make_profile("large", 10**9)],
        batch_size=BATCH, epochs=EPOCHS, learning_rate=rate, seed=SEED,
    )  # fmt: skip
    expected = expected_losses(folder, RATE if rate is None else rate)
    assert result.training.losses == pytest.approx(expected, rel=1e-12)
    assert (result.data.steps, result.data.accumulation_steps) == (8, 3)
    assert len(result.latency_host.steps_ms) > 0
    device = result.devices[0]
    assert device.training is not None
    assert device.training.steps_done == 8
    # 5 x 7 and 7 x 3 elements of 8 bytes.
    assert result.package.parameter_bytes == 448
    assert "take 448 B of" in advice.for_package_size(result)


def test_a_step_calls_the_optimizer_once(folder: Path) -> None:
    """Operators are counted over whole steps: three batches and one update each."""
    result = simulate(
        folder / "package", folder / "data.npz", [], batch_size=BATCH, epochs=1, seed=SEED
    )
    calls = {cost.op_type: cost.calls for cost in result.latency_host.by_operator}
    # The model has one Tanh; AdamW's bias correction has two, and the step takes two roots.
    assert calls["Tanh"] % 5 == 0
    assert calls["Sqrt"] * 5 == calls["Tanh"] * 2


def test_a_warm_up_that_does_not_fit(folder: Path) -> None:
    with pytest.raises(OdtpackError, match="total_steps") as caught:
        simulate(folder / "package", folder / "data.npz", [], batch_size=40, epochs=1, seed=SEED)
    assert caught.value.code == "bad-schedule"
    assert caught.value.hint == "the training makes 1 steps: replay more epochs"


def test_working_memory_of_the_optimizer_counts_elements_of_eight_bytes(folder: Path) -> None:
    package = Package.open(folder / "package")
    plan = plan_memory(package, {"x": (BATCH, 5), "target": (BATCH, 3)})
    phase = next(phase for phase in plan.phases if phase.name == "optimizer step")
    # 35 and 21 elements, each rounded up to 64 bytes: 320 + 192.
    held = [item for item in phase.items if item.kind == "activations"]
    assert [item.nbytes for item in held if item.name != "kept by the arena"] == [512]
