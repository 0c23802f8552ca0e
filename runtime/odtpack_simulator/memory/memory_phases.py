"""What a plan of memory says: the phases of a training, and what is in use at the worst of each.

:mod:`odtpack_simulator.memory.memory_plan` makes the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from odtpack_simulator.result import (
    MemoryBreakdown,
    MemoryKind,
    PeakTensor,
    PhasePeak,
    PredictedMemory,
    TimelinePoint,
)

_SHOWN_TENSORS: Final = 40
_SAME: Final = 0.01
"""Share of a peak by which a later phase may be above an earlier one and not be called it."""

MEASURED_AS: Final = {
    "loading": (
        "loading the training model",
        "loading the evaluation model",
        "placing the parameters",
    ),
    "evaluation": ("first evaluation", "evaluation"),
    "step": ("first step", "training step", "optimizer step", "accumulating step"),
    "saving": ("saving",),
    "exporting": ("exporting",),
    "resuming": ("resuming",),
}
"""What a replay measures as one phase, and the phases of the plan that it is. It does not export,
and resumes only where it was interrupted."""


@dataclass(frozen=True, slots=True)
class Item:
    """Something that takes memory: a tensor, or what a session takes."""

    name: str
    nbytes: int
    kind: MemoryKind


@dataclass(frozen=True, slots=True)
class Phase:
    """The most memory in use during one part of a training."""

    name: str
    items: tuple[Item, ...]

    @property
    def nbytes(self) -> int:
        """Sum of the items in bytes."""
        return sum(item.nbytes for item in self.items)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The predicted memory of training a package."""

    phases: tuple[Phase, ...]  # What is in use at the worst moment of each phase
    # Memory while each node of the training model runs, then each node of the optimizer model.
    timeline: tuple[TimelinePoint, ...]
    unknown: tuple[str, ...]  # Tensors whose size depends on data; they are estimates

    @property
    def peak(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.nbytes)

    def phase_peaks(self, measured: Mapping[str, int] | None = None) -> list[PhasePeak]:
        """The peak of every phase that a replay distinguishes, in their order."""
        # `measured`: Bytes by phase as a replay measured them; none if it did not.
        planned = {phase.name: phase.nbytes for phase in self.phases}
        return [
            PhasePeak(
                phase=phase,
                predicted_bytes=max(planned.get(name, 0) for name in names),
                measured_bytes=(measured or {}).get(phase),
            )
            for phase, names in MEASURED_AS.items()
        ]

    @property
    def highest_phase(self) -> str:
        """The first phase, of those that a replay distinguishes, that needs the peak."""
        # What later phases need besides, within _SAME, makes no other phase of it.
        least = (1 - _SAME) * self.peak.nbytes
        return next(each.phase for each in self.phase_peaks() if each.predicted_bytes >= least)

    def predicted(self) -> PredictedMemory:
        """The peak and its parts, as the result of a simulation stores it."""
        parts = dict.fromkeys(MemoryBreakdown.model_fields, 0)
        for item in self.peak.items:
            parts[item.kind] += item.nbytes
        return PredictedMemory(peak_bytes=self.peak.nbytes, breakdown=MemoryBreakdown(**parts))

    def tensors_at_peak(self) -> list[PeakTensor]:
        """What is alive at the peak, largest first; the small ones of a kind as one."""
        ordered = sorted(self.peak.items, key=lambda item: (-item.nbytes, item.name))
        ordered = [item for item in ordered if item.nbytes > 0]
        shown, rest = ordered[:_SHOWN_TENSORS], ordered[_SHOWN_TENSORS:]
        for kind in MemoryBreakdown.model_fields:
            small = [item for item in rest if item.kind == kind]
            if small:
                total = sum(item.nbytes for item in small)
                shown.append(Item(f"{len(small)} smaller", total, small[0].kind))
        return [PeakTensor(name=item.name, bytes=item.nbytes, kind=item.kind) for item in shown]
