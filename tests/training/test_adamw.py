"""AdamW follows the formula of the reference, computed in float64 from the same gradients."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from odtpack import optimizers
from tests import zoo
from tests.packaging_tools import OPTIMIZERS, batch, generate, open_training

SETTINGS = {
    "default": optimizers.AdamW(),
    "weight-decay": optimizers.AdamW(weight_decay=0.1),
    "other": optimizers.AdamW(beta1=0.8, beta2=0.9, epsilon=1e-3, weight_decay=0.01),
}


@dataclasses.dataclass
class Formula:
    """m, v and p of the reference's adam_mode 1, for one tensor, in float64."""

    method: optimizers.AdamW
    p: np.ndarray
    m: np.ndarray | float = 0.0
    v: np.ndarray | float = 0.0

    def step(self, g: np.ndarray, rate: float, t: int) -> None:
        b1, b2 = self.method.beta1, self.method.beta2
        g = g.astype(np.float64)
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * g * g
        size = rate * np.sqrt(1 - b2**t) / (1 - b1**t)
        self.p = self.p - size * self.m / (np.sqrt(self.v) + self.method.epsilon)
        self.p = self.p - rate * self.method.weight_decay * self.p


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    ("build", "size"),
    [
        (lambda: zoo.mlp((30, 20, 10)), 16),
        (lambda: zoo.cnn(size=12, width=(4, 6)), 4),
        (lambda: zoo.transformer_encoder(vocab=20, d=16, layers=1, T=8, ff=32), 4),
    ],
    ids=["mlp", "cnn", "transformer"],
)
def test_ten_steps(setting: str, build: object, size: int, tmp_path: Path) -> None:
    method, model = SETTINGS[setting], build()
    generate(model, tmp_path, OPTIMIZERS["adamw"])
    if setting != "default":
        _replace_optimizer(tmp_path, method)
    state, module, optimizer = open_training(tmp_path)
    formulas = {n: Formula(method, p.data.astype(np.float64)) for n, p in state.parameters}
    initial = {name: formula.p for name, formula in formulas.items()}
    data = batch(model, size)
    for step in range(1, 11):
        rate = 0.01 / step
        optimizer.set_learning_rate(rate)
        module(*data)
        for name, formula in formulas.items():
            formula.step(state.parameters[name].grad, rate, step)
        optimizer.step()
        module.lazy_reset_grad()
    assert optimizer.step_count == 10
    for name, formula in formulas.items():
        after = state.parameters[name].data
        np.testing.assert_allclose(after, formula.p, rtol=2e-6, atol=1e-6, err_msg=name)
        if not name.endswith("key.bias"):  # the softmax does not see it, its gradient is 0
            assert np.abs(formula.p - initial[name]).max() > 0.001


def _replace_optimizer(folder: Path, method: optimizers.AdamW) -> None:
    opset = onnx.load(folder / "training_model.onnx").opset_import[0].version
    ir.save(optimizers.optimizer_model(method, opset), folder / "optimizer_model.onnx")


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("step", [1, 2, 1000, 10**6])
def test_one_step_over_all_magnitudes(setting: str, step: int) -> None:
    method = SETTINGS[setting]
    model = ir.to_proto(optimizers.optimizer_model(method, 17)).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    random = np.random.default_rng(0)
    magnitude = np.logspace(-15, 8, 1001)
    g = (random.choice([-1, 1], 1001) * magnitude).astype(np.float32)
    g[::100] = 0
    p = random.standard_normal(1001, dtype=np.float32)
    m = (random.standard_normal(1001) * magnitude).astype(np.float32)
    v = (random.random(1001) * magnitude**2).astype(np.float32)
    formula = Formula(method, p.astype(np.float64), m.astype(np.float64), v.astype(np.float64))
    formula.step(g, 0.01, step)
    feeds = {"params": p, "gradients": g, "first_order_moments": m, "second_order_moments": v}
    feeds |= {"learning_rate": np.float32([0.01]), "step": np.int64([step])}
    names = ["params.out", "first_order_moments.out", "second_order_moments.out"]
    after = session.run(names, feeds)
    # The new moment may be the difference of two large numbers.
    scale = np.abs(m) + np.abs(g)
    assert (np.abs(after[1] - formula.m) <= 3e-7 * scale).all()
    np.testing.assert_allclose(after[2], formula.v, rtol=3e-7, atol=1e-37)
    moved = np.abs(formula.p - p)
    reach = 0.01 * scale / (np.sqrt(formula.v) + method.epsilon)
    assert (np.abs(after[0] - formula.p) <= 3e-7 * np.abs(p) + 1e-5 * (moved + reach)).all()


def test_sgd_is_one_subtraction(tmp_path: Path) -> None:
    model = zoo.mlp((6, 5, 4))
    generate(model, tmp_path)
    state, module, optimizer = open_training(tmp_path)
    optimizer.set_learning_rate(0.25)
    module(*batch(model, 3, classes=4))
    expected = {n: p.data - np.float32(0.25) * p.grad for n, p in state.parameters}
    optimizer.step()
    for name, parameter in state.parameters:
        np.testing.assert_array_equal(parameter.data, expected[name])
