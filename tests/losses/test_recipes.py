"""Losses with several predictions and targets in recipes, manifests and the runtime."""

import dataclasses
import json

import numpy as np
import onnx
import pytest
import torch
from torch.nn import functional as F

from odtpack.build import build_package
from odtpack.losses import LOSSES, make_loss, parse_options
from odtpack.optimizers import OPTIMIZERS
from odtpack_runtime.package.manifest import Manifest
from odtpack_runtime.package.verify import verify_package
from odtpack_runtime.training.loop import load_dataset
from scripts.manifest_schema import manifest_schema
from tests.losses.cases import CASES, normal, probabilities
from tests.losses.harness import package, shifted
from tests.model_text import parsed
from tests.packaging_tools import open_training
from tests.refused import refused
from tests.training.forward import contents, names

# What a package says of its loss


def test_labels_and_their_options(tmp_path):
    options = {"weight": np.array([1, 2, 3]), "ignore_index": -100}
    manifest = package(tmp_path, shifted([(4, 3)]), "cross_entropy", options)
    assert manifest.loss == "cross_entropy"
    assert manifest.loss_options == {
        "reduction": "mean", "weight": [1.0, 2.0, 3.0], "ignore_index": -100,
        "label_smoothing": 0.0, "labels": "numbers",
    }  # fmt: skip
    labels = manifest.inputs[1]
    assert (labels.name, labels.role, labels.dtype) == ("labels", "labels", "int64")
    assert (labels.class_count, labels.ignore_index) == (3, -100)
    assert (manifest.class_count, manifest.ignored_label) == (3, -100)
    for name in ("training", "eval"):
        model = onnx.load(tmp_path / f"{name}_model.onnx")
        found = {entry.key: entry.value for entry in model.metadata_props}
        assert found["odtpack.class_count"] == "3"
        assert found["odtpack.ignore_index"] == "-100"
    assert Manifest.from_json((tmp_path / "manifest.json").read_bytes(), "m") == manifest


def test_the_runtime_checks_labels_but_the_ignored_one(tmp_path):
    manifest = package(
        tmp_path / "package", shifted([(4, 3)]), "cross_entropy", {"ignore_index": 255}
    )
    _, module, _ = open_training(tmp_path / "package")
    x = normal(4, 3)
    assert np.isfinite(module(x, np.array([0, 255, 2, 255])))
    with refused("label-out-of-range", "254"):
        module(x, np.array([0, 254, 2, 255]))
    np.savez(tmp_path / "data.npz", x0=x, labels=np.array([0, 255, 2, 255]))
    given = {"class_count": manifest.class_count, "ignored_label": manifest.ignored_label}
    assert load_dataset(tmp_path / "data.npz", manifest.input_specs(), **given)
    with refused("label-out-of-range", "255"):
        load_dataset(tmp_path / "data.npz", manifest.input_specs(), class_count=3)


def test_labels_of_several_losses_are_checked_each(tmp_path):
    """ONNX counts -1 from the end: the last class would be trained without a word."""
    parts = [
        ("word", "cross_entropy", 1.0, ("y0",), {"ignore_index": 255}),
        ("place", "cross_entropy", 1.0, ("y1",), {}),
    ]
    manifest = build_package(shifted([(4, 3), (4, 5)]), tmp_path / "package", losses=parts)
    facts = [(item.class_count, item.ignore_index) for item in manifest.inputs[2:]]
    assert facts == [(3, 255), (5, None)]
    _, module, _ = open_training(tmp_path / "package")
    x0, x1, words, places = normal(4, 3), normal(4, 5), np.array([0, 255, 2, 1]), np.arange(4) + 1
    assert np.isfinite(module(x0, x1, words, places)[0])
    for wrong in ((np.array([0, -1, 2, 1]), places), (words, places + 1), (words, places - 2)):
        with refused("label-out-of-range", "labels."):
            module(x0, x1, *wrong)
    verify_package(tmp_path / "package")


@pytest.mark.parametrize(("kind", "options"), [
    ("cross_entropy", {"weight": [1.0, 0.5, 2.0], "label_smoothing": 0.1}),
    ("bce_with_logits", {"weight": [1.0, 0.5, 2.0], "pos_weight": [2.0, 3.0, 0.5]}),
])  # fmt: skip
def test_class_weights_of_several_losses_do_not_train(kind, options, tmp_path):
    model = shifted([(4, 3)])
    alone = package(tmp_path / "one", model, kind, options)
    parts = [("part", kind, 1.0, (), options)]
    several = build_package(model, tmp_path / "several", losses=parts)
    roles = [{p.name: p.role for p in manifest.parameters} for manifest in (alone, several)]
    assert roles[0] == roles[1]


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_has_its_inputs_in_the_manifest(name, tmp_path):
    case = next(case for case in CASES.values() if case.name == name)
    manifest = package(tmp_path, shifted([x.shape for x in case.xs]), name, case.options)
    data = [(f"x{i}", "data") for i in range(len(case.xs))]
    targets = {
        "cross_entropy": [("labels", "labels")],
        "nll": [("labels", "labels")],
        "next_token": [("labels", "labels")],
        "distillation": [("labels", "labels"), ("target", "target")],
        "triplet_margin": [],
        "info_nce": [],
        "ctc": [("labels", "labels"), ("input_lengths", "target"), ("target_lengths", "target")],
    }.get(name, [("target", "target")])
    assert [(item.name, item.role) for item in manifest.inputs] == data + targets
    assert names(tmp_path / "training_model.onnx")[0][: len(data + targets)] == [
        name for name, _ in data + targets
    ]
    assert manifest.loss == name
    loss = make_loss(name, case.options)
    assert json.loads(json.dumps(loss.settings())) == manifest.loss_options
    assert make_loss(name, manifest.loss_options) == loss


