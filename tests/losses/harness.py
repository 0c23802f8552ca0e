"""Trains on any loss: parameters are added to what the loss reads, so its gradient is theirs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnxruntime
import torch

from odtpack import optimizers
from odtpack.build import build_package
from tests.model_text import LEVELS, parsed
from tests.packaging_tools import open_training

RATE = 0.1
TorchLoss = Callable[..., torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss with options, inputs of :func:`shifted`, targets; the oracle takes predictions too."""

    name: str
    options: Mapping[str, object]
    xs: Sequence[np.ndarray]
    targets: Sequence[np.ndarray]
    oracle: TorchLoss


def shifted(shapes, opset=17, values=None, batch="N"):
    """y0 = x0 + s0, y1 = x1 + s1, ...: each s a parameter of the shape of one sample."""
    samples = [tuple(shape[1:]) for shape in shapes]
    dims = [", ".join([batch, *map(str, sample)]) for sample in samples]
    inputs = ", ".join(f"float[{d}] x{i}" for i, d in enumerate(dims))
    outputs = ", ".join(f"float[{d}] y{i}" for i, d in enumerate(dims))
    nodes = " ".join(f"y{i} = Add(x{i}, s{i})" for i in range(len(dims)))
    random = np.random.default_rng(1)
    given = values or [random.standard_normal(sample) for sample in samples]
    shifts = {f"s{i}": value.astype(np.float32) for i, value in enumerate(given)}
    return parsed(f"shifted ({inputs}) => ({outputs}) {{{nodes}}}", opset, **shifts)


def package(folder, model, name, options, **more):
    """A package that trains every parameter of a model with SGD."""
    return build_package(
        model, folder, loss=name, loss_options=options, optimizer=optimizers.SGD(), **more
    )


def options(optimized: bool) -> onnxruntime.SessionOptions:
    """Session options with ONNX Runtime's graph optimizations on or off."""
    found = onnxruntime.SessionOptions()
    found.graph_optimization_level = LEVELS["all" if optimized else "off"]
    return found


def check(
    folder, case, *, opset=17, optimized=True, steps=10, rtol=2e-5, atol=2e-6, loss_rtol=None
):
    """Ten steps of SGD side by side with PyTorch in float64: losses, gradients, parameters.

    With a ``loss_rtol`` the absolute tolerance of losses is 0.
    """
    xs, targets = case.xs, case.targets
    model = shifted([x.shape for x in xs], opset)
    package(folder, model, case.name, case.options, prediction=False)
    state, module, optimizer = open_training(folder, options(optimized))
    optimizer.set_learning_rate(RATE)
    shifts = [
        torch.from_numpy(state.parameters[f"s{i}"].data.astype(np.float64)).requires_grad_()
        for i in range(len(xs))
    ]
    inputs = [torch.from_numpy(x).double() for x in xs]
    wanted = [torch.from_numpy(t) for t in targets]
    wanted = [t.double() if t.is_floating_point() else t for t in wanted]
    torch_optimizer = torch.optim.SGD(shifts, lr=RATE)
    limits = {"rtol": rtol, "atol": atol} if loss_rtol is None else {"rtol": loss_rtol}

    def predictions() -> list[torch.Tensor]:
        # The sum is rounded to float32, as in the model: the loss is judged, not the addition.
        sums = [x + shift for x, shift in zip(inputs, shifts, strict=True)]
        return [y + (y.detach().float() - y.detach()) for y in sums]

    for step in range(steps):
        loss = module(*xs, *targets)
        torch_optimizer.zero_grad()
        reference = case.oracle(*predictions(), *wanted)
        reference.backward()
        message = f"step {step}"
        assert loss.shape == ()
        assert loss.dtype == np.float32
        np.testing.assert_allclose(loss, reference.item(), err_msg=message, **limits)
        for i, shift in enumerate(shifts):
            gradient = shift.grad.numpy()
            assert np.isfinite(gradient).all()
            np.testing.assert_allclose(
                state.parameters[f"s{i}"].grad, gradient, rtol=rtol, atol=atol, err_msg=message
            )
        optimizer.step()
        module.lazy_reset_grad()
        torch_optimizer.step()
    for i, shift in enumerate(shifts):
        np.testing.assert_allclose(
            state.parameters[f"s{i}"].data, shift.detach().numpy(), rtol=rtol, atol=10 * atol
        )
    final = case.oracle(*predictions(), *wanted).item()
    evaluated = module.eval()(*xs, *targets)
    if isinstance(evaluated, tuple):  # a classifier's evaluation model returns its scores as well
        evaluated = evaluated[0]
    limits = limits if loss_rtol else {"rtol": 10 * rtol, "atol": 10 * atol}
    np.testing.assert_allclose(evaluated, final, **limits)
