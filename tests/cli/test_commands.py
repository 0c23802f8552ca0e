"""What the commands do when all is well."""

import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import onnx.parser
import onnx.reference
import pytest

from odtpack import artifacts
from odtpack.build import build_package
from odtpack.cli.export import forward_values
from odtpack.update.diff import PackageDiff
from odtpack_runtime import CheckpointState
from odtpack_runtime.package.package import Package
from odtpack_runtime.training.loop import evaluate
from odtpack_simulator.device.profile import list_profiles, load_profile
from tests import zoo
from tests.cli.conftest import Run, Shared, arrays, assert_refused, tree
from tests.model_text import parsed, retyped
from tests.packages.samples import small_model, with_values
from tests.packaging_tools import batch, open_training


class TestBuild:
    def test_same_bytes_as_generate_artifacts(self, run, shared, tmp_path):
        names = [tensor.name for tensor in onnx.load(shared.model).graph.initializer]
        artifacts.generate_artifacts(
            shared.model, requires_grad=[name for name in names if name.startswith("fc.")],
            frozen_params=[name for name in names if name.startswith("conv")],
            loss=artifacts.LossType.MSELoss, optimizer=artifacts.OptimType.SGD,
            artifact_directory=tmp_path / "call",
        )  # fmt: skip
        options = "--optimizer", "sgd", "--train", "fc.*"
        outcome = run(*shared.build(tmp_path / "command", *options, loss="mse"), code=0)
        assert tree(tmp_path / "command") == tree(tmp_path / "call")
        assert outcome.out == ""
        assert "trainable     2 parameters, 99 elements, 396 B" in outcome.err
        assert "frozen        4 parameters, 336 elements, 1.34 kB" in outcome.err
        assert "training_model.onnx" in outcome.err

    def test_json_is_the_manifest(self, run, shared, tmp_path):
        options = "--freeze conv1.* --freeze conv2.* --weight-decay 0.01 --beta1 0.8 --output"
        outcome = run(*shared.build(tmp_path / "p", *options.split(), "output", "--json"))
        content = outcome.json()
        assert content.pop("path") == str(tmp_path / "p")
        assert content.pop("check_seconds") > 0
        assert content == Package.open(tmp_path / "p").manifest.as_dict()
        assert content["optimizer"]["weight_decay"] == 0.01
        assert content["optimizer"]["beta1"] == 0.8
        roles = {item["name"]: item["role"] for item in content["parameters"]}
        assert roles["conv1.weight"] == "frozen"
        assert roles["fc.weight"] == "trainable"
        assert [item["name"] for item in content["outputs"]] == ["loss", "output"]
        assert "built" in outcome.err

    def test_options_of_the_loss(self, run, shared, tmp_path):
        options = "--loss-option", "label_smoothing=0.1", "--loss-option", "ignore_index=-1"
        outcome = run(*shared.build(tmp_path / "p", *options, "--json"), code=0)
        options = outcome.json()["loss_options"]
        assert options.pop("labels") == "numbers"
        assert options == {"reduction": "mean", "ignore_index": -1, "label_smoothing": 0.1}
        data = arrays()
        data["labels"][::2] = -1
        np.savez(tmp_path / "some.npz", **data)
        train = "train", tmp_path / "p", "--data", tmp_path / "some.npz", "--epochs", 1
        assert run(*train, "--out", tmp_path / "t.ckpt").code == 0
        simulate = "simulate", tmp_path / "p", "--data", tmp_path / "some.npz"
        assert run(*simulate, "--device", "samsung/galaxy-a12", "--epochs", 1).code == 0

    def test_again_into_a_package_leaves_nothing_of_the_old_one(self, run, shared, tmp_path):
        first = run(*shared.build(tmp_path, "--ort-format", "--nominal"), code=0)
        assert first.out == ""
        assert first.err.startswith("built")  # the converter's own talk is not shown
        names = set(tree(tmp_path))
        assert {"training_model.ort", "nominal_checkpoint"} < names
        assert "optimizer_model.required_operators.config" in names
        assert Package.open(tmp_path)
        (tmp_path / "notes.txt").write_text("mine")
        run(*shared.build(tmp_path), code=0)
        assert set(tree(tmp_path)) == set(tree(shared.package)) | {"notes.txt"}

    def test_loss_that_is_part_of_the_model(self, run, shared, tmp_path):
        model = onnx.load(shared.package / "eval_model.onnx")
        parameters = {tensor.name: tensor for tensor in onnx.load(shared.model).graph.initializer}
        inputs = [value for value in model.graph.input if value.name not in parameters]
        model.graph.ClearField("input")
        model.graph.input.extend(inputs)
        model.graph.initializer.extend(parameters.values())
        onnx.save(model, tmp_path / "with_loss.onnx")
        build = "build", tmp_path / "with_loss.onnx", "--out", tmp_path / "p", "--loss", "none"
        outcome = run(*build, "--json", code=0)
        assert outcome.json()["loss"] == "none"
        assert [item["name"] for item in outcome.json()["inputs"]] == ["input", "labels"]


