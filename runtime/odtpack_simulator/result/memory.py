"""Memory in a result: the plan, the peak that was measured, and what a device grants."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from odtpack_simulator.device.kits import Kit, Sharing
from odtpack_simulator.result.base import Bytes, Count, Text
from odtpack_simulator.values.part import Part
from odtpack_simulator.values.quantities import SourceKind

MemoryKind = Literal[
    "parameters", "gradients", "optimizer_state", "inputs", "activations", "session"
]
LimitMethod = Literal["cgroup", "rlimit", "watchdog"]
"""How a child was held: by the kernel's control group, by RLIMIT_DATA, or by being watched."""


class MemoryBreakdown(Part):
    """What is alive at the predicted peak; the parts sum to the peak."""

    parameters: Bytes
    gradients: Bytes
    optimizer_state: Bytes
    inputs: Bytes
    activations: Bytes
    session: Bytes

    @property
    def total(self) -> int:
        """Sum of the parts in bytes."""
        return sum(getattr(self, name) for name in type(self).model_fields)


class PredictedMemory(Part):
    """The memory plan's peak before anything ran."""

    peak_bytes: Bytes
    breakdown: MemoryBreakdown

    @model_validator(mode="after")
    def _parts_sum_to_peak(self) -> PredictedMemory:
        if self.breakdown.total != self.peak_bytes:
            msg = f"the breakdown sums to {self.breakdown.total}, the peak is {self.peak_bytes}"
            raise ValueError(msg)
        return self


class TimelinePoint(Part):
    """Working set while one node of the training step runs."""

    index: Count
    node: Text
    op_type: Text
    live_bytes: Bytes
    part: Literal["forward", "backward", "update"] | None = None


class PeakTensor(Part):
    """A tensor that is alive at the predicted peak."""

    name: Text
    bytes: Bytes
    kind: MemoryKind


class PhasePeak(Part):
    """The most memory of one phase of a training: as planned, and as measured."""

    phase: Text
    predicted_bytes: Bytes
    measured_bytes: Bytes | None


class PlannedChange(Part):
    """The peak that was planned for the package with something changed.

    Attributes:
        micro_batch: Samples in memory at once, accumulated to the same update; null for all.
        freeze: What stays frozen besides what is, in words; null for nothing.
        stateless_optimizer: Whether the optimizer is SGD without momentum, which keeps nothing.
        peak_bytes: The planned peak.
    """

    micro_batch: Count | None = None
    freeze: Text | None = None
    stateless_optimizer: bool = False
    peak_bytes: Bytes


class MemoryInfo(Part):
    """Memory of the training step, device-independent.

    Of several kits in a result (see :class:`DeviceMemory`) it is that of the one that needs most:
    ``sharing`` says how its sessions come by their memory; null in results of earlier versions.
    ``mapped_bytes`` are those of frozen weights in a file that is mapped: clean pages, which the
    system drops and reads again, and which no limit of memory is about. They are no part of
    any other figure; null where all weights are in memory.
    ``changes`` are planned where a check about memory failed; null where none did.
    """

    predicted: PredictedMemory
    measured_peak_bytes: Bytes | None
    phases: list[PhasePeak] = Field(default_factory=list)
    timeline: list[TimelinePoint]
    tensors_at_peak: list[PeakTensor]
    changes: list[PlannedChange] | None = None
    sharing: Sharing | None = None
    mapped_bytes: Bytes | None = None


class DeviceMemory(Part):
    """Memory of the replay, and of the app around it, against what this device gives one app.

    The limit holds for the process: ``app_bytes`` is what the app holds without the training, and
    ``runtime_bytes`` what ONNX Runtime's library does; both are null in results of earlier
    versions, which count neither. ``kit`` is what the app trains with, and ``sharing`` whether its
    sessions share an arena.

    ``outcome``: ``fits`` or ``over`` the limit, ``killed`` when the child process hit it,
    ``not judged`` when the limit is unknown; ``depends`` where the limit has a range and the
    peak lies between its low end, ``limit_low_bytes``, and ``limit_bytes``. ``held`` says how
    a child process was held to this limit; null where the peak, measured without a limit, is
    so far from it that holding would show nothing; and ``held_bytes`` to how much: what the limit
    leaves a training. ``limit_entitled``: the limit is that of an
    app with the entitlement for more memory. From ``warning_bytes`` on the system warns the
    app that memory is low. ``unmeasured_bytes`` is what was planned for the parts of the app's
    life that were not measured: exporting, and resuming where no replay was interrupted. ``phase``
    is the first part that needs the peak.
    """

    limit_bytes: Bytes | None
    limit_low_bytes: Bytes | None = None
    limit_kind: SourceKind | None = None
    limit_source: Text | None = None
    limit_state: Literal["foreground", "background"] = "foreground"
    limit_entitled: bool = False
    entitled_limit_bytes: Bytes | None = None
    predicted_peak_bytes: Bytes
    measured_peak_bytes: Bytes | None
    outcome: Literal["fits", "depends", "over", "killed", "not judged"] = "not judged"
    held: LimitMethod | None = None
    held_bytes: Bytes | None = None
    warning_bytes: Bytes | None = None
    unmeasured_bytes: Bytes | None = None
    phase: Text | None = None
    app_bytes: Bytes | None = None
    app_kind: SourceKind | None = None
    app_source: Text | None = None
    runtime_bytes: Bytes | None = None
    kit: Kit | None = None
    sharing: Sharing | None = None
    detail: Text = ""

    @property
    def others_bytes(self) -> int:
        """What the process holds besides the training: the app, and ONNX Runtime's library."""
        return (self.app_bytes or 0) + (self.runtime_bytes or 0)

    @property
    def need_bytes(self) -> int:
        """What the whole process holds at the peak of the training."""
        return self.peak_bytes + self.others_bytes

    @property
    def room_bytes(self) -> int | None:
        """What the limit leaves a training; None if the limit is unknown."""
        return None if self.limit_bytes is None else max(0, self.limit_bytes - self.others_bytes)

    @property
    def peak_bytes(self) -> int:
        """The peak of the training: measured where the child measured one, else predicted.

        What the replay does not measure may need more than the training did.
        """
        measured = self.measured_peak_bytes
        trained = self.predicted_peak_bytes if measured is None else measured
        return max(trained, self.unmeasured_bytes or 0)

    @property
    def is_measured(self) -> bool:
        """Whether the peak to judge was measured."""
        return self.measured_peak_bytes is not None and self.measured_peak_bytes >= self.peak_bytes
