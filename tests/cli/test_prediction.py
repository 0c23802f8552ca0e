"""Every training of a classifier shows its accuracy, unless the build says otherwise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from odtpack_runtime import CheckpointState, Module
from odtpack_runtime.package.package import Package
from odtpack_runtime.package.verify import verify_package
from tests.cli.conftest import Run, Shared, arrays


def outputs(path: Path) -> list[str]:
    return [value.name for value in onnx.load(path).graph.output]


def test_only_the_evaluation_model_returns_the_prediction(shared: Shared) -> None:
    """Training keeps its memory: nothing has to live on for the prediction."""
    package = Package.open(shared.package)
    assert outputs(package.eval_model) == ["loss", "output"]
    assert outputs(package.training_model)[1].endswith(".accumulation.out")
    (given,) = package.manifest.evaluation_outputs
    assert (given.name, given.role, given.shape[1]) == ("output", "prediction", 3)
    assert [output.name for output in package.manifest.outputs] == ["loss"]
    verify_package(shared.package)


def test_the_prediction_is_that_of_the_forward_model(shared: Shared) -> None:
    package = Package.open(shared.package)
    state = CheckpointState.load_checkpoint(package.checkpoint)
    module = Module(package.training_model, state, package.eval_model).eval()
    data = arrays()
    _, scores = module(data["input"], data["labels"])
    forward = onnxruntime.InferenceSession(shared.model, providers=["CPUExecutionProvider"])
    (expected,) = forward.run(None, {"input": data["input"]})
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["option", "recipe"])
def test_a_build_that_is_told_so_returns_the_loss_only(
    run: Run, shared: Shared, tmp_path: Path, how: str
) -> None:
    package = tmp_path / "package"
    if how == "option":
        arguments = [shared.model, "--loss", "cross_entropy", "--out", package, "--no-prediction"]
    else:
        recipe = tmp_path / "recipe.toml"
        recipe.write_text(
            f'model = "{shared.model}"\npackage = "package"\nprediction = false\n'
            '[loss]\nkind = "cross_entropy"\n'
        )
        arguments = ["--recipe", recipe]
    assert run("build", *arguments).code == 0
    assert outputs(package / "eval_model.onnx") == ["loss"]
    outcome = run("train", package, "--data", shared.data, "--epochs", 1, "--json")
    assert outcome.json()["accuracy_after"] is None
    assert "accuracy" not in outcome.err


def test_train_shows_loss_and_accuracy_before_and_after(
    run: Run, shared: Shared, tmp_path: Path
) -> None:
    outcome = run(
        *("train", shared.package, "--data", shared.data, "--epochs", 8, "--lr", 0.01),
        *("--holdout", 0.2, "--out", tmp_path / "ck", "--json"),
    )
    figures = outcome.json()
    for when in ("before", "after"):
        (line,) = [line for line in outcome.err.splitlines() if line.startswith(when)]
        assert f"{figures[f'eval_loss_{when}']:.4f}" in line
        assert f"accuracy {figures[f'accuracy_{when}']:.1%}" in line
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


def test_simulate_shows_loss_and_accuracy_before_and_after(run: Run, shared: Shared) -> None:
    outcome = run(
        *("simulate", shared.package, "--data", shared.data, "--device", "pixel-8a"),
        *("--interruptions", 0, "--epochs", 8, "--lr", 0.01, "--json"),
    )
    training = outcome.json()["training"]
    assert training["metric_name"] == "accuracy"
    line = " ".join(outcome.err.partition("On 12 held-out")[2].split())
    assert f"{training['eval_loss_before']:.3g} → {training['eval_loss_after']:.3g}" in line
    before, after = (100 * training[f"metric_{when}"] for when in ("before", "after"))
    assert f"accuracy {before:.1f} → {after:.1f} %" in line
