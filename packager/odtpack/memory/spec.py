"""What the memory compiler is asked for, and what it did."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

FREE_SLOWDOWN: Final = 0.02
"""Part of a step's time that a build without a budget may spend on computing again."""

WORTH: Final = 0.03
"""Part of the activations that must be saved for a model to be changed at all."""

USUAL_BATCH: Final = 8
USUAL_SIZE: Final = 64


@dataclasses.dataclass(frozen=True)
class MemorySpec:
    """For which shapes the memory of a step is made small, and how far.

    Attributes:
        sizes: Sizes of open axes of the inputs by name.
        batch: Size of every other open first axis.
        other: Size of every other open axis.
        limit: Bytes of activations that a training step may have at its peak, those of the
            sessions' nodes that are added counted; as few as ``slowdown`` allows if None.
        slowdown: Part of the training model's time that computing again may take, by the
            estimate of :mod:`odtpack.memory.costs`.
        worth: Part of the activations below which a saving is left.
    """

    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    batch: int = USUAL_BATCH
    other: int = USUAL_SIZE
    limit: int | None = None
    slowdown: float = FREE_SLOWDOWN
    worth: float = WORTH


@dataclasses.dataclass(frozen=True)
class Decision:
    """One tensor that is not kept for the backward pass.

    Attributes:
        name: What it is, for people: ``layers.0.linear1/Gelu``.
        nbytes: Its size for the shapes that were asked for.
        seconds: Estimated time of computing it again.
    """

    name: str
    nbytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """What the compiler did to a training model.

    Attributes:
        before: Bytes of activations at the peak of a step as differentiated.
        after: The same as emitted.
        seconds: Estimated time of a step as differentiated.
        decisions: What is computed again, the largest first.
    """

    before: int
    after: int
    seconds: float
    decisions: tuple[Decision, ...] = ()

    @property
    def slowdown(self) -> float:
        """Estimated part of the time of a step that computing again adds."""
        return sum(each.seconds for each in self.decisions) / self.seconds if self.seconds else 0.0
