"""``--memory-budget``: training stays within it, or the build says what it takes."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks.memory_prediction import make_job
from odtpack.artifacts import OptimType
from odtpack.build import build_package
from odtpack.optimizers import SGD
from odtpack.recipe import read_recipe
from odtpack.spec import BuildSpec
from odtpack_runtime.package.package import Package
from odtpack_simulator.memory.memory_plan import plan_memory
from odtpack_simulator.replay.replay import run_training_child
from tests import zoo
from tests.model_text import parsed
from tests.packaging_tools import batch
from tests.refused import refused

BATCH = 8


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    return zoo.transformer_encoder(d=128, layers=3, ff=512, opset=14)


def planned(model: onnx.ModelProto, folder: Path) -> int:
    data, labels = batch(model, BATCH)
    return plan_memory(
        Package.open(folder), {"input": data.shape, "labels": labels.shape}
    ).peak.nbytes


def written(model: onnx.ModelProto, folder: Path, **options: Any) -> bytes:
    """The training model of a package with these options."""
    build_package(model, folder, loss="cross_entropy", self_check=False, **options)
    return (folder / "training_model.onnx").read_bytes()


def test_training_stays_within_it(model, tmp_path):
    """The plan says so, and a real training under that limit ends well."""
    job = make_job(model, BATCH, OptimType.SGD, tmp_path)
    usual = planned(model, tmp_path / "package")
    budget = int(0.88 * usual)
    said: list[str] = []
    build_package(
        model, tmp_path / "package", loss="cross_entropy", optimizer=SGD(),
        memory_budget=f"{budget} B", memory_batch=BATCH, remark=said.append,
    )  # fmt: skip
    peak = planned(model, tmp_path / "package")
    assert peak <= budget < usual
    assert said[0].startswith("activations of a step: ")
    assert any("recomputed, +" in sentence for sentence in said[1:])
    result = run_training_child(job)
    if result.peak_bytes is None:
        pytest.skip("memory is measured on Linux only")
    assert abs(peak / result.peak_bytes - 1) < 0.03
    assert run_training_child(dataclasses.replace(job, limit_bytes=budget)).outcome == "completed"


def test_a_dropout_is_never_computed_again(tmp_path):
    """It would draw another mask, of which the gradient knows nothing."""
    build_package(
        zoo.transformer_encoder(d=32, layers=3, ff=64), tmp_path, loss="cross_entropy",
        optimizer=SGD(), adapter="lora", adapter_on=["*"], adapter_dropout=0.3, self_check=False,
    )  # fmt: skip
    adapter = Package.open(tmp_path).manifest.adapter
    assert adapter is not None
    nodes = onnx.load(tmp_path / "training_model.onnx", load_external_data=False).graph.node
    assert [node.op_type for node in nodes].count("Dropout") == len(adapter.layers)


def test_enough_memory_changes_nothing(model, tmp_path):
    assert written(model, tmp_path / "usual") == written(
        model, tmp_path / "budget", memory_budget="1 GB"
    )


def test_sizes_of_open_axes(model, tmp_path):
    """What is planned for longer sequences takes more: the same budget is too small for them."""
    name = model.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    assert name
    written(model, tmp_path / "small", memory_budget="40 MB", memory_sizes=[f"{name}=1"])
    with refused("memory-budget-too-small", "most of it: "):
        written(model, tmp_path / "large", memory_budget="40 MB", memory_sizes=[f"{name}=64"])
    assert not (tmp_path / "large").exists()


@pytest.mark.parametrize("declared", ["length", "?"])
def test_sizes_of_a_target_follow_from_those_of_the_inputs(declared, tmp_path):
    """Whether the exporter gave the computed size a name or not."""
    text = "g (float[batch, t, 4] x) => (float[batch, length, 4] y)"
    body = "{ h = Mul(x, w) y = Concat <axis = 1> (h, h) }"
    model = parsed(f"{text} {body}", w=np.ones(4, np.float32))
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_param = declared
    manifest = build_package(model, tmp_path / "p", loss="mse", memory_budget="60 MB")
    name = "y.1" if declared == "?" else declared
    assert [item.shape for item in manifest.inputs] == [("batch", "t", 4), ("batch", name, 4)]


@pytest.mark.parametrize(("given", "code"), [
    ({"memory_budget": "60"}, "bad-memory-budget"),
    ({"memory_budget": "60 furlongs"}, "bad-memory-budget"),
    ({"memory_budget": "60 MB", "memory_sizes": ["tokens"]}, "bad-memory-budget"),
    ({"memory_budget": "60 MB", "memory_sizes": ["tokens=0"]}, "bad-memory-budget"),
    ({"memory_budget": "60 MB", "memory_batch": 0}, "bad-batch-size"),
    ({"memory_batch": 4}, "option-not-used"),
    ({"memory_budget": "60 MB", "runtime": "ort-training"}, "target-cannot"),
    ({"memory_budget": "1 MB"}, "memory-budget-too-small"),
])  # fmt: skip
def test_what_cannot_be_is_said(given, code, tmp_path):
    with refused(code):
        build_package(zoo.mlp((20, 10, 5)), tmp_path / "p", loss="cross_entropy", **given)  # type: ignore[arg-type]
    assert not (tmp_path / "p").exists()


def test_two_builds_give_the_same_bytes(model, tmp_path):
    budget = {"memory_budget": "50 MB", "memory_batch": BATCH}
    one, other = (written(model, tmp_path / name, **budget) for name in "ab")
    assert one == other


def test_a_recipe_means_its_own_batch(tmp_path):
    recipe = tmp_path / "recipe.toml"
    memory = "[memory]\nbudget = '60 MB'\n"
    loss = "model = 'model.onnx'\n[loss]\nkind = 'mse'\n"
    for text, samples in (("", None), ("[batch]\nsize = 32\nmicro_batch = 16\n", 16)):
        recipe.write_text(loss + memory + text)
        assert BuildSpec.of(read_recipe(recipe)).memory_batch == samples


def test_no_budget_where_data_decide_how_often_a_loop_turns(tmp_path):
    """What its gradient keeps of every turn has no bound."""
    text = """net (float[batch, 8] x) => (float[batch, 8] y) {
        first = MatMul (x, w)
        y = Loop (, , first) <body = turn (int64 i, bool on, float[batch, 8] s)
            => (bool go, float[batch, 8] t) {
            m = MatMul (s, w) t = Tanh (m) most = ReduceMax <keepdims = 0> (t)
            half = Constant <value_float = 0.5> () go = Greater (most, half)
        }>
    }"""
    model = parsed(text, w=np.eye(8, dtype=np.float32))
    with refused("memory-not-planned", "a Loop keeps values"):
        build_package(model, tmp_path / "p", loss="cross_entropy", memory_budget="1 GB")
