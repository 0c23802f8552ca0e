"""``odtpack fit`` from the command line."""

import json
import re

import numpy as np
import pytest

from odtpack.cli.device.fit import _check_folder, _write
from odtpack.fit.outcome import FitResult
from odtpack_runtime.errors import OdtpackError
from odtpack_simulator.figures.limits import parse_budgets
from tests.cli.conftest import Run, assert_refused, tree
from tests.fit.conftest import Files
from tests.fit.made import SOLUTION, made_fit

NARROW = ["--batch-size", 16, "--optimizer", "sgd", "--lr", 0.02, "--trials", 2, "--finalists", 1]


@pytest.fixture
def start(run: Run, files: Files) -> Run:
    def call(*more: object) -> object:
        return run(
            *("fit", files.model, "--data", files.data, "--loss", "cross_entropy"),
            *("--epochs", 1, *more),
        )

    return call


def test_recipes_are_written_and_build(start, run, tmp_path):
    out = tmp_path / "fitted"
    devices = ["--device", "zero-2-w", "--device", "pi-5"]
    outcome = start(*devices, *NARROW, "--out", out, "--json")
    assert outcome.code == 0, outcome.err
    result = FitResult.model_validate_json(outcome.out)
    assert json.loads((out / "fit.json").read_text()) == outcome.json()
    assert len(result.pareto) == 1
    assert set(tree(out)) == {"fit.html", "fit.json", "recipe.schema.json", "recipe-1.toml"}
    assert (out / "recipe-1.toml").read_text() == result.pareto[0].recipe
    manifest = run("build", "--recipe", out / "recipe-1.toml", "--json", code=0).json()
    choice = result.pareto[0].choice
    assert manifest["optimizer"]["kind"] == choice.optimizer == "sgd"
    assert manifest["accumulation_steps"] == choice.batch_size // choice.micro_batch
    assert "raspberrypi/zero-2-w" in result.devices
    assert f"{100 * (result.pareto[0].metric or 0):.1f} %" in outcome.err
    assert "unknown: time_s" not in outcome.err
    assert "unknown: energy_j" not in outcome.err
    assert "Traceback" not in outcome.err
    # What the package makes of it, built into the folder, does not hinder the next search.
    assert (out / "package-1").is_dir()


def test_nothing_fits(start, files, tmp_path):
    """Exit code 1, and the nearest candidate, measured, with what it misses and by how much."""
    budget = tmp_path / "budgets.toml"
    budget.write_text('[budgets]\npeak_memory = "500 kB"\n')
    parse_budgets(budget.read_bytes())
    out = tmp_path / "fitted"
    outcome = start(
        *("--device", "zero-2-w", *NARROW, "--budget", budget), *("--out", out, "--json")
    )
    assert outcome.code == 1, outcome.err
    result = FitResult.model_validate_json(outcome.out)
    assert result.pareto == []
    assert not result.found
    nearest = result.nearest
    assert nearest.miss == pytest.approx(nearest.peak_bytes / 500e3 - 1)
    dropped = [each for each in result.left if each.stage == "plan"]
    assert len(dropped) == result.looked_at - 1
    assert nearest.predicted_peak_bytes == min(
        nearest.predicted_peak_bytes, *(each.predicted_peak_bytes or 0 for each in dropped)
    )
    assert "No candidate meets every budget" in outcome.err
    assert re.search("peak_memory: the (measured|predicted) peak is", outcome.err)
    assert f"its worst figure is beyond its limit by {100 * nearest.miss:.1f} %" in outcome.err
    assert set(tree(out)) == {"fit.html", "fit.json", "recipe.schema.json"}


@pytest.mark.parametrize("strict", [False, True])
def test_a_limit_that_cannot_be_judged_is_not_kept(strict, start, tmp_path):
    """A browser's profile has no computing rate: nobody knows the time of a step there."""
    budget, out = tmp_path / "budgets.toml", tmp_path / "fitted"
    budget.write_text('[budgets]\nstep_latency = "1 s"\n')
    words = ["--device", "web/phone", *NARROW, "--budget", budget, "--out", out]
    outcome = start(*words, *(["--strict"] if strict else []))
    assert outcome.code == (1 if strict else 0), outcome.err
    assert "not judged on web/phone: step_latency: " in outcome.out
    result = FitResult.model_validate_json((out / "fit.json").read_bytes())
    assert result.found
    assert not result.judged
    assert ("web/phone", "step_latency") in {
        (where, check.metric) for where, check in result.pareto[0].unjudged
    }
    page = (out / "fit.html").read_text()
    assert "keeps every budget that could be judged on 1 device" in page
    assert "is-not-judged" in page


