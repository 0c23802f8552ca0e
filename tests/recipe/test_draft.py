"""``odtpack init`` writes a recipe that builds as it is, and as its comments say."""

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest

from odtpack.recipe import read_recipe
from odtpack.recipe.draft import SCHEMA_NAME
from odtpack_runtime.package.package import Package
from tests import zoo
from tests.cli.conftest import assert_refused, tree
from tests.simulator.graphs import weighted
from tests.test_docs import ROOT, blocks, odtpack, prepare_encoder
from tests.test_docs import folder as digits

MODELS = {"cnn": lambda: zoo.cnn(size=8, width=(4, 8), classes=3), "mlp": zoo.mlp}


def _one_layer(outputs: int, names: tuple[str, str] = ("fc.weight", "out")) -> onnx.ModelProto:
    weight, out = names
    text = f"g (float[n, 3] x) => (float[n, {outputs}] y) {{ y = MatMul (x, w) }}"
    model = weighted(text, {"w": np.eye(3, outputs, dtype=np.float32)})
    model.graph.initializer[0].name, model.graph.output[0].name = weight, out
    model.graph.node[0].input[1], model.graph.node[0].output[0] = weight, out
    return model


@pytest.mark.parametrize("name", MODELS)
def test_builds_as_it_is(run, tmp_path, name):
    onnx.save(MODELS[name](), tmp_path / "model.onnx")
    recipe = tmp_path / "deep" / "recipe.toml"
    recipe.parent.mkdir()
    run("init", tmp_path / "model.onnx", "--out", recipe, code=0)
    assert recipe.read_text().startswith("#:schema recipe.schema.json\n")
    assert json.loads((recipe.parent / "recipe.schema.json").read_text())["required"]
    assert 'model = "../model.onnx"' in recipe.read_text()
    assert run("build", "--recipe", recipe).code == 0
    Package.open(recipe.parent / "package")


def test_the_layer_before_the_loss_is_proposed(run, folder):
    """The file has its weight first, as a file may that an exporter folded."""
    model = onnx.load(folder / "factory.onnx")
    model.graph.initializer.sort(key=lambda tensor: not tensor.name.startswith("fc."))
    onnx.save(model, folder / "sorted.onnx")
    # A factor behind the head is not a layer.
    output = model.graph.output[0].name
    for node in model.graph.node:
        node.output[:] = ["raw" if name == output else name for name in node.output]
    model.graph.node.append(onnx.helper.make_node("Mul", ["scale", "raw"], [output]))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(1, np.float32), "scale"))
    onnx.save(model, folder / "scaled.onnx")
    for name in ("sorted", "scaled"):
        args = "init", folder / f"{name}.onnx", "--out", folder / f"{name}.toml"
        assert run(*args).code == 0
        assert '# train = ["fc.*"]' in (folder / f"{name}.toml").read_text()


def test_lists_the_parameters_with_their_sizes(run, folder):
    assert run("init", folder / "factory.onnx", "--out", folder / "new.toml").code == 0
    text = (folder / "new.toml").read_text()
    tensors = onnx.load(folder / "factory.onnx").graph.initializer
    for module in ("conv1", "conv2", "fc"):
        count = sum(int(np.prod(t.dims)) for t in tensors if t.name.startswith(f"{module}."))
        assert re.search(rf'^#   "{module}\.\*" +{count:,} in 2, ', text, re.M), text


def test_what_is_commented_out_is_right_too(run, folder):
    """Uncommented, everything is still a recipe that builds."""
    assert run("init", folder / "factory.onnx", "--out", folder / "new.toml").code == 0
    (folder / "budgets.toml").write_text("")
    lines = []
    for line in (folder / "new.toml").read_text().splitlines():
        found = re.fullmatch(r"# (\[.*|[a-z_]+ = .*)", line)
        text = found[1] if found else line
        if text.startswith(("budgets = ", "freeze = ")):  # the one of two ways to say it
            continue
        if text.startswith(("[privacy]", "clip_norm = ", "noise_multiplier = ")):
            continue  # it goes with neither [clip] nor micro-batches
        lines.append(text.replace('["logits"]', '["output"]'))
    (folder / "all.toml").write_text("\n".join(lines))
    table = read_recipe(folder / "all.toml").table
    fields = set(type(table).model_fields)
    # It has classes, only samples, and one loss.
    assert table.model_fields_set == fields - {"head", "inputs", "losses", "privacy"}
    content = run("build", "--recipe", folder / "all.toml", "--json", code=0).json()
    assert content["accumulation_steps"] == 4
    assert content["schedule"]["kind"] == "cosine"
    assert (folder / "package" / "training_model.ort").is_file()


