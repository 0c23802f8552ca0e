"""Optimizer models of float32 networks hold no float64, and lose nothing by it."""

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from odtpack.optimizers import SGD, Adafactor, Adam, AdamW, Lion, Optimizer, optimizer_model
from tests.sweep import split

STEPS = 10_000
SIZE = 24
RATE = 1e-3

TWINS = {
    "adamw": (AdamW(formula="pytorch", epsilon=1e-8, weight_decay=0.01),
              lambda p: torch.optim.AdamW(p, lr=RATE, weight_decay=0.01)),
    "adamw, slow second moment": (
        AdamW(beta2=0.99999, formula="pytorch", epsilon=1e-8),
        lambda p: torch.optim.AdamW(p, lr=RATE, betas=(0.9, 0.99999), weight_decay=0.0),
    ),
    "adam": (Adam(weight_decay=0.01), lambda p: torch.optim.Adam(p, lr=RATE, weight_decay=0.01)),
    "adafactor": (Adafactor(), lambda p: torch.optim.Adafactor(p, lr=RATE)),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", split(TWINS, lambda name: name in ("adafactor", "adamw, slow second moment"))
)
def test_ten_thousand_steps_stay_with_pytorch(name):
    """As far from PyTorch in float64 as PyTorch in float32 is."""
    ours, make = TWINS[name]
    random = np.random.default_rng(0)
    start = random.standard_normal((SIZE, 4)).astype(np.float32)
    gradients = random.standard_normal((STEPS, SIZE, 4)).astype(np.float32) + np.float32(0.1)
    exact = _torch(make, start.astype(np.float64), gradients)
    single = _torch(make, start, gradients)
    found = _ours(ours, start, gradients)
    apart = np.abs(exact - start).max()
    assert apart > 0.5  # there was something to go astray on
    own, peer = (np.abs(each - exact).max() / apart for each in (found, single))
    print(f"{name}: {own:.2g} from float64, PyTorch in float32 {peer:.2g}")
    assert own <= peer * 1.5


@pytest.mark.parametrize("optimizer", [AdamW(), Adam(), Adafactor(), SGD(momentum=0.9), Lion()])
def test_no_value_is_float64(optimizer):
    graph = optimizer_model(optimizer, 17).graph
    types = {value.dtype for node in graph for value in node.outputs}
    types |= {value.dtype for value in graph.initializers.values()}
    casts = {n.attributes["to"].as_int() for n in graph if n.op_type == "Cast"}
    assert ir.DataType.DOUBLE not in types
    assert ir.DataType.DOUBLE not in casts


def _torch(make: object, start: np.ndarray, gradients: np.ndarray) -> np.ndarray:
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = make([parameter])  # type: ignore[operator]
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient.astype(start.dtype))
        optimizer.step()
    return parameter.detach().numpy().astype(np.float64)


def _ours(optimizer: Optimizer, start: np.ndarray, gradients: np.ndarray) -> np.ndarray:
    model = ir.to_proto(optimizer_model(optimizer, 17)).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    shaped = isinstance(optimizer, Adafactor)
    shape = start.shape if shaped else (start.size,)
    values = {"params": start.reshape(shape)}
    for vector in optimizer.state:
        sizes = [s if i in (vector.axes or (0, 1)) else 1 for i, s in enumerate(shape)]
        values[vector.name] = np.zeros(sizes, np.float32)
    fixed = {"learning_rate": np.array([RATE], np.float32)}
    if shaped:
        fixed["factored"] = np.array([True])
    names = list(values)
    for step, gradient in enumerate(gradients, 1):
        fed = {"step": np.array([step]), "gradients": gradient.reshape(shape)}
        results = session.run([f"{name}.out" for name in names], {**values, **fixed, **fed})
        values = dict(zip(names, results, strict=True))
    return values["params"].reshape(start.shape).astype(np.float64)
