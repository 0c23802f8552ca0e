"""Optimizers, groups, accumulation and schedules on the command line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odtpack_runtime import CheckpointState
from odtpack_runtime.checkpoint.state import SCHEDULE_PROPERTY
from odtpack_runtime.package.package import Package
from tests.cli.conftest import Run, Shared, assert_refused

Build = Callable[..., dict[str, Any]]


@pytest.fixture
def build(run: Run, shared: Shared, tmp_path: Path) -> Build:
    """Build the package ``p`` with options; return its manifest."""
    return lambda *options: run(*shared.build(tmp_path / "p", "--json", *options), code=0).json()


FORMULA = "--optimizer-option", "formula=pytorch"


@pytest.mark.parametrize(("options", "expected"), [
    (("--optimizer", "sgd", "--momentum", 0.9, "--optimizer-option", "nesterov=true"),
     {"kind": "sgd", "momentum": 0.9, "nesterov": True, "dampening": 0.0}),
    ((*FORMULA, "--optimizer-option", "bias_correction=False"),
     {"kind": "adamw", "formula": "pytorch", "bias_correction": False, "beta1": 0.9}),
    (("--optimizer", "adam", "--epsilon", 1e-4), {"kind": "adam", "epsilon": 1e-4}),
    (("--optimizer", "lion", "--weight-decay", 0.3), {"kind": "lion", "weight_decay": 0.3}),
    (("--optimizer", "adafactor", "--optimizer-option", "beta2_decay=-0.7"),
     {"kind": "adafactor", "beta2_decay": -0.7, "clip_threshold": 1.0}),
])  # fmt: skip
def test_every_optimizer_is_built_and_trains(
    build, run, shared, tmp_path, options,
    expected,
):  # fmt: skip
    assert build(*options)["optimizer"].items() >= expected.items()
    assert run("inspect", tmp_path / "p").out.count(str(expected["kind"])) >= 1
    rate = {"sgd": 0.05, "lion": 0.003, "adafactor": 0.1}.get(str(expected["kind"]), 0.01)
    train = "train", tmp_path / "p", "--data", shared.data, "--out", tmp_path / "t.ckpt", "--json"
    outcome = run(*train, "--epochs", 8, "--batch-size", 8, "--lr", rate, code=0)
    assert outcome.json()["eval_loss_after"] < 0.8 * outcome.json()["eval_loss_before"]


def test_the_manifest_says_what_happens_around_the_optimizer(build, run, tmp_path):
    options = """--weight-decay 0.05 --no-vector-decay --clip-norm 1 --accumulate 4
        --group fc.*:lr=10 --group *.bias:decay=0.5 --schedule cosine:warmup=2,floor=0.1,lr=0.02"""
    content = build(*options.split())
    assert content["clip"] == {"norm": 1.0, "value": None}
    assert content["accumulation_steps"] == 4
    assert [tuple(group.values()) for group in content["groups"]] == [
        (1.0, 0.05, ["conv1.weight", "conv2.weight"]), (1.0, 0.5, ["conv1.bias", "conv2.bias"]),
        (10.0, 0.05, ["fc.weight"]), (10.0, 0.0, ["fc.bias"]),
    ]  # fmt: skip
    for group in content["groups"]:
        assert [*group] == ["learning_rate_scale", "weight_decay", "parameters"]
    settings = {"warmup_steps": 2, "floor": 0.1}
    assert content["schedule"] == {"kind": "cosine", "settings": settings, "learning_rate": 0.02}
    shown = run("inspect", tmp_path / "p").out
    assert "gradients by norm, 1" in shown
    assert "4 batches per optimizer step" in shown
    assert "1 parameter, learning rate x 10, weight decay 0" in shown
    assert "cosine" in shown
    assert Package.open(tmp_path / "p").manifest.groups[3].parameters == ("fc.bias",)


def test_a_plain_manifest_says_nothing_of_it(shared):
    text = json.loads((shared.package / "manifest.json").read_text())
    assert not text.keys() & {"clip", "groups", "accumulation_steps", "schedule"}
    assert set(text["optimizer"]) == {
        "kind", "beta1", "beta2", "epsilon", "weight_decay", "formula", "bias_correction",
    }  # fmt: skip


def test_train_follows_the_schedule_and_goes_on_with_it(build, run, shared, tmp_path):
    """48 samples by 8, accumulated by 4: steps of 4 and 2 batches, 2 steps an epoch."""
    schedule = "cosine:warmup=2,total=12,floor=0.1,lr=0.02"
    build("--accumulate", 4, "--schedule", schedule, "--clip-norm", 0.5, "--group", "fc.*:lr=2")
    train = ("train", tmp_path / "p", "--data", shared.data, "--batch-size", 8, "--seed", 3,
             "--json")  # fmt: skip
    whole, half, rest = (tmp_path / name for name in ("whole", "half", "rest"))
    outcome = run(*train, "--epochs", 4, "--out", whole, code=0)
    assert outcome.json()["steps"] == 8
    assert outcome.json()["schedule"] == "cosine"
    assert "batches of 8 x 4" in outcome.err
    factor = 0.1 + 0.9 * (1 + np.cos(np.pi * 6 / 10)) / 2
    assert outcome.json()["learning_rate"] == pytest.approx(0.02 * factor, rel=1e-6)
    assert run(*train, "--epochs", 2, "--out", half).code == 0
    resumed = run(*train, "--epochs", 2, "--resume", half, "--out", rest)
    assert resumed.json()["learning_rate"] == outcome.json()["learning_rate"]
    assert rest.read_bytes() == whole.read_bytes()


def test_which_schedule_counts(build, run, shared, tmp_path):
    build("--schedule", "linear:lr=0.01")
    train = "train", tmp_path / "p", "--data", shared.data, "--batch-size", 8, "--json"
    first, out = tmp_path / "first", tmp_path / "out"
    # Without total it ends where the training does.
    assert run(*train, "--epochs", 2, "--out", first).json()["learning_rate"] == 0
    plain = run(*train, "--epochs", 1, "--schedule", "none", "--lr", 0.004, "--out", out).json()
    assert (plain["schedule"], plain["learning_rate"]) == (None, 0.004)
    assert SCHEDULE_PROPERTY not in CheckpointState.load_checkpoint(out).properties
    other = run(*train, "--epochs", 1, "--schedule", "step:period=4,gamma=0.5", "--out", out)
    assert other.json()["learning_rate"] == pytest.approx(0.001 * 0.5)
    # A new rate for the schedule that is resumed; and an end to it.
    again = ("--resume", out, "--epochs", 1, "--out", tmp_path / "again")
    assert run(*train, *again, "--lr", 0.1).json()["learning_rate"] == pytest.approx(0.1 * 0.125)
    assert run(*train, *again, "--schedule", "none").json()["schedule"] is None


@pytest.mark.parametrize(
    ("schedule", "word"), [("sine", "cosine"), ("linear:warmup=100", "the training makes 6 steps")]
)
def test_schedules_that_do_not_fit(run, shared, tmp_path, schedule, word):
    train = shared.train(tmp_path / "t", "--epochs", 1, "--batch-size", 8, "--schedule", schedule)
    assert_refused(run(*train), "bad-schedule", word)
    assert not (tmp_path / "t").exists()
