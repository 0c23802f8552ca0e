"""A build option is declared once: recipe, command line and Python call follow from it."""

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from odtpack import artifacts, optimizers
from odtpack.build import build_package
from odtpack.cli._app import app
from odtpack.cli._options import overlay
from odtpack.errors import OdtpackError
from odtpack.recipe import read_recipe
from odtpack.recipe.schema import json_schema
from odtpack.spec import BuildSpec, options
from odtpack_runtime import CheckpointState
from odtpack_runtime.package.manifest import Manifest
from odtpack_runtime.training.schedules import ScheduleSpec
from scripts.manifest_schema import manifest_schema
from tests import zoo
from tests.packages.samples import tree
from tests.refused import refused

MODEL = Path("model.onnx")

# Each key of a recipe, the option that says the same, and the field that both become.
GIVEN = {
    "train": ("[parameters]\ntrain = ['a.*']", {"train": ["a.*"]}, ("a.*",)),
    "freeze": ("[parameters]\nfreeze = ['a.*']", {"freeze": ["a.*"]}, ("a.*",)),
    "like": ("[parameters]\nlike = '/a.txt'", {"like": "/a.txt"}, "/a.txt"),
    "freeze_rows": ("[parameters]\nfreeze_rows = ['a=0']", {"freeze_rows": ["a=0"]}, ("a=0",)),
    "untie": ("[parameters]\nuntie = ['a.*']", {"untie": ["a.*"]}, ("a.*",)),
    "stop_gradient": ("stop_gradient = ['a']", {"stop_gradient": ["a"]}, ("a",)),
    "inputs": ("[inputs]\nsr = 16000", {"inputs": ["sr=16000"]}, ("sr=16000",)),
    "sizes": ("sizes = ['a=4']", {"sizes": ["a=4"]}, ("a=4",)),
    "adapter": ("adapter.kind = 'lora'", {"adapter": "lora"}, "lora"),
    "adapter_on": ("[adapter]\non = ['a']", {"adapter_on": ["a"]}, ("a",)),
    "adapter_feedforward": ("[adapter]\nfeedforward = ['a']", {"adapter_feedforward": ["a"]},
                            ("a",)),
    "adapter_rank": ("adapter.rank = 4", {"adapter_rank": 4}, 4),
    "adapter_alpha": ("adapter.alpha = 4.0", {"adapter_alpha": 4.0}, 4.0),
    "adapter_dropout": ("adapter.dropout = 0.5", {"adapter_dropout": 0.5}, 0.5),
    "adapter_seed": ("adapter.seed = 4", {"adapter_seed": 4}, 4),
    "adapter_tokens": ("adapter.tokens = 4", {"adapter_tokens": 4}, 4),
    "outputs": ("outputs = ['y']", {"outputs": ["y"]}, ("y",)),
    "prediction": ("prediction = false", {"prediction": False}, False),
    "loss_inputs": ("loss.inputs = ['y']", {"loss_inputs": ["y"]}, ("y",)),
    "loss_options": ("loss.reduction = 'sum'", {"loss_option": ["reduction=sum"]},
                     {"reduction": "sum"}),
    "losses": ("losses = [{ name = 'a', kind = 'mse', weight = 0.5, inputs = ['y'],"
               " options = { reduction = 'sum' } }]",
               {"losses": ["a=mse weight=0.5 input=y reduction=sum"]},
               (("a", "mse", 0.5, ("y",), {"reduction": "sum"}),)),
    "optimizer": ("optimizer.kind = 'lion'", {"optimizer": "lion"}, "lion"),
    "optimizer_options": ("optimizer = { kind = 'adamw', beta1 = 0.5 }", {"beta1": 0.5},
                          {"beta1": 0.5}),
    "clip_norm": ("clip.norm = 2.0", {"clip_norm": 2.0}, 2.0),
    "clip_value": ("clip.value = 2.0", {"clip_value": 2.0}, 2.0),
    "privacy_clip": ("privacy.clip_norm = 2.0", {"privacy_clip": 2.0}, 2.0),
    "privacy_noise": ("privacy.noise_multiplier = 2.0", {"privacy_noise": 2.0}, 2.0),
    "groups": ("groups = [{ parameters = 'a', learning_rate_scale = 2.0 }]", {"groups": ["a:lr=2"]},
               (("a", 2.0, None),)),
    "decay_vectors": ("optimizer = { kind = 'adamw', decay_vectors = false }",
                      {"decay_vectors": False}, False),
    "accumulation_steps": ("batch = { size = 8, micro_batch = 2 }", {"accumulation_steps": 4}, 4),
    "schedule": ("schedule = { kind = 'cosine', floor = 0.5 }", {"schedule": "cosine:floor=0.5"},
                 ScheduleSpec("cosine", {"floor": 0.5})),
    "memory_budget": ("memory.budget = '60 MB'", {"memory_budget": "60 MB"}, "60 MB"),
    "memory_batch": ("memory.batch = 4", {"memory_batch": 4}, 4),
    "memory_sizes": ("memory.sizes = ['a=4']", {"memory_sizes": ["a=4"]}, ("a=4",)),
    "step_model": ("memory.step_model = 'never'", {"step_model": "never"}, "never"),
    "runtime": ("target.runtime = 'ort-training'", {"runtime": "ort-training"}, "ort-training"),
    "sessions": ("target.sessions = 'small'", {"sessions": "small"}, "small"),
    "threads": ("target.threads = 2", {"threads": 2}, 2),
    "frozen_storage": ("formats.frozen_dtype = 'int8'", {"frozen_storage": "int8"}, "int8"),
    "precision": ("formats.precision = 'mixed'", {"precision": "mixed"}, "mixed"),
    "base": ("formats.base = 'int4'", {"base": "int4"}, "int4"),
    "nominal": ("formats.nominal = true", {"nominal": True}, True),
    "self_check": ("formats.self_check = false", {"self_check": False}, False),
    "segments": ("memory.segments = true", {"segments": True}, True),
    "keep_products": ("memory.keep_products = 24", {"keep_products": 24}, 24),
    "native": ("formats.native = true", {"native": True}, True),
    "onnxruntime": ("target.onnxruntime = '1.20'", {"onnxruntime": "1.20"}, "1.20"),
}  # fmt: skip


