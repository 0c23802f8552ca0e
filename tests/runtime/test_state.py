"""CheckpointState without and with a Module: parameters and properties."""

import os
from pathlib import Path

import numpy as np
import pytest

from odtpack_runtime import (
    CheckpointState,
    LRScheduler,
    Module,
    OdtpackError,
    Optimizer,
    UnknownKeyError,
    WrongTypeError,
)
from odtpack_runtime.checkpoint.format import CheckpointData
from odtpack_runtime.checkpoint.parameters import ALIGNMENT, address
from odtpack_runtime.checkpoint.writer import write_checkpoint
from odtpack_runtime.files.folder_update import replace_together, staged_beside
from odtpack_runtime.package.package import Package
from odtpack_runtime.training.schedules import Cosine
from odtpack_simulator.device.profile import load_profile
from tests import zoo
from tests.packaging_tools import built_package
from tests.refused import refused
from tests.simulator.factory import make_result


@pytest.fixture
def state() -> CheckpointState:
    trainable = {"w": np.float32([[1, 2], [3, 4]]), "a": np.float32([5])}
    return CheckpointState(CheckpointData(trainable, {"f": np.int64([6, 7])}))


def test_parameters_are_a_mapping_sorted_by_name(state):
    assert [name for name, _ in state.parameters] == ["a", "f", "w"]
    assert [parameter.name for _, parameter in state.parameters] == ["a", "f", "w"]
    assert len(state.parameters) == 3
    assert ["w" in state.parameters, "x" in state.parameters] == [True, False]
    assert [state.parameters[name].requires_grad for name in "wf"] == [True, False]
    assert repr(state.parameters) == "Parameters(a, f, w)"
    assert repr(state.parameters["f"]) == "Parameter('f', int64[2], frozen)"


@pytest.mark.parametrize("name", ["x", 3, None, []])
def test_an_unknown_parameter_is_a_key_error(state, name):
    with pytest.raises(KeyError, match="a, f, w") as caught:
        state.parameters[name]  # type: ignore[index]
    assert isinstance(caught.value, UnknownKeyError)
    assert isinstance(caught.value, OdtpackError)


def test_values_are_live_and_can_be_set_before_a_module_exists(state):
    view = state.parameters["w"].data
    state.parameters["w"].data = np.float32([[0, 0], [0, 1]])
    assert view.tolist() == [[0, 0], [0, 1]]
    view[0, 0] = 9
    assert state.parameters["w"].data[0, 0] == 9
    state.parameters["a"] = np.float32([8])
    assert state.parameters["a"].data.tolist() == [8]
    assert state.parameters["w"].grad is None


@pytest.mark.parametrize(("value", "code"), [
    (np.zeros((2, 1), np.float32), "parameter-shape"),
    (np.zeros(4, np.float32), "parameter-shape"),
    (np.zeros((2, 2)), "parameter-type"),
    ([[1, 2], [3, 4]], "parameter-type"),
])  # fmt: skip
def test_a_value_of_another_shape_or_type_is_refused(state, value, code):
    with refused(code, "'w'"):
        state.parameters["w"].data = value  # type: ignore[assignment]
    assert state.parameters["w"].data.tolist() == [[1, 2], [3, 4]]


def test_a_module_places_parameters_in_aligned_flat_memory(regression):
    state = regression.state()
    before = {name: parameter.data.copy() for name, parameter in state.parameters}
    frozen = [state.parameters[name].data for name in ("mean", "scale")]
    module = Module(regression.training, state, regression.evaluation)
    for name, parameter in state.parameters:
        assert address(parameter.data) % ALIGNMENT == 0
        assert np.array_equal(parameter.data, before[name])
        zeros = np.zeros_like(parameter.data) if parameter.requires_grad else None
        np.testing.assert_array_equal(parameter.grad, zeros, strict=True)
    flat = module.flat
    assert [slot.name for slot in flat.trainable.slots] == ["W", "b"]
    assert [slot.name for slot in flat.frozen.slots] == ["scale", "mean"]
    assert np.shares_memory(flat.parameters, state.parameters["b"].data)
    assert np.shares_memory(flat.gradients, state.parameters["b"].grad)
    # They may be larger than all that is trained: not copied.
    for name, array in zip(("mean", "scale"), frozen, strict=True):
        assert state.parameters[name].data is array


@pytest.mark.parametrize(("value", "kept"), [
    (3, 3), (-(2**63), -(2**63)), (True, 1), (np.bool_(False), 0), (np.int16(-5), -5),
    (np.uint64(2**62), 2**62), (0.1, float(np.float32(0.1))), (np.float32(2.0), 2.0),
    (np.float64(2.0), 2.0), (np.float16(0.5), 0.5), (float("inf"), float("inf")), ("text", "text"),
    ("", ""), (b"x", "x"), ("ä".encode(), "ä"),
])  # fmt: skip
def test_properties_keep_numbers_and_text(state, tmp_path, value, kept):
    state.properties["p"] = value
    assert state.properties["p"] == kept
    assert type(state.properties["p"]) is type(kept)
    CheckpointState.save_checkpoint(state, tmp_path / "c")
    loaded = CheckpointState.load_checkpoint(tmp_path / "c").properties["p"]
    assert loaded == kept
    assert type(loaded) is type(kept)


