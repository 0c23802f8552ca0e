"""How a package is trained, as its manifest says it: optimizer, clipping, groups, schedule."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from odtpack_runtime.package.manifest_base import Name, Part


class AdamWInfo(Part):
    """Hyperparameters of AdamW."""

    kind: Literal["adamw"]
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    formula: Literal["reference", "pytorch"] = "reference"
    bias_correction: bool = True


class AdamInfo(Part):
    """Hyperparameters of Adam with an L2 penalty."""

    kind: Literal["adam"]
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    bias_correction: bool = True


class CustomOptimizerInfo(Part):
    """An optimizer that is described by its model only."""

    kind: Literal["custom"]


class SGDInfo(Part):
    """Hyperparameters of SGD."""

    kind: Literal["sgd"]
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0


class LionInfo(Part):
    """Hyperparameters of Lion."""

    kind: Literal["lion"]
    beta1: float
    beta2: float
    weight_decay: float


class AdafactorInfo(Part):
    """Hyperparameters of Adafactor."""

    kind: Literal["adafactor"]
    beta2_decay: float
    epsilon2: float
    clip_threshold: float
    weight_decay: float


OptimizerInfo = Annotated[
    AdamWInfo | AdamInfo | SGDInfo | LionInfo | AdafactorInfo | CustomOptimizerInfo,
    Field(discriminator="kind"),
]


class ClipInfo(Part):
    """How gradients are clipped: by the norm of all of them, or each element by its value."""

    norm: float | None = None
    value: float | None = None


class GroupInfo(Part):
    """Parameters with a learning rate and a weight decay of their own."""

    learning_rate_scale: float
    weight_decay: float
    parameters: tuple[Name, ...]


class ScheduleInfo(Part):
    """The schedule of the learning rate that the recipe proposes.

    ``settings`` are those of the class of this kind in
    :data:`odtpack_runtime.training.schedules.SCHEDULES`; without ``total_steps`` a schedule that
    ends runs over the whole training.
    """

    kind: Name
    settings: dict[str, int | float | tuple[int, ...]] = Field({})
    learning_rate: float | None = None
