"""Runs of an optimizer's model, held to PyTorch's and to the formulas in float64."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from odtpack.build import build_package
from odtpack.optimizers import Adafactor, Clip, GroupRule, Optimizer
from tests import zoo
from tests.packaging_tools import batch, open_training
from tests.training.formulas import FORMULAS, RATES, as_matrix, clipped

STEPS = 25

GROUPS = (
    GroupRule("fc.*", learning_rate_scale=0.25, weight_decay=0.0),
    GroupRule("*.bias", weight_decay=0.2),
    GroupRule("conv1.weight", learning_rate_scale=2.0),
)


@dataclasses.dataclass
class Run:
    """A package of a small CNN in training: kernels, matrices, vectors, chunks."""

    optimizer: Optimizer
    update: dict[str, Any]
    folder: Path

    def __post_init__(self) -> None:
        model = zoo.cnn(size=8, width=(4, 8), classes=3)
        build_package(
            model, self.folder, loss="cross_entropy", optimizer=self.optimizer, **self.update
        )
        self.data = [batch(model, 6, seed=seed, classes=3) for seed in range(4)]
        self.open()

    def open(self, checkpoint: Path | None = None) -> None:
        self.state, self.module, self.stepper = open_training(self.folder, checkpoint=checkpoint)

    @property
    def kind(self) -> str:
        return self.optimizer.kind

    def values(self) -> dict[str, np.ndarray]:
        return {name: p.data.copy() for name, p in self.state.parameters}

    def steps(self, first: int, last: int) -> Iterator[tuple[dict[str, np.ndarray], float, int]]:
        """Make steps with a falling rate; yield the gradients, the rate and the step's number."""
        for t in range(first, last):
            rate = float(np.float32(RATES[self.kind] * (1 - 0.02 * t)))
            self.stepper.set_learning_rate(rate)
            self.module(*self.data[t % len(self.data)])
            grads = {name: p.grad.copy() for name, p in self.state.parameters}
            self.stepper.step()
            for name, p in self.state.parameters:  # clipped or not, they remain
                np.testing.assert_array_equal(p.grad, grads[name])
            self.module.lazy_reset_grad()
            yield grads, rate, t

    def trained(self, first: int, last: int) -> dict[str, bytes]:
        """Parameters after some steps, bit by bit."""
        for _ in self.steps(first, last):
            pass
        return {name: value.tobytes() for name, value in self.values().items()}


def group_of(name, rank, optimizer, update):
    """Learning rate scale and decay of a parameter, said a second time."""
    decay = optimizer.weight_decay if update.get("decay_vectors", True) or rank > 1 else 0.0
    if "groups" in update:
        if name.startswith("fc."):
            return 0.25, 0.0
        if name.endswith(".bias"):
            return 1.0, 0.2
        if name == "conv1.weight":
            return 2.0, decay
    return 1.0, decay


def _torch_optimizer(optimizer: Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    o: Any = optimizer
    common = {"weight_decay": o.weight_decay, "lr": 1.0}
    if o.kind == "sgd":
        more = {name: getattr(o, name) for name in ("momentum", "dampening", "nesterov")}
        return torch.optim.SGD(groups, **common, **more)
    if o.kind == "adafactor":
        more = {"beta2_decay": o.beta2_decay, "eps": (None, o.epsilon2), "d": o.clip_threshold}
        return torch.optim.Adafactor(groups, **common, **more)
    make = torch.optim.AdamW if o.kind == "adamw" else torch.optim.Adam
    return make(groups, **common, betas=(o.beta1, o.beta2), eps=o.epsilon)


def in_torch(optimizer: Optimizer) -> bool:
    """Whether torch.optim has the very formula."""
    if isinstance(optimizer, Adafactor):
        return optimizer.clip_threshold >= 1  # PyTorch takes no less
    return optimizer.kind == "sgd" or (
        optimizer.kind in ("adam", "adamw")
        and getattr(optimizer, "formula", "pytorch") == "pytorch"
        and bool(optimizer.bias_correction)  # type: ignore[attr-defined]
    )


def check_against_torch(run: Run) -> None:
    # PyTorch's Adafactor is given convolution kernels as the matrices that ours makes of them.
    view = as_matrix if run.kind == "adafactor" else np.asarray
    tensors = {name: torch.tensor(view(value)) for name, value in run.values().items()}
    ranks = {name: value.ndim for name, value in run.values().items()}
    groups = []
    for name, tensor in tensors.items():
        scale, decay = group_of(name, ranks[name], run.optimizer, run.update)
        groups.append({"params": [tensor], "weight_decay": decay, "scale": scale})
    theirs = _torch_optimizer(run.optimizer, groups)
    for grads, rate, _ in run.steps(1, STEPS + 1):
        for name, tensor in tensors.items():
            tensor.grad = torch.tensor(view(grads[name]))
        if "clip_norm" in run.update:
            torch.nn.utils.clip_grad_norm_(tensors.values(), run.update["clip_norm"])
        if "clip_value" in run.update:
            torch.nn.utils.clip_grad_value_(tensors.values(), run.update["clip_value"])
        for group in theirs.param_groups:
            group["lr"] = rate * group["scale"]
        theirs.step()
        for name, value in run.values().items():
            np.testing.assert_allclose(
                view(value), tensors[name].numpy(), rtol=2e-6, atol=1e-6, err_msg=name
            )


def check_against_float64(run: Run) -> None:
    exact = {name: value.astype(np.float64) for name, value in run.values().items()}
    start = {name: value.copy() for name, value in exact.items()}
    kept: dict[str, dict[str, np.ndarray]] = {name: {} for name in exact}
    clip = Clip(run.update.get("clip_norm"), run.update.get("clip_value"))
    formula = FORMULAS[run.kind](run.optimizer)  # type: ignore[operator]
    for grads, rate, t in run.steps(1, STEPS + 1):
        doubles = {name: g.astype(np.float64) for name, g in grads.items()}
        for name, g in clipped(doubles, clip).items():
            scale, decay = group_of(name, g.ndim, run.optimizer, run.update)
            exact[name] = formula(exact[name], g, kept[name], rate * scale, t, decay)
        for name, value in run.values().items():
            np.testing.assert_allclose(value, exact[name], rtol=2e-6, atol=1e-6, err_msg=name)
    assert run.stepper.step_count == STEPS
    for name, value in exact.items():
        assert np.abs(value - start[name]).max() > 1e-4, name  # the tolerance times 100
