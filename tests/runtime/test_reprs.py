"""What stands in a notebook when an object is printed: what it is, and how far it is."""

from __future__ import annotations

import numpy as np
import pytest

from odtpack.build import build_package
from odtpack_runtime import CheckpointState, LRScheduler, Module, Optimizer
from odtpack_runtime.package.package import Package
from odtpack_runtime.training.schedules import Cosine
from odtpack_simulator.device.profile import load_profile
from tests import zoo
from tests.simulator.factory import make_result


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    folder = tmp_path_factory.mktemp("reprs") / "digits"
    model = zoo.mlp((8, 16, 4))
    build_package(model, folder, loss="cross_entropy", freeze=["fc1.*"], nominal=True)
    return Package.open(folder)


def test_they_say_what_trains_and_how_far_it_is(package: Package) -> None:
    trained, total = 16 * 4 + 4, 8 * 16 + 16 + 16 * 4 + 4
    elements = f"{trained} of {total} elements train"
    assert repr(package) == f"Package(digits, cross_entropy, adamw, {elements})"
    state = CheckpointState.load_checkpoint(package.checkpoint)
    assert repr(state) == f"CheckpointState(4 parameters, {elements})"
    module = Module(package.training_model, state)
    expected = f"Module(training_model.onnx, {elements}, training mode, no evaluation model)"
    assert repr(module) == expected
    optimizer = Optimizer(package.optimizer_model, module)
    scheduler = LRScheduler(optimizer, Cosine(total_steps=4), 0.5)
    assert repr(optimizer) == "Optimizer(adamw, learning rate 0.5, 0 steps made)"
    module(np.zeros((2, 8), np.float32), np.array([0, 1]))
    optimizer.step()
    optimizer.step()
    scheduler.step()
    assert repr(optimizer) == "Optimizer(adamw, learning rate 0.25, 2 steps made)"
    assert repr(scheduler) == "LRScheduler(cosine from 0.5, 0.25 after 2 steps)"
    assert repr(state).endswith(", optimizer at step 2)")


def test_a_state_without_values_says_so(package: Package) -> None:
    assert package.nominal_checkpoint is not None
    state = CheckpointState.load_checkpoint(package.nominal_checkpoint)
    assert repr(state) == "CheckpointState(4 parameters, names without values)"
    module = Module(package.training_model, state, package.eval_model).eval()
    assert "68 of 212 elements train, no values yet, evaluation mode" in repr(module)


def test_results_and_profiles_are_short() -> None:
    profile = load_profile("apple/iphone-16-pro")
    assert repr(profile).startswith("DeviceProfile(apple/iphone-16-pro, ios, ")
    assert str(profile) == repr(profile)
    result = make_result()
    assert repr(result).startswith("SimulationResult(digits-cnn, 240 steps on ")
    for each in (profile, result, *result.devices):
        assert len(repr(each)) < 200
