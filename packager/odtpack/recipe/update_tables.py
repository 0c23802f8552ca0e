"""``[clip]``, ``[[groups]]`` and ``[schedule]`` of a recipe.

The keys are the fields of the classes that they describe, with the same defaults; a test
holds the two together.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from odtpack.recipe.ranges import Count, NotNegative, Positive, PositiveCount, Range, Table
from odtpack.recipe.variants import by_kind
from odtpack_simulator.values.schema_errors import TAG_PREFIX


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
    learning_rate_scale: Positive = 1.0
    """Factor of the learning rate."""
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
