"""Adam."""

from __future__ import annotations

import dataclasses

from odtpack.optimizers.common.base import (
    FIRST,
    SECOND,
    Ops,
    Optimizer,
    StateVector,
    Value,
    Values,
    add_decay,
    change,
    moments,
)
from odtpack.option import option


@dataclasses.dataclass(frozen=True)
class Adam(Optimizer):
    """Adam, with weight decay as an L2 penalty on the loss: ``torch.optim.Adam``.

    ::

        g <- g + weight_decay p
        m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2
        p <- p - lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + epsilon)

    Source: Kingma and Ba (2015), https://arxiv.org/abs/1412.6980.

    Raises:
        OdtpackError: A hyperparameter is out of range.
    """

    kind = "adam"
    summary = "Adam."
    source = "`torch.optim.Adam`, decay as an L2 penalty"
    keeps = "two moments: 8 bytes"
    beta1: float = option(0.9, "Decay of the first moment.", above=0, below=1)
    beta2: float = option(0.999, "Decay of the second moment.", above=0, below=1)
    epsilon: float = option(1e-8, "Added to the denominator.", above=0)
    bias_correction: bool = option(True, "Whether the moments are corrected for their start at 0.")

    state = (StateVector(FIRST), StateVector(SECOND))

    def write(self, op: Ops, values: Values, weight_decay: Value | float) -> dict[str, Value]:
        params = values["params"]
        gradients = add_decay(op, values["gradients"], params, weight_decay)
        m, v = moments(op, values, gradients, self.beta1, self.beta2)
        step = change(op, values, m, v, self, scaled_epsilon=True)
        return {"params": op.Sub(params, step), FIRST: m, SECOND: v}
