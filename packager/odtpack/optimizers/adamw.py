"""AdamW."""

from __future__ import annotations

import dataclasses
from typing import Final, Literal

from odtpack.optimizers.common.base import (
    FIRST,
    SECOND,
    Ops,
    Optimizer,
    StateVector,
    Value,
    Values,
    change,
    keep_factor,
    moments,
)
from odtpack.option import option

REFERENCE: Final = "reference"
PYTORCH: Final = "pytorch"


@dataclasses.dataclass(frozen=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay, by one of two formulas.

    Both begin with::

        m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2

    ``reference``, that of Hugging Face transformers and adam_mode 1 of onnxruntime-training::

        p <- p - lr sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + epsilon)
        p <- p - lr weight_decay p

    ``pytorch``, that of ``torch.optim.AdamW`` and adam_mode 0::

        p <- p - lr weight_decay p
        p <- p - lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + epsilon)

    Without ``bias_correction`` both powers b^t count as 0.

    Source: Loshchilov and Hutter (2019), https://arxiv.org/abs/1711.05101.

    Raises:
        OdtpackError: A hyperparameter is out of range.
    """

    kind = "adamw"
    summary = "Adam with decoupled weight decay."
    source = (
        "Hugging Face transformers, `adam_mode` 1 of onnxruntime-training; with "
        "`formula=pytorch` `torch.optim.AdamW`, `adam_mode` 0"
    )
    keeps = "two moments: 8 bytes"
    beta1: float = option(0.9, "Decay of the first moment.", above=0, below=1)
    beta2: float = option(0.999, "Decay of the second moment.", above=0, below=1)
    epsilon: float = option(1e-6, "Added to the denominator.", above=0)
    formula: Literal["reference", "pytorch"] = option(
        REFERENCE,
        "Whose formula: that of onnxruntime-training's default, or of `torch.optim.AdamW`.",
    )
    bias_correction: bool = option(True, "Whether the moments are corrected for their start at 0.")

    state = (StateVector(FIRST), StateVector(SECOND))

    def write(self, op: Ops, values: Values, weight_decay: Value | float) -> dict[str, Value]:
        rate, params = values["learning_rate"], values["params"]
        m, v = moments(op, values, values["gradients"], self.beta1, self.beta2)
        keep = keep_factor(op, rate, weight_decay)
        early = self.formula == PYTORCH
        if keep is not None and early:
            params = op.Mul(params, keep)
        step = change(op, values, m, v, self, scaled_epsilon=early)
        new = op.Sub(params, step)
        if keep is not None and not early:
            new = op.Mul(new, keep)
        return {"params": new, FIRST: m, SECOND: v}
