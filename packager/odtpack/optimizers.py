"""Optimizers as graphs over flat vectors, in order of increasing complexity.

An optimizer model updates a flat vector of parameters, whatever their number: its inputs
are ``params`` and ``gradients`` and, for each moment, a vector of the same length. All
nodes are elementwise, so a runtime may run it over the whole vector or chunk by chunk,
and may bind each ``X.out`` to the memory of ``X``.
"""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir

from odtpack import targets
from odtpack.autodiff.ops import Ops
from odtpack.errors import OdtpackError
from odtpack.passes import aliases

FIRST, SECOND = "first_order_moments", "second_order_moments"


@dataclasses.dataclass(frozen=True)
class SGD:
    """p <- p - lr g."""

    kind = "sgd"
    moments: tuple[str, ...] = ()

    def write(self, op: Ops, values: dict[str, ir.Value]) -> dict[str, ir.Value]:
        """Write the update; return the new value of each vector."""
        step = op.Mul(values["gradients"], values["learning_rate"])
        return {"params": op.Sub(values["params"], step)}

    def settings(self) -> dict[str, float]:
        """Hyperparameters, for the manifest."""
        return {}


@dataclasses.dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay, in the order of the reference (its adam_mode 1).

    m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2
    p <- p - lr sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + epsilon)
    p <- p - lr weight_decay p

    Without ``bias_correction`` both powers count as 0.

    Source: Hugging Face transformers' AdamW, after Loshchilov and Hutter (2019).

    Raises:
        OdtpackError: A hyperparameter is out of range.
    """

    kind = "adamw"
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-6
    weight_decay: float = 0.0
    moments: tuple[str, ...] = (FIRST, SECOND)
    bias_correction: bool = True

    def __post_init__(self) -> None:
        for name, good, bounds in (
            ("beta1", 0 < self.beta1 < 1, "between 0 and 1"),
            ("beta2", 0 < self.beta2 < 1, "between 0 and 1"),
            ("epsilon", 0 < self.epsilon < math.inf, "above 0"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "0 or more"),
        ):
            if not good:
                raise OdtpackError(
                    "bad-hyperparameter",
                    f"{name} is {getattr(self, name):g}; it must be {bounds}",
                    hint=f"leave it out: the default is {getattr(AdamW, name):g}",
                )

    def write(self, op: Ops, values: dict[str, ir.Value]) -> dict[str, ir.Value]:
        """Write the update; return the new value of each vector."""
        params, grads, rate = values["params"], values["gradients"], values["learning_rate"]
        m = op.Add(op.Mul(values[FIRST], self.beta1), op.Mul(grads, 1 - self.beta1))
        v = op.Add(
            op.Mul(values[SECOND], self.beta2),
            op.Mul(op.Mul(grads, grads), 1 - self.beta2),
        )
        size = rate
        if self.bias_correction:
            # 1 - b^t as 1 - exp(t ln b), on one element, in double: with b2 = 0.999 the first
            # steps lose four digits to cancellation in float32.
            step = op.cast(values["step"], ir.DataType.DOUBLE)
            unbias1 = op.Sub(1.0, op.Exp(op.Mul(step, math.log(self.beta1))))
            unbias2 = op.Sub(1.0, op.Exp(op.Mul(step, math.log(self.beta2))))
            correction = op.cast(op.Div(op.Sqrt(unbias2), unbias1), ir.DataType.FLOAT)
            size = op.Mul(rate, correction)
        direction = op.Div(m, op.Add(op.Sqrt(v), self.epsilon))
        new = op.Sub(params, op.Mul(direction, size))
        if self.weight_decay:
            keep = op.Sub(1.0, op.Mul(rate, self.weight_decay))
            new = op.Mul(new, keep)
        return {"params": new, FIRST: m, SECOND: v}

    def settings(self) -> dict[str, float]:
        """Hyperparameters, for the manifest."""
        uncorrected = {} if self.bias_correction else {"bias_correction": False}
        return uncorrected | {
            "beta1": self.beta1,
            "beta2": self.beta2,
            "epsilon": self.epsilon,
            "weight_decay": self.weight_decay,
        }


Optimizer = SGD | AdamW
OPTIMIZERS: dict[str, type[SGD] | type[AdamW]] = {"sgd": SGD, "adamw": AdamW}


def optimizer_model(optimizer: Optimizer, opset: int) -> ir.Model:
    """Build the optimizer model.

    Args:
        optimizer: Formula and hyperparameters.
        opset: Opset of the training model, so that one runtime loads both.

    Returns:
        Model with inputs ``learning_rate`` FLOAT[1], ``step`` INT64[1] (from 1), and
        ``params``, ``gradients`` and the moments, each FLOAT[n].
    """
    vectors = ["params", "gradients", *optimizer.moments]
    values = {
        "learning_rate": ir.val("learning_rate", dtype=ir.DataType.FLOAT, shape=[1]),
        "step": ir.val("step", dtype=ir.DataType.INT64, shape=[1]),
    }
    values.update((name, ir.val(name, dtype=ir.DataType.FLOAT, shape=["n"])) for name in vectors)
    graph = ir.Graph(
        list(values.values()), [], nodes=[], opset_imports={"": opset}, name="optimizer"
    )
    for name, value in optimizer.write(Ops(graph), values).items():
        value.name = f"{name}.out"
        value.shape = ir.Shape(["n"])
        graph.outputs.append(value)
        aliases.verify(graph, values[name], value)
    model = ir.Model(graph, ir_version=8, producer_name="odtpack")
    model.metadata_props["odtpack.optimizer"] = optimizer.kind
    model.metadata_props["odtpack.moments"] = str(len(optimizer.moments))
    targets.stamp(model)
    return model