@pytest.mark.parametrize(("value", "kind"), [
    (None, TypeError), ([1], TypeError), (np.zeros(2), TypeError), (1j, TypeError),
    (2**63, OdtpackError), (1e300, OdtpackError), (b"\xff", OdtpackError), ("\ud800", OdtpackError),
])  # fmt: skip
def test_other_properties_are_refused(state, value, kind):
    with pytest.raises(kind) as caught:
        state.properties["p"] = value
    assert isinstance(caught.value, OdtpackError)
    assert "p" not in state.properties


def test_properties_are_a_mapping(state):
    assert len(state.properties) == 0
    state.properties["b"] = 1
    state.properties["a"] = "x"
    state.properties["b"] = 2.5
    assert list(state.properties) == [("a", "x"), ("b", 2.5)]
    assert len(state.properties) == 2
    assert repr(state.properties) == "Properties({'b': 2.5, 'a': 'x'})"
    with pytest.raises(KeyError, match="a, b"):
        state.properties["c"]
    with pytest.raises(WrongTypeError):
        state.properties[3] = 1  # type: ignore[index]
    with pytest.raises(WrongTypeError):
        state.properties[""] = 1
    with refused("property-type", "reserved"):  # a save with moments would lose it
        state.properties["odtpack.optimizer"] = "mine"


def test_a_state_is_not_made_of_anything_else(regression, tmp_path):
    with pytest.raises(TypeError):
        CheckpointState("checkpoint")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        CheckpointState.save_checkpoint("checkpoint", tmp_path / "c")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Module(regression.training, "checkpoint")  # type: ignore[arg-type]


def test_a_nominal_state_has_names_only(tmp_path):
    data = CheckpointData({"W": np.zeros((3, 2), np.float32)}, {}, True, None, {"round": 1})
    write_checkpoint(tmp_path / "nominal", data)
    state = CheckpointState.load_checkpoint(tmp_path / "nominal")
    assert state.is_nominal
    assert "W" in state.parameters
    assert len(state.parameters) == 1
    for use in (
        lambda: state.parameters["W"],
        lambda: list(state.parameters),
        lambda: state.parameters.__setitem__("W", np.zeros((3, 2), np.float32)),
    ):
        with refused("nominal-state"):
            use()
    state.properties["round"] = 2
    CheckpointState.save_checkpoint(state, tmp_path / "again")
    again = CheckpointState.load_checkpoint(tmp_path / "again")
    assert again.is_nominal
    assert again.properties["round"] == 2
    assert "W" in again.parameters


# What stands in a notebook when an object is printed: what it is, and how far it is.


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    folder = tmp_path_factory.mktemp("reprs") / "digits"
    model = zoo.mlp((8, 16, 4))
    return built_package(model, folder, freeze=["fc1.*"], nominal=True)


def test_they_say_what_trains_and_how_far_it_is(package):
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


def test_a_state_without_values_says_so(package):
    assert package.nominal_checkpoint is not None
    state = CheckpointState.load_checkpoint(package.nominal_checkpoint)
    assert repr(state) == "CheckpointState(4 parameters, names without values)"
    module = Module(package.training_model, state, package.eval_model).eval()
    assert "68 of 212 elements train, no values yet, evaluation mode" in repr(module)


def test_results_and_profiles_are_short():
    profile = load_profile("apple/iphone-16-pro")
    assert repr(profile).startswith("DeviceProfile(apple/iphone-16-pro, ios, ")
    assert str(profile) == repr(profile)
    result = make_result()
    assert repr(result).startswith("SimulationResult(digits-cnn, 240 steps on ")
    for each in (profile, result, *result.devices):
        assert len(repr(each)) < 200


# A model and what was made of it: those that are there are of one training, whatever happens.

NAMES = ("m.onnx", "m.ort", "m.arm.ort")


def export(folder: Path, text: str) -> None:
    with staged_beside(folder / "m.onnx") as stage:
        for name in NAMES:
            (stage / name).write_text(text)
        replace_together(folder / "m.onnx", stage / "m.onnx", [stage / name for name in NAMES[1:]])


def held(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_all_are_replaced(tmp_path):
    for text in ("old", "new"):
        export(tmp_path, text)
        assert held(tmp_path) == dict.fromkeys(NAMES, text)


@pytest.mark.parametrize("call", ["replace", "fsync"])
@pytest.mark.parametrize("killed", [True, False])
@pytest.mark.parametrize("at", range(1, 8))
def test_at_each_call(tmp_path, monkeypatch, call, killed, at):
    export(tmp_path, "old")
    owner = Path if call == "replace" else os
    original, left = getattr(owner, call), at

    def counted(*arguments: object) -> object:
        nonlocal left
        left -= 1
        if left == 0 or (killed and left < 0):
            raise KeyboardInterrupt if killed else OSError(5, os.strerror(5))
        return original(*arguments)

    said = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, call, counted)
        try:
            export(tmp_path, "new")
        except OdtpackError as error:
            said = error.what
        except KeyboardInterrupt:
            said = "killed"
    found = held(tmp_path)
    assert len(set(found.values())) == 1, "of one training"
    if killed and said:
        assert "m.onnx" in found
    elif "was written" in said:
        assert found["m.onnx"] == "new"
    else:
        assert found == dict.fromkeys(NAMES, "old" if said else "new")
