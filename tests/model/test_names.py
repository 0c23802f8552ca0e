"""Messages, tables and proposals name what the user's model and module have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from odtpack.build import build_package
from odtpack.cli import main
from odtpack.model.cause import named_cause
from odtpack.recipe.draft import draft
from odtpack_runtime import OdtpackError

FLOATS = np.linspace(-1, 1, 144, dtype=np.float32)
TEXT = """<ir_version: 8, opset_import: ["": 17]>
g (float[T, N, 4] x) => (float[T, N, 2] y) {
    s, last = GRU <hidden_size = 3> (x, "gru.W", "gru.R")
    flat = Squeeze(s, axis)
    y = MatMul(flat, "fc.weight")
    turned = Transpose <perm = [1, 2, 0]> (flat)
    spare = Conv(turned, "onnx::Conv_102")
    whole = Cast <to = 7> (spare)
}"""


@pytest.fixture
def model() -> onnx.ModelProto:
    """A recurrent layer, a linear one, and a convolution whose weight lost its name."""
    text = TEXT
    shapes = {
        "gru.W": (1, 9, 4),
        "gru.R": (1, 9, 3),
        "fc.weight": (3, 2),
        "onnx::Conv_102": (3, 3, 1),
    }
    for index, name in enumerate(shapes):
        text = text.replace(f'"{name}"', f"name{index}")
    proto = parser.parse_model(text)
    for node in proto.graph.node:
        node.name = "/conv/Conv" if node.op_type == "Conv" else f"38_{node.op_type}"
        node.input[:] = [
            list(shapes)[int(name[4:])] if name.startswith("name") else name for name in node.input
        ]
    for name, shape in shapes.items():
        values = FLOATS[: int(np.prod(shape))].reshape(shape)
        proto.graph.initializer.append(numpy_helper.from_array(values, name))
    proto.graph.initializer.append(numpy_helper.from_array(np.array([1]), "axis"))
    return proto


def test_a_node_that_was_made_stands_for_the_users(model: onnx.ModelProto) -> None:
    said = "node '38_MatMul/QuantizeLinear/Div' reads 'fc.weight' and '38_GRU'"
    with pytest.raises(OdtpackError) as caught, named_cause(model):
        raise OdtpackError("unsupported-node", said, hint="--freeze 'onnx::Conv_102'")
    assert caught.value.what == "node '38_MatMul' reads 'fc.weight' and '38_GRU'"
    assert caught.value.hint == "--freeze 'conv.weight'"


def test_a_package_shows_both_names(
    model: onnx.ModelProto, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_package(model, tmp_path / "p", loss="mse", loss_inputs=("spare",))
    assert main(["inspect", str(tmp_path / "p")]) == 0
    assert "onnx::Conv_102 (conv.weight)" in capsys.readouterr().out


def test_an_adapter_is_proposed_where_it_can_be(model: onnx.ModelProto, tmp_path: Path) -> None:
    del model.graph.node[3:]
    onnx.save(model, tmp_path / "model.onnx")
    text = draft(tmp_path / "model.onnx", tmp_path)
    assert '# on = ["fc"]' in text
    build_package(model, tmp_path / "p", loss="mse", adapter="lora", adapter_on=("fc",))


def test_what_only_the_loss_needs_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model with its loss inside also gives its accuracy, which reads the labels."""
    proto = parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
    g (float[N, 4] x, int64[N] t) => (float loss, float[N, 3] logits, float accuracy) {
        logits = MatMul(x, w)
        loss = SoftmaxCrossEntropyLoss(logits, t)
        named = ArgMax <axis = 1, keepdims = 0> (logits)
        right = Equal(named, t)
        count = Cast <to = 1> (right)
        accuracy = ReduceMean <keepdims = 0> (count)
    }""")
    proto.graph.initializer.append(numpy_helper.from_array(FLOATS[:12].reshape(4, 3), "w"))
    notes: list[str] = []
    outputs = ("logits", "accuracy")
    build_package(proto, tmp_path / "p", loss="none", outputs=outputs, remark=notes.append)
    assert ["'accuracy' needs 't', which 'logits' does not" in note for note in notes] == [True]
    assert main(["export", str(tmp_path / "p"), "--out", str(tmp_path / "m.onnx")]) == 0
    assert "logits, accuracy, from x, t" in capsys.readouterr().err