@pytest.mark.parametrize("name", GIVEN)
def test_a_recipe_and_an_option_say_the_same(name, tmp_path):
    text, option, value = GIVEN[name]
    path = tmp_path / "recipe.toml"
    path.write_text(f"model = 'model.onnx'\nloss.kind = 'cross_entropy'\n{text}\n")
    plain = BuildSpec(MODEL, "cross_entropy")
    spec = dataclasses.replace(BuildSpec.of(read_recipe(path)), model=MODEL)
    assert spec == dataclasses.replace(plain, **{name: value})
    path.write_text("model = 'model.onnx'\nloss.kind = 'cross_entropy'\n")
    assert dataclasses.replace(overlay(option, read_recipe(path)), model=MODEL) == spec
    assert spec.canonical_json() != plain.canonical_json()


def test_every_field_can_be_given():
    fields = {field.name for field in dataclasses.fields(BuildSpec)}
    assert {each.name for each in options()} == fields - {"model"}
    # A head has a command of its own.
    assert fields - set(GIVEN) == {"model", "loss", "ort_format", "head"}


def test_the_call_takes_every_field():
    """By its name and with its default."""
    taken = inspect.signature(build_package).parameters
    for each in options():
        assert taken[each.name].default == each.default, each.name
    assert list(taken)[:3] == ["model", "folder", "remark"]
    assert len(taken) == 3 + len(options())


def test_every_option_is_in_the_schema_and_in_help():
    """Every flag is an option of the command, every key stands in the schema with its text."""
    schema = json_schema()
    command = typer.main.get_command(app).commands["build"]  # type: ignore[attr-defined]
    flags = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    for each in options():
        for flag in each.flag.split("/") if each.flag else ():
            assert flag in flags, flag
        *above, key = each.key.split(".")
        if each.flag and not each.parse and key != "accumulation_steps":
            texts = _descriptions(schema, above[0] if above else "", key)
            assert texts == {each.meaning}, each.key


def _descriptions(schema: dict[str, Any], table: str, key: str) -> set[str]:
    """What the schema says of a key of a table, in all of its kinds."""
    if not table:
        return {schema["properties"][key]["description"]}
    name = {"clip": "ClipTable"}.get(table, f"{table.title()}Table")
    found = {"loss": "LossTable|Table", "optimizer": "Table"}.get(table)
    kinds = [name] if found is None else [
        kind for kind, each in schema["$defs"].items()
        if key in each.get("properties", {}) and "kind" in each["properties"]
    ]  # fmt: skip
    return {schema["$defs"][kind]["properties"][key]["description"] for kind in kinds}


def test_the_manifest_has_a_field_for_every_option_that_is_recorded():
    """The runtime's record knows nothing of the declarations, and is no part of them."""
    fields = {field.name for field in dataclasses.fields(Manifest)}
    recorded = {each.manifest for each in options() if each.manifest}
    assert recorded <= fields
    assert {"loss", "optimizer", "accumulation_steps", "session", "adapter"} <= recorded
    assert recorded <= manifest_schema()["properties"].keys()


