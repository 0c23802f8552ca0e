"""Python runs the conformance suite: ``odtpack_runtime``, and a kit that only knows manifests.

``make test`` runs two cases of it, ``make kits`` all: it takes as long to write as to run.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from odtpack_runtime import CheckpointState, LRScheduler, Module, Optimizer
from odtpack_runtime.checkpoint.format import read_checkpoint
from odtpack_runtime.checkpoint.parameters import Array
from odtpack_runtime.checkpoint.writer import write_checkpoint
from odtpack_runtime.package.package import Package
from odtpack_runtime.package.self_check import self_check
from odtpack_runtime.package.verify import write_inference_model
from odtpack_runtime.session.options import default_session_options
from odtpack_runtime.training.loop import loss_of
from odtpack_runtime.training.schedules import make_schedule
from tests.kits.harness import contents
from tests.kits.plain_kit import PlainKit
from tests.kits.vectors import write_suite
from tests.refused import refused

THREADS = 1


def cases(suite: Path, *kinds: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Folder and content of every case of some kinds."""
    index = json.loads((suite / "index.json").read_text())
    assert index["threads"] == THREADS
    found = [entry["name"] for entry in index["cases"] if entry["kind"] in kinds]
    assert found, kinds
    for name in found:
        yield suite / name, json.loads((suite / name / "case.json").read_text(encoding="utf-8"))


def tensor(folder: Path, entry: dict[str, Any]) -> Array:
    """A tensor of a case."""
    dtype = np.dtype(entry["dtype"])
    count = int(np.prod(entry["shape"], dtype=np.int64))
    data = np.fromfile(folder / entry["file"], dtype, count, offset=entry["offset"])
    return data.reshape(entry["shape"])


def tensors(folder: Path, entries: list[dict[str, Any]]) -> list[Array]:
    return [tensor(folder, entry) for entry in entries]


def open_module(folder: Path, case: dict[str, Any]) -> tuple[Package, Module, Optimizer]:
    """What a case trains, and on what."""
    package = Package.open(folder / case["package"])
    models = {key: folder / path for key, path in case.get("models", {}).items()}
    training = models.get("training_model", package.training_model)
    state = CheckpointState.load_checkpoint(folder / case["checkpoint"])
    evaluation = models.get("eval_model", package.eval_model)
    options = default_session_options(training, threads=THREADS)
    module = Module(training, state, evaluation, session_options=options)
    optimizer = Optimizer(models.get("optimizer_model", package.optimizer_model), module)
    return package, module, optimizer


def test_two_runs(tmp_path):
    """What the tests of the whole suite check, of a part that is written in a second."""
    write_suite(tmp_path / "suite", ["adam", "groups"])
    check_runs(tmp_path / "suite", tmp_path)
    check_plain_runs(tmp_path / "suite", tmp_path)
    check_exported_models(tmp_path / "suite")


@pytest.mark.kits
def test_runs(suite, tmp_path):
    check_runs(suite, tmp_path)


def check_runs(suite: Path, tmp_path: Path) -> None:
    for folder, case in cases(suite, "train", "resume", "nominal", "not_finite"):
        package, module, optimizer = open_module(folder, case)
        if case["kind"] == "nominal":
            with refused("nominal-state"):
                module(*tensors(folder, case["steps"][0]["inputs"]))
            values = tensor(folder, case["values"])
            module.copy_buffer_to_parameters(values, trainable_only=False)
        if case["learning_rate"] is not None:
            optimizer.set_learning_rate(case["learning_rate"])
        scheduler = LRScheduler.restore(optimizer)
        if case["schedule"] is not None:
            said = case["schedule"]
            settings = {k: tuple(v) if isinstance(v, list) else v
                        for k, v in said["settings"].items()}  # fmt: skip
            schedule = make_schedule(said["kind"], settings)
            scheduler = LRScheduler(optimizer, schedule, said["initial_lr"])
        for step in case["steps"]:
            results = module(*tensors(folder, step["inputs"]))
            same_loss(loss_of(results), step, folder.name)
            outputs = results[1:] if isinstance(results, tuple) else ()
            if step["loss"] is None:
                assert module.last_not_finite.code == step["not_finite"]
            else:
                for entry, found in zip(step["outputs"], outputs, strict=True):
                    np.testing.assert_array_equal(found, tensor(folder, entry))
            if step["update"]:
                assert optimizer.get_learning_rate() == step["rate"]
                made = optimizer.step_count
                optimizer.step()
                if scheduler is not None and optimizer.step_count > made:
                    scheduler.step()
            if step["reset"]:
                module.lazy_reset_grad()
        assert module.skipped_steps == case.get("skipped_steps", 0)
        module.eval()
        found = module(*tensors(folder, case["evaluation"]["inputs"]))
        assert loss_of(found) == case["evaluation"]["loss"], folder.name
        for name, value in case["properties"].items():
            module.state.properties[name] = value
        path = tmp_path / "after.ckpt"
        CheckpointState.save_checkpoint(module.state, path, include_optimizer_state=True)
        assert contents(path) == contents(folder / case["after"]), folder.name
        values = {**module.state.arrays(trainable=True), **module.state.arrays(trainable=False)}
        write_inference_model(package, values, tmp_path / "m.onnx")
        assert (tmp_path / "m.onnx").read_bytes() == (folder / "export.onnx").read_bytes()


