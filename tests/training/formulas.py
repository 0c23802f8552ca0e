"""Optimizers in numpy float64, written from their papers and from PyTorch's documentation."""

from collections.abc import Callable

import numpy as np

from odtpack import optimizers

Array = np.ndarray
Formula = Callable[[Array, Array, dict[str, Array], float, int, float], Array]
"""New p from p, g, what is kept (changed in place), learning rate, step from 1, decay."""

FORMULAS: dict[str, Callable[..., Formula]] = {}
CASES: dict[str, optimizers.Optimizer] = {}
RATES: dict[str, float] = {}
"""What is known of each optimizer by its kind: the formula, settings to try, a learning rate."""


def formula(kind: str, rate: float, **cases: dict[str, object]) -> Callable[..., object]:
    """Declare the formula of an optimizer, a rate at which it learns, and settings to try.

    The settings have names; ``plain`` stands for the optimizer's own.
    """

    def declare(function: Callable[..., Formula]) -> Callable[..., Formula]:
        FORMULAS[kind], RATES[kind] = function, rate
        for label, settings in cases.items():
            name = kind if label == "plain" else f"{kind}-{label.replace('_', '-')}"
            CASES[name] = optimizers.OPTIMIZERS[kind](**settings)  # type: ignore[arg-type]
        return function

    return declare


@formula(
    "sgd", 0.1, plain={}, decay={"weight_decay": 0.1}, momentum={"momentum": 0.9},
    dampening={"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.05},
    nesterov={"momentum": 0.9, "nesterov": True, "weight_decay": 0.05},
)  # fmt: skip
def sgd(o: optimizers.SGD) -> Formula:
    def step(p: Array, g: Array, kept: dict[str, Array], lr: float, t: int, decay: float) -> Array:
        g = g + decay * p
        if not o.momentum:
            return p - lr * g
        first = g if t == 1 else o.momentum * kept["b"] + (1 - o.dampening) * g
        kept["b"] = first
        return p - lr * (g + o.momentum * first if o.nesterov else first)

    return step


@formula(
    "lion", 0.002, plain={}, decay={"beta1": 0.8, "beta2": 0.95, "weight_decay": 0.3},
    forgetful={"beta1": 0.95, "beta2": 0.5},
)  # fmt: skip
def lion(o: optimizers.Lion) -> Formula:
    def step(p: Array, g: Array, kept: dict[str, Array], lr: float, t: int, decay: float) -> Array:
        m = kept.setdefault("m", np.zeros_like(p))
        direction = np.sign(o.beta1 * m + (1 - o.beta1) * g)
        kept["m"] = o.beta2 * m + (1 - o.beta2) * g
        return p - lr * (direction + decay * p)

    return step


def _moments(beta1: float, beta2: float, g: Array, kept: dict[str, Array]) -> tuple[Array, Array]:
    kept["m"] = beta1 * kept.get("m", 0.0) + (1 - beta1) * g
    kept["v"] = beta2 * kept.get("v", 0.0) + (1 - beta2) * g * g
    return kept["m"], kept["v"]


@formula(
    "adam", 0.01, plain={},
    decay={"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3, "weight_decay": 0.1},
    uncorrected={"bias_correction": False},
)  # fmt: skip
def adam(o: optimizers.Adam) -> Formula:
    def step(p: Array, g: Array, kept: dict[str, Array], lr: float, t: int, decay: float) -> Array:
        m, v = _moments(o.beta1, o.beta2, g + decay * p, kept)
        c1, c2 = (1 - o.beta1**t, 1 - o.beta2**t) if o.bias_correction else (1.0, 1.0)
        return p - lr * (m / c1) / (np.sqrt(v / c2) + o.epsilon)

    return step


@formula(
    "adamw", 0.01, plain={"weight_decay": 0.1},
    uncorrected={"weight_decay": 0.1, "bias_correction": False},
    pytorch={"formula": "pytorch", "weight_decay": 0.1},
    pytorch_eps={"formula": "pytorch", "beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3},
    pytorch_uncorrected={"formula": "pytorch", "bias_correction": False},
)  # fmt: skip
def adamw(o: optimizers.AdamW) -> Formula:
    def step(p: Array, g: Array, kept: dict[str, Array], lr: float, t: int, decay: float) -> Array:
        m, v = _moments(o.beta1, o.beta2, g, kept)
        c1, c2 = (1 - o.beta1**t, 1 - o.beta2**t) if o.bias_correction else (1.0, 1.0)
        if o.formula == "pytorch":
            p = p - lr * decay * p
            return p - lr * (m / c1) / (np.sqrt(v / c2) + o.epsilon)
        p = p - lr * np.sqrt(c2) / c1 * m / (np.sqrt(v) + o.epsilon)
        return p - lr * decay * p

    return step


def as_matrix(x: Array) -> Array:
    """A tensor of more than two axes as Adafactor sees it: the first axes by the rest."""
    if x.ndim < 3:
        return x
    sizes = [(x[(..., *[0] * (x.ndim - i))].size, i) for i in range(1, x.ndim)]
    rows = min((rows + x.size // rows, i, rows) for rows, i in sizes)[2]
    return x.reshape(rows, -1)


@formula(
    "adafactor", 0.05, plain={},
    other={"beta2_decay": -0.5, "epsilon2": 0.1, "clip_threshold": 1.1, "weight_decay": 0.1},
    tight={"epsilon2": 0.1, "clip_threshold": 0.3},
)  # fmt: skip
def adafactor(o: optimizers.Adafactor) -> Formula:
    epsilon1 = 2.0**-23

    def rms(x: Array) -> float:
        return float(np.sqrt(np.mean(x * x)))

    def step(p: Array, g: Array, kept: dict[str, Array], lr: float, t: int, decay: float) -> Array:
        b = t**o.beta2_decay
        shape = p.shape
        p, g = as_matrix(p), as_matrix(g)
        if g.ndim > 1:
            row, column = (g * g).mean(-1, keepdims=True), (g * g).mean(-2, keepdims=True)
            kept["r"] = (1 - b) * kept.get("r", 0.0) + b * row
            kept["c"] = (1 - b) * kept.get("c", 0.0) + b * column
            v = kept["r"] * kept["c"] / np.maximum(kept["r"].mean(-2, keepdims=True), epsilon1)
        else:
            kept["v"] = v = (1 - b) * kept.get("v", 0.0) + b * g * g
        u = g / np.sqrt(np.maximum(v, epsilon1**2))
        size = max(o.epsilon2, rms(p)) * min(lr, 1 / np.sqrt(t))
        p = p - lr * decay * p
        return (p - size * u / max(1.0, rms(u) / o.clip_threshold)).reshape(shape)

    return step


def clipped(grads: dict[str, Array], clip: optimizers.Clip) -> dict[str, Array]:
    """Gradients by the formulas of torch.nn.utils."""
    if clip.value is not None:
        return {name: np.clip(g, -clip.value, clip.value) for name, g in grads.items()}
    if clip.norm is not None:
        norm = np.sqrt(sum(float((g * g).sum()) for g in grads.values()))
        factor = min(1.0, clip.norm / (norm + 1e-6))
        return {name: g * factor for name, g in grads.items()}
    return grads
