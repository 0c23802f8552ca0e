"""What a model file declares, names and leaves unsaid does not lead a build astray."""

from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from onnx import numpy_helper

from odtpack.artifacts import LossType, OptimType, generate_artifacts
from odtpack.build import build_package
from odtpack.errors import OdtpackError
from odtpack.model.loading import load_model
from odtpack.onnxblock import TrainingBlock, base, blocks
from odtpack.onnxblock.blocks import Block
from odtpack.onnxblock.loss import CrossEntropyLoss
from odtpack.package.candidates import candidates
from odtpack_runtime.package.manifest import Manifest
from odtpack_simulator.replay.paired_loss import accuracy_inputs
from tests.model_text import drawn, parsed
from tests.packaging_tools import built_training, open_training
from tests.refused import refused

RANDOM = np.random.default_rng(2)


def _model(text: str, **values: tuple[int, ...]) -> onnx.ModelProto:
    return parsed(text, **drawn(RANDOM, **values))


def _roles(manifest: Manifest) -> dict[str, str]:
    return {parameter.name: parameter.role for parameter in manifest.parameters}


def test_declared_sizes_are_hints(tmp_path):
    """Logits that are declared [batch, vocabulary] and are [batch * sequence, vocabulary]."""
    model = _model(
        """(int64[batch, sequence] input) => (float[batch, 7] logits) <int64[2] s = {-1, 4}> {
            h = Gather(embed, input) f = Reshape(h, s) logits = MatMul(f, head) }""",
        embed=(7, 4), head=(4, 7),
    )  # fmt: skip
    _, module, _ = built_training(model, tmp_path / "package")
    tokens = RANDOM.integers(0, 7, (6, 10))
    labels = RANDOM.integers(0, 7, 60)
    values = {t.name: numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer}
    scores = values["embed"][tokens].reshape(60, 4) @ values["head"]
    expected = np.mean(np.log(np.exp(scores).sum(1)) - scores[np.arange(60), labels])
    assert float(module(tokens, labels)) == pytest.approx(expected, rel=1e-5)


def test_sizes_that_inference_confirms_are_held_to(tmp_path):
    model = _model("(float[batch, 4] x) => (float[batch, 3] y) { y = MatMul(x, w) }", w=(4, 3))
    _, module, _ = built_training(model, tmp_path / "package")
    with pytest.raises(OdtpackError, match="'batch' is 2 in input 'x' and 3 in input 'labels'"):
        module(np.zeros((2, 4), np.float32), np.zeros(3, np.int64))


TWO_HEADS = """(float[N, 4] x) => (float[N, 3] y, float[N, 2] z) {
    y = MatMul(x, first) z = MatMul(x, second) }"""


def test_freeze_what_no_gradient_reaches(tmp_path):
    model = _model(TWO_HEADS, first=(4, 3), second=(4, 2))
    manifest = build_package(model, tmp_path / "package", loss="cross_entropy", freeze=["sec*"])
    assert _roles(manifest) == {"first": "trainable"}
    with pytest.raises(OdtpackError, match="matches no parameter of the model"):
        build_package(model, tmp_path / "other", loss="cross_entropy", freeze=["third*"])


SCALED = """(float[N, 4] x) => (float[N, 3] y)
    <float logit_scale = {2.6}, float eps = {0.00001}, float power = {3}> {
    h = MatMul(x, w) c = Mul(h, logit_scale) p = Pow(c, power) y = Add(p, eps) }"""


def test_scalar_parameters(tmp_path, run):
    model = _model(SCALED, w=(4, 3))
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    assert candidates(load_model(model)) == ["logit_scale", "w"]
    for name, patterns in (("default", ()), ("star", ("*",))):
        manifest = build_package(model, tmp_path / name, loss="mse", train=patterns)
        assert _roles(manifest) == {"logit_scale": "trainable", "w": "trainable"}
    listed = run("inspect", path, "--json", code=0).json()["parameters"]
    assert [p["name"] for p in listed if p["role"] == "trainable"] == ["logit_scale", "w"]
    state, module, _ = open_training(tmp_path / "default")
    x, target = np.ones((2, 4), np.float32), np.zeros((2, 3), np.float32)
    module(x, target)
    scores = x.astype(np.float64) @ numpy_helper.to_array(model.graph.initializer[-1])
    predicted = (2.6 * scores) ** 3 + 1e-5
    slope = np.mean(2 * predicted * 3 * (2.6 * scores) ** 2 * scores)
    grads = {name: parameter.grad for name, parameter in state.parameters}
    assert float(grads["logit_scale"]) == pytest.approx(slope, rel=1e-4)


class _Head(Block):
    def build(self, name: str) -> str:
        result: str = CrossEntropyLoss()(blocks.Linear(3, 2)(name))
        return result