def test_the_schema_names_every_loss_and_optimizer():
    schema = manifest_schema()
    assert set(schema["properties"]["loss"]["enum"]) == {*LOSSES, "none", "custom"}
    kinds = schema["properties"]["optimizer"]["discriminator"]["mapping"]
    assert set(kinds) == {*OPTIMIZERS, "custom"}
    for kind, place in kinds.items():
        record = schema["$defs"][place.rpartition("/")[2]]
        fields = dataclasses.fields(OPTIMIZERS[kind]) if kind in OPTIMIZERS else ()
        assert set(record["properties"]) == {"kind", *(field.name for field in fields)}
        assert record["properties"]["kind"]["const"] == kind


# Which values a loss reads


TOWERS = """
towers (float[N, 4] a, float[N, 4] p, float[N, 4] n, float[N, 4] unused)
    => (float[N, 4] other, float[N, 2] ea, float[N, 2] ep, float[N, 2] en)
{ other = Neg(unused) ea = MatMul(a, w) ep = MatMul(p, w) en = MatMul(n, w) }
"""


def towers() -> onnx.ModelProto:
    return parsed(TOWERS, w=normal(4, 2))


def test_predictions_are_named_in_order(tmp_path):
    package(tmp_path, towers(), "triplet_margin", {}, loss_inputs=["ea", "ep", "en"])
    _, module, _ = open_training(tmp_path)
    assert module.input_names() == ["a", "p", "n", "unused"]
    a, p, n = normal(5, 4, seed=1), normal(5, 4, seed=2), normal(5, 4, seed=3)
    w = normal(4, 2).astype(float)
    d = [np.linalg.norm((a - b) @ w + 1e-6, axis=1) for b in (p, n)]
    expected = np.maximum(d[0] - d[1] + 1, 0).mean()
    assert float(module(a, p, n, n)) == pytest.approx(expected, rel=1e-5)


def test_targets_may_be_values_of_the_model(tmp_path):
    """A teacher that runs in the same graph, and labels as int32."""
    text = """
    both (float[N, 3] x, int32[N] classes) => (float[N, 3] student, float[N, 3] teacher)
    { student = Add(x, s) teacher = Mul(x, t) }"""
    model = parsed(text, s=normal(3), t=normal(3))
    manifest = build_package(
        model, tmp_path, loss="distillation", loss_inputs=["student", "classes", "teacher"],
        train=["s"],
    )  # fmt: skip
    assert [(item.name, item.role) for item in manifest.inputs] == [
        ("x", "data"),
        ("classes", "labels"),
    ]
    _, module, _ = open_training(tmp_path)
    assert np.isfinite(module(normal(4, 3), np.array([0, 1, 2, 0], np.int32)))


def test_soft_labels_may_be_values_of_the_model_and_of_token_classifiers(tmp_path):
    """Logits [N, tokens, C]: the probabilities have the same axes."""
    text = "both (float[N, 4, 3] x, float[N, 4, 3] q) => (float[N, 4, 3] y) { y = Add(x, s) }"
    model = parsed(text, s=normal(3))
    soft = {"labels": "probabilities", "layout": "NLC"}
    package(tmp_path, model, "cross_entropy", soft, loss_inputs=["y", "q"])
    _, module, _ = open_training(tmp_path)
    x, q = normal(2, 4, 3, seed=1), probabilities(2, 3, 4).transpose(0, 2, 1)
    y = torch.from_numpy(x + normal(3)).double()
    expected = F.cross_entropy(y.transpose(1, 2), torch.from_numpy(q).double().transpose(1, 2))
    assert float(module(x, np.ascontiguousarray(q))) == pytest.approx(expected.item(), rel=1e-5)