class TestTrain:
    def test_learns_and_leaves_the_package_alone(self, run, shared, tmp_path):
        before = tree(shared.package)
        options = "--epochs", 8, "--batch-size", 8, "--lr", 0.02, "--json"
        outcome = run(*shared.train(tmp_path / "t.ckpt", *options), code=0)
        content = outcome.json()
        assert (content["train_samples"], content["eval_samples"]) == (48, 12)
        assert content["steps"] == 48
        assert [entry["epoch"] for entry in content["epochs"]] == list(range(1, 9))
        assert content["eval_loss_after"] < content["eval_loss_before"] / 2
        last = content["epochs"][-1]["loss"]
        assert f"epoch    8   loss {last:.4f}" in outcome.err
        assert f"after        eval loss {content['eval_loss_after']:.4f}" in outcome.err
        assert tree(shared.package) == before
        assert CheckpointState.load_checkpoint(tmp_path / "t.ckpt").optimizer.step == 48

    def test_loss_before_is_that_of_the_model(self, run, shared, tmp_path):
        options = "--epochs", 1, "--eval", shared.data, "--batch-size", 7, "--json"
        outcome = run(*shared.train(tmp_path / "t.ckpt", *options))
        data = arrays()
        model = onnx.reference.ReferenceEvaluator(str(shared.model))
        (logits,) = model.run(None, {"input": data["input"]})
        peaks = logits - logits.max(axis=1, keepdims=True)
        log_p = peaks - np.log(np.exp(peaks).sum(axis=1, keepdims=True))
        expected = -log_p[np.arange(len(log_p)), data["labels"]].mean()
        content = outcome.json()
        assert content["eval_loss_before"] == pytest.approx(expected, rel=1e-5)
        assert (content["train_samples"], content["eval_samples"]) == (60, 60)

    def test_the_order_of_the_evaluation_is_that_of_its_file(self, run, shared, tmp_path):
        """Where a loss weighs samples, batches of another order have another mean."""
        run(*shared.build(tmp_path / "p", "--loss-option", "ignore_index=0"), code=0)
        held = {name: array[:23] for name, array in arrays().items()}
        np.savez(tmp_path / "held.npz", allow_pickle=False, **held)
        common = "--data", shared.data, "--eval", tmp_path / "held.npz", "--batch-size", 8
        found = [
            run("train", tmp_path / "p", *common, "--seed", seed, "--epochs", 1, "--json").json()
            for seed in (0, 1)
        ]
        _, module, _ = open_training(tmp_path / "p")
        batches = [[array[start : start + 8] for array in held.values()] for start in (0, 8, 16)]
        expected = pytest.approx(evaluate(module, batches).loss, rel=1e-6)
        assert [each["eval_loss_before"] for each in found] == [expected] * 2

    def test_resumed_is_as_if_never_interrupted(self, run, shared, tmp_path):
        whole, half, rest = (tmp_path / name for name in ("whole", "half", "rest"))
        options = "--seed", 3, "--epochs"
        run(*shared.train(whole, *options, 4, "--lr", 0.01), code=0)
        run(*shared.train(half, *options, 2, "--lr", 0.01), code=0)
        assert "epoch    3" in run(*shared.train(rest, *options, 2, "--resume", half)).err
        assert rest.read_bytes() == whole.read_bytes()

    @pytest.mark.parametrize("options", [
        ("--accumulate", 1), ("--accumulate", 3),
        ("--adapter", "lora", "--on", "*", "--adapter-dropout", 0.5),
    ], ids=["the model's", "of a step of several batches", "an adapter's"])  # fmt: skip
    def test_dropout_follows_from_the_seed_and_the_step(self, run, tmp_path, options):
        """Each batch of a step has another mask, and a resumed training draws the next one."""
        more = "" if "--adapter" in options else ", r, t"
        text = f"(float[N, 4] x) => (float[N, 3] y) {{ d = Dropout(x{more}) y = MatMul(d, w) }}"
        w = np.arange(1, 13, dtype=np.float32).reshape(4, 3)
        model = parsed(text, 21, ir_version=10, w=w, r=np.float32(0.5), t=True)
        onnx.save(model, tmp_path / "m.onnx")
        rng = np.random.default_rng(0)
        data = {"x": rng.random((40, 4), np.float32), "labels": rng.integers(0, 3, 40)}
        np.savez(tmp_path / "data.npz", allow_pickle=False, **data)
        build = "build", tmp_path / "m.onnx", "--out", tmp_path / "p", "--loss", "cross_entropy"
        run(*build, *options, code=0)
        train = "train", tmp_path / "p", "--data", tmp_path / "data.npz", "--batch-size", 4
        whole, half, rest = (tmp_path / name for name in ("whole", "half", "rest"))
        run(*train, "--epochs", 2, "--out", whole, code=0)
        run(*train, "--epochs", 1, "--out", half, code=0)
        run(*train, "--epochs", 1, "--resume", half, "--out", rest, code=0)
        assert rest.read_bytes() == whole.read_bytes()

    def test_what_is_printed_is_saved(self, run, shared, tmp_path, monkeypatch):
        """Ctrl-C in a save: no line of its epoch; else one save for each epoch."""
        out, saves = tmp_path / "t.ckpt", 0
        save = CheckpointState.save_checkpoint
        train = shared.train(out, "--epochs", 2)

        def counted(*arguments: object, **options: object) -> None:
            nonlocal saves
            saves += 1
            if saves == 4:
                raise KeyboardInterrupt
            save(*arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(CheckpointState, "save_checkpoint", counted)
        run(*train, code=0)
        assert saves == 2
        kept = CheckpointState.load_checkpoint(f"{out}.previous")
        assert dict(kept.properties)["odtpack.epochs"] == 1
        stopped = run(*train, code=130)
        assert "epoch    1" in stopped.err
        assert "epoch    2" not in stopped.err

    def test_seed_decides(self, run, shared, tmp_path):
        for name, seed in (("a", 0), ("b", 0), ("c", 1)):
            run(*shared.train(tmp_path / name, "--epochs", 1, "--seed", seed), code=0)
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
        assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()

    def test_default_place_is_beside_the_package(self, run, shared, tmp_path):
        package = shutil.copytree(shared.package, tmp_path / "pkg")
        assert run("train", package, "--data", shared.data, "--epochs", 1).code == 0
        assert (tmp_path / "pkg.ckpt").is_file()

    def test_fixed_batch(self, run, tmp_path):
        model = zoo.mlp(sizes=(4, 3))
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 8
        model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 8
        onnx.save(model, tmp_path / "fixed.onnx")
        package = tmp_path / "fixed"
        run("build", tmp_path / "fixed.onnx", "--out", package, "--loss", "cross_entropy", code=0)
        x, labels = batch(model, 30, classes=3)
        np.savez(tmp_path / "data.npz", allow_pickle=False, input=x, labels=labels)
        train = "train", package, "--data", tmp_path / "data.npz", "--out", tmp_path / "t"
        outcome = run(*train, "--epochs", 1, "--holdout", 0.3, "--json", code=0)
        assert (outcome.json()["batch_size"], outcome.json()["steps"]) == (8, 2)
        assert outcome.json()["eval_samples"] == 8  # the ninth makes no batch
        assert "evaluating on 8 of 9 held-out samples" in outcome.err
        simulated = tmp_path / "simulated.json"
        run(
            *("simulate", package, "--data", tmp_path / "data.npz", "--device", "google/pixel-8a"),
            *("--epochs", 1, "--holdout", 0.3, "--batch-size", 8, "--report", f"json:{simulated}"),
            *("--interruptions", 0, "--report", f"html:{tmp_path / 'page'}"),
        )
        told = json.loads(simulated.read_text())["data"]
        assert (told["held_out_samples"], told["evaluated_samples"]) == (9, 8)
        assert "on 8 of 9 held-out samples" in (tmp_path / "page").read_text()
        refused = run(*train, "--batch-size", 4, code=2)
        assert "error[batch-size-fixed]" in refused.err
        assert "--batch-size 8" in refused.err
        assert "error[too-few-samples]" in run(*train, "--holdout", 0.8, code=2).err


class TestExport:
    def export(self, run: Run, shared: Shared, out: Path, *more: object) -> onnx.ModelProto:
        run("export", shared.package, "--out", out, *more, code=0)
        model = onnx.load(out)
        onnx.checker.check_model(model)
        return model

    def test_gives_back_the_forward_model(self, run, shared, tmp_path):
        model = self.export(run, shared, tmp_path / "m.onnx")
        assert [value.name for value in model.graph.input] == ["input"]
        assert [value.name for value in model.graph.output] == ["output"]
        feed = {"input": arrays()["input"]}
        (expected,) = onnx.reference.ReferenceEvaluator(str(shared.model)).run(None, feed)
        (found,) = onnx.reference.ReferenceEvaluator(model).run(None, feed)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)

    def test_trained_values(self, run, shared, tmp_path):
        checkpoint = tmp_path / "t.ckpt"
        run(*shared.train(checkpoint, "--epochs", 8, "--batch-size", 8, "--lr", 0.02), code=0)
        model = self.export(run, shared, tmp_path / "m.onnx", "--checkpoint", checkpoint)
        data = arrays()
        (logits,) = onnx.reference.ReferenceEvaluator(model).run(None, {"input": data["input"]})
        assert (logits.argmax(axis=1) == data["labels"]).mean() > 0.9

    def test_any_value_of_the_forward_graph(self, run, shared, tmp_path):
        available, predictions = forward_values(Package.open(shared.package))
        assert predictions == ["output"]
        assert available[0] == "output"
        hidden = next(name for name in available if name.startswith("relu1"))
        names = "--outputs", hidden, "--outputs", "output"
        model = self.export(run, shared, tmp_path / "m.onnx", *names)
        assert [value.name for value in model.graph.output] == [hidden, "output"]

    def test_default_is_what_build_named(self, run, shared, tmp_path):
        name = forward_values(Package.open(shared.package))[0][1]
        package = tmp_path / "p"
        run(*shared.build(package, "--output", name), code=0)
        outcome = run("export", package, "--out", tmp_path / "m.onnx", "--json")
        assert outcome.json()["outputs"] == [name, "output"]

    def test_default_of_several_losses(self, run, shared, tmp_path):
        package = tmp_path / "p"
        part = "--loss-part", "digit=cross_entropy input=output"
        assert run("build", shared.model, "--out", package, *part, "--no-self-check").code == 0
        outcome = run("export", package, "--out", tmp_path / "m.onnx", "--json")
        assert outcome.json()["outputs"] == ["output"]