def _artifacts(folder: Path, **arguments: object) -> Manifest:
    model = _model(
        "(float[N, 4] x) => (float[N, 3] y) { h = MatMul(x, body.a) y = MatMul(h, body.b) }"
        .replace("body.a", '"body.a"').replace("body.b", '"body.b"'),
        **{"body.a": (4, 3), "body.b": (3, 3)},
    )  # fmt: skip
    options = {"loss": LossType.CrossEntropyLoss, "optimizer": OptimType.AdamW, **arguments}
    generate_artifacts(model, artifact_directory=folder, **options)  # type: ignore[arg-type]
    return Manifest.from_json((folder / "manifest.json").read_bytes(), "manifest.json")


def test_what_a_block_creates_is_trained(tmp_path):
    head = {"linear.weight": "trainable", "linear.bias": "trainable"}
    manifest = _artifacts(tmp_path / "one", requires_grad=["body.b"], loss=_Head())
    assert _roles(manifest) == {"body.b": "trainable", **head}
    assert _roles(_artifacts(tmp_path / "two", loss=_Head())) == head
    manifest = _artifacts(tmp_path / "three", loss=_Head(), frozen_params=["linear.bias"])
    assert _roles(manifest) == {"linear.weight": "trainable", "linear.bias": "frozen"}


def test_what_a_training_block_creates_is_trained():
    class Net(TrainingBlock):
        def build(self, name: str) -> str:
            result: str = CrossEntropyLoss()(blocks.Linear(4, 2)(name))
            return result

    net = Net()
    with base(_model("(float[N, 4] x) => (float[N, 4] y) { y = Relu(x) }")):
        net("y")
    assert [tensor.name for tensor in net.parameters()[0]] == ["linear.weight", "linear.bias"]


def test_globs_in_requires_grad(tmp_path):
    assert _roles(_artifacts(tmp_path / "all", requires_grad=["body.*"])) == {
        "body.a": "trainable", "body.b": "trainable",
    }  # fmt: skip
    with pytest.raises(OdtpackError, match=r"requires_grad 'tail.\*' matches no parameter"):
        _artifacts(tmp_path / "none", requires_grad=["tail.*"])


SEQUENCE = "(float[batch, %s, 4] x) => (float[batch, %s, 5] y) { y = MatMul(x, w) }"


def test_cross_entropy_says_which_axis_it_takes(tmp_path):
    said: list[str] = []
    model = _model(SEQUENCE % (6, 6), w=(4, 5))
    build_package(model, tmp_path / "package", loss="cross_entropy", remark=said.append)
    assert said == [
        "cross_entropy takes axis 1 of 'y' [batch, 6, 5] for the classes, as PyTorch does, and "
        "labels [batch, 5]; where the classes are on the last axis, use --loss-option layout=NLC"
    ]


def test_classes_are_on_the_only_axis_of_a_known_length(tmp_path):
    said: list[str] = []
    model = _model(SEQUENCE % ("sequence", "sequence"), w=(4, 5))
    manifest = build_package(model, tmp_path, loss="cross_entropy", remark=said.append)
    assert said == [
        "cross_entropy takes the last axis of 'y' [batch, sequence, 5] for the classes, and labels "
        "[batch, sequence]"
    ]
    (labels,) = [each for each in manifest.inputs if each.role == "labels"]
    assert (labels.shape, labels.class_count) == (("batch", "sequence"), 5)


@pytest.mark.parametrize(("count", "layout"), [(6, "NLC"), (5, None)])
def test_labels_of_the_model_say_where_the_classes_are(count, layout, tmp_path):
    """Of scores [batch, 6, 5], labels [batch, 6] leave the last axis; [batch, 5] leave axis 1."""
    model = _model(
        f"(float[batch, 6, 4] x, int64[batch, {count}] t) => (float[batch, 6, 5] y)"
        " { y = MatMul(x, w) }", w=(4, 5),
    )  # fmt: skip
    manifest = build_package(model, tmp_path, loss="cross_entropy", loss_inputs=("y", "t"))
    assert manifest.loss_options.get("layout") == layout


@pytest.mark.parametrize(("loss", "options", "scores"), [
    ("cross_entropy", {}, 1), ("cross_entropy", {"layout": "NLC"}, 2),
    ("next_token", {}, None), ("ctc", {}, None),
])  # fmt: skip
def test_an_accuracy_is_of_classes_that_are_known_to_be_on_axis_1(loss, options, scores, tmp_path):
    """All sizes of [batch, 5, 5] fit."""
    model = _model(SEQUENCE % (5, 5), w=(4, 5))
    manifest = build_package(model, tmp_path, loss=loss, loss_options=options, outputs=("y",))
    assert accuracy_inputs(manifest)[0] == scores


