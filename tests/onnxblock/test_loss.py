"""Loss blocks agree with PyTorch, in value and in gradient, with every option."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch.nn import functional as F

from odtpack import onnxblock
from odtpack.onnxblock import loss
from tests.onnxblock.nets import Twin, batch, mlp, model_of, names, run, values

SHAPE = (7, 5)
RANDOM = np.random.default_rng(3)
TARGET = RANDOM.random(SHAPE, np.float32)
LABELS = RANDOM.integers(0, 5, 7)
WEIGHT = np.array([1.0, 0.5, 2.0, 0.25, 3.0])


class Forward(onnxblock.ForwardBlock):
    def __init__(self, block: onnxblock.Block) -> None:
        super().__init__()
        self.loss = block

    def build(self, *names: str) -> Any:
        return self.loss(*names)


class Train(onnxblock.TrainingBlock):
    def __init__(self, block: onnxblock.Block) -> None:
        super().__init__()
        self.loss = block

    def build(self, *names: str) -> Any:
        return self.loss(*names)


CASES: dict[str, tuple[Any, Any, np.ndarray]] = {}
for reduction in ("mean", "sum", "none"):
    how = {"reduction": reduction}
    CASES |= {
        f"mse-{reduction}": (
            loss.MSELoss(reduction),
            lambda y, t, how=how: F.mse_loss(y, t, **how),
            TARGET,
        ),
        f"l1-{reduction}": (
            loss.L1Loss(reduction),
            lambda y, t, how=how: F.l1_loss(y, t, **how),
            TARGET,
        ),
        f"cross_entropy-{reduction}": (
            loss.CrossEntropyLoss(reduction=reduction),
            lambda y, t, how=how: F.cross_entropy(y, t, **how),
            LABELS,
        ),
        f"cross_entropy-weight-{reduction}": (
            loss.CrossEntropyLoss(WEIGHT, reduction, ignore_index=3),
            lambda y, t, how=how: F.cross_entropy(
                y, t, torch.tensor(WEIGHT), ignore_index=3, **how
            ),
            LABELS,
        ),
        f"bce_with_logits-{reduction}": (
            loss.BCEWithLogitsLoss(reduction=reduction),
            lambda y, t, how=how: F.binary_cross_entropy_with_logits(y, t, **how),
            TARGET,
        ),
        f"bce_with_logits-weight-{reduction}": (
            loss.BCEWithLogitsLoss(WEIGHT, reduction, pos_weight=WEIGHT[::-1]),
            lambda y, t, how=how: F.binary_cross_entropy_with_logits(
                y, t, torch.tensor(WEIGHT), pos_weight=torch.tensor(WEIGHT[::-1].copy()), **how
            ),
            TARGET,
        ),
    }


def _tensor(target: np.ndarray) -> torch.Tensor:
    tensor = torch.from_numpy(target)
    return tensor.double() if tensor.is_floating_point() else tensor


@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    block, oracle, target = CASES[name]
    model, forward = mlp(), Forward(block)
    with onnxblock.base(model):
        forward("output-0")
    onnx.checker.check_model(forward.to_model_proto(), full_check=True)
    x = batch(model)
    feeds = {"input-0": x, "labels" if target.dtype == np.int64 else "target": target}
    (result,) = run(forward.to_model_proto(), feeds).values()
    expected = oracle(Twin(model)(torch.from_numpy(x).double()), _tensor(target))
    assert result.shape == tuple(expected.shape)
    np.testing.assert_allclose(result, expected.detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize("name", [name for name in CASES if "none" not in name])
def test_gradients(name: str, optimized: bool) -> None:
    block, oracle, target = CASES[name]
    model, train = mlp(), Train(block)
    for parameter in names(model):
        train.requires_grad(parameter)
    with onnxblock.base(model):
        train("output-0")
    x = batch(model)
    feeds = {"input-0": x, "labels" if target.dtype == np.int64 else "target": target}
    results = run(train.to_model_proto()[0], feeds | values(model), optimized)
    twin = Twin(model)
    reference = oracle(twin(torch.from_numpy(x).double()), _tensor(target))
    reference.backward()
    first = next(iter(results.values()))
    assert float(first) == pytest.approx(reference.item(), rel=1e-5)
    gradients = twin.gradients()
    assert set(gradients) == set(names(model))
    for parameter, expected in gradients.items():
        ours = results[f"{parameter}_grad.accumulation.out"]
        np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=1e-6, err_msg=parameter)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_labels_of_pixels(reduction: str) -> None:
    """[N, C, h, w] has labels [N, h, w]; the reference drops the last axis instead."""
    scores = RANDOM.standard_normal((2, 3, 4, 6)).astype(np.float32)
    labels = RANDOM.integers(0, 3, (2, 4, 6))
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "pixels",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 4, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3, 4, 6])],
    )
    model = model_of(graph)
    forward = Forward(loss.CrossEntropyLoss(reduction=reduction))
    with onnxblock.base(model):
        forward("y")
    info = next(i for i in forward.to_model_proto().graph.input if i.name == "labels")
    dims = [d.dim_value or d.dim_param for d in info.type.tensor_type.shape.dim]
    assert dims == ["N", 4, 6]
    (result,) = run(forward.to_model_proto(), {"x": scores, "labels": labels}).values()
    expected = F.cross_entropy(torch.tensor(scores), torch.tensor(labels), reduction=reduction)
    np.testing.assert_allclose(result, expected.numpy(), rtol=1e-5, atol=1e-6)


def test_any_loss_by_name() -> None:
    model, forward = mlp(outputs=3), Forward(loss.Loss("triplet_margin", margin=0.5))
    with onnxblock.base(model):
        forward("output-0", "output-1", "output-2")
    assert [i.name for i in forward.to_model_proto().graph.input] == ["input-0"]
    x = batch(model)
    (result,) = run(forward.to_model_proto(), {"input-0": x}).values()
    embeddings = Twin(model)(torch.from_numpy(x).double())
    expected = F.triplet_margin_loss(*embeddings, margin=0.5).item()
    assert float(result) == pytest.approx(expected, rel=1e-5)


def test_targets_of_any_name() -> None:
    forward = Forward(loss.MSELoss())
    with onnxblock.base(mlp()) as accessor:
        onnxblock.blocks.InputLike("output-0")("wanted")
        forward("output-0", "wanted")
        assert [value.name for value in accessor.model.graph.input] == ["input-0", "wanted"]
    with onnxblock.base(mlp()) as accessor:
        forward("output-0", "fresh")
        assert [value.name for value in accessor.model.graph.input] == ["input-0", "fresh"]
    with onnxblock.base(mlp(outputs=2)) as accessor:
        forward("output-0", "output-1")
        assert [value.name for value in accessor.model.graph.input] == ["input-0"]
