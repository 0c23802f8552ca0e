"""A build that ends well has run its models; one that does not names the user's node."""

import numpy as np
import onnx
import pytest

from odtpack.artifacts import LossType, OptimType, generate_artifacts
from odtpack.build import build_package
from odtpack.cli import main
from odtpack.optimizers import SGD
from odtpack.package import self_check
from odtpack_runtime import CheckpointState, OdtpackError
from tests.model_text import add_initializers, parsed
from tests.refused import refused

FLOATS = np.linspace(-1, 1, 60, dtype=np.float32)
CASES = {
    "two types": ("h = MatMul(x, w)  y = Add(h, d)", "invalid-model", "'y' (Add)"),
    "whole numbers": ("h = MatMul(x, w)  y = Add(h, i)", "invalid-model", "'y' (Add)"),
    "widths": ("h = MatMul(x, v)  y = Add(h, b)", "invalid-model", "'h' (MatMul)"),
    "no kernel": ("n = Cast <to = 7> (x)  h = Gemm(n, j)  c = Cast <to = 1> (h)  y = Mul(c, b)",
                  "models-do-not-run", "'h'"),
    "widths as it runs": ("n = NonZero(x)  c = Cast <to = 1> (n)  y = MatMul(c, v)",
                          "models-do-not-run", "'y'"),
}  # fmt: skip
TENSORS = {
    "w": FLOATS[:12].reshape(4, 3), "v": FLOATS[:15].reshape(5, 3), "b": FLOATS[:3],
    "e": FLOATS[:3].reshape(1, 3), "d": FLOATS[:3].astype(np.float64), "i": np.arange(3),
    "two": np.array([2]), "one": np.array([1]), "narrow": FLOATS[:4].reshape(4, 1),
    "j": np.ones((4, 3), np.int64), "k": np.ones((1, 1, 10), np.float32),
}  # fmt: skip


def model(
    nodes: str, inputs: str = "float[batch, 4] x", output: str = "float[a, 3] y"
) -> onnx.ModelProto:
    proto = parsed(f"g ({inputs}) => ({output}) {{ {nodes} }}")
    read = {name for node in proto.graph.node for name in node.input}
    add_initializers(proto, {name: array for name, array in TENSORS.items() if name in read})
    return proto