@pytest.mark.parametrize(("outputs", "loss"), [(10, "cross_entropy"), (1, "mse")])
def test_guesses_the_loss_from_the_output(run, tmp_path, outputs, loss):
    onnx.save(_one_layer(outputs), tmp_path / "m.onnx")
    assert run("init", tmp_path / "m.onnx", "--out", tmp_path / "r.toml").code == 0
    assert read_recipe(tmp_path / "r.toml").table.loss.kind == loss
    assert f'"out", is [n, {outputs}]' in (tmp_path / "r.toml").read_text()


def test_hostile_names_stay_in_their_comments(run, tmp_path):
    names = ('w\n[loss]\nkind = "l1"\n#"[a].*\u202e', 'o"\n[clip]\x7f\u2066')
    onnx.save(_one_layer(4, names), tmp_path / "m.onnx")
    assert run("init", tmp_path / "m.onnx", "--out", tmp_path / "r.toml").code == 0
    assert (tmp_path / "r.toml").read_text().isascii()
    table = read_recipe(tmp_path / "r.toml").table
    assert table.loss.kind == "cross_entropy"
    assert table.clip is None
    assert run("build", "--recipe", tmp_path / "r.toml").code == 0


def test_replaces_no_recipe_unasked(run, folder):
    before = tree(folder)
    command = "init", folder / "factory.onnx", "--out", folder / "recipe.toml"
    assert_refused(run(*command), "recipe-exists", "--force")
    assert_refused(run("init", folder / "no.onnx", "--out", folder / "r.toml"), "model-not-found")
    assert tree(folder) == before
    assert run(*command, "--force").code == 0
    assert tree(folder) != before


def test_an_encoder_is_offered_a_head(run, tmp_path):
    prepare_encoder(tmp_path)
    assert run("init", tmp_path / "encoder.onnx", "--out", tmp_path / "new.toml").code == 0
    text = (tmp_path / "new.toml").read_text()
    for line in ("[head]", 'pool = "mean"', "classes = 10"):
        assert f"# {line}" in text, text
        text = text.replace(f"# {line}", line)
    text = re.sub(r'^kind = "mse".*', 'kind = "cross_entropy"', text, count=1, flags=re.M)
    (tmp_path / "new.toml").write_text(text)
    run("build", "--recipe", tmp_path / "new.toml", "--json", code=0)


# The page on recipes: its example builds and replays, its commands run in order.

PAGE = ROOT / "docs" / "recipe.md"

__all__ = ["digits"]


@pytest.fixture
def example(tmp_path: Path) -> Path:
    text, *_ = blocks(PAGE, "toml")
    path = tmp_path / "personal.toml"
    path.write_text(text)
    return path


def test_example_and_commands(example, digits, run):
    # Of all blocks, since what stands between two of them looks like one without a language.
    found = re.findall(r"^```(\w*)\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    commands = [line for language, text in found if not language for line in text.splitlines()]
    assert len(commands) == 4
    for command in commands:
        odtpack(run, command.removeprefix("odtpack "), digits)
    assert (digits / "personal" / "training_model.ort").is_file()
    schema = (ROOT / "docs" / "schemas" / SCHEMA_NAME).read_text()
    assert (digits / SCHEMA_NAME).read_text() == schema


def test_example_is_complete(example):
    """Every table is in it but those of which the page has further examples."""
    table = read_recipe(example).table
    left_out = {"head", "adapter", "privacy", "inputs", "losses", "sizes", "data"}
    assert table.model_fields_set == set(type(table).model_fields) - left_out


@pytest.mark.parametrize(("number", "name"), [(1, "classifier"), (2, "adapted"), (3, "private")])
def test_further_examples(run, digits, number, name):
    """Of a head, of an adapter and of private training."""
    prepare_encoder(digits)
    path = digits / "recipe.toml"
    path.write_text(blocks(PAGE, "toml")[number])
    assert run("build", "--recipe", path).code == 0
    manifest = Package.open(digits / name).manifest
    trained = {p.name: p.shape for p in manifest.parameters if p.role == "trainable"}
    if name == "classifier":
        assert trained == {"head.weight": (4, 4), "head.bias": (4,)}
    elif name == "adapted":
        assert set(trained) == {*manifest.adapter.parameters, "fc.bias"}
        assert trained["base_model.model.fc.lora_A.weight"][0] == 4
    else:
        privacy = manifest.privacy
        assert (privacy.clip_norm, privacy.noise_multiplier) == (1.0, 1.1)


def test_options_of_the_page_exist(run):
    text = run("build", "--help").out + run("simulate", "--help").out
    table = PAGE.read_text().partition("| option | key |")[2].partition("## Keys")[0]
    words = [word.strip("`,") for line in table.splitlines() for word in line.split()]
    options = [word for word in words if "--" in word]
    options = [option for option in options if not option.startswith("|")]
    assert len(options) > 20
    for option in options:
        assert f"{option} " in text, option
