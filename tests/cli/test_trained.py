"""``odtpack build`` prints what trains, by name and group, in at most five lines."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from odtpack_runtime import CheckpointState, Module
from odtpack_runtime.package.package import Package
from odtpack_runtime.package.verify import verify_package
from odtpack_simulator.values.units import format_percent
from tests import zoo
from tests.cli.conftest import Outcome, arrays, assert_refused
from tests.model_text import drawn, parsed
from tests.packaging_tools import open_training

TITLE = "  trains     "


DEEP = "encoder.layers.{}.attention.output."


def _chain(path: Path, layers: int, form: str = DEEP) -> Path:
    """A network of linear layers."""
    layer = 'h{} = Gemm(h{}, "{}w", "{}b")'
    names = [form.format(i) for i in range(layers)]
    nodes = [layer.format(i + 1, i, name, name) for i, name in enumerate(names)]
    shapes = {name + kind: shape for name in names for kind, shape in (("w", (4, 4)), ("b", (4,)))}
    text = f"(float[N, 4] h0) => (float[N, 4] h{layers}) {{ {' '.join(nodes)} }}"
    weights = drawn(np.random.default_rng(0), **shapes)
    onnx.save(parsed(text, 21, ir_version=10, **weights), path)
    return path


def _printed(outcome: Outcome) -> list[str]:
    """The lines from what trains on."""
    return [line.strip() for line in outcome.err.partition(TITLE)[2].splitlines()]


FIRST, SECOND = DEEP.format(0), DEEP.format(1)


@pytest.mark.parametrize(("layers", "options", "lines"), [
    (1, (), [f"{FIRST}w, {FIRST}b"]),
    (30, (), ["encoder.layers.* (60)"]),
    (2, ("--freeze", "*.b", "--group", "*.1.*:lr=2,decay=0.5"),
     [f"lr x1, decay 0: {FIRST}w", f"lr x2, decay 0.5: {SECOND}w"]),
])  # fmt: skip
def test_what_trains(layers, options, lines, run, tmp_path):
    model = _chain(tmp_path / "model.onnx", layers)
    outcome = run(
        "build", model, "--out", tmp_path / "package", "--loss", "mse", "--json",
        "--no-self-check", *options, code=0)  # fmt: skip
    printed = _printed(outcome)
    assert sorted(printed[: len(lines)]) == sorted(lines)
    assert not printed[len(lines)].startswith("encoder")
    trained = {p["name"] for p in outcome.json()["parameters"] if p["role"] == "trainable"}
    kinds = "w" if options else "wb"
    assert trained == {DEEP.format(i) + kind for i in range(layers) for kind in kinds}


def test_flat_names_are_counted(run, tmp_path):
    model = _chain(tmp_path / "model.onnx", 30, "a_layer_of_many_{}_")
    outcome = run("build", model, "--out", tmp_path / "package", "--loss", "mse", "--no-self-check")
    printed = _printed(outcome)
    assert printed[4].endswith(" and 60 in all")
    assert not printed[5].startswith("a_layer")
    assert max(map(len, printed[:5])) <= 84


# Every training of a classifier shows its accuracy, unless the build says otherwise.


def outputs(path: Path) -> list[str]:
    return [value.name for value in onnx.load(path).graph.output]


def test_only_the_evaluation_model_returns_the_prediction(shared):
    """Training keeps its memory: nothing has to live on for the prediction."""
    package = Package.open(shared.package)
    assert outputs(package.eval_model) == ["loss", "output"]
    assert outputs(package.training_model)[1].endswith(".accumulation.out")
    (given,) = package.manifest.evaluation_outputs
    assert (given.name, given.role, given.shape[1]) == ("output", "prediction", 3)
    assert [output.name for output in package.manifest.outputs] == ["loss"]
    verify_package(shared.package)


def test_the_prediction_is_that_of_the_forward_model(shared):
    _, module, _ = open_training(shared.package)
    data = arrays()
    _, scores = module.eval()(data["input"], data["labels"])
    forward = onnxruntime.InferenceSession(shared.model, providers=["CPUExecutionProvider"])
    (expected,) = forward.run(None, {"input": data["input"]})
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["option", "recipe"])
def test_a_build_that_is_told_so_returns_the_loss_only(run, shared, tmp_path, how):
    package, recipe = tmp_path / "package", tmp_path / "recipe.toml"
    recipe.write_text(f'model = "{shared.model}"\npackage = "package"\nprediction = false\n'
                      '[loss]\nkind = "cross_entropy"\n')  # fmt: skip
    command = shared.build(package, "--no-prediction")
    run(*command if how == "option" else ("build", "--recipe", recipe), code=0)
    assert outputs(package / "eval_model.onnx") == ["loss"]
    outcome = run("train", package, "--data", shared.data, "--epochs", 1, "--json")
    assert outcome.json()["accuracy_after"] is None
    assert "accuracy" not in outcome.err


def test_train_shows_loss_and_accuracy_before_and_after(run, shared, tmp_path):
    options = "--epochs", 8, "--lr", 0.01, "--holdout", 0.2, "--json"
    outcome = run(*shared.train(tmp_path / "ck", *options))
    figures = outcome.json()
    for when in ("before", "after"):
        (line,) = [line for line in outcome.err.splitlines() if line.startswith(when)]
        assert f"{figures[f'eval_loss_{when}']:.4f}" in line
        assert f"accuracy {format_percent(figures[f'accuracy_{when}'])}" in line
    package = Package.open(shared.package)
    held_out = np.random.default_rng([0, 0]).permutation(60)[48:]
    data = {name: array[held_out] for name, array in arrays().items()}
    model = tmp_path / "after.onnx"
    state = CheckpointState.load_checkpoint(tmp_path / "ck")
    module = Module(package.training_model, state, package.eval_model)
    module.export_model_for_inferencing(model, ["output"])
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    (scores,) = session.run(None, {"input": data["input"]})
    assert figures["accuracy_after"] == (scores.argmax(1) == data["labels"]).mean()


def test_simulate_shows_loss_and_accuracy_before_and_after(run, shared):
    simulate = "simulate", shared.package, "--data", shared.data, "--device", "pixel-8a"
    outcome = run(*simulate, "--interruptions", 0, "--epochs", 8, "--lr", 0.01, "--json")
    training = outcome.json()["training"]
    assert training["metric_name"] == "accuracy"
    line = " ".join(outcome.err.partition("On 12 held-out")[2].split())
    assert f"{training['eval_loss_before']:.3g} → {training['eval_loss_after']:.3g}" in line
    before, after = (100 * training[f"metric_{when}"] for when in ("before", "after"))
    assert f"accuracy {before:.1f} → {after:.1f} %" in line


# ``inspect`` of a package: the tree of sizes; ``build --frozen-dtype``.


def test_tree(run, shared):
    outcome = run("inspect", shared.package, code=0)
    for path in shared.package.iterdir():
        (line,) = (row for row in outcome.out.splitlines() if path.name in row)
        assert "%" in line


def test_json(run, shared):
    sizes = run("inspect", shared.package, "--json").json()["sizes"]
    assert sizes["size_bytes"] == sum(path.stat().st_size for path in shared.package.iterdir())
    assert {part["name"] for part in sizes["parts"]} == {p.name for p in shared.package.iterdir()}


def test_reports(run, shared, tmp_path):
    page, data = tmp_path / "sizes.html", tmp_path / "sizes.json"
    reports = "--report", f"html:{page}", "--report", f"json:{data}"
    outcome = run("inspect", shared.package, *reports, "--json", code=0)
    assert json.loads(data.read_text()) == outcome.json()["sizes"]
    assert shared.package.name in page.read_text()


@pytest.mark.parametrize(("of", "destination", "code"), [
    ("package", "pdf:x.pdf", "report-format-unknown"),
    ("package", "junit:x.xml", "report-format-unknown"),
    ("package", "html:missing/x.html", "cannot-write"),
    ("model", "html:x.html", "option-not-used"),
])  # fmt: skip
def test_bad_reports(
    run, shared, monkeypatch, tmp_path,
    of, destination, code,
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    outcome = run("inspect", getattr(shared, of), "--report", destination, code=2)
    assert f"error[{code}]" in outcome.err
    assert not outcome.out
    assert "junit" not in outcome.err.replace(destination, "").replace("'junit'", "")
    assert not list(tmp_path.iterdir())


def test_a_report_does_not_replace_a_file_of_the_package(run, shared):
    before = (shared.package / "checkpoint").read_bytes()
    run("inspect", shared.package, "--report", f"html:{shared.package / 'checkpoint'}", code=2)
    assert (shared.package / "checkpoint").read_bytes() == before


def test_frozen_dtype(run, tmp_path):
    model = tmp_path / "model.onnx"
    onnx.save(zoo.transformer_encoder(layers=1, d=64, ff=64, T=8, vocab=50), model)
    arguments = ("build", model, "--loss", "cross_entropy", "--train", "classifier.*", "--json")
    plain = run(*arguments, "--out", tmp_path / "plain").json()
    half = run(*arguments, "--out", tmp_path / "half", "--frozen-dtype", "float16").json()
    stored = [p for p in half["parameters"] if p["dtype"] == "float16"]
    assert stored
    assert all(p["role"] == "frozen" and p["model_dtype"] == "float32" for p in stored)
    saved = sum(2 * int(np.prod(p["shape"])) for p in stored)
    sizes = [c["files"]["checkpoint"]["size_bytes"] for c in (plain, half)]
    assert sizes[0] - sizes[1] == pytest.approx(saved, abs=32 * len(stored))  # tensors are aligned
    outcome = run("inspect", tmp_path / "half")
    assert f"{len(stored)} of them are float32 in the model" in outcome.out


def test_frozen_dtype_without_frozen_weights(run, shared, tmp_path):
    outcome = run(*shared.build(tmp_path / "p", "--frozen-dtype", "int8"))
    assert_refused(outcome, "storage-not-used", "--freeze")


@pytest.mark.parametrize("storage", ["float32", "float16", "int8"])
def test_export_has_outputs_that_the_loss_does_not_read(storage, run, tmp_path):
    """The evaluation model does not compute them; a large frozen head may be stored in less."""
    random = np.random.default_rng(1)
    weights = {name: random.normal(size=(40, size)).astype(np.float32)
               for name, size in (("frozen", 40), ("trained", 4))}  # fmt: skip
    text = """(float[b, 40] x) => (float[b, 40] far, float[b, 4] near) {
        h = Tanh(x) inner = MatMul(h, frozen) far = Sigmoid(inner) near = MatMul(h, trained)
    }"""
    onnx.save(parsed(text, **weights), tmp_path / "model.onnx")
    run("build", tmp_path / "model.onnx", "--out", tmp_path / "p", "--loss", "mse",
        "--loss-input", "near", "--train", "trained", "--freeze", "frozen",
        *([] if storage == "float32" else ["--frozen-dtype", storage]), code=0)  # fmt: skip
    package = Package.open(tmp_path / "p")
    nodes = onnx.load(package.eval_model).graph.node
    assert "Sigmoid" not in {node.op_type for node in nodes}
    wanted = ["far", "near", "inner"]
    named = [word for name in wanted for word in ("--outputs", name)]
    run("export", package.path, "--out", tmp_path / "a.onnx", *named, code=0)
    state, module, _ = open_training(package.path)
    state.parameters["trained"].data = np.ones((40, 4), np.float32)
    module.export_model_for_inferencing(tmp_path / "b.onnx", wanted)
    x = random.normal(size=(3, 40)).astype(np.float32)
    bound = {"float32": 1e-6, "float16": 5e-3, "int8": 5e-2}[storage]
    for name, trained in (("a", weights["trained"]), ("b", np.ones((40, 4), np.float32))):
        path = tmp_path / f"{name}.onnx"
        onnx.checker.check_model(onnx.load(path), full_check=True)
        far, near, inner = onnxruntime.InferenceSession(path).run(None, {"x": x})
        expected = np.tanh(x) @ weights["frozen"]
        np.testing.assert_allclose(inner, expected, atol=20 * bound)
        np.testing.assert_allclose(far, 1 / (1 + np.exp(-expected)), atol=5 * bound)
        np.testing.assert_allclose(near, np.tanh(x) @ trained, rtol=1e-5, atol=1e-5)
