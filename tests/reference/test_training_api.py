"""What the reference's C++ tests (orttraining/test/training_api/core) check, through Python."""

from pathlib import Path

import numpy as np
import pytest

from odtpack.artifacts import OptimType
from odtpack_runtime import CheckpointState, LinearLRScheduler, Module, OdtpackError, Optimizer
from odtpack_runtime.checkpoint.format import parse_checkpoint
from tests import zoo
from tests.packaging_tools import batch, generate, losses_of_steps, open_training
from tests.refused import refused

MODEL = zoo.mlp((20, 30, 10))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate(MODEL, tmp_path_factory.mktemp("package"), OptimType.AdamW, ort_format=True)


def test_gradients_accumulate_until_they_are_reset(package):
    state, module, _ = open_training(package)
    first, second = batch(MODEL, 8, 1), batch(MODEL, 8, 2)
    gradient = state.parameters["fc1.weight"].grad
    module(*first)
    one = gradient.copy()
    module.lazy_reset_grad()
    module(*second)
    two = gradient.copy()
    module(*first)
    np.testing.assert_allclose(gradient, one + two, rtol=1e-5, atol=1e-8)


# Warm-up and decay of the reference's schedule for 70 steps; its JSON data are this formula.
@pytest.mark.parametrize("warmup", [0, 10, 30, 70])
def test_the_linear_schedule(package, warmup):
    _, module, optimizer = open_training(package)
    scheduler = LinearLRScheduler(optimizer, warmup, 70, 0.1)
    inputs = batch(MODEL, 2)
    for step in range(72):
        rate = 0.1 * (step / warmup if step < warmup else max(0, (70 - step) / max(1, 70 - warmup)))
        assert optimizer.get_learning_rate() == pytest.approx(rate if step < 70 else 0, abs=1e-8)
        module(*inputs)
        optimizer.step()
        scheduler.step()


def test_sessions_of_ort_format(package, tmp_path):
    """All three models as .ort files train alike, and export from them gives the same model."""
    _, module, optimizer = open_training(package)
    state = CheckpointState.load_checkpoint(package / "checkpoint")
    other = Module(package / "training_model.ort", state, package / "eval_model.ort")
    other_optimizer = Optimizer(package / "optimizer_model.ort", other)
    assert other.input_names() == module.input_names()
    for seed in range(3):
        inputs = batch(MODEL, 8, seed)
        np.testing.assert_allclose(other(*inputs), module(*inputs), rtol=1e-5)
        for each, stepper in ((module, optimizer), (other, other_optimizer)):
            stepper.step()
            each.lazy_reset_grad()
    other.export_model_for_inferencing(tmp_path / "inference.ort", ["output"])
    assert (tmp_path / "inference.ort").read_bytes()[4:8] == b"ORTM"


def test_parameters_by_name_are_read_and_updated(package):
    state, module, _ = open_training(package)
    x, labels = batch(MODEL, 8)
    bias = state.parameters["fc2.bias"]
    assert bias.data.shape == (10,)
    before = module.eval()(x, labels)
    bias.data = np.full(10, -1.0, np.float32)
    # The same shift of every logit changes nothing.
    np.testing.assert_allclose(module(x, labels), before, rtol=1e-5)
    bias.data = np.arange(10, dtype=np.float32)
    assert abs(module(x, labels) - before) > 0.1


def test_buffers_of_a_wrong_size(package):
    _, module, _ = open_training(package)
    for size in (0, module.get_parameters_size() - 1, module.get_parameters_size() + 1):
        with refused("buffer-size"):
            module.copy_buffer_to_parameters(np.zeros(size, np.float32))


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_a_checkpoint_round_trip(package, tmp_path, with_optimizer):
    state, module, optimizer = open_training(package)
    losses_of_steps(module, optimizer, (batch(MODEL, 8, seed) for seed in range(2)))
    state.properties["epoch"] = 3
    path = tmp_path / "checkpoint"
    CheckpointState.save_checkpoint(state, path, include_optimizer_state=with_optimizer)
    loaded, other, other_optimizer = open_training(package, checkpoint=path)
    assert loaded.properties["epoch"] == 3
    assert other_optimizer.step_count == (2 if with_optimizer else 0)
    inputs = batch(MODEL, 8, 2)
    assert other(*inputs) == module(*inputs)
    for each in (optimizer, other_optimizer):
        each.step()
    same = [
        np.array_equal(loaded.parameters[name].data, parameter.data)
        for name, parameter in state.parameters
    ]
    assert all(same) == with_optimizer


def test_a_checkpoint_in_memory(package):
    data = (package / "checkpoint").read_bytes()
    assert len(CheckpointState(parse_checkpoint(data)).parameters) == 4
    with pytest.raises(OdtpackError):
        parse_checkpoint(data[: len(data) // 2])


def test_a_missing_checkpoint(tmp_path):
    with refused("checkpoint-not-found"):
        CheckpointState.load_checkpoint(tmp_path / "nothing")
