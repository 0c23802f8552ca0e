"""What the memory compiler is asked for, and what it did."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

from odtpack.choices import STOCK
from odtpack.errors import OdtpackError
from odtpack.spec import BuildSpec
from odtpack_simulator.values.units import parse_quantity

FREE_SLOWDOWN: Final = 0.05
"""Part of a step's time that a build without a budget may spend on computing again."""

WORTH: Final = 0.03
"""Part of the activations that must be saved for a model to be changed at all."""

USUAL_BATCH: Final = 8
USUAL_SIZE: Final = 64


@dataclasses.dataclass(frozen=True)
class MemorySpec:
    """For which shapes the memory of a step is made small, and how far."""

    # Sizes of open axes of the inputs by name.
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    batch: int = USUAL_BATCH  # size of every other open first axis
    other: int = USUAL_SIZE  # size of every other open axis
    # Bytes that the whole training may take at its peak, see :mod:`odtpack.package.write`.
    budget: int | None = None
    # Bytes of activations that a training step may have at its peak, those of the sessions' nodes
    # that are added counted; as few as ``slowdown`` allows if None.
    limit: int | None = None
    # Part of the training model's time that computing again may take, by the estimate of
    # :mod:`odtpack.memory.schedule`.
    slowdown: float = FREE_SLOWDOWN
    worth: float = WORTH  # part of the activations below which a saving is left


def read_memory(spec: BuildSpec) -> MemorySpec:
    """The problem that a specification poses."""
    if spec.memory_budget is None:
        if spec.memory_batch is not None or spec.memory_sizes:
            raise OdtpackError(
                "option-not-used",
                "a batch size and sizes are given for a memory budget, and there is none",
                hint="add --memory-budget, as in --memory-budget '60 MB'",
            )
        return MemorySpec()
    if spec.runtime != STOCK:
        raise OdtpackError(
            "target-cannot", "a memory budget is kept with stock ONNX Runtime only",
            hint="leave --memory-budget or --target out",
        )  # fmt: skip
    named = {}
    for text in spec.memory_sizes:
        name, _, size = text.rpartition("=")
        if not name or not size.isascii() or not size.isdigit() or int(size) < 1:
            raise OdtpackError(
                "bad-memory-budget", f"{text!r} is not NAME=SIZE with a size of 1 or more"
            )
        named[name] = int(size)
    budget = int(parse_quantity(spec.memory_budget, "bytes"))
    return MemorySpec(named, spec.memory_batch or USUAL_BATCH, budget=budget)


@dataclasses.dataclass(frozen=True)
class Decision:
    """One tensor that is not kept for the backward pass."""

    name: str  # what it is, for people: ``layers.0.linear1/Gelu``
    nbytes: int  # its size for the shapes that were asked for
    seconds: float  # estimated time of computing it again


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """What the compiler did to a training model."""

    before: int  # bytes of activations at the peak of a step as differentiated
    after: int  # the same as emitted
    seconds: float  # estimated time of a step as differentiated
    spec: MemorySpec  # what it was asked for
    decisions: tuple[Decision, ...] = ()  # what is computed again, the largest first

    @property
    def slowdown(self) -> float:
        """Estimated part of the time of a step that computing again adds."""
        return sum(each.seconds for each in self.decisions) / self.seconds if self.seconds else 0.0
