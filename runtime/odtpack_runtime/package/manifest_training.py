"""How a package is trained, as its manifest says it: optimizer, clipping, groups, schedule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from odtpack_runtime.files.records import Part
from odtpack_runtime.package.manifest_base import Name


@dataclass(frozen=True, kw_only=True)
class AdamWInfo(Part):
    """Hyperparameters of AdamW."""

    kind: Literal["adamw"]
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    formula: Literal["reference", "pytorch"] = "reference"
    bias_correction: bool = True


@dataclass(frozen=True, kw_only=True)
class AdamInfo(Part):
    """Hyperparameters of Adam with an L2 penalty."""

    kind: Literal["adam"]
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    bias_correction: bool = True


@dataclass(frozen=True, kw_only=True)
class CustomOptimizerInfo(Part):
    """An optimizer that is described by its model only."""

    kind: Literal["custom"]


@dataclass(frozen=True, kw_only=True)
class SGDInfo(Part):
    """Hyperparameters of SGD."""

    kind: Literal["sgd"]
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LionInfo(Part):
    """Hyperparameters of Lion."""

    kind: Literal["lion"]
    beta1: float
    beta2: float
    weight_decay: float


@dataclass(frozen=True, kw_only=True)
class AdafactorInfo(Part):
    """Hyperparameters of Adafactor."""

    kind: Literal["adafactor"]
    beta2_decay: float
    epsilon2: float
    clip_threshold: float
    weight_decay: float


OptimizerInfo = AdamWInfo | AdamInfo | SGDInfo | LionInfo | AdafactorInfo | CustomOptimizerInfo


@dataclass(frozen=True, kw_only=True)
class ClipInfo(Part):
    """How gradients are clipped: by the norm of all of them, or each element by its value."""

    norm: float | None = None
    value: float | None = None


@dataclass(frozen=True, kw_only=True)
class GroupInfo(Part):
    """Parameters with a learning rate and a weight decay of their own."""

    learning_rate_scale: float
    weight_decay: float
    parameters: tuple[Name, ...]


@dataclass(frozen=True, kw_only=True)
class ScheduleInfo(Part):
    """The schedule of the learning rate that the recipe proposes.

    ``settings`` are those of the class of this kind in
    :data:`odtpack_runtime.training.schedules.SCHEDULES`; without ``total_steps`` a schedule that
    ends runs over the whole training.
    """

    kind: Name
    settings: dict[str, int | float | tuple[int, ...]] = field(default_factory=dict)
    learning_rate: float | None = None