def test_what_a_manifest_records_is_what_was_asked_for(tmp_path):
    asked: dict[str, Any] = {
        "loss": "mse", "accumulation_steps": 3, "clip_norm": 0.5, "sessions": "small",
        "groups": ("*bias:lr=2",), "schedule": "cosine:floor=0.5", "optimizer": "sgd",
        "optimizer_options": {"momentum": 0.9}, "self_check": False,
    }  # fmt: skip
    manifest = build_package(zoo.mlp((4, 3, 2)), tmp_path / "package", **asked)
    assert (manifest.loss, manifest.accumulation_steps) == ("mse", 3)
    assert manifest.optimizer.kind == "sgd"
    assert manifest.optimizer.settings["momentum"] == 0.9
    assert manifest.clip.norm == 0.5
    assert not manifest.session.arena
    assert [group.learning_rate_scale for group in manifest.groups] == [1.0, 2.0]
    assert manifest.schedule.kind == "cosine"
    assert manifest.self_check is None


@pytest.mark.parametrize(("wrong", "code"), [
    ({"accumulation_steps": 0}, "bad-accumulation"), ({"adapter_rank": 0}, "bad-adapter"),
    ({"clip_norm": 0.0}, "bad-hyperparameter"), ({"clip_norm": "1"}, "bad-argument"),
    ({"memory_budget": "60"}, "bad-memory-budget"), ({"memory_batch": 0}, "bad-batch-size"),
    ({"onnxruntime": "new"}, "bad-version"), ({"schedule": 3}, "bad-argument"),
    ({"head": "mean"}, "bad-argument"),
])  # fmt: skip
def test_bounds_are_checked_wherever_a_value_comes_from(wrong, code):
    with refused(code, what=next(iter(wrong))) as error:
        BuildSpec(MODEL, "mse", **wrong)
    assert error.value.hint


# An argument of a wrong type is an error that names it, and not an exception of Python's own.

WRONG: list[dict[str, Any]] = [
    {"optimizer": "sdg"}, {"optimizer": optimizers.SGD}, {"optimizer": 3}, {"loss": ["mse"]},
    {"loss": 3}, {"loss_options": 3}, {"loss_options": ["reduction"]}, {"clip_norm": "1"},
    {"groups": "*"}, {"schedule": {"kind": "cosine"}}, {"adapter": "qlora"},
    {"accumulation_steps": "2"}, {"accumulation_steps": 2.5}, {"accumulation_steps": None},
    {"accumulation_steps": True}, {"train": "fc*"}, {"train": 3}, {"train": [3]}, {"freeze": "fc*"},
    {"freeze": None}, {"loss_inputs": "output"}, {"loss_inputs": [3]}, {"outputs": "output"},
    {"outputs": 3}, {"frozen_storage": "int4"}, {"frozen_storage": ["int8"]}, {"ort_format": True},
    {"ort_format": "fixed"}, {"nominal": "yes"}, {"onnxruntime": 1.2}, {"onnxruntime": (1, 20)},
    {"runtime": "stock"}, {"runtime": None},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_build_package_names_it(wrong, tmp_path):
    arguments: dict[str, Any] = {"loss": "cross_entropy", **wrong}
    with refused("bad-argument") as error:
        build_package(zoo.mlp((4, 3, 2)), tmp_path / "p", **arguments)
    (name,) = wrong
    assert error.value.what.startswith(name)
    assert error.value.hint
    assert not list(tmp_path.iterdir())


def test_an_optimizer_goes_by_its_name_or_as_an_object(tmp_path):
    for name, given in (("a", {"optimizer": optimizers.SGD(momentum=0.9)}), ("b", {
        "optimizer": "sgd", "optimizer_options": {"momentum": 0.9},
    })):  # fmt: skip
        build_package(zoo.mlp((4, 3, 2)), tmp_path / name, loss="mse", **given)
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


@pytest.mark.parametrize("folder", [3, None, b"p"])
def test_a_folder_that_is_no_path(folder):
    with pytest.raises(OdtpackError, match="folder cannot be"):
        build_package(zoo.mlp((4, 3, 2)), folder, loss="mse")


@pytest.mark.parametrize(
    "wrong",
    [{"artifact_directory": 3}, {"prefix": 3}, {"frozen_params": 3}, {"loss_input_names": 3},
     {"additional_output_names": 3}, {"requires_grad": 3}],
    ids=str,
)  # fmt: skip
def test_generate_artifacts_names_it(wrong, tmp_path):
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
def test_a_property_of_a_derived_type_is_saved_as_its_base(value, expected, tmp_path):
    build_package(zoo.mlp((4, 3, 2)), tmp_path / "p", loss="cross_entropy")
    state = CheckpointState.load_checkpoint(tmp_path / "p" / "checkpoint")
    state.properties[Text("name")] = value
    CheckpointState.save_checkpoint(state, tmp_path / "c")
    loaded = CheckpointState.load_checkpoint(tmp_path / "c").properties["name"]
    assert loaded == expected
    assert type(loaded) is type(expected)
