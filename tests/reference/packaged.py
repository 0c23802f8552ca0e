"""Models in text, packaged with the reference's generate_artifacts, and held to PyTorch."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from odtpack.artifacts import LossType, OptimType, generate_artifacts
from odtpack_runtime import CheckpointState, Module, Optimizer
from tests.packaging_tools import open_training

Training = tuple[CheckpointState, Module, Optimizer]

Forward = Callable[..., Tensor]


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def package(folder, model, train, loss=LossType.MSELoss, optimizer=OptimType.SGD):
    generate_artifacts(model, train, loss=loss, optimizer=optimizer, artifact_directory=folder)
    return open_training(folder)


def follows(folder, model, train, x, forward):
    """Package a model with MSE; its loss and gradients are PyTorch's. ``forward(x, **trained)``."""
    training = package(folder, model, train)
    state, module, _ = training
    tensors = {
        name: torch.from_numpy(state.parameters[name].data.copy()).double().requires_grad_()
        for name in train
    }
    y = forward(torch.from_numpy(x).double() if x.dtype.kind == "f" else torch.from_numpy(x),
                **tensors)  # fmt: skip
    target = random(*y.shape, seed=99)
    expected = F.mse_loss(y, torch.from_numpy(target).double())
    gradients = torch.autograd.grad(expected, list(tensors.values()))
    np.testing.assert_allclose(module(x, target), expected.item(), rtol=1e-5)
    for name, gradient in zip(train, gradients, strict=True):
        found = state.parameters[name].grad
        np.testing.assert_allclose(found, gradient.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)
    return training