@pytest.mark.kits
def test_the_manifest_is_enough(suite, tmp_path):
    """A kit that reads no metadata and binds no memory gives the same, bit by bit."""
    check_plain_runs(suite, tmp_path)


def check_plain_runs(suite: Path, tmp_path: Path) -> None:
    for folder, case in cases(suite, "train", "resume", "not_finite"):
        models = {key: path.removeprefix("package/") for key, path in case["models"].items()}
        kit = PlainKit(folder / "package", folder / case["checkpoint"], models, THREADS)
        for step in case["steps"]:
            batch = {entry["name"]: tensor(folder, entry) for entry in step["inputs"]}
            loss, *outputs = kit.train_step(batch)
            same_loss(float(loss), step, folder.name)
            if step["loss"] is not None:
                for entry, found in zip(step["outputs"], outputs, strict=True):
                    np.testing.assert_array_equal(found, tensor(folder, entry))
            if step["update"]:
                kit.rate = np.float32(step["rate"])
                kit.optimizer_step()
        assert kit.skipped_steps == case.get("skipped_steps", 0)
        inputs = case["evaluation"]["inputs"]
        batch = {entry["name"]: tensor(folder, entry) for entry in inputs}
        assert float(kit.evaluate(batch)[0]) == case["evaluation"]["loss"], folder.name
        after = read_checkpoint(folder / case["after"])
        kit.rate = np.float32(after.optimizer.learning_rate)
        kit.properties |= case["properties"]
        kit.properties |= {k: v for k, v in after.properties.items() if k == "odtpack.schedule"}
        write_checkpoint(tmp_path / "plain.ckpt", kit.content())
        assert contents(tmp_path / "plain.ckpt") == contents(folder / case["after"]), folder.name
        assert kit.export() == (folder / "export.onnx").read_bytes(), folder.name


def same_loss(found: float, step: dict[str, Any], where: str) -> None:
    """Check a loss; one that is not finite is null in JSON."""
    assert (found if np.isfinite(found) else None) == step["loss"], where


@pytest.mark.kits
def test_exported_models(suite):
    check_exported_models(suite)


def check_exported_models(suite: Path) -> None:
    for folder, case in cases(suite, "train", "resume", "nominal"):
        path = folder / case["export"]["file"]
        onnx.checker.check_model(str(path), full_check=True)
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        fed = {entry["name"]: tensor(folder, entry) for entry in case["export"]["inputs"]}
        assert [node.name for node in session.get_inputs()] == list(fed)
        outputs = {entry["name"]: tensor(folder, entry) for entry in case["export"]["outputs"]}
        assert [node.name for node in session.get_outputs()] == list(outputs)
        for expected, result in zip(outputs.values(), session.run(None, fed), strict=True):
            np.testing.assert_array_equal(result, expected, folder.name)


@pytest.mark.kits
def test_self_checks(suite):
    for folder, case in cases(suite, "self_check"):
        package = Package.open(folder / case["package"])
        if case["code"] is None:
            assert self_check(package).largest_part <= 1
            continue
        with refused(case["code"]):
            self_check(package)


@pytest.mark.kits
def test_recoveries(suite, tmp_path):
    for folder, case in cases(suite, "recover"):
        for path in folder.glob("trained*"):
            shutil.copy(path, tmp_path)
        path = tmp_path / case["checkpoint"]
        previous = (tmp_path / case["previous"]).read_bytes()
        state = CheckpointState.load_checkpoint(path)
        assert state.recovered
        assert f"of optimizer step {case['step']}:" in state.recovered
        assert state.optimizer.step == case["step"]
        CheckpointState.save_checkpoint(state, tmp_path / "again", include_optimizer_state=True)
        assert contents(tmp_path / "again") == contents(folder / case["previous"]), folder.name
        if case["lost"] is not None:
            assert f": {case['lost']} optimizer steps made since are lost" in state.recovered
        # The first save stands in for the damaged file; only the next moves it on.
        for name in ("first", "second"):
            state.properties[name] = 1
            CheckpointState.save_checkpoint(state, path, True, keep_previous=True)
            if name == "first":
                first = path.read_bytes()
                assert (tmp_path / case["previous"]).read_bytes() == previous
        assert (tmp_path / case["previous"]).read_bytes() == first
        assert CheckpointState.load_checkpoint(path).recovered is None
        path.unlink()


@pytest.mark.kits
def test_errors(suite, tmp_path):
    for folder, case in cases(suite, "error"):
        if case["code"] == "private-training":
            continue  # Python makes private gradients
        with refused(case["code"]):
            _fail(folder, case, tmp_path)


def _fail(folder: Path, case: dict[str, Any], scratch: Path) -> None:
    match case["action"]:
        case "open":
            Package.open(folder / case["package"]).require_stock()
        case "load_checkpoint":
            CheckpointState.load_checkpoint(folder / case["checkpoint"])
        case "session":
            open_module(folder, case)
        case "step":
            _, module, _ = open_module(folder, case)
            module(*tensors(folder, case["inputs"]))
        case "export":
            package, module, _ = open_module(folder, case)
            values = {**module.state.arrays(trainable=True)}
            write_inference_model(package, values, scratch / "m.onnx", case["outputs"])


@pytest.mark.kits
def test_buffers(suite):
    for folder, case in cases(suite, "buffer"):
        _, module, _ = open_module(folder, case)
        values = module.get_contiguous_parameters(trainable_only=False).numpy()
        np.testing.assert_array_equal(values, tensor(folder, case["values"]))