class TestInspect:
    def test_package(self, run, shared):
        outcome = run("inspect", shared.package, "--json")
        content = outcome.json()
        assert content["kind"] == "package"
        sizes = {item["name"]: item["size_bytes"] for item in content["parameters"]}
        assert sizes["conv2.weight"] == 8 * 4 * 9 * 4
        assert "conv2.weight" in outcome.err
        assert "labels: int64[batch] (labels)" in outcome.err
        assert "ONNX Runtime 1.12 and newer" in outcome.err
        assert run("inspect", shared.package / "manifest.json").code == 0

    def test_model(self, run, shared):
        outcome = run("inspect", shared.model, "--json")
        content = outcome.json()
        assert content["kind"] == "model"
        assert content["opsets"] == {"": 17}
        shape = ["batch", 1, 8, 8]
        assert content["inputs"] == [{"name": "input", "dtype": "float32", "shape": shape}]
        layers = ("conv1", "conv2", "fc")
        names = {f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}
        assert {item["name"] for item in content["parameters"]} == names
        counts = {item["operator"]: item["nodes"] for item in content["operators"]}
        assert counts == {"Conv": 2, "Flatten": 1, "Gemm": 1, "MaxPool": 2, "Relu": 2}
        assert {item["gradient"] for item in content["operators"]} == {"rule"}
        assert "runs on ONNX Runtime 1.12" in outcome.err

    def test_checkpoint(self, run, shared, tmp_path):
        path = tmp_path / "t.ckpt"
        run(*shared.train(path, "--epochs", 2), code=0)
        content = run("inspect", path, "--json").json()
        assert content["kind"] == "checkpoint"
        assert content["optimizer"]["step"] == 4
        assert content["optimizer"]["moments"] == 2
        assert content["properties"] == {"odtpack.epochs": 2}
        outcome = run("inspect", shared.package / "checkpoint", "--json")
        assert outcome.json()["optimizer"] is None
        assert len(outcome.json()["parameters"]) == 6


