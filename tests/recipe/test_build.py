"""Builds by recipe: as by options, overridden by options, and skipped when nothing changed."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from odtpack.choices import OrtFormat, Platform, Style
from odtpack.fit.finalists import Surroundings, recipe_text
from odtpack.recipe import BuildSpec, read_recipe
from odtpack.recipe.key import cache_key, write_stamp
from odtpack.spec import Head
from odtpack_runtime import CheckpointState
from odtpack_runtime.package.package import Package
from odtpack_runtime.training.schedules import ScheduleSpec
from tests import zoo
from tests.cli.conftest import arrays, assert_refused, tree
from tests.programs import ran
from tests.recipe.conftest import RECIPE, Run, run
from tests.refused import refused
from tests.simulator.graphs import weighted
from tests.test_docs import prepare_encoder

FULL = """
label_smoothing = 0.1
ignore_index = 2

[parameters]
freeze = ["conv1.*"]

[optimizer]
kind = "sgd"
momentum = 0.9
nesterov = true
weight_decay = 0.01
decay_vectors = false

[clip]
norm = 1.5

[[groups]]
parameters = "fc.*"
learning_rate_scale = 10

[schedule]
kind = "multistep"
milestones = [10, 20]
learning_rate = 0.01

[batch]
size = 12
micro_batch = 4

[formats]
nominal = true

