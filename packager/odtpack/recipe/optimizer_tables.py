"""``[optimizer]``, ``[clip]``, ``[[groups]]`` and ``[schedule]`` of a recipe.

The keys are the fields of the classes that they describe, with the same defaults; a test
holds the two together.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from odtpack.recipe.ranges import Count, NotNegative, Positive, PositiveCount, Range, Switch, Table
from odtpack.recipe.variants import by_kind
from odtpack_simulator.values.schema_errors import TAG_PREFIX

_Open = Annotated[float, Range(above=0, below=1)]
_HalfOpen = Annotated[float, Range(least=0, below=1)]


class _Optimizer(Table):
    weight_decay: NotNegative = 0.0
    """How strongly parameters are drawn to 0; `adam` and `sgd`: an L2 penalty."""
    decay_vectors: Switch = True
    """Whether biases, scales of normalizations and other vectors decay too."""


class AdamWTable(_Optimizer):
    """Adam with decoupled weight decay."""

    kind: Literal["adamw"]
    beta1: _Open = 0.9
    """Decay of the first moment."""
    beta2: _Open = 0.999
    """Decay of the second moment."""
    epsilon: Positive = 1e-6
    """Added to the denominator."""
    formula: Literal["reference", "pytorch"] = "reference"
    """Whose formula: that of onnxruntime-training's default, or of `torch.optim.AdamW`."""
    bias_correction: Switch = True
    """Whether the moments are corrected for their start at 0."""


class AdamTable(_Optimizer):
    """Adam."""

    kind: Literal["adam"]
    beta1: _Open = 0.9
    """Decay of the first moment."""
    beta2: _Open = 0.999
    """Decay of the second moment."""
    epsilon: Positive = 1e-8
    """Added to the denominator."""
    bias_correction: Switch = True
    """Whether the moments are corrected for their start at 0."""


class SGDTable(_Optimizer):
    """Stochastic gradient descent."""

    kind: Literal["sgd"]
    momentum: _HalfOpen = 0.0
    """How much of the last step is kept."""
    dampening: _HalfOpen = 0.0
    """Share of the gradient that does not enter the momentum."""
    nesterov: Switch = False
    """Nesterov's method; asks for momentum and no dampening."""

    @model_validator(mode="after")
    def _check_momentum(self) -> SGDTable:
        if self.nesterov and (not self.momentum or self.dampening):
            msg = "nesterov asks for momentum and no dampening"
            raise ValueError(msg)
        if self.dampening and not self.momentum:
            msg = "dampening asks for momentum"
            raise ValueError(msg)
        return self


class LionTable(_Optimizer):
    """Lion."""

    kind: Literal["lion"]
    beta1: _Open = 0.9
    """How the sign of a step is mixed."""
    beta2: _Open = 0.99
    """Decay of the moment."""


class AdafactorTable(_Optimizer):
    """Adafactor, with the learning rate as given."""

    kind: Literal["adafactor"]
    beta2_decay: Annotated[float, Range(most=0)] = -0.8
    """Power of the step by which the second moment decays."""
    epsilon2: Positive = 1e-3
    """Least root mean square of a parameter."""
    clip_threshold: Positive = 1.0
    """Largest root mean square of a step."""


OptimizerTable = Annotated[
    Annotated[AdamWTable, Tag(f"{TAG_PREFIX}adamw")]
    | Annotated[AdamTable, Tag(f"{TAG_PREFIX}adam")]
    | Annotated[SGDTable, Tag(f"{TAG_PREFIX}sgd")]
    | Annotated[LionTable, Tag(f"{TAG_PREFIX}lion")]
    | Annotated[AdafactorTable, Tag(f"{TAG_PREFIX}adafactor")],
    Discriminator(by_kind),
]


class ClipTable(Table):
    """How gradients are clipped; one of the two."""

    norm: Positive | None = None
    """Norm that all gradients together are scaled down to."""
    value: Positive | None = None
    """Largest magnitude of an element."""

    @model_validator(mode="after")
    def _check_one(self) -> ClipTable:
        if (self.norm is None) == (self.value is None):
            msg = "needs one of norm and value, not both"
            raise ValueError(msg)
        return self


class GroupTable(Table):
    """Trained parameters with numbers of their own; the first pattern that matches counts."""

    parameters: Annotated[str, Field(min_length=1)]
    """Pattern of their names."""
    learning_rate_scale: NotNegative = 1.0
    """Factor of the learning rate; 0 keeps them as they are."""
    weight_decay: NotNegative | None = None
    """Weight decay in place of the optimizer's."""


class _Schedule(Table):
    warmup_steps: Count = 0
    """Steps over which the rate rises from 0."""
    learning_rate: Positive | None = None
    """Rate that the factors are of; without it, that of the training."""


class _Ending(_Schedule):
    total_steps: PositiveCount | None = None
    """Step at which it ends; without it, at the end of the training."""

    @model_validator(mode="after")
    def _check_end(self) -> _Ending:
        if self.total_steps is not None and self.total_steps < self.warmup_steps:
            msg = f"total_steps must be warmup_steps ({self.warmup_steps}) or more"
            raise ValueError(msg)
        return self


class ConstantTable(_Schedule):
    """One rate after the warm-up."""

    kind: Literal["constant"]


class LinearTable(_Ending):
    """A straight line to 0."""

    kind: Literal["linear"]


class CosineTable(_Ending):
    """Half a cosine wave."""

    kind: Literal["cosine"]
    floor: Annotated[float, Range(least=0, most=1)] = 0.0
    """Factor at the end."""


_Gamma = Annotated[float, Range(above=0, most=1)]


class StepTable(_Schedule):
    """A factor after every period."""

    kind: Literal["step"]
    period: PositiveCount
    """Steps of a period."""
    gamma: _Gamma = 0.1
    """The factor."""


class MultiStepTable(_Schedule):
    """A factor at every milestone."""

    kind: Literal["multistep"]
    milestones: Annotated[tuple[Count, ...], Field(min_length=1)]
    """Steps at which the rate changes, rising."""
    gamma: _Gamma = 0.1
    """The factor."""

    @model_validator(mode="after")
    def _check_order(self) -> MultiStepTable:
        if list(self.milestones) != sorted(self.milestones):
            msg = "milestones must rise"
            raise ValueError(msg)
        return self


ScheduleTable = Annotated[
    Annotated[ConstantTable, Tag(f"{TAG_PREFIX}constant")]
    | Annotated[LinearTable, Tag(f"{TAG_PREFIX}linear")]
    | Annotated[CosineTable, Tag(f"{TAG_PREFIX}cosine")]
    | Annotated[StepTable, Tag(f"{TAG_PREFIX}step")]
    | Annotated[MultiStepTable, Tag(f"{TAG_PREFIX}multistep")],
    Discriminator(by_kind),
]
