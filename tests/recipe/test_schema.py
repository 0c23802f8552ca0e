"""What may stand in a recipe is what losses, optimizers and schedules take; all else is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from odtpack.errors import OdtpackError
from odtpack.losses import LOSSES
from odtpack.optimizers import OPTIMIZERS, make_optimizer
from odtpack.recipe import BuildSpec, read_recipe
from odtpack.recipe.schema import LossTable, OptimizerTable, ScheduleTable, json_schema
from odtpack_runtime.training.schedules import SCHEDULES
from tests.recipe.conftest import RECIPE
from tests.refused import refused


def variants(union: Any) -> dict[str, type[BaseModel]]:
    models = [get_args(part)[0] for part in get_args(get_args(union)[0])]
    return {get_args(model.model_fields["kind"].annotation)[0]: model for model in models}


def defaults(table: type[BaseModel], *without: str) -> dict[str, Any]:
    return {
        name: None if field.is_required() else field.default
        for name, field in table.model_fields.items()
        if name not in ("kind", *without)
    }


@pytest.mark.parametrize("name", LOSSES)
def test_losses_have_their_options_and_defaults(name):
    assert defaults(variants(LossTable)[name], "inputs") == LOSSES[name].defaults()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_have_their_settings_and_defaults(name):
    wanted = {field.name: field.default for field in dataclasses.fields(OPTIMIZERS[name])}
    assert defaults(variants(OptimizerTable)[name], "decay_vectors") == wanted


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_have_their_settings_and_defaults(name):
    table = variants(ScheduleTable)[name]
    kind = SCHEDULES[name]
    found = defaults(table, "learning_rate")
    assert set(found) == {field.name for field in dataclasses.fields(kind)}
    for field in dataclasses.fields(kind):
        if not field.metadata.get("required"):
            assert found[field.name] == field.default, field.name


def test_there_are_no_others():
    assert set(variants(LossTable)) == {*LOSSES, "none"}
    assert set(variants(OptimizerTable)) == set(OPTIMIZERS)
    assert set(variants(ScheduleTable)) == set(SCHEDULES)


# What a recipe refuses because of a range, the classes refuse too, and the other way round.
BOUNDS = [
    ("optimizer", 'kind = "adamw"', "beta1", (0.0, 1.0, -0.5, 1.5), (0.5, 0.0001)),
    ("optimizer", 'kind = "adamw"', "epsilon", (0.0, -1.0), (1e-12,)),
    ("optimizer", 'kind = "adamw"', "weight_decay", (-0.1,), (0, 10.0)),
    ("optimizer", 'kind = "sgd"', "momentum", (-0.1, 1.0), (0.0, 0.99)),
    ("optimizer", 'kind = "adafactor"', "beta2_decay", (0.1,), (0.0, -1.5)),
    ("optimizer", 'kind = "adafactor"', "clip_threshold", (0.0,), (0.5,)),
    ("loss", 'kind = "cross_entropy"', "label_smoothing", (-0.1, 1.1), (0, 1)),
    ("loss", 'kind = "huber"', "delta", (0.0, -1.0), (2,)),
    ("loss", 'kind = "distillation"', "alpha", (-0.1, 1.1), (0.0, 1.0)),
    ("loss", 'kind = "ctc"', "blank", (-1,), (0, 5)),
    ("schedule", 'kind = "cosine"', "floor", (-0.1, 1.1), (0, 1)),
    ("schedule", 'kind = "step"\nperiod = 5', "gamma", (0.0, 1.1), (1.0,)),
    ("schedule", 'kind = "step"', "period", (0, -1), (1,)),
]


@pytest.mark.parametrize(("table", "kind", "key", "bad", "good"), BOUNDS)
def test_ranges_are_those_of_the_classes(tmp_path, table, kind, key, bad, good):
    loss = "" if table == "loss" else '[loss]\nkind = "mse"\n'
    for value in (*bad, *good):
        path = tmp_path / "recipe.toml"
        path.write_text(f'model = "m.onnx"\n{loss}[{table}]\n{kind}\n{key} = {value}\n')
        line = len(path.read_text().splitlines())
        if value in good:
            assert make(table, path) is not None
            continue
        with refused("recipe-invalid", where=f"{path}:{line}") as caught:
            read_recipe(path)
        for word in (f"{table}.{key}", "must be a", str(value)):
            assert word in caught.value.what
        with pytest.raises(OdtpackError):
            make_raw(table, kind, key, value)


def make(table: str, path: Path) -> object:
    """What the class makes of a recipe that was read."""
    from odtpack.losses import make_loss

    settings = BuildSpec.of(read_recipe(path))
    if table == "loss":
        return make_loss(settings.loss, settings.loss_options)
    if table == "optimizer":
        return make_optimizer(settings.optimizer, settings.optimizer_options)
    return settings.schedule


def make_raw(table: str, kind: str, key: str, value: float) -> object:
    from odtpack.losses import make_loss
    from odtpack_runtime.training.schedules import make_schedule

    name, *rest = (line.split(" = ")[1].strip('"') for line in kind.splitlines())
    if table == "loss":
        return make_loss(name, {key: value})
    if table == "optimizer":
        return make_optimizer(name, {key: value})
    given: dict[str, Any] = {"total_steps": 10} if name == "cosine" else {}
    given |= {"period": int(rest[0])} if rest else {}
    return make_schedule(name, {**given, key: value})


def test_an_optimizer_that_there_is_not_is_refused_in_python_too():
    with refused("bad-argument") as caught:
        make_optimizer("adamx", {})
    with refused("bad-argument", "optimizer cannot be"):
        make_optimizer(["adamw"], {})  # type: ignore[arg-type]
    assert caught.value.what == "optimizer cannot be 'adamx'"
    assert "'adamw'" in (caught.value.hint or "")


@pytest.mark.parametrize(("more", "words"), [
    ("label_smothing = 0.1", ("loss.label_smothing", "did you mean 'label_smoothing'", ":6")),
    ("[optimiser]\nkind = 'sgd'", ("optimiser", "did you mean 'optimizer'", ":6")),
    ("[optimizer]\nkind = 'adamx'", ("'adamx'", "did you mean 'adam", ":6")),
    ("[optimizer]\nbeta1 = 0.9", ("optimizer", "kind", ":6")),
    ("[optimizer]\nkind = 'sgd'\nbeta1 = 0.9", ("optimizer.beta1", "momentum", ":8")),
    ("[optimizer]\nkind = 'sgd'\nnesterov = true", ("nesterov asks for momentum",)),
    ("[optimizer]\nkind = 'sgd'\nnesterov = 1", ("optimizer.nesterov", ":8")),
    ("[optimizer]\nkind = 'sgd'\nmomentum = true", ("optimizer.momentum", "True", ":8")),
    ("[optimizer]\nkind = 'sgd'\nmomentum = nan", ("optimizer.momentum", ":8")),
    ("[clip]\nnorm = 1\nvalue = 1", ("clip", "one of norm and value", ":6")),
    ("[clip]", ("clip", "one of norm and value")),
    ("[[groups]]\nparameters = 'a'\n[[groups]]\nparameters = ''", ("groups[1]", ":9")),
    ("[schedule]\nkind = 'cosine'\nwarmup_steps = 9\ntotal_steps = 5", ("total_steps", "9")),
    ("[schedule]\nkind = 'multistep'\nmilestones = [3, 2]", ("milestones must rise",)),
    ("[batch]\nsize = 10\nmicro_batch = 4", ("size (10)", "micro_batch (4)", ":6")),
    ("[batch]\nsize = 2.5", ("batch.size", "a whole number, 1 or more", "'2.5'", ":7")),
    ("[target]\nonnxruntime = 1.20", ("target.onnxruntime", ":7")),
    ("[target]\nonnxruntime = 'new'", ("target.onnxruntime", '"1.20"', "'new'", ":7")),
    ("[target]\nplatforms = ['andriod']", ("did you mean 'android'", ":7")),
    ("[budgets]\npeak_memory = 200", ("budgets.peak_memory", '"200 MB"', ":7")),
    ("[budgets]\npeak_memory = '200 Mb'", ("'Mb'", "did you mean MB", ":7")),
    ("[budgets]\npeek_memory = '2 MB'", ("did you mean 'peak_memory'", ":7")),
    ("[budgets.class.android]\nstep_latency = 5", ("step_latency", "50 ms", ":7")),
    ("weight = 'heavy'", ("loss.weight", ":6")),
])  # fmt: skip
def test_wrong_recipes_say_where_and_what_was_meant(write, more, words):
    with refused("recipe-invalid") as caught:
        read_recipe(write(more))
    error = caught.value
    assert error.hint
    for word in words:
        text = error.where if word.startswith(":") else error.what
        assert text.endswith(word) if word.startswith(":") else word in text, error


@pytest.mark.parametrize(("content", "code"), [
    (b"model = ", "recipe-malformed"), (b"\xff\xfe", "recipe-malformed"),
    (b"a = " + b"[" * 5000, "recipe-malformed"), (b"x" * 300_000, "recipe-too-large"),
    (b"", "recipe-invalid"),
])  # fmt: skip
def test_files_that_are_no_recipes(tmp_path, content, code):
    path = tmp_path / "recipe.toml"
    path.write_bytes(content)
    with refused(code):
        read_recipe(path)


def test_the_json_schema_knows_every_table():
    schema = json_schema()
    assert schema["additionalProperties"] is False
    assert set(schema["required"]) == {"model", "loss"}
    for definition in schema["$defs"].values():
        if definition.get("type") == "object":
            assert definition["additionalProperties"] is False, definition
    beta = schema["$defs"]["AdamWTable"]["properties"]["beta1"]
    assert (beta["exclusiveMinimum"], beta["exclusiveMaximum"]) == (0, 1)
    assert json.loads(json.dumps(schema)) == schema


def test_equal_settings_have_equal_text(tmp_path):
    """Defaults that are spelled out, order, comments and where the model lies do not count."""
    first = tmp_path / "first.toml"
    first.write_text(RECIPE)
    (tmp_path / "deep").mkdir()
    second = tmp_path / "deep" / "second.toml"
    second.write_text(
        'model = "../other.onnx" # comment\n[optimizer]\nbeta1 = 0.9\nkind = "adamw"\n'
        '[loss]\nreduction = "mean"\nkind = "cross_entropy"\n[batch]\nsize = 64\n'
        '[budgets]\npeak_memory = "1 MB"\n'
    )
    third = tmp_path / "third.toml"
    third.write_text(RECIPE + "label_smoothing = 0.1\n")
    texts = [BuildSpec.of(read_recipe(p)).canonical_json() for p in (first, second, third)]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