@pytest.mark.parametrize(("length", "options"), [("sequence", {}), (6, {"layout": "NLC"})])
def test_the_accuracy_of_a_token_classifier(length, options, tmp_path, run):
    """The model gives [batch, sequence, classes], and some labels do not count."""
    model = _model(SEQUENCE % (length, length), w=(4, 5))
    manifest = build_package(
        model, tmp_path / "package", loss="cross_entropy",
        loss_options={"ignore_index": -1, **options},
    )  # fmt: skip
    x, labels = RANDOM.standard_normal((32, 6, 4), np.float32), RANDOM.integers(-1, 5, (32, 6))
    np.savez(tmp_path / "data.npz", x=x, labels=labels)
    train = ("train", tmp_path / "package", "--data", tmp_path / "data.npz", "--holdout", "0")
    found = run(*train, "--epochs", "1", "--out", tmp_path / "ck", "--json", code=0).json()
    named = (x @ numpy_helper.to_array(model.graph.initializer[0])).argmax(-1)
    assert found["accuracy_before"] == pytest.approx(np.mean((named == labels)[labels >= 0]))
    assert [(o.name, o.role) for o in manifest.all_outputs][1:] == [("loss/scores", "prediction")]
    run("export", tmp_path / "package", "--out", tmp_path / "model.onnx", code=0)
    assert [value.name for value in onnx.load(tmp_path / "model.onnx").graph.output] == ["y"]


def test_cross_entropy_refuses_classes_of_any_number(tmp_path):
    model = _model(
        "(float[batch, c, 4, 5] x) => (float[batch, c, 4, 5] y) { y = MatMul(x, w) }", w=(5, 5)
    )
    with refused("classes-unknown", what="[batch, c, 4, 5]"):
        build_package(model, tmp_path / "package", loss="cross_entropy")


def test_a_bias_of_one_element_in_a_file_of_constants(tmp_path):
    """All weights are Constant nodes, and one number alone is also what a factor looks like."""
    model = _model("""(float[N, 1, 4, 4] x) => (float[N, 1, 2, 2] y) {
        w = Constant<value = float[1, 1, 3, 3] {1, 2, 3, 4, 5, 6, 7, 8, 9}>()
        b = Constant<value = float[1] {0}>()
        half = Constant<value = float[1] {0.5}>()
        c = Conv(x, w, b) y = Mul(c, half) }""")
    manifest = build_package(model, tmp_path / "package", loss="mse")
    assert _roles(manifest) == {"w": "trainable", "b": "trainable"}


def test_a_matrix_in_a_constant_beside_initializers_is_named(tmp_path, run):
    text = """(float[N, 2] x) => (float[N, 2] y) {
        last = Constant<value = float[2, 2] {1, 2, 3, 4}>()
        h = MatMul(x, w) y = MatMul(h, last) }"""
    path = tmp_path / "model.onnx"
    onnx.save(_model(text, w=(2, 2)), path)
    words = "build", path, "--loss", "mse", "--out"
    said = " ".join(run(*words, tmp_path / "package", code=0).err.split())
    assert "last: a Constant node at the place of a weight" in said
    assert "--train 'last' trains it" in said
    both = run(*words, tmp_path / "both", "--train", "last", "--train", "w", code=0)
    assert "a Constant node" not in both.err


@pytest.mark.parametrize("row", [True, False])
def test_a_row_that_shuts_out_does_not_make_a_mask_of_a_table(row):
    model = _model(
        """(int64[N] x) => (float[N, 2] y) { h = Gather(table, x) y = MatMul(h, w) }""",
        table=(4, 3), w=(3, 2),
    )  # fmt: skip
    table = numpy_helper.to_array(model.graph.initializer[0]).copy()
    table[2, None if row else 1] = -np.inf
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(table, "table"))
    assert candidates(load_model(model)) == (["table", "w"] if row else ["w"])


def test_scales_of_every_rank_are_settings():
    model = _model(
        """(float[N, 3] x) => (float[N, 2] y) <int8[2] zero = {0, 0}> {
            q = QuantizeLinear<axis = 1>(h, scale, zero)
            y = DequantizeLinear<axis = 1>(q, bias_scale, zero)
            h = MatMul(x, w) }""",
        w=(3, 2), scale=(2,), bias_scale=(2,),
    )  # fmt: skip
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([nodes[2], *nodes[:2]])
    assert candidates(load_model(model)) == ["w"]


@pytest.mark.parametrize("layout", ["TNC", "NTC"])
def test_ctc_says_which_axis_is_time(layout, tmp_path, run):
    model = _model("(float[N, T, 6] x) => (float[N, T, 5] y) { y = MatMul(x, w) }", w=(6, 5))
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    words = "build", path, "--loss", "ctc", "--out", tmp_path / "package"
    said = " ".join(run(*words, "--loss-option", f"layout={layout}", code=0).err.split())
    note = "ctc reads 'y' [N, T, 5] as [time, samples, classes]; if samples come first"
    assert (note in said) == (layout == "TNC")
