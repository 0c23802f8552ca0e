"""Lion: the sign of an interpolated momentum."""

from __future__ import annotations

import dataclasses

import numpy as np

from odtpack.optimizers.common.base import (
    FIRST,
    Ops,
    Optimizer,
    StateVector,
    Value,
    Values,
    keep_factor,
    lerp,
)
from odtpack.option import option


@dataclasses.dataclass(frozen=True)
class Lion(Optimizer):
    """The sign of a momentum as the direction.

    ::

        p <- p - lr (sign(b1 m + (1 - b1) g) + weight_decay p)
        m <- b2 m + (1 - b2) g

    Every element moves by the learning rate, so that one three to ten times smaller than
    AdamW's is right, and a decay larger by the same factor. One moment: half of AdamW's state.

    Source: Chen et al. (2023), https://arxiv.org/abs/2302.06675, algorithm 2.

    Raises:
        OdtpackError: A hyperparameter is out of range.
    """

    kind = "lion"
    summary = "Lion."
    source = "Chen et al. (2023), algorithm 2"
    keeps = "one moment: 4 bytes"
    learning_rates = (0.0003, 0.001, 0.0001)
    beta1: float = option(
        0.9, "Weight of the moment in the interpolation whose sign is the update.", above=0, below=1
    )
    # Less would make rounding of the moment, times beta1 / beta2, the sign of the update.
    beta2: float = option(0.99, "Decay of the moment.", least=0.1, below=1)

    state = (StateVector(FIRST),)

    def write(self, op: Ops, values: Values, weight_decay: Value | float) -> dict[str, Value]:
        params, rate, gradients = values["params"], values["learning_rate"], values["gradients"]
        # The new moment is computed first, in place, and the mix from it, which is the same number.
        # To order the reads by a Shape does not work: ONNX Runtime folds it where sizes are known.
        moment = lerp(op, values[FIRST], gradients, self.beta2)
        mixed = lerp(op, moment, gradients, self.beta1 / self.beta2)
        # u / (|u| + tiny) is the sign of u, NaN where u is. The operator Sign takes longer
        # than all other nodes together, and hides NaN.
        # Tiny is float32's for float64, too: ONNX Runtime removes an addition of what float32
        # rounds to 0, and the direction of 0 would be 0 / 0.
        tiny = float(np.finfo(np.float32).tiny)
        direction = op.Div(mixed, op.Add(op.Abs(mixed), tiny))
        keep = keep_factor(op, rate, weight_decay)
        if keep is not None:
            params = op.Mul(params, keep)
        return {"params": op.Sub(params, op.Mul(direction, rate)), FIRST: moment}
