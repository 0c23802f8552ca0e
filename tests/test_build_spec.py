"""A build option is declared once: recipe, command line and Python call follow from it."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import pytest

from odtpack.build import build_package
from odtpack.build_spec import BuildSpec, options
from odtpack.cli._build_options import overlay
from odtpack.package.optimizer_update import Update
from odtpack.recipe import read_recipe
from odtpack_runtime.training.schedules import ScheduleSpec

MODEL = Path("model.onnx")

# Each key of a recipe, the option that says the same, and the field that both become.
GIVEN = {
    "train": ("[parameters]\ntrain = ['a.*']", {"train": ["a.*"]}, ("a.*",)),
    "freeze": ("[parameters]\nfreeze = ['a.*']", {"freeze": ["a.*"]}, ("a.*",)),
    "untie": ("[parameters]\nuntie = ['a.*']", {"untie": ["a.*"]}, ("a.*",)),
    "adapter": ("adapter.kind = 'lora'", {"adapter": "lora"}, "lora"),
    "adapter_on": ("[adapter]\non = ['a']", {"adapter_on": ["a"]}, ("a",)),
    "adapter_feedforward": (
        "[adapter]\nfeedforward = ['a']", {"adapter_feedforward": ["a"]}, ("a",),
    ),
    "adapter_rank": ("adapter.rank = 4", {"adapter_rank": 4}, 4),
    "adapter_alpha": ("adapter.alpha = 4.0", {"adapter_alpha": 4.0}, 4.0),
    "adapter_dropout": ("adapter.dropout = 0.5", {"adapter_dropout": 0.5}, 0.5),
    "adapter_seed": ("adapter.seed = 4", {"adapter_seed": 4}, 4),
    "adapter_tokens": ("adapter.tokens = 4", {"adapter_tokens": 4}, 4),
    "outputs": ("outputs = ['y']", {"outputs": ["y"]}, ("y",)),
    "prediction": ("prediction = false", {"prediction": True}, False),
    "loss_inputs": ("loss.inputs = ['y']", {"loss_inputs": ["y"]}, ("y",)),
    "loss_options": (
        "loss.reduction = 'sum'", {"loss_option": ["reduction=sum"]}, {"reduction": "sum"},
    ),
    "optimizer": ("optimizer.kind = 'lion'", {"optimizer": "lion"}, "lion"),
    "optimizer_options": (
        "optimizer = { kind = 'adamw', beta1 = 0.5 }", {"beta1": 0.5}, {"beta1": 0.5},
    ),
    "clip_norm": ("clip.norm = 2.0", {"clip_norm": 2.0}, 2.0),
    "clip_value": ("clip.value = 2.0", {"clip_value": 2.0}, 2.0),
    "privacy_clip": ("privacy.clip_norm = 2.0", {"privacy_clip": 2.0}, 2.0),
    "privacy_noise": ("privacy.noise_multiplier = 2.0", {"privacy_noise": 2.0}, 2.0),
    "groups": (
        "groups = [{ parameters = 'a', learning_rate_scale = 2.0 }]", {"groups": ["a:lr=2"]},
        (("a", 2.0, None),),
    ),
    "decay_vectors": (
        "optimizer = { kind = 'adamw', decay_vectors = false }", {"decay_vectors": True}, False,
    ),
    "accumulation_steps": (
        "batch = { size = 8, micro_batch = 2 }", {"accumulation_steps": 4}, 4,
    ),
    "schedule": (
        "schedule = { kind = 'cosine', floor = 0.5 }", {"schedule": "cosine:floor=0.5"},
        ScheduleSpec("cosine", {"floor": 0.5}),
    ),
    "memory_budget": ("memory.budget = '60 MB'", {"memory_budget": "60 MB"}, "60 MB"),
    "memory_batch": ("memory.batch = 4", {"memory_batch": 4}, 4),
    "memory_sizes": ("memory.sizes = ['a=4']", {"memory_sizes": ["a=4"]}, ("a=4",)),
    "step_model": ("memory.step_model = 'never'", {"step_model": "never"}, "never"),
    "runtime": ("target.runtime = 'ort-training'", {"runtime": "ort-training"}, "ort-training"),
    "sessions": ("target.sessions = 'small'", {"sessions": "small"}, "small"),
    "frozen_storage": ("formats.frozen_dtype = 'int8'", {"frozen_storage": "int8"}, "int8"),
    "base": ("formats.base = 'int4'", {"base": "int4"}, "int4"),
    "nominal": ("formats.nominal = true", {"nominal": True}, True),
    "self_check": ("formats.self_check = false", {"self_check": True}, False),
    "segments": ("memory.segments = true", {"segments": True}, True),
    "onnxruntime": ("target.onnxruntime = '1.20'", {"onnxruntime": "1.20"}, "1.20"),
}  # fmt: skip


@pytest.mark.parametrize("name", GIVEN)
def test_a_recipe_and_an_option_say_the_same(name: str, tmp_path: Path) -> None:
    text, option, value = GIVEN[name]
    path = tmp_path / "recipe.toml"
    path.write_text(f"model = 'model.onnx'\nloss.kind = 'cross_entropy'\n{text}\n")
    plain = BuildSpec(MODEL, "cross_entropy")
    spec = dataclasses.replace(BuildSpec.of(read_recipe(path)), model=MODEL)
    assert spec == dataclasses.replace(plain, **{name: value})
    assert overlay(option, plain) == spec
    assert spec.canonical_json() != plain.canonical_json()


def test_every_field_can_be_given() -> None:
    fields = {field.name for field in dataclasses.fields(BuildSpec)}
    assert {field.name for field, _ in options()} == fields - {"model"}
    # A head has a command of its own.
    assert fields - set(GIVEN) == {"model", "loss", "ort_format", "head"}


def test_the_call_takes_every_field() -> None:
    """By its name and with its default, or as a part of the optimizer and its update."""
    taken = inspect.signature(build_package).parameters
    parts = {field.name for field in dataclasses.fields(Update)}
    parts |= {"clip_norm", "clip_value", "privacy_clip", "privacy_noise", "optimizer_options"}
    parts.add("head")  # the model has it before the call
    for field in dataclasses.fields(BuildSpec):
        if field.name in parts or field.name.startswith("adapter_"):  # those of its AdapterSpec
            continue
        assert field.name in taken, field.name
        if field.name not in ("model", "loss", "loss_options", "optimizer"):
            assert taken[field.name].default == field.default, field.name
