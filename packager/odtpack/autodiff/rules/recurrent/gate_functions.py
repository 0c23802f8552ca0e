"""Activation functions inside recurrent operators, with their slopes.

Names, default parameters and the order in which parameters are taken from the attributes
are those of ONNX Runtime's CPU kernels, since they compute the forward pass. Where they
differ from the specification (``ThresholdedRelu`` and ``Affine`` without parameters), a
gradient by the specification would be that of another function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.graph.ops import Ops

_TAKES_ALPHA = {"affine", "leakyrelu", "thresholdedrelu", "scaledtanh", "hardsigmoid", "elu"}
_TAKES_BETA = {"affine", "scaledtanh", "hardsigmoid"}
_DEFAULT_ALPHA = {"leakyrelu": 0.01, "hardsigmoid": 0.2, "elu": 1.0}
_DEFAULT_BETA = {"hardsigmoid": 0.5}
_NAMES = (
    "Affine", "Relu", "LeakyRelu", "ThresholdedRelu", "Tanh", "ScaledTanh", "Sigmoid",
    "HardSigmoid", "Elu", "Softsign", "Softplus",
)  # fmt: skip
_LOWER = {name.lower() for name in _NAMES}


@dataclasses.dataclass(frozen=True)
class GateFunction:
    """y = f(a), where a is clipped first.

    Attributes:
        name: Name in lower case.
        alpha: First parameter.
        beta: Second parameter.
        clip: Bound on the absolute value of a; None without one.
    """

    name: str
    alpha: float = 0.0
    beta: float = 0.0
    clip: float | None = None

    def value(self, op: Ops, a: ir.Value) -> ir.Value:
        """The function of ``a``, which is clipped first."""
        return _VALUES[self.name](op, self._clipped(op, a), self)

    def slope(self, op: Ops, a: ir.Value | None, y: ir.Value) -> ir.Value:
        """The derivative at ``a``, where y = f(a); zero where ``a`` is clipped.

        Args:
            op: Writer.
            a: Input of the function; may be None if :attr:`slope_needs_input` is False.
            y: Its output.
        """
        if a is None:
            return _SLOPES[self.name](op, y, y, self)
        slope = _SLOPES[self.name](op, self._clipped(op, a), y, self)
        if self.clip is None:
            return slope
        return op.Mul(slope, op.heaviside(op.Sub(self.clip, op.Abs(a))))

    @property
    def slope_needs_input(self) -> bool:
        """Whether the slope cannot be computed from the output."""
        known = self.name in ("tanh", "sigmoid", "relu", "hardsigmoid")
        return not known or self.clip is not None

    def _clipped(self, op: Ops, a: ir.Value) -> ir.Value:
        return a if self.clip is None else op.Clip(a, -self.clip, self.clip)


_Slope = Callable[[Ops, ir.Value, ir.Value, GateFunction], ir.Value]
_Value = Callable[[Ops, ir.Value, GateFunction], ir.Value]


def _constant_slope(op: Ops, a: ir.Value, y: ir.Value, f: GateFunction) -> ir.Value:
    dtype = (a.dtype or ir.DataType.FLOAT).numpy()
    return op.Expand(op.constant(np.array([f.alpha], dtype)), op.Shape(y))


def _scaled_tanh_slope(op: Ops, a: ir.Value, y: ir.Value, f: GateFunction) -> ir.Value:
    t = op.Tanh(op.Mul(a, f.beta))
    return op.Mul(op.Sub(1, op.Mul(t, t)), f.alpha * f.beta)


def _softsign_slope(op: Ops, a: ir.Value, y: ir.Value, f: GateFunction) -> ir.Value:
    width = op.Add(op.Abs(a), 1)
    return op.Reciprocal(op.Mul(width, width))


_VALUES: dict[str, _Value] = {
    "sigmoid": lambda op, a, f: op.Sigmoid(a),
    "tanh": lambda op, a, f: op.Tanh(a),
    "relu": lambda op, a, f: op.Relu(a),
    "affine": lambda op, a, f: op.Add(op.Mul(a, f.alpha), f.beta),
    "leakyrelu": lambda op, a, f: op.LeakyRelu(a, alpha=f.alpha),
    "thresholdedrelu": lambda op, a, f: op.ThresholdedRelu(a, alpha=f.alpha),
    "scaledtanh": lambda op, a, f: op.Mul(op.Tanh(op.Mul(a, f.beta)), f.alpha),
    "hardsigmoid": lambda op, a, f: op.HardSigmoid(a, alpha=f.alpha, beta=f.beta),
    "elu": lambda op, a, f: op.Elu(a, alpha=f.alpha),
    "softsign": lambda op, a, f: op.Softsign(a),
    "softplus": lambda op, a, f: op.Softplus(a),
}

_SLOPES: dict[str, _Slope] = {
    "sigmoid": lambda op, a, y, f: op.Mul(y, op.Sub(1, y)),
    "tanh": lambda op, a, y, f: op.Sub(1, op.Mul(y, y)),
    "relu": lambda op, a, y, f: op.heaviside(y),
    "affine": _constant_slope,
    "leakyrelu": lambda op, a, y, f: op.Add(op.Mul(op.heaviside(a), 1 - f.alpha), f.alpha),
    "thresholdedrelu": lambda op, a, y, f: op.heaviside(op.Sub(a, f.alpha)),
    "scaledtanh": _scaled_tanh_slope,
    "hardsigmoid": lambda op, a, y, f: op.Mul(op.heaviside(op.Mul(y, op.Sub(1, y))), f.alpha),
    "elu": lambda op, a, y, f: op.Where(op.Greater(a, 0), 1, op.Add(y, f.alpha)),
    "softsign": _softsign_slope,
    "softplus": lambda op, a, y, f: op.Sigmoid(a),
}


def gate_functions(ctx: Context, defaults: Sequence[str]) -> list[tuple[GateFunction, ...]]:
    """Functions of an LSTM or GRU node, a tuple for each direction.

    Parameters go to those functions that take one, in their order.

    Args:
        ctx: The node.
        defaults: Names of the functions of one direction, where the node names none.

    Raises:
        OdtpackError: A function that ONNX Runtime does not know, or another number of them.
    """
    count = len(defaults) * directions(ctx)
    names = ctx.strings("activations") or tuple(defaults) * directions(ctx)
    if len(names) != count:
        raise ctx.unsupported(f"it names {len(names)} activations, and not {count}")
    alphas, betas = (list(ctx.floats(f"activation_{name}")) for name in ("alpha", "beta"))
    clip = ctx.float("clip", 0.0) or None
    functions = []
    for given in names:
        name = given.lower()
        if name not in _LOWER:
            raise _unknown(ctx, given)
        alpha, beta = _DEFAULT_ALPHA.get(name, 0.0), _DEFAULT_BETA.get(name, 0.0)
        if name in _TAKES_ALPHA and alphas:
            alpha = alphas.pop(0)
        if name in _TAKES_BETA and betas:
            beta = betas.pop(0)
        functions.append(GateFunction(name, alpha, beta, clip))
    size = len(defaults)
    return [tuple(functions[at : at + size]) for at in range(0, count, size)]


def rnn_functions(ctx: Context) -> list[tuple[GateFunction, ...]]:
    """The function of each direction of an RNN node.

    The kernel knows the names in one spelling only. Older ones take parameters by direction
    and zero for one that is missing, newer ones as for LSTM: a node on which they disagree
    has no gradient.

    Raises:
        OdtpackError: As above, or runtimes disagree about a parameter.
    """
    count = directions(ctx)
    names = ctx.strings("activations", ("Tanh", "Tanh"))
    if len(names) == 2 and count == 1:
        names = names[:1]
    if len(names) != count:
        raise ctx.unsupported(f"it names {len(names)} activations, and not {count}")
    for name in names:
        if name not in _NAMES:
            raise _unknown(ctx, name)
    lowered = [name.lower() for name in names]
    alphas = _by_direction(ctx, "activation_alpha", [name in _TAKES_ALPHA for name in lowered])
    betas = _by_direction(ctx, "activation_beta", [name in _TAKES_BETA for name in lowered])
    clip = ctx.float("clip", -1.0)
    return [
        (GateFunction(name, alpha, beta, clip if clip >= 0 else None),)
        for name, alpha, beta in zip(lowered, alphas, betas, strict=True)
    ]


def _by_direction(ctx: Context, attribute: str, takes: Sequence[bool]) -> list[float]:
    given = ctx.floats(attribute)
    order = iter(given)
    in_order = [next(order, None) if taken else None for taken in takes]
    by_direction = [given[d] if taken and d < len(given) else None for d, taken in enumerate(takes)]
    missing = any(taken and value is None for taken, value in zip(takes, by_direction, strict=True))
    if missing or in_order != by_direction or 0 < len(given) < len(takes):
        raise ctx.unsupported(
            f"versions of ONNX Runtime differ in how they read its attribute {attribute}: "
            f"give it {len(takes)} elements, the same ones if only the second direction "
            "needs one"
        )
    return [value or 0.0 for value in by_direction]


def directions(ctx: Context) -> int:
    """Number of directions of a recurrent node."""
    return 2 if ctx.string("direction", "forward") == "bidirectional" else 1


def _unknown(ctx: Context, name: str) -> Exception:
    return ctx.unsupported(
        f"ONNX Runtime knows no activation {name!r} in it; it knows {', '.join(_NAMES)}"
    )