[target]
onnxruntime = "1.20"
"""
AS_OPTIONS = (
    *("--loss", "cross_entropy", "--loss-option", "label_smoothing=0.1"),
    *("--loss-option", "ignore_index=2", "--freeze", "conv1.*", "--output", "output"),
    *("--optimizer", "sgd", "--momentum", 0.9, "--optimizer-option", "nesterov=true"),
    *("--weight-decay", 0.01, "--no-vector-decay", "--clip-norm", 1.5, "--group", "fc.*:lr=10"),
    *("--schedule", "multistep:milestones=10+20,lr=0.01", "--accumulate", 3, "--nominal"),
    *("--onnxruntime", "1.20"),
)


def test_a_recipe_builds_what_options_build(run, folder):
    (folder / "recipe.toml").write_text('outputs = ["output"]\n' + RECIPE + FULL)
    run("build", "--recipe", folder / "recipe.toml", code=0)
    other = folder / "other"
    assert run("build", folder / "factory.onnx", "--out", other, *AS_OPTIONS).code == 0
    assert tree(folder / "package") == tree(other)
    manifest = Package.open(other).manifest
    assert manifest.accumulation_steps == 3
    assert manifest.loss_options["label_smoothing"] == 0.1


def test_options_take_the_place_of_keys(run, folder, write):
    write(FULL)
    outcome = run(
        *("build", "--recipe", folder / "recipe.toml", "--out", folder / "p", "--json"),
        *("--loss", "mse", "--optimizer", "adamw", "--beta1", 0.8, "--freeze", "conv2.*"),
        *("--accumulate", 1, "--clip-value", 0.5, "--group", "conv1.*:decay=1"),
        *("--schedule", "cosine"),
        code=0,
    )
    content = outcome.json()
    assert not (folder / "package").exists()
    assert content["loss"] == "mse"
    assert content["loss_options"].get("label_smoothing") is None
    assert content["optimizer"]["kind"] == "adamw"
    assert content["optimizer"]["beta1"] == 0.8
    assert content["optimizer"]["weight_decay"] == 0.0  # of the recipe's sgd
    assert content["clip"] == {"norm": None, "value": 0.5}
    assert content["accumulation_steps"] == 1
    assert content["schedule"]["kind"] == "cosine"
    assert content["files"]["nominal_checkpoint"]  # what no option names stays
    roles = {item["name"]: item["role"] for item in content["parameters"]}
    assert (roles["conv1.weight"], roles["conv2.weight"]) == ("trainable", "frozen")


def test_one_option_of_the_recipes_own_loss_and_optimizer(run, folder, write):
    outcome = run(
        *("build", "--recipe", write(FULL), "--json"),
        *("--loss-option", "label_smoothing=0.3", "--momentum", 0.5),
        code=0,
    )
    content = outcome.json()
    assert content["loss_options"]["label_smoothing"] == 0.3
    assert content["loss_options"]["ignore_index"] == 2
    assert content["optimizer"]["momentum"] == 0.5
    assert content["optimizer"]["nesterov"] is True


@pytest.mark.parametrize(("more", "options", "code", "words"), [
    ("labelsmoothing = 1\n", (), "recipe-invalid", ("label_smoothing", "recipe.toml:6")),
    ("[optimizer]\nkind = 'sgd'", ("--beta1", 0.5), "option-not-used", ("--beta1",)),
    ("", ("--beta1", 1.5), "bad-hyperparameter", ("beta1",)),
    ("", ("--accumulate", 0), "bad-accumulation", ("accumulation_steps is 0",)),
    ("", ("--onnxruntime", "new"), "bad-version", ("'new'",)),
    ("", ("--onnxruntime", "1.8"), "target-cannot-load", ("1.8", "opset 14")),
    ("[target]\nonnxruntime = '1.7'", (), "target-too-old", ("1.7", "1.8")),
])  # fmt: skip
def test_refused(
    run, folder, write, more, options, code,
    words,
):  # fmt: skip
    assert_refused(run("build", "--recipe", write(more), *options), code, *words)
    assert not (folder / "package").exists()


def test_no_place_for_the_package(run, folder):
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.replace('package = "package"\n', ""))
    assert_refused(run("build", "--recipe", recipe), "usage", "--out")
    recipe.write_text(RECIPE.replace("factory.onnx", "missing.onnx"))
    assert_refused(run("build", "--recipe", recipe), "model-not-found", "missing.onnx")
    command = "build", "--recipe", recipe, "--if-changed"
    assert_refused(run(*command), "model-not-found", "missing.onnx")


def _linear(path: Path, opset: int, ir_version: int) -> None:
    text = f"""<ir_version: {ir_version}, opset_import: ["": {opset}]>
        linear (float[batch, 3] input) => (float[batch, 3] output) {{
            output = MatMul (input, weight)
        }}"""
    onnx.save(weighted(text, {"weight": np.ones((3, 3), np.float32)}), path)


class TestTarget:
    def test_a_model_that_is_too_new_for_it(self, run, folder, write):
        _linear(folder / "factory.onnx", 23, 10)
        recipe = write('[target]\nonnxruntime = "1.20.1"\n')
        words = "1.20.1", "opset 21", "opset 23", "1.23", "export the model with opset 21"
        assert_refused(run("build", "--recipe", recipe), "target-cannot-load", *words)
        assert not (folder / "package").exists()
        assert run("build", "--recipe", write('[target]\nonnxruntime = "1.23"\n')).code == 0
        assert run("build", "--recipe", write('[target]\nonnxruntime = "9.0"\n')).code == 0

    def test_odtpack_keeps_to_what_it_loads(self, run, folder, write):
        """Without a target the model of opset 13 is read as one of opset 17."""
        _linear(folder / "factory.onnx", 13, 7)
        for more, opset in (("", 17), ('[target]\nonnxruntime = "1.8"\n', 13)):
            run("build", "--recipe", write(more), code=0)
            manifest = Package.open(folder / "package").manifest
            assert manifest.opsets[""] == opset
        assert manifest.minimum_onnxruntime == "1.8"


class TestIfChanged:
    def build(self, run: Run, folder: Path, *options: object) -> bool:
        command = "build", "--recipe", folder / "recipe.toml", "--if-changed", "--json"
        outcome = run(*command, *options, code=0)
        content = outcome.json()
        assert content["cache_key"] in outcome.err
        built = content["built"]
        assert ("unchanged" in outcome.err) is not built
        Package.open(folder / "package")
        assert isinstance(built, bool)
        return built

    def test_the_second_time_nothing_is_written(self, run, folder):
        assert self.build(run, folder)
        times = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
        assert not self.build(run, folder)
        assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == times

    def test_what_decides_the_package_makes_it_anew(self, run, folder, write):
        assert self.build(run, folder)
        write("label_smoothing = 0.1\n")
        assert self.build(run, folder)
        assert self.build(run, folder, "--weight-decay", 0.1)
        assert self.build(run, folder)
        onnx.save(zoo.cnn(size=8, width=(4, 8), classes=4), folder / "factory.onnx")
        assert self.build(run, folder)
        write('label_smoothing = 0.1\n[budgets]\npeak_memory = "1 MB" # not of the package\n')
        assert not self.build(run, folder)

    @pytest.mark.parametrize("name", ["manifest.json", "checkpoint", "eval_model.onnx"])
    def test_a_package_that_is_not_whole_is_made_anew(self, run, folder, name):
        assert self.build(run, folder)
        path = folder / "package" / name
        content = path.read_bytes()
        path.unlink()
        if name != "manifest.json":  # without it the folder is none of ours to write to
            assert self.build(run, folder)
        path.write_bytes(content)
        assert not self.build(run, folder)  # another time, the same bytes
        path.write_bytes(bytes(len(content)))
        if name != "manifest.json":
            assert self.build(run, folder)
            assert path.read_bytes() == content

    def test_a_manifest_that_cannot_be_read_is_kept(self, run, folder):
        """As one that another version with the same key wrote."""
        assert self.build(run, folder)
        (folder / "package" / "manifest.json").write_text('{"schema_version": 2}')
        write_stamp(folder / "package", _keys(folder))
        outcome = run("build", "--recipe", folder / "recipe.toml", "--if-changed")
        assert_refused(outcome, "folder-not-empty", "schema version 2", "update odtpack")

    def test_a_damaged_stamp_is_none(self, run, folder):
        assert self.build(run, folder)
        stamp = folder / "package.stamp.json"
        whole = stamp.read_text()
        for content in ("", "[]", "{}", "[" * 100_000, whole.replace('"files"', '"flies"'),
                        whole.replace('"manifest.json"', '"../recipe.toml"')):  # fmt: skip
            stamp.write_text(content)
            assert self.build(run, folder), content[:40]
            assert stamp.read_text() != content


def _keys(folder: Path) -> str:
    return cache_key(BuildSpec.of(read_recipe(folder / "recipe.toml")))


def _externally(model: onnx.ModelProto, path: Path) -> None:
    """Save a model whose weights lie in the file ``w`` beside it."""
    onnx.save(model, path, save_as_external_data=True, location="w", size_threshold=0)


class TestCacheKey:
    def test_is_that_of_build(self, run, folder):
        outcome = run("cache-key", "--recipe", folder / "recipe.toml", code=0)
        assert outcome.err == ""
        key = outcome.out.strip()
        assert len(key) == 64
        assert key == _keys(folder)
        built = run("build", "--recipe", folder / "recipe.toml", "--if-changed", "--json")
        assert built.json()["cache_key"] == key

    def test_follows_external_data_and_versions(self, folder, monkeypatch):
        model = onnx.load(folder / "factory.onnx")
        before = _keys(folder)
        _externally(model, folder / "factory.onnx")
        keys = [before, _keys(folder)]
        data = bytearray((folder / "w").read_bytes())
        data[0] ^= 1
        (folder / "w").write_bytes(data)
        keys.append(_keys(folder))
        monkeypatch.setattr("odtpack.recipe.key.version", lambda name: "9.9")
        keys.append(_keys(folder))
        monkeypatch.setattr("onnxruntime.__version__", "9.9")
        keys.append(_keys(folder))
        assert len(set(keys)) == len(keys)

    def test_external_data_outside_the_folder_are_not_read(self, run, folder):
        path = folder / "factory.onnx"
        _externally(onnx.load(path), path)
        content = path.read_bytes()
        path.write_bytes(content.replace(b"location\x12\x01w", b"location\x12\x01/"))
        outcome = run("cache-key", "--recipe", folder / "recipe.toml")
        assert_refused(outcome, "external-data-escapes")

    def test_needs_no_large_import(self, folder):
        """It runs before each build of an app: nothing that differentiates or trains is loaded."""
        probe = (
            "import json, sys\nfrom odtpack.cli import main\n"
            f"code = main(['cache-key', '--recipe', {str(folder / 'recipe.toml')!r}])\n"
            "print(json.dumps(sorted(sys.modules)))\n"
            "sys.exit(code)\n"
        )
        loaded = set(json.loads(ran(sys.executable, "-c", probe).stdout.splitlines()[-1]))
        unwanted = {
            "jinja2", "odtpack.autodiff", "odtpack.build", "odtpack.model.loading",
            "onnx.reference", "onnx_ir", "onnxruntime.tools", "rich", "scipy", "sklearn", "torch",
        }  # fmt: skip
        assert not loaded & unwanted

    def test_opens_no_session(self, folder, monkeypatch):
        def refuse(*_: object, **__: object) -> None:
            raise AssertionError("a session was opened")

        monkeypatch.setattr("onnxruntime.InferenceSession", refuse)
        assert len(_keys(folder)) == 64


def test_a_recipe_in_the_current_folder_is_found(run, folder, monkeypatch):
    monkeypatch.chdir(folder)
    outcome = run("build", "--no-self-check", "--step-model", "never")
    assert (outcome.code, outcome.out) == (0, "")
    assert "using recipe.toml" in outcome.err
    assert Package.open(folder / "package").manifest.loss == "cross_entropy"
    assert run("cache-key").out == run("cache-key", "--recipe", "recipe.toml").out
    monkeypatch.chdir(folder / "package")
    assert_refused(run("build"), "usage", "MODEL.onnx", "--recipe")


def test_a_switch_of_the_recipe_is_turned_off(run, folder, write):
    recipe = write("[formats]\nnominal = true\nself_check = false\n")
    for option, written in (("--nominal", True), ("--no-nominal", False)):
        assert run("build", "--recipe", recipe, option).code == 0
        assert (folder / "package" / "nominal_checkpoint").exists() is written


# A recipe gives an encoder a head, as ``odtpack head`` does.

__all__ = ["run"]

ABOVE = 'model = "encoder.onnx"\npackage = "package"\n'
BELOW = '[loss]\nkind = "cross_entropy"\n\n[parameters]\ntrain = ["head.*"]\n'


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    prepare_encoder(tmp_path)
    return tmp_path


def written(prepared: Path, head: str) -> Path:
    path = prepared / "recipe.toml"
    path.write_text(f"{ABOVE}\n[head]\n{head}\n{BELOW}")
    return path


def test_the_package_is_that_of_the_command_and_a_build(run, prepared):
    recipe = written(prepared, 'pool = "mean"\nclasses = 3\nseed = 7\n')
    assert run("build", "--recipe", recipe).code == 0
    model, encoder = prepared / "classifier.onnx", prepared / "encoder.onnx"
    asked = ("--pool", "mean", "--classes", 3, "--seed", 7, "--out", model)
    assert run("head", encoder, *asked).code == 0
    built = ("--loss", "cross_entropy", "--train", "head.*", "--out", prepared / "other")
    assert run("build", model, *built).code == 0
    for name in ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint"):
        one, other = (prepared / package / name for package in ("package", "other"))
        assert one.read_bytes() == other.read_bytes()
    manifests = [
        json.loads((prepared / p / "manifest.json").read_text()) for p in ("package", "other")
    ]
    assert manifests[0]["recipe_digest"] == manifests[1]["recipe_digest"]
    state = CheckpointState.load_checkpoint(prepared / "package" / "checkpoint")
    assert state.parameters["head.weight"].data.shape == (3, 4)


def test_every_key_of_the_head_decides_the_package(prepared):
    mean = 'pool = "mean"\nclasses = 3'
    heads = (mean, 'pool = "cls"\nclasses = 3', 'pool = "mean"\nclasses = 4',
             f"{mean}\nseed = 1", f'{mean}\ninput = "hidden"')  # fmt: skip
    keys = {cache_key(BuildSpec.of(read_recipe(written(prepared, head)))) for head in heads}
    assert len(keys) == len(heads)


@pytest.mark.parametrize(("head", "key"), [
    ('pool = "max"\nclasses = 3', "head.pool"), ('pool = "cls"\nclasses = 0', "head.classes"),
    ('pool = "cls"', "head.classes"), ('pool = "cls"\nclasses = 3\nwidth = 4', "head.width"),
])  # fmt: skip
def test_what_is_no_head_is_refused_with_its_key(prepared, head, key):
    with refused("recipe-invalid", what=key):
        read_recipe(written(prepared, head))


def test_a_head_that_does_not_fit_is_refused_with_the_model(run, prepared):
    for head, code in (("none", "head-without-input"), ('cls"\ninput = "no', "unknown-output")):
        recipe = written(prepared, f'pool = "{head}"\nclasses = 3')
        outcome = run("build", "--recipe", recipe, code=2)
        assert f"[{code}]" in outcome.err
        assert "encoder.onnx" in outcome.err
    assert not (prepared / "package").exists()


SAID: dict[str, Any] = {
    "loss": "mse", "head": Head(pool="mean", classes=3, seed=7, input="hidden"),
    "loss_options": {"label_smoothing": 0.5}, "optimizer": "sgd", "train": ("head.*",),
    "freeze": ("a.*", "b"), "freeze_rows": ("table=1:3",), "untie": ("t",),
    "stop_gradient": ("s",), "adapter": "lora", "adapter_on": ("q",), "adapter_feedforward": ("f",),
    "adapter_rank": 4, "adapter_alpha": 2.0, "adapter_dropout": 0.5, "adapter_seed": 3,
    "adapter_tokens": 5, "loss_inputs": ("y",),
    "losses": (("aux", "mse", 0.5, ("z",), {"reduction": "sum"}),), "inputs": ("sr=16000", "w=1,2"),
    "sizes": ("tokens=512",), "outputs": ("o",), "prediction": False,
    "optimizer_options": {"weight_decay": 0.5}, "clip_norm": 1.5, "clip_value": 0.25,
    "privacy_clip": 2.0, "privacy_noise": 1.25, "groups": (("fc.*", 10.0, None),),
    "decay_vectors": False, "accumulation_steps": 2,
    "schedule": ScheduleSpec("linear", {"total_steps": 9}),
    "runtime": "webgpu", "sessions": "small", "threads": 2, "precision": "mixed",
    "frozen_storage": "int8", "base": "int4", "segments": True,
    "keep_products": 24,
    "ort_format": OrtFormat((Style.RUNTIME,), (Platform.ARM,)), "nominal": True,
    "self_check": False, "memory_budget": "60 MB", "step_model": "never", "native": True,
    "memory_batch": 4, "memory_sizes": ("tokens=9",), "onnxruntime": "1.20",
}  # fmt: skip
"""A value of each option that is not its default."""


@pytest.mark.parametrize("name", [each.name for each in dataclasses.fields(BuildSpec)][1:])
def test_a_recipe_that_is_written_again_says_the_same(name, tmp_path):
    """As ``odtpack fit`` writes it."""
    more = {"memory_budget": "9 MB"} if name.startswith("memory_") else {}
    more |= {"loss": "cross_entropy"} if name.startswith("loss_") else {}
    plain = BuildSpec(tmp_path / "m.onnx", **more)
    value = str(tmp_path / "other") if name == "like" else SAID[name]
    spec = dataclasses.replace(plain, **{name: value})
    assert spec.canonical_json() != plain.canonical_json()
    path = tmp_path / "recipe.toml"
    path.write_text(recipe_text(spec, 8, Surroundings(tmp_path, "package")))
    found = BuildSpec.of(read_recipe(path))
    if found.memory_batch == 8:  # which a recipe says with its batch
        found = dataclasses.replace(found, memory_batch=None)
    assert found.canonical_json() == spec.canonical_json()


# A replay takes budgets, devices and batch from a recipe.

MORE = """
[batch]
size = 12
micro_batch = 6