class TestDevices:
    def test_list(self, run):
        outcome = run("devices", "list", "--json")
        assert [item["name"] for item in outcome.json()] == list_profiles()
        for name in list_profiles():
            assert name in outcome.err

    @pytest.mark.parametrize("name", list_profiles())
    def test_show_names_unit_kind_and_source_of_every_figure(self, run, name):
        outcome = run("devices", "show", name, "--json")
        figures = load_profile(name).figures()
        assert outcome.json()["figures"] == [figure.model_dump(mode="json") for figure in figures]
        for figure in figures:
            assert figure.key in outcome.err
            assert figure.source in outcome.err
            if figure.unit not in (None, "1", "cores"):
                assert f"{figure.value:g} {figure.unit}" in outcome.err
            assert figure.value is None or f"({figure.kind})" in outcome.err


# The commands on a float16 model, from its file to an inference model.


@pytest.mark.parametrize(("dtype", "kept"), [(np.float16, "float32"), (np.float64, "float64")])
def test_build_inspect_train_and_export(run, dtype, kept, tmp_path):
    model = zoo.mlp((20, 30, 10))
    onnx.save(retyped(model, dtype), tmp_path / "model.onnx")
    x, labels = batch(model, 64)
    np.savez(tmp_path / "data.npz", input=x.astype(dtype), labels=labels)

    def done(*arguments: object) -> str:
        outcome = run(*arguments, code=0)
        return outcome.out + outcome.err

    package = tmp_path / "package"
    done("build", tmp_path / "model.onnx", "--out", package, "--loss", "cross_entropy")
    text = done("inspect", package)
    assert f"{kept}[30, 20]" in text
    assert ("4 of them are float16 in the model" in text) == (dtype is np.float16)
    trained = tmp_path / "trained.ckpt"
    done("train", package, "--data", tmp_path / "data.npz", "--epochs", "2", "--out", trained)
    exported = tmp_path / "inference.onnx"
    done("export", package, "--checkpoint", trained, "--out", exported)
    graph = onnx.load(exported).graph
    types = {tensor.data_type for tensor in graph.initializer}
    assert types == {onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))}
    assert [output.name for output in graph.output] == ["output"]