@pytest.mark.parametrize("self_check", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_a_model_that_does_not_run(name, self_check, tmp_path):
    nodes, code, node = CASES[name]
    with refused(code, what=node):
        build_package(model(nodes), tmp_path / "p", loss="mse", self_check=self_check)
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("optimizer", [None, OptimType.AdamW])
def test_probabilities_for_labels(optimizer, tmp_path):
    """As both of PyTorch's exporters write ``cross_entropy`` with them."""
    soft = model(
        "h = MatMul(x, w)  l = SoftmaxCrossEntropyLoss(h, p)",
        "float[batch, 4] x, float[batch, 3] p", "float l",
    )  # fmt: skip
    with pytest.raises(OdtpackError, match=r"'l' .SoftmaxCrossEntropyLoss") as caught:
        generate_artifacts(
            soft, requires_grad=["w"], optimizer=optimizer, artifact_directory=tmp_path / "p"
        )
    assert "--loss cross_entropy --loss-option labels=probabilities" in str(caught.value.hint)


def test_a_size_that_only_a_weight_tells(tmp_path):
    """The batch's width is open, and must be that of the weight."""
    manifest = build_package(
        model("y = MatMul(x, w)", "float[batch, width] x"), tmp_path / "p", loss="mse"
    )
    assert manifest.self_check.inputs[0].shape == (2, 4)


LOSS = "  gap = Sub(h, {})  p = Mul(gap, gap)  y = ReduceMean <keepdims = 0> (p)"
IDLE = {
    "zero": "h = MatMul(x, w)  z = Sub(h, h)  g = Mul(t, z)  y = ReduceMean <keepdims = 0> (g)",
    "not read": "h = MatMul(x, w)  z = Sub(t, t)" + LOSS.format("z"),
    # [batch, 1] minus [batch] is [batch, batch]: each sample against the targets of all.
    "another order": "h = MatMul(x, narrow)  f = Squeeze(t, one)" + LOSS.format("f"),
    "": "h = MatMul(x, narrow)" + LOSS.format("t"),
}
TOLD = {"zero": "exactly 0", "not read": "not depend on 't'", "another order": "another order"}


@pytest.mark.parametrize("name", IDLE)
def test_a_loss_that_teaches_nothing_is_told(name, tmp_path):
    notes: list[str] = []
    forward = model(IDLE[name], "float[batch, 4] x, float[batch, 1] t", "float y, float[a, b] h")
    build_package(forward, tmp_path / "p", loss="none", remark=notes.append)
    found = [note for note in notes if "cannot learn from this loss" in note]
    assert [TOLD.get(name, "") in note for note in found] == [True] * bool(name)


def test_sequences_that_begin_alike_teach(tmp_path):
    """The made-up ones have two tokens: the first predicts the second, and is the same in both."""
    notes: list[str] = []
    nodes = "h = Gather(w, x)  y = Mul(h, h)"
    forward = model(nodes, "int64[batch, length] x", "float[batch, length, 3] y")
    build_package(forward, tmp_path / "p", loss="next_token", remark=notes.append)
    assert not [note for note in notes if "cannot learn from this loss" in note]


@pytest.mark.parametrize(("layout", "told"), [("TNC", True), ("NTC", False)])
def test_axes_that_are_confused_are_told_by_training(layout, told, tmp_path, capsys):
    """Read the wrong way round no label fits: the loss is 0, and nothing else shows it."""
    nodes = "h = MatMul(x, w)  s = Shape(h)  y = Reshape(h, s)"
    forward = model(nodes, "float[n, ?, 4] x", "float[?, ?, ?] y")
    options = {"layout": layout}
    build_package(forward, tmp_path / "p", loss="ctc", loss_options=options, optimizer=SGD())
    random = np.random.default_rng(0)
    labels, lengths = random.integers(1, 3, (8, 3)), {"input": 6, "target": 3}
    np.savez(
        tmp_path / "data.npz", x=random.standard_normal((8, 6, 4)).astype(np.float32),
        labels=labels, **{f"{name}_lengths": np.full(8, n) for name, n in lengths.items()},
    )  # fmt: skip
    data, out = str(tmp_path / "data.npz"), str(tmp_path / "c")
    more = ["--epochs", "1", "--batch-size", "2", "--out", out]
    assert main(["train", str(tmp_path / "p"), "--data", data, *more]) == 0
    assert ("the loss is exactly 0" in capsys.readouterr().err) == told


def test_an_ignored_label_above_the_classes_is_no_class(tmp_path):
    """As 255 in the masks of most segmentation data."""
    options = {"ignore_index": 255}
    forward = model("y = MatMul(x, w)")
    build_package(forward, tmp_path / "p", loss="cross_entropy", loss_options=options)
    x, labels = np.eye(4, dtype=np.float32)[[0, 1, 2, 3] * 9], np.array([255, 0, 1, 2] * 9)
    np.savez(tmp_path / "data.npz", x=x, labels=labels)
    words = ["train", tmp_path / "p", "--data", tmp_path / "data.npz", "--out", tmp_path / "c"]
    assert main([*map(str, words)]) == 0


def test_every_initializer_is_a_list_and_no_choice(tmp_path):
    """``requires_grad=[i.name for i in model.graph.initializer]``, as most public code has it."""
    forward = model("h = MatMul(x, w)  c = Cast <to = 1> (i)  y = Mul(h, c)  s = Relu(d)")
    names = [tensor.name for tensor in forward.graph.initializer]
    assert set(names) == {"w", "i", "d"}
    with pytest.warns(UserWarning, match="every initializer.*: d, i$"):
        generate_artifacts(
            forward, requires_grad=names, loss=LossType.MSELoss, optimizer=OptimType.AdamW,
            artifact_directory=tmp_path / "p",
        )  # fmt: skip
    state = CheckpointState.load_checkpoint(tmp_path / "p" / "checkpoint")
    assert list(state.arrays(trainable=True)) == ["w"]


@pytest.mark.parametrize("name", ["?", "-1", " "])
def test_what_stands_for_a_name_is_none(name, tmp_path):
    """Two axes without a name need not be of one size."""
    forward = model(
        "h = Shape(t)  z = Cast <to = 1> (h)  s = ReduceSum <keepdims = 1> (z)  m = Mul(x, s)  "
        "y = MatMul(m, w)",
        "float[batch, 4] x, float[batch, a] t",
    )
    forward.graph.input[0].type.tensor_type.shape.dim[0].dim_param = name
    forward.graph.input[1].type.tensor_type.shape.dim[1].dim_param = name
    manifest = build_package(forward, tmp_path / "p", loss="mse")
    assert [item.shape for item in manifest.inputs[:2]] == [(None, 4), ("batch", None)]


def test_a_target_has_the_size_that_a_run_tells(tmp_path):
    """The prediction's length follows from the samples', and no name says how."""
    forward = model(
        "c = Concat <axis = 1> (x, x)  h = Unsqueeze(c, two)  y = MatMul(h, e)",
        "float[batch, length] x", "float[batch, double, 3] y",
    )  # fmt: skip
    manifest = build_package(forward, tmp_path / "p", loss="mse")
    assert [item.shape for item in manifest.self_check.inputs] == [(2, 2), (2, 4, 3)]


def test_what_a_build_cannot_or_need_not_record_is_run_all_the_same(tmp_path, monkeypatch):
    """Weights that are too large for the recorded steps are run once; foreign operators are not."""
    notes: list[str] = []
    monkeypatch.setattr(self_check, "_LARGEST_BYTES", 10)
    manifest = build_package(
        model("y = MatMul(x, w)"), tmp_path / "p", loss="mse", remark=notes.append
    )
    assert "too large" in str(manifest.self_check.reason)
    assert ["the models were run" in note for note in notes] == [True]
    with pytest.raises(OdtpackError, match="'h'"):
        build_package(model(CASES["no kernel"][0]), tmp_path / "q", loss="mse")

    notes.clear()
    foreign = model("f = com.acme.Known(x)  m = Add(x, f)  y = MatMul(m, w)")
    foreign.graph.value_info.append(onnx.helper.make_tensor_value_info("f", 1, ["batch", 4]))
    foreign.opset_import.append(onnx.helper.make_opsetid("com.acme", 1))
    build_package(foreign, tmp_path / "r", loss="mse", remark=notes.append)
    assert ["were not run: no library with com.acme" in note for note in notes] == [True]


def test_sizes_that_nothing_tells_are_no_reason_to_refuse(tmp_path):
    """Strides that leave nothing of a short signal; no constant says how long it must be."""
    convs = " ".join(
        f"c{i + 1} = Conv <kernel_shape = [10], strides = [9]> (c{i}, k)" for i in range(4)
    )
    nodes = f"{convs} y = ReduceMean <axes = [2], keepdims = 0> (c4)"
    forward = model(nodes, "float[N, 1, T] c0", "float[N, 1] y")
    notes: list[str] = []
    manifest = build_package(forward, tmp_path / "package", loss="mse", remark=notes.append)
    assert any("none of the input sizes" in note for note in notes)
    assert "no sizes are known" in str(manifest.self_check.reason)


def test_samples_that_are_one_to_the_model_say_nothing_of_the_order_of_targets(tmp_path):
    """The made-up indices are equal, and so are the rows."""
    notes: list[str] = []
    table = np.random.default_rng(0).random((4, 3), np.float32)
    text = "g (int64[N] x) => (float[N, 3] y) { y = Gather(table, x) }"
    build_package(parsed(text, table=table), tmp_path / "p", loss="mse", remark=notes.append)
    assert not notes
