"""Several losses are their weighted sum, in value, parts and gradient, as in PyTorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, parser
from torch.nn import functional

from odtpack.build import build_package
from odtpack.errors import OdtpackError
from odtpack_runtime import CheckpointState, Module
from odtpack_runtime.training.loop import evaluate

MODEL = """<ir_version: 8, opset_import: ["" : 17]>
two (float[n, 6] x) => (float[n, 5, 4] kinds, float[n, 1] size) {
    h = MatMul(x, body)
    t = Tanh(h)
    size = MatMul(t, size_weight)
    flat = MatMul(t, kinds_weight)
    shape = Constant <value = int64[3] {-1, 5, 4}> ()
    kinds = Reshape(flat, shape)
}"""
SIZES = {"body": (6, 8), "size_weight": (8, 1), "kinds_weight": (8, 20)}
PARTS = [
    "kind=cross_entropy input=kinds layout=NLC ignore_index=3 weight=0.3",
    "size=mse input=size weight=2",
]


def _model() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    random = np.random.default_rng(3)
    weights = {n: random.normal(size=s).astype(np.float32) for n, s in SIZES.items()}
    model = parser.parse_model(MODEL)
    model.graph.initializer.extend(
        helper.make_tensor(n, 1, w.shape, w.tobytes(), raw=True) for n, w in weights.items()
    )
    return model, weights


def test_value_parts_and_gradient_are_those_of_pytorch(tmp_path: Path) -> None:
    model, weights = _model()
    manifest = build_package(model, tmp_path / "p", losses=PARTS)
    assert manifest.inference is not None
    assert manifest.inference.outputs == ("kinds", "size")
    assert manifest.inference.inputs == ("x",)
    names = [each.name for each in manifest.outputs]
    assert names == ["loss", "loss.kind", "accuracy.kind", "loss.size"]

    random = np.random.default_rng(4)
    x = random.normal(size=(7, 6)).astype(np.float32)
    labels = random.integers(0, 4, (7, 5))
    target = random.normal(size=(7, 1)).astype(np.float32)
    given = {n: torch.tensor(w, dtype=torch.float64).requires_grad_() for n, w in weights.items()}
    hidden = torch.tanh(torch.tensor(x, dtype=torch.float64) @ given["body"])
    scores = (hidden @ given["kinds_weight"]).reshape(-1, 4)
    wanted = torch.tensor(labels.ravel())
    kind = functional.cross_entropy(scores, wanted, ignore_index=3)
    size = functional.mse_loss(hidden @ given["size_weight"], torch.tensor(target).double())
    (0.3 * kind + 2 * size).backward()
    counted = wanted != 3
    accuracy = (scores.argmax(1) == wanted)[counted].double().mean()

    state = CheckpointState.load_checkpoint(tmp_path / "p" / "checkpoint")
    with Module(
        tmp_path / "p" / "training_model.onnx", state, tmp_path / "p" / "eval_model.onnx"
    ) as module:
        batch = [
            {"x": x, "labels.kind": labels, "target.size": target}[n] for n in module.input_names()
        ]
        module.train()
        results = module(*batch)
        expected = [0.3 * kind + 2 * size, kind, accuracy, size]
        np.testing.assert_allclose(
            [float(r) for r in results], [each.item() for each in expected], rtol=1e-5
        )
        for name, parameter in state.parameters:
            exact = given[name].grad
            assert exact is not None
            np.testing.assert_allclose(parameter.grad, exact.numpy(), rtol=1e-4, atol=1e-6)
        found = evaluate(module, [batch], numbers={n: i for i, n in enumerate(names) if i})
        assert found.means == pytest.approx(
            {"loss.kind": kind.item(), "accuracy.kind": accuracy.item(), "loss.size": size.item()},
            rel=1e-5,
        )


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        (["a=mse input=size", "a=l1 input=size"], "named-twice"),
        (["a=mse input=nothing"], "unknown-value"),
        (["a=nothing"], "unknown-loss"),
        (["mse"], "bad-loss-option"),
        (["a=mse weight=-1"], "bad-loss-option"),
    ],
)
def test_what_does_not_fit_is_said(parts: list[str], code: str, tmp_path: Path) -> None:
    with pytest.raises(OdtpackError) as error:
        build_package(_model()[0], tmp_path / "p", losses=parts)
    assert error.value.code == code


def test_one_loss_besides_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OdtpackError, match="several besides"):
        build_package(_model()[0], tmp_path / "p", loss="mse", losses=PARTS)