# ``odtpack diff``.


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    """The shared package with another head and a further output."""
    model = with_values(small_model(), "fc.bias")
    build_package(model, tmp_path / "newer", loss="cross_entropy", outputs=["flatten/Flatten"])
    return tmp_path / "newer"


class TestDiff:
    def test_text(self, run, shared, newer):
        outcome = run("diff", shared.package, newer)
        assert (outcome.code, outcome.err) == (0, "")
        assert outcome.out.startswith("compatible: a trained checkpoint can be used unchanged")
        for words in ("calls must change", "output 'flatten/Flatten' is new", "fc.bias", "3 of 3"):
            assert words in outcome.out

    def test_json_is_as_the_schema_says(self, run, shared, newer):
        outcome = run("diff", shared.package, newer, "--format", "json", code=0)
        found = PackageDiff.model_validate_json(outcome.out)
        assert [change.name for change in found.parameters] == ["fc.bias"]
        assert outcome.err == ""
        assert run("diff", shared.package, newer, "--json").out == outcome.out

    def test_markdown(self, run, shared, newer):
        outcome = run("diff", shared.package, newer, "--format", "markdown")
        assert (outcome.code, outcome.err) == (0, "")
        assert outcome.out.startswith("**compatible: ")
        for title in ("### Trained checkpoints", "### App", "### Files", "### Parameters"):
            assert title in outcome.out

    @pytest.mark.parametrize(("classes", "options", "steps", "says"), [
        (3, {}, 4, ""),
        (3, {"optimizer": "sgd"}, 2, "reset: the optimizer changes from adamw to sgd"),
        (5, {}, 2, "new package: 'fc.weight': its shape changes from [3, 32] to [5, 32]"),
    ])  # fmt: skip
    def test_a_checkpoint_goes_over(self, run, shared, tmp_path, classes, options, steps, says):
        new, trained, out = (tmp_path / name for name in ("new", "trained", "out"))
        model = with_values(small_model(classes=classes))
        build_package(model, new, loss="cross_entropy", **options)
        run(*shared.train(trained, "--epochs", 1), code=0)
        outcome = run("carry-over", shared.package, new, trained, "--out", out, "--json", code=0)
        found, whole = (CheckpointState.load_checkpoint(each).parameters for each in (out, trained))
        names = outcome.json()["carried_over"]
        assert len(names) == (6 if classes == 3 else 4)
        for name in names:
            np.testing.assert_array_equal(found[name].data, whole[name].data)
        assert says in outcome.err
        more = "train", new, "--data", shared.data, "--epochs", 1, "--resume", out, "--json"
        assert run(*more, code=0).json()["steps"] == steps
        again = run("carry-over", shared.package, new, trained, "--out", trained)
        assert_refused(again, "cannot-write", "read by the same command")

    def test_no_package(self, run, shared, tmp_path):
        assert_refused(run("diff", shared.package, tmp_path / "absent"), "package-not-found")
        for command in (("verify", shared.model), ("diff", shared.model, shared.package)):
            outcome = run(*command)
            assert_refused(outcome, "package-not-found")
            assert f"{shared.model.name} is a model, not a package folder" in outcome.err
            assert f"odtpack build {shared.model} --out package" in outcome.err


