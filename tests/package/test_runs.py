"""A build that ends well has run its models; one that does not names the user's node."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from odtpack.artifacts import OptimType, generate_artifacts
from odtpack.build import build_package
from odtpack_runtime import OdtpackError

FLOATS = np.linspace(-1, 1, 60, dtype=np.float32)
CASES = {
    "two types": ("h = MatMul(x, w)  y = Add(h, d)", "invalid-model", "'y' (Add)"),
    "whole numbers": ("h = MatMul(x, w)  y = Add(h, i)", "invalid-model", "'y' (Add)"),
    "widths": ("h = MatMul(x, v)  y = Add(h, b)", "invalid-model", "'h' (MatMul)"),
    "no kernel": (
        "n = Cast <to = 7> (x)  h = Gemm(n, j)  c = Cast <to = 1> (h)  y = Mul(c, b)",
        "models-do-not-run", "'h'",
    ),
    "widths as it runs": (
        "n = NonZero(x)  c = Cast <to = 1> (n)  y = MatMul(c, v)",
        "models-do-not-run", "'y'",
    ),
}  # fmt: skip
TENSORS = {
    "w": FLOATS[:12].reshape(4, 3), "v": FLOATS[:15].reshape(5, 3), "b": FLOATS[:3],
    "d": FLOATS[:3].astype(np.float64), "i": np.arange(3), "j": np.ones((4, 3), np.int64),
}  # fmt: skip


def model(
    nodes: str, inputs: str = "float[batch, 4] x", output: str = "float[a, 3] y"
) -> onnx.ModelProto:
    proto = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g ({inputs}) => ({output}) {{ {nodes} }}'
    )
    proto.graph.initializer.extend(
        numpy_helper.from_array(array, name)
        for name, array in TENSORS.items()
        if any(name in node.input for node in proto.graph.node)
    )
    return proto


@pytest.mark.parametrize("self_check", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_a_model_that_does_not_run(name: str, self_check: bool, tmp_path: Path) -> None:
    nodes, code, node = CASES[name]
    with pytest.raises(OdtpackError) as caught:
        build_package(model(nodes), tmp_path / "p", loss="mse", self_check=self_check)
    assert caught.value.code == code
    assert node in caught.value.what
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("optimizer", [None, OptimType.AdamW])
def test_probabilities_for_labels(optimizer: OptimType | None, tmp_path: Path) -> None:
    """As both of PyTorch's exporters write ``cross_entropy`` with them."""
    soft = model(
        "h = MatMul(x, w)  l = SoftmaxCrossEntropyLoss(h, p)",
        "float[batch, 4] x, float[batch, 3] p", "float l",
    )  # fmt: skip
    with pytest.raises(OdtpackError, match=r"'l' .SoftmaxCrossEntropyLoss") as caught:
        generate_artifacts(
            soft, requires_grad=["w"], optimizer=optimizer, artifact_directory=tmp_path / "p"
        )
    assert "kl_div" in str(caught.value.hint)


def test_a_size_that_only_a_weight_tells(tmp_path: Path) -> None:
    """The batch's width is open, and must be that of the weight."""
    manifest = build_package(
        model("y = MatMul(x, w)", "float[batch, width] x"), tmp_path / "p", loss="mse"
    )
    assert manifest.self_check is not None
    assert manifest.self_check.inputs[0].shape == (2, 4)
