"""Ten steps of SGD, by odtpack and by PyTorch in float64, to lay side by side."""

import dataclasses
import math

import numpy as np
import onnx
import torch
from torch.nn import functional as F

from tests.packaging_tools import losses_of_steps, open_training
from tests.torch_twins import losses_of, twin
from tests.training.settled import KinkMargin

STEPS = 10


@dataclasses.dataclass(frozen=True)
class Run:
    """What a training run leaves."""

    losses: np.ndarray  # of every step, before its update
    values: dict[str, np.ndarray]  # parameters and running statistics after the last step
    eval_loss: float  # of the same batch in evaluation mode, after the last step
    kink_margin: float = math.inf  # how near to a kink of Relu6 it came, where that was watched


def ours(folder, x, labels, learning_rate, *, steps=STEPS, options=None):
    """Train the package in ``folder`` through the training runtime."""
    state, module, optimizer = open_training(folder, options)
    optimizer.set_learning_rate(learning_rate)
    losses = losses_of_steps(module, optimizer, [(x, labels)] * steps)
    evaluated = module.eval()(x, labels)
    return Run(
        np.array(losses),
        {name: parameter.data.copy() for name, parameter in state.parameters},
        float(evaluated[0] if isinstance(evaluated, tuple) else evaluated),
    )


def pytorch(model, x, labels, learning_rate, *, steps=STEPS, prepare=lambda module: None):
    """Train PyTorch's twin of a zoo model, changed by ``prepare``, in float64."""
    module = twin(model, running_var="unbiased").double()
    prepare(module)
    margin = KinkMargin(module)
    data, classes = torch.from_numpy(x), torch.from_numpy(labels)
    if data.is_floating_point():
        data = data.double()
    optimizer = torch.optim.SGD(module.parameters(), lr=learning_rate)
    losses = losses_of(optimizer, lambda: F.cross_entropy(module(data), classes), steps)
    values = dict(module.named_parameters()) | dict(module.named_buffers())
    near = margin.value
    module.eval()
    return Run(
        np.array(losses), {name: value.detach().numpy() for name, value in values.items()},
        F.cross_entropy(module(data), classes).item(), near,
    )  # fmt: skip


def initial(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Initializers of a model by name."""
    return {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