# Which operators a target leaves to the processor.


def test_operators_that_the_provider_lacks_are_named(run, tmp_path):
    text = """(float[n, 4] x) => (float[n, 4] y) <float[4] w = {1, 2, 3, 4}>
        { h = Mul(x, w) r = Round(h) z = Sin(h) s = Add(z, r) y = LogSoftmax(s) }"""
    onnx.save(parsed(text), tmp_path / "m.onnx")
    done = run("ops", "check", tmp_path / "m.onnx", "--target", "webgpu", code=0)
    assert "Round has no kernel on webgpu" in done.out
    assert "LogSoftmax" not in done.out


def test_what_its_kernels_refuse_is_named(run, tmp_path):
    text = """(float[1, 1, 2, 2, 2] x) => (float[1, 1, 1, 1, 1] y)
        <float[1, 1, 2, 2, 2] w = {1, 2, 3, 4, 5, 6, 7, 8}> { y = Conv(x, w) }"""
    onnx.save(parsed(text), tmp_path / "m.onnx")
    done = run("ops", "check", tmp_path / "m.onnx", "--target", "webgpu")
    assert "Conv has no kernel for three axes on webgpu: the model is refused" in done.out


def test_init_quotes_the_name_in_the_next_command(run, shared, tmp_path):
    recipe = tmp_path / "my recipe.toml"
    outcome = run("init", shared.model, "--out", recipe)
    (line,) = [line for line in outcome.err.splitlines() if line.startswith("next: ")]
    assert shlex.split(line.removeprefix("next: ")) == ["odtpack", "build", "--recipe", str(recipe)]