@pytest.mark.parametrize("apart", [True, False])
def test_train_simulate_and_fit_evaluate_on_the_same(apart, start, run, files, tmp_path):
    with np.load(files.data) as arrays:
        np.savez(tmp_path / "other.npz", **{name: each[:50] + 0 for name, each in arrays.items()})
    on = ["--eval", tmp_path / "other.npz"] if apart else ["--holdout", 0.4]
    words = ["--data", files.data, "--lr", 0.02, "--epochs", 1, *on, "--json"]
    package = tmp_path / "package"
    options = ("--optimizer", "sgd", "--optimizer-option", "momentum=0.9", "--loss")
    assert run("build", files.model, "--out", package, *options, "cross_entropy").code == 0
    trained = run("train", package, *words, "--batch-size", 16, "--out", tmp_path / "ck").json()
    device = ("--device", "pi-5")
    replayed = run("simulate", package, *words, "--batch-size", 16, *device).json()
    fitted = start(*device, *NARROW, "--trials", 1, *on, "--json").json()
    assert trained["eval_samples"] == (50 if apart else 128)
    assert (
        replayed["data"]["held_out_samples"] == fitted["held_out_samples"] == 50 + 78 * (not apart)
    )
    assert replayed["data"]["evaluated_apart"] == apart
    assert replayed["training"]["eval_loss_after"] == pytest.approx(trained["eval_loss_after"])
    (best,) = fitted["pareto"] + fitted["over_budget"]
    assert best["loss"] == pytest.approx(trained["eval_loss_after"], rel=1e-4)
    assert_refused(start(*device, "--eval", files.data, "--holdout", 0.5), "holdout-and-eval")


class TestBadInput:
    """Nothing is built or written."""

    def test_what_is_missing(self, run, start, files):
        device = ("--device", "pixel-8a")
        assert_refused(run("fit", files.model, "--loss", "mse", *device), "usage", "--data")
        given = ("--data", files.data, *device)
        assert_refused(run("fit", files.model, *given), "usage", "--loss")
        assert_refused(run("fit", "--loss", "mse", *given), "usage", "MODEL.onnx")
        assert_refused(start(), "no-device", "--device")

    def test_values(self, start, tmp_path):
        device = ("--device", "pixel-8a")
        assert_refused(start("--device", "nokia-3310"), "device-unknown", "nokia-3310")
        assert_refused(start(*device, "--lr", -1), "bad-learning-rate", "-1")
        assert_refused(start(*device, "--lr", "nan"), "bad-learning-rate")
        assert_refused(start(*device, "--optimizer", "sofia"), "usage")
        assert_refused(start(*device, "--jobs", 100000), "usage", "--jobs")
        budget = tmp_path / "budgets.toml"
        budget.write_text("[budgets]\npeak_memory = 5\n")
        assert_refused(start(*device, "--budget", budget), "budgets-invalid", f"{budget}:2")
        budget.write_text('[device."nokia/3310"]\nfinal_loss = 5\n')
        assert_refused(start(*device, "--budget", budget), "budgets-unknown-device")
        assert_refused(start(*device, "--freeze", "nothing.*"), "unknown-parameter", "nothing.*")

    def test_a_folder_of_other_things(self, start, tmp_path):
        (tmp_path / "diary.txt").write_text("mine")
        device = ("--device", "pixel-8a")
        assert_refused(start(*device, "--out", tmp_path), "folder-not-empty", str(tmp_path))
        assert_refused(start(*device, "--out", tmp_path / "diary.txt"), "cannot-write")
        (tmp_path / "fit.json").write_text('{"steps": 9000}')  # of a watch
        assert_refused(start(*device, "--out", tmp_path), "folder-not-empty", str(tmp_path))
        assert set(tree(tmp_path)) == {"diary.txt", "fit.json"}


def test_a_new_result_takes_the_place_of_an_old_one(tmp_path):
    """Recipes of the old one go, other files stay, and a changed recipe is not written over."""
    (tmp_path / "package-1").mkdir()
    result = made_fit()
    old = made_fit(pareto=[SOLUTION | {"recipe": text} for text in ("first", "second")])
    (tmp_path / "fit.json").write_text(old.to_json())
    for name, text in {"1": "first", "2": "second", "x": "old"}.items():
        (tmp_path / f"recipe-{name}.toml").write_text(text)
    for name, text in {"2": "mine now", "3": "mine"}.items():
        path = tmp_path / f"recipe-{name}.toml"
        before = path.read_text() if path.exists() else None
        path.write_text(text)
        with pytest.raises(OdtpackError, match=f"recipe-{name}.toml") as caught:
            _check_folder(tmp_path)
        assert caught.value.code == "folder-not-empty"
        path.unlink() if before is None else path.write_text(before)
    _write(result, tmp_path, _check_folder(tmp_path))
    found = tree(tmp_path)
    left = {"fit.html", "fit.json", "recipe.schema.json", "recipe-x.toml", "package-1"}
    assert set(found) == left
    assert found["fit.json"] == result.to_json().encode()
    assert found["recipe-x.toml"] == b"old"