def test_loss_inputs_that_do_not_fit(tmp_path):
    with refused("too-few-loss-inputs", "anchor, positive, negative", "--loss-input"):
        package(tmp_path / "a", towers(), "triplet_margin", {}, loss_inputs=["ea", "ep"])
    with refused("too-few-loss-inputs", "has 1 outputs"):
        package(tmp_path / "b", shifted([(4, 3)]), "info_nce", {})
    with refused("too-many-loss-inputs", "prediction, target"):
        package(tmp_path / "c", towers(), "mse", {}, loss_inputs=["ea", "ep", "en"])
    with refused("prediction-shape", "'other', 'ea'"):
        package(tmp_path / "d", towers(), "info_nce", {}, loss_inputs=["other", "ea"])
    with refused("prediction-rank", r"\[N, D\]"):
        package(tmp_path / "e", shifted([(2, 3, 4)] * 2), "info_nce", {})
    with refused("target-type", "INT64", "'ep'", "labels=prob"):
        package(tmp_path / "f", towers(), "cross_entropy", {}, loss_inputs=["ea", "ep"])
    with refused("loss-not-scalar", "'mean' or 'sum'"):
        package(tmp_path / "g", shifted([(4, 3)]), "mse", {"reduction": "none"})
    text = "g (float[N, 3] x) => (int64[N, 3] y) { z = Add(x, s) y = Cast <to = 7> (z) }"
    whole = parsed(text, s=normal(3))
    with refused("prediction-type", "INT64"):
        build_package(whole, tmp_path / "h", loss="mse", train=["s"])
    assert contents(tmp_path) == {}


# Options


@pytest.mark.parametrize(("name", "options", "word"), [
    ("mse", {"reduction": "max"}, "'mean' or 'sum'"),
    ("huber", {"delta": 0}, "above 0"),
    ("huber", {"delta": "wide"}, "number"),
    ("huber", {"delta": True}, "number"),
    ("smooth_l1", {"beta": float("nan")}, "number"),
    ("cross_entropy", {"label_smoothing": 1.5}, "at most 1"),
    ("cross_entropy", {"ignore_index": 1.5}, "whole number"),
    ("cross_entropy", {"ignore_index": 2**70}, "whole number"),
    ("cross_entropy", {"weight": 1.0}, "list of numbers"),
    ("cross_entropy", {"weight": [1, -1]}, "0 or more"),
    ("cross_entropy", {"weight": ["a", "b"]}, "list of numbers"),
    ("bce_with_logits", {"pos_weight": [float("inf")]}, "0 or more"),
    ("kl_div", {"teacher": "scores"}, "'logits' or 'probabilities'"),
    ("kl_div", {"temperature": -1}, "above 0"),
    ("distillation", {"alpha": 2}, "at most 1"),
    ("triplet_margin", {"p": 3}, "1 or 2"),
    ("triplet_margin", {"swap": 1}, "True or False"),
    ("info_nce", {"temperature": 0}, "above 0"),
])  # fmt: skip
def test_options_out_of_range(name, options, word):
    with refused("bad-loss-option", name, next(iter(options)), word):
        make_loss(name, options)


def test_options_that_do_not_exist():
    with refused("unknown-loss-option", "'delta'", "reduction, layout, weight, ignore_index"):
        make_loss("cross_entropy", {"delta": 1})
    with refused("unknown-loss", "hinge", "cross_entropy, ctc"):
        make_loss("hinge")


def test_weights_must_fit_the_model(tmp_path):
    with refused("bad-loss-option", "weight", "each of the 3 classes"):
        package(tmp_path, shifted([(4, 3)]), "cross_entropy", {"weight": [1, 2]})
    for weight in ([1, 2], np.ones((1, 1, 3))):
        with refused("bad-loss-option", "pos_weight", r"\[N, 3\]"):
            package(tmp_path, shifted([(4, 3)]), "bce_with_logits", {"pos_weight": weight})


def test_options_as_people_type_them():
    texts = ["weight=0.5,2,1", "ignore_index=-100", "label_smoothing=1", "reduction=sum"]
    assert parse_options("cross_entropy", texts) == {
        "weight": (0.5, 2, 1), "ignore_index": -100, "label_smoothing": 1.0, "reduction": "sum",
    }  # fmt: skip
    found = parse_options("triplet_margin", ["swap=true", "margin=2", "p=1"])
    assert found == {"swap": True, "margin": 2.0, "p": 1}
    assert make_loss("cross_entropy", parse_options("cross_entropy", texts))
    for text in ("weight", "=3"):
        with refused("bad-loss-option", "label_smoothing=0.1"):
            parse_options("cross_entropy", [text])
    with refused("named-twice", "'p'"):
        parse_options("triplet_margin", ["p=1", "p=2"])


def test_labels_of_another_name_are_checked(tmp_path):
    """ONNX counts negative indices from the end: -1 would train the last class."""
    text = """(float[batch, 6] input, int64[batch] y) => (float[batch, 3] output, int64[batch] same)
        { output = MatMul(input, w) same = Identity(y) }"""
    model = parsed(text, w=normal(6, 3))
    folder = tmp_path / "package"
    build_package(model, folder, loss="cross_entropy", loss_inputs=("output", "y"))
    _, module, _ = open_training(folder)
    data = np.zeros((2, 6), np.float32)
    module(data, np.array([0, 2]))
    for label in (-1, -3, 3):
        with refused("label-out-of-range", f"'y' holds the label {label}"):
            module(data, np.array([0, label]))
    verify_package(folder)
