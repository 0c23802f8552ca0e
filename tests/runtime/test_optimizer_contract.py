"""Metadata of optimizer models: what they mean, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odtpack_runtime import CheckpointState, Module, OdtpackError, Optimizer
from odtpack_runtime.training.optimizer_contract import StateVector, matrix, read_contract
from tests.runtime import models

INPUTS = ("learning_rate", "step", "params", "gradients")


def group(*names: str, scale: Any = 1.0, decay: Any = 0.0) -> dict[str, Any]:
    return {"learning_rate_scale": scale, "weight_decay": decay, "parameters": list(names)}


@pytest.mark.parametrize(
    ("shape", "seen", "rows", "columns"),
    [
        ((), (1, 1), (), ()),
        ((7,), (1, 7), (1,), (7,)),
        ((5, 7), (5, 7), (5, 1), (1, 7)),
        ((1, 7), (1, 7), (1, 1), (1, 7)),
        ((64, 32, 3, 3), (64, 288), (64, 1, 1, 1), (1, 32, 3, 3)),
        ((320, 64, 1, 1), (320, 64), (320, 1, 1, 1), (1, 64, 1, 1)),
        ((96, 1, 3, 3), (96, 9), (96, 1, 1, 1), (1, 1, 3, 3)),
        ((8, 64, 64), (512, 64), (8, 64, 1), (1, 1, 64)),
        ((1, 4, 4), (4, 4), (1, 4, 1), (1, 1, 4)),
        ((0, 3), (0, 3), (0, 1), (1, 3)),
    ],
)
def test_shapes_of_what_is_kept(
    shape: tuple[int, ...],
    seen: tuple[int, ...],
    rows: tuple[int, ...],
    columns: tuple[int, ...],
) -> None:
    assert matrix(shape) == seen
    for axis, stored in ((0, rows), (1, columns)):
        vector = StateVector("v", (axis,))
        assert vector.stored_shape(shape) == stored
        bound = vector.bound_shape(shape)
        assert bound == tuple(s if i == axis else 1 for i, s in enumerate(seen))
        assert np.prod(bound) == np.prod(stored)
    assert StateVector("v").stored_shape(shape) == shape


def test_without_metadata_the_moments_are_those_among_the_inputs() -> None:
    contract = read_contract({}, (*INPUTS, "first_order_moments"), "m")
    assert [vector.name for vector in contract.state] == ["first_order_moments"]
    flags = contract.by_parameter, contract.whole, contract.clips_norm, contract.takes_decay
    assert not any(flags)
    assert contract.groups == ()
    assert read_contract({"odtpack.elementwise": "false"}, INPUTS, "m").whole
    assert read_contract({}, (*INPUTS, "gradient_norm"), "m").clips_norm


def test_metadata_are_read() -> None:
    metadata = {
        "odtpack.state": json.dumps([{"name": "r", "axes": [0]}, {"name": "c", "axes": [1]}]),
        "odtpack.groups": json.dumps([group("a", scale=2, decay=0.5), group("b", "c")]),
    }
    contract = read_contract(metadata, (*INPUTS, "weight_decay"), "m")
    assert contract.by_parameter
    assert contract.takes_decay
    assert contract.state == (StateVector("r", (0,)), StateVector("c", (1,)))
    assert [g.parameters for g in contract.groups] == [("a",), ("b", "c")]
    assert (contract.groups[0].learning_rate_scale, contract.groups[0].weight_decay) == (2, 0.5)
    contract.check_groups(["c", "a", "b"], "m")
    for names in (["a", "b"], ["a", "b", "c", "d"]):
        with pytest.raises(OdtpackError) as caught:
            contract.check_groups(names, "m")
        assert caught.value.code == "model-mismatch"


BAD_STATE: list[Any] = [
    {},
    "x",
    ["x"],
    [{}],
    [{"name": ""}],
    [{"name": 3}],
    [{"name": "params"}],
    [{"name": "weight_decay"}],
    [{"name": "m"}, {"name": "m"}],
    [{"name": "m", "axes": 1}],
    [{"name": "m", "axes": [2]}],
    [{"name": "m", "axes": [-1]}],
    [{"name": "m", "axes": [True]}],
    [{"name": "m", "axes": [1, 0]}],
    [{"name": "m", "axes": [0, 0]}],
    [{"name": "m", "axes": [0]}, {"name": "v"}],
    [{"name": f"m{i}"} for i in range(9)],
]
BAD_GROUPS: list[Any] = [
    {},
    [1],
    [{"parameters": ["a"]}],
    [group()],
    [group("a"), group("a")],
    [group("a", "a")],
    [group("a", scale=-1)],
    [group("a", scale="1")],
    [group("a", scale=True)],
    [group("a", decay=1e999)],
    [group("a", decay=None)],
    [group(1)],  # type: ignore[arg-type]
    [{**group(), "parameters": "a"}],
]


@pytest.mark.parametrize(
    ("key", "text"),
    [
        *(("odtpack.state", json.dumps(value)) for value in BAD_STATE),
        *(("odtpack.groups", json.dumps(value)) for value in BAD_GROUPS),
        ("odtpack.groups", json.dumps([group("a", scale=float("nan"))])),
        ("odtpack.state", "["),
        ("odtpack.state", "[" * 100_000),
        ("odtpack.groups", ""),
    ],
)
def test_wrong_metadata_are_refused(key: str, text: str) -> None:
    with pytest.raises(OdtpackError) as caught:
        read_contract({key: text}, INPUTS, "some.onnx")
    assert caught.value.code == "bad-metadata"
    assert "some.onnx" in str(caught.value)


@pytest.mark.parametrize(
    ("metadata", "inputs"),
    [
        ({}, (*INPUTS, "weight_decay")),
        (
            {
                "odtpack.groups": json.dumps([group("a"), group("b")]),
                "odtpack.elementwise": "false",
            },
            INPUTS,
        ),
    ],
)
def test_contradictions_are_refused(metadata: dict[str, str], inputs: tuple[str, ...]) -> None:
    with pytest.raises(OdtpackError) as caught:
        read_contract(metadata, inputs, "m")
    assert caught.value.code == "bad-metadata"


def open_module(files: models.Files) -> Module:
    return Module(files.training, CheckpointState.load_checkpoint(files.checkpoint))


@pytest.mark.parametrize(
    ("metadata", "code"),
    [
        ({"odtpack.groups": json.dumps([group("W")])}, "model-mismatch"),
        ({"odtpack.groups": json.dumps([group("W", "b", "scale")])}, "model-mismatch"),
        ({"odtpack.state": json.dumps([{"name": "first_order_moments"}])}, "not-an-optimizer"),
        ({"odtpack.state": json.dumps([{"name": "m", "axes": [0]}])}, "not-an-optimizer"),
    ],
)
def test_models_that_do_not_keep_their_word(
    regression: models.Files, metadata: dict[str, str], code: str
) -> None:
    path = models.write(regression.folder, "odd.onnx", models.SGD, metadata)
    with pytest.raises(OdtpackError) as caught:
        Optimizer(path, open_module(regression))
    assert caught.value.code == code


def test_a_group_scales_the_learning_rate(regression: models.Files) -> None:
    metadata = {"odtpack.groups": json.dumps([group("b", scale=0.5), group("W", scale=0)])}
    path = models.write(regression.folder, "grouped.onnx", models.SGD, metadata)
    module = open_module(regression)
    optimizer = Optimizer(path, module)
    optimizer.set_learning_rate(0.25)
    assert optimizer.get_learning_rate() == 0.25
    with pytest.raises(OdtpackError) as caught:
        optimizer.set_learning_rate(1e39)
    assert caught.value.code == "bad-learning-rate"
    before = {name: p.data.copy() for name, p in module.state.parameters}
    module(np.ones((4, 3), np.float32), np.zeros((4, 2), np.float32))
    optimizer.step()
    b, W = module.state.parameters["b"], module.state.parameters["W"]
    assert b.grad is not None
    np.testing.assert_array_equal(b.data, before["b"] - np.float32(0.125) * b.grad)
    np.testing.assert_array_equal(W.data, before["W"])


@pytest.mark.parametrize(
    "text", ["", "{}", '["W"]', '["W", "W"]', '["W", "b", "scale"]', '["W", 1]', "[" * 100_000]
)
def test_an_order_that_is_none(regression: models.Files, text: str) -> None:
    path = models.write(
        regression.folder, "t.onnx", models.REGRESSION_TRAINING, {"odtpack.parameter_order": text}
    )
    with pytest.raises(OdtpackError) as caught:
        Module(path, CheckpointState.load_checkpoint(regression.checkpoint))
    assert caught.value.code == "bad-metadata"


def test_a_scale_that_is_too_much(regression: models.Files) -> None:
    metadata = {"odtpack.groups": json.dumps([group("b", scale=1e38), group("W")])}
    path = models.write(regression.folder, "grouped.onnx", models.SGD, metadata)
    optimizer = Optimizer(path, open_module(regression))
    with pytest.raises(OdtpackError) as caught:
        optimizer.set_learning_rate(100.0)
    assert caught.value.code == "bad-learning-rate"
    assert optimizer.get_learning_rate() == float(np.float32(0.001))


def test_an_order_in_memory(regression: models.Files) -> None:
    metadata = {"odtpack.parameter_order": '["b", "W"]'}
    path = models.write(regression.folder, "t.onnx", models.REGRESSION_TRAINING, metadata)
    module = Module(path, CheckpointState.load_checkpoint(regression.checkpoint))
    assert [slot.name for slot in module.flat.trainable.slots] == ["b", "W"]
    flat = module.get_contiguous_parameters(trainable_only=True).numpy()
    np.testing.assert_array_equal(flat[:6], module.state.parameters["W"].data.reshape(-1))


@pytest.mark.parametrize("text", ["0", "-1", "two", ""])
def test_accumulation_that_is_none(regression: models.Files, text: str) -> None:
    metadata = {"odtpack.accumulation_steps": text}
    path = models.write(regression.folder, "t.onnx", models.REGRESSION_TRAINING, metadata)
    with pytest.raises(OdtpackError) as caught:
        Module(path, CheckpointState.load_checkpoint(regression.checkpoint))
    assert caught.value.code == "bad-metadata"


def test_moments_of_other_shapes_are_refused(regression: models.Files, tmp_path: Path) -> None:
    """What a checkpoint may hold and this optimizer does not keep."""
    module = open_module(regression)
    Optimizer(regression.adamw, module).step()
    data = module.state.snapshot(True)
    assert data.optimizer is not None
    data.optimizer.moments["W"] = [np.ones((3, 1), np.float32), np.ones((1, 2), np.float32)]
    with pytest.raises(OdtpackError, match="'W' of other shapes") as caught:
        Optimizer(regression.adamw, Module(regression.training, CheckpointState(data)))
    assert caught.value.code == "optimizer-mismatch"
