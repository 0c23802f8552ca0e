"""Stochastic gradient descent."""

from __future__ import annotations

import dataclasses

import numpy as np

from odtpack.errors import OdtpackError
from odtpack.optimizers.common.base import (
    FIRST,
    Ops,
    Optimizer,
    StateVector,
    Value,
    Values,
    add_decay,
)
from odtpack.option import option


@dataclasses.dataclass(frozen=True)
class SGD(Optimizer):
    """p <- p - lr g, with what ``torch.optim.SGD`` adds to it.

    ::

        g <- g + weight_decay p
        b <- g in the first step, momentum b + (1 - dampening) g from then on
        p <- p - lr b, with nesterov p - lr (g + momentum b)

    Without momentum nothing is kept.

    Source: Sutskever et al. (2013), as in https://docs.pytorch.org/docs/stable/optim.html.

    Raises:
        OdtpackError: A hyperparameter is out of range, or Nesterov's method is asked for
            without momentum or with dampening.
    """

    kind = "sgd"
    summary = "Stochastic gradient descent."
    source = "`torch.optim.SGD`, with dampening and Nesterov's method"
    keeps = "with momentum one moment: 4 bytes; else nothing"
    learning_rates = (0.03, 0.1, 0.01)
    momentum: float = option(0.0, "How much of the last step is kept.", least=0, below=1)
    dampening: float = option(
        0.0, "Share of the gradient that does not enter the momentum.", least=0, below=1
    )
    nesterov: bool = option(False, "Nesterov's method; requires momentum above 0 and dampening 0.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.nesterov and (not self.momentum or self.dampening)) or (
            self.dampening and not self.momentum
        ):
            what = "nesterov" if self.nesterov else "dampening"
            raise OdtpackError(
                "bad-hyperparameter",
                f"{what} asks for momentum" + (" and no dampening" if self.nesterov else ""),
                hint="write for example: --momentum 0.9",
            )

    @property
    def state(self) -> tuple[StateVector, ...]:
        """The momentum, if there is one."""
        return (StateVector(FIRST),) if self.momentum else ()

    def write(self, op: Ops, values: Values, weight_decay: Value | float) -> dict[str, Value]:
        params, rate = values["params"], values["learning_rate"]
        gradients = add_decay(op, values["gradients"], params, weight_decay)
        if not self.momentum:
            return {"params": op.Sub(params, op.Mul(gradients, rate))}
        fresh = gradients
        if self.dampening:
            dtype = op.type_of(gradients).numpy()
            share = op.constant(np.full(1, 1 - self.dampening, dtype))
            fresh = op.Mul(gradients, op.Where(op.Equal(values["step"], 1), 1.0, share))
        buffer = op.Add(op.Mul(values[FIRST], self.momentum), fresh)
        direction = buffer
        if self.nesterov:
            direction = op.Add(gradients, op.Mul(buffer, self.momentum))
        return {"params": op.Sub(params, op.Mul(direction, rate)), FIRST: buffer}