[target]
devices = ["raspberrypi/pi-5"]

[budgets]
package_size = "1 kB"
"""


def test_budgets_devices_and_batch_are_those_of_the_recipe(run, folder, write):
    recipe = write(MORE)
    np.savez(folder / "data.npz", allow_pickle=False, **arrays())
    assert run("build", "--recipe", recipe).code == 0
    command = "simulate", folder / "package", "--data", folder / "data.npz", "--epochs", 1
    outcome = run(*command, "--recipe", recipe, "--json")
    assert outcome.code == 1, outcome.err  # over budget
    content = outcome.json()
    assert [device["name"] for device in content["devices"]] == ["raspberrypi/pi-5"]
    line = recipe.read_text().splitlines().index('package_size = "1 kB"') + 1
    assert f"recipe.toml:{line}" in outcome.out
    assert '"batch_size": 6' in outcome.out
    (folder / "wide.toml").write_text('[budgets]\npackage_size = "1 GB"\n')
    options = "--budget", folder / "wide.toml", "--device", "pi-4", "--batch-size", 4
    outcome = run(*command, "--recipe", recipe, "--json", *options, code=0)
    assert [device["name"] for device in outcome.json()["devices"]] == ["raspberrypi/pi-4"]
    assert '"batch_size": 4' in outcome.out
