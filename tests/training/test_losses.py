"""Every loss and its gradient agree with PyTorch, also where a naive formula overflows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from torch.nn import functional as F

from tests.packaging_tools import LOSSES, generate, open_training

TORCH = {
    "mse": F.mse_loss,
    "cross_entropy": F.cross_entropy,
    "bce_with_logits": F.binary_cross_entropy_with_logits,
    "l1": F.l1_loss,
}
SHAPES = {"vector": (6, 5), "sequence": (3, 5, 4), "image": (2, 5, 3, 4)}


def _shifted(shape: tuple[int, ...], opset: int) -> onnx.ModelProto:
    """y = x + shift, the shift being a parameter of the shape of one sample."""
    sample = list(shape[1:])
    batched = ", ".join(["N", *map(str, sample)])
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}]> '
        f"shifted (float[{batched}] x) => (float[{batched}] y) "
        "{ y = Add(x, shift) }"
    )
    shift = np.random.default_rng(1).standard_normal(sample, dtype=np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(shift, "shift"))
    return model


def _target(name: str, shape: tuple[int, ...]) -> np.ndarray:
    random = np.random.default_rng(2)
    if name == "cross_entropy":
        return random.integers(0, shape[1], (shape[0], *shape[2:]))
    if name == "bce_with_logits":
        return random.random(shape, dtype=np.float32)
    return random.standard_normal(shape, dtype=np.float32)


def _check(name: str, x: np.ndarray, target: np.ndarray, folder: Path, opset: int = 17) -> None:
    """Loss, gradient and evaluation loss against PyTorch in float64."""
    model = _shifted(x.shape, opset)
    generate(model, folder, loss=LOSSES[name])
    state, module, _ = open_training(folder)
    assert module.input_names() == ["x", "labels" if name == "cross_entropy" else "target"]
    loss = module(x, target)

    shift = torch.from_numpy(state.parameters["shift"].data.astype(np.float64)).requires_grad_()
    wanted = torch.from_numpy(target)
    if name != "cross_entropy":
        wanted = wanted.double()
    # The sum is rounded to float32, as in the model: the loss is judged, not the addition.
    y = torch.from_numpy(x).double() + shift
    y = y + (y.detach().float() - y.detach())
    reference = TORCH[name](y, wanted)
    reference.backward()
    assert loss.shape == ()
    assert loss.dtype == np.float32
    assert float(loss) == pytest.approx(reference.item(), rel=1e-6)
    np.testing.assert_allclose(
        state.parameters["shift"].grad, shift.grad.numpy(), rtol=1e-5, atol=1e-8
    )
    assert float(module.eval()(x, target)) == pytest.approx(reference.item(), rel=1e-6)


@pytest.mark.parametrize("opset", [12, 13, 17, 21])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LOSSES)
def test_agrees_with_pytorch(name: str, shape: str, opset: int, tmp_path: Path) -> None:
    x = np.random.default_rng(3).standard_normal(SHAPES[shape], dtype=np.float32)
    _check(name, x, _target(name, SHAPES[shape]), tmp_path, opset)


@pytest.mark.parametrize("magnitude", [1e2, 1e4, 1e30])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["cross_entropy", "bce_with_logits"])
def test_large_logits(name: str, shape: str, magnitude: float, tmp_path: Path) -> None:
    x = np.random.default_rng(3).standard_normal(SHAPES[shape]) * magnitude
    _check(name, x.astype(np.float32), _target(name, SHAPES[shape]), tmp_path)


def test_equal_large_logits(tmp_path: Path) -> None:
    x = np.full((4, 3), 3e38, np.float32)
    _check("cross_entropy", x, np.array([0, 1, 2, 0]), tmp_path)


def test_l1_has_no_slope_at_zero(tmp_path: Path) -> None:
    shape = (4, 3)
    x = np.random.default_rng(3).standard_normal(shape, dtype=np.float32)
    shift = onnx.numpy_helper.to_array(_shifted(shape, 17).graph.initializer[0])
    target = x + shift
    target[2:] += 1
    _check("l1", x, target, tmp_path)
