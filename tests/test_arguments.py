"""An argument of a wrong type is an error that names it, and not an exception of Python's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odtpack import artifacts, optimizers
from odtpack.build import build_package
from odtpack.errors import OdtpackError
from odtpack_runtime import CheckpointState
from tests import zoo
from tests.packages.samples import tree

WRONG: list[dict[str, Any]] = [
    {"optimizer": "sdg"}, {"optimizer": optimizers.SGD}, {"optimizer": 3},
    {"loss": ["mse"]}, {"loss": 3}, {"loss_options": 3}, {"loss_options": ["reduction"]},
    {"clip_norm": "1"}, {"groups": "*"}, {"schedule": {"kind": "cosine"}}, {"adapter": "qlora"},
    {"accumulation_steps": "2"}, {"accumulation_steps": 2.5}, {"accumulation_steps": None},
    {"accumulation_steps": True},
    {"train": "fc*"}, {"train": 3}, {"train": [3]}, {"freeze": "fc*"}, {"freeze": None},
    {"loss_inputs": "output"}, {"loss_inputs": [3]}, {"outputs": "output"}, {"outputs": 3},
    {"frozen_storage": "int4"}, {"frozen_storage": ["int8"]},
    {"ort_format": True}, {"ort_format": "fixed"}, {"nominal": "yes"},
    {"onnxruntime": 1.2}, {"onnxruntime": (1, 20)}, {"runtime": "stock"}, {"runtime": None},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_build_package_names_it(wrong: dict[str, Any], tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"loss": "cross_entropy", **wrong}
    with pytest.raises(OdtpackError) as error:
        build_package(zoo.mlp((4, 3, 2)), tmp_path / "p", **arguments)
    (name,) = wrong
    assert error.value.code == "bad-argument"
    assert error.value.what.startswith(name)
    assert error.value.hint
    assert not list(tmp_path.iterdir())


def test_an_optimizer_goes_by_its_name_or_as_an_object(tmp_path: Path) -> None:
    for name, given in (("a", {"optimizer": optimizers.SGD(momentum=0.9)}), ("b", {
        "optimizer": "sgd", "optimizer_options": {"momentum": 0.9},
    })):  # fmt: skip
        build_package(zoo.mlp((4, 3, 2)), tmp_path / name, loss="mse", **given)
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


@pytest.mark.parametrize("folder", [3, None, b"p"])
def test_a_folder_that_is_no_path(folder: Any) -> None:
    with pytest.raises(OdtpackError, match="folder cannot be"):
        build_package(zoo.mlp((4, 3, 2)), folder, loss="mse")


@pytest.mark.parametrize(
    "wrong",
    [
        {"artifact_directory": 3}, {"prefix": 3}, {"frozen_params": 3}, {"loss_input_names": 3},
        {"additional_output_names": 3}, {"requires_grad": 3},
    ],
    ids=str,
)  # fmt: skip
def test_generate_artifacts_names_it(wrong: dict[str, Any], tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        "requires_grad": ["fc1.weight"], "artifact_directory": tmp_path,
        "loss": artifacts.LossType.MSELoss, **wrong,
    }  # fmt: skip
    (name,) = wrong
    with pytest.raises(OdtpackError, match=name):
        artifacts.generate_artifacts(zoo.mlp((4, 3, 2)), **arguments)


class Text(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "something else"


class Whole(int):
    pass


class Real(float):
    pass


@pytest.mark.parametrize(
    ("value", "expected"),
    [(Text("a"), "a"), (np.str_("b"), "b"), (Whole(3), 3), (Real(0.5), 0.5), (np.bool_(True), 1)],
    ids=lambda value: type(value).__name__,
)
def test_a_property_of_a_derived_type_is_saved_as_its_base(
    value: Any, expected: object, tmp_path: Path
) -> None:
    build_package(zoo.mlp((4, 3, 2)), tmp_path / "p", loss="cross_entropy")
    state = CheckpointState.load_checkpoint(tmp_path / "p" / "checkpoint")
    state.properties[Text("name")] = value
    CheckpointState.save_checkpoint(state, tmp_path / "c")
    loaded = CheckpointState.load_checkpoint(tmp_path / "c").properties["name"]
    assert loaded == expected
    assert type(loaded) is type(expected)
