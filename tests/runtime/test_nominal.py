"""A nominal checkpoint names the parameters; their values come later."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from odtpack_runtime import CheckpointState, Module, Optimizer
from odtpack_runtime.checkpoint.format import CheckpointData
from odtpack_runtime.checkpoint.writer import write_checkpoint
from tests.refused import refused
from tests.runtime import models

X = np.arange(6, dtype=np.float32).reshape(2, 3)
T = np.ones((2, 2), np.float32)


@pytest.fixture
def nominal(regression: models.Files) -> Path:
    """The checkpoint of the package without its values, as the packager writes it."""
    full = regression.state().snapshot(False)
    path = regression.folder / "nominal_checkpoint"
    groups = (
        {name: np.empty(0, array.dtype) for name, array in arrays.items()}
        for arrays in (full.trainable, full.frozen)
    )
    write_checkpoint(path, CheckpointData(*groups, nominal=True, properties={"round": 1}))
    return path


def open_nominal(regression, nominal):
    module = regression.module(CheckpointState.load_checkpoint(nominal))
    return module.state, module, Optimizer(regression.adamw, module)


def step(module: Module, optimizer: Optimizer) -> float:
    loss = module(X, T)
    optimizer.step()
    module.lazy_reset_grad()
    return float(loss)


def test_sizes_and_names_are_known_from_the_models(regression, nominal):
    state, module, _ = open_nominal(regression, nominal)
    assert (state.is_nominal, len(state.parameters), "W" in state.parameters) == (True, 4, True)
    assert [module.get_parameters_size(trainable_only=each) for each in (True, False)] == [8, 14]
    assert module.input_names() == ["input", "target"]
    assert module.eval().output_names() == ["loss", "prediction"]


USES: dict[str, Callable[[Module, Optimizer, Path], object]] = {
    "getitem": lambda module, *_: module.state.parameters["W"],
    "iter": lambda module, *_: list(module.state.parameters),
    "setitem": lambda module, *_: module.state.parameters.__setitem__("W", X),
    "train": lambda module, *_: module(X, T),
    "evaluate": lambda module, *_: module.eval()(X, T),
    "step": lambda module, optimizer, path: optimizer.step(),
    "contiguous": lambda module, *_: module.get_contiguous_parameters(),
    "export": lambda module, _, path: module.export_model_for_inferencing(path, ["prediction"]),
    "trainable only": lambda module, *_: module.copy_buffer_to_parameters(np.zeros(8, np.float32)),
}


@pytest.mark.parametrize("use", USES)
def test_what_needs_values_says_how_to_get_them(regression, nominal, tmp_path, use):
    _, module, optimizer = open_nominal(regression, nominal)
    with refused("nominal-state", "load a complete checkpoint"):
        USES[use](module, optimizer, tmp_path / "inference.onnx")
    assert not (tmp_path / "inference.onnx").exists()


@pytest.mark.parametrize("way", ["buffer", "file", "file before the module"])
def test_a_completed_state_trains_and_saves_as_any_other(regression, nominal, tmp_path, way):
    reference = regression.module()
    full = reference.state
    expected_optimizer = Optimizer(regression.adamw, reference)
    if way == "file before the module":
        state = CheckpointState.load_checkpoint(nominal)
        state.load_parameters(regression.checkpoint)
        assert not state.is_nominal
        module = regression.module(state)
        optimizer = Optimizer(regression.adamw, module)
    else:
        state, module, optimizer = open_nominal(regression, nominal)
        if way == "file":
            state.load_parameters(regression.checkpoint)
        else:
            buffer = reference.get_contiguous_parameters()
            module.copy_buffer_to_parameters(buffer, trainable_only=False)
    assert not state.is_nominal
    assert state.properties["round"] == 1
    for _ in range(3):
        assert step(module, optimizer) == step(reference, expected_optimizer)
    for name, parameter in full.parameters:
        assert np.array_equal(state.parameters[name].data, parameter.data)
    CheckpointState.save_checkpoint(state, tmp_path / "a", include_optimizer_state=True)
    full.properties["round"] = 1
    CheckpointState.save_checkpoint(full, tmp_path / "b", include_optimizer_state=True)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_saved_before_it_is_completed_it_remains_nominal(regression, nominal, tmp_path):
    state, _, _ = open_nominal(regression, nominal)
    CheckpointState.save_checkpoint(state, tmp_path / "again", include_optimizer_state=True)
    again = CheckpointState.load_checkpoint(tmp_path / "again")
    assert (again.is_nominal, again.optimizer, len(again.parameters)) == (True, None, 4)


def test_values_of_another_model_are_refused(regression, nominal):
    state, _, _ = open_nominal(regression, nominal)
    full = regression.state().snapshot(False)
    other = regression.folder / "other"
    for trainable, frozen in (
        (full.trainable | {"W": np.zeros((2, 3), np.float32)}, full.frozen),
        (full.trainable, {}),
        (full.trainable | {"b": np.zeros(2)}, full.frozen),
    ):
        write_checkpoint(other, CheckpointData(trainable, frozen))
        with refused("checkpoint-mismatch"):
            state.load_parameters(other)
        assert state.is_nominal
    with refused("nominal-state"):
        state.load_parameters(nominal)


def test_values_of_a_complete_state_can_be_replaced(regression):
    module = regression.module()
    state = module.state
    first = module.eval()(X, T)[0]
    view = state.parameters["W"].data
    view[...] = 0
    assert module(X, T)[0] != first
    state.load_parameters(regression.checkpoint)
    assert view.any()  # the memory is the same
    assert module(X, T)[0] == first


def test_a_model_that_leaves_a_shape_open(regression, nominal):
    path = regression.changed("float[3] scale", "float[n] scale")
    with refused("model-mismatch", "shape of 'scale' is not known"):
        Module(path, CheckpointState.load_checkpoint(nominal))
