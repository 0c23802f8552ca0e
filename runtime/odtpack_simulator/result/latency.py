"""Latency in a result: what the host measured, and what that means on a device."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from odtpack_simulator.result.base import Bytes, Count, NonNegative, Text
from odtpack_simulator.values.part import Part
from odtpack_simulator.values.units import Interval

OperatorClass = Literal["compute", "memory", "other"]


class OperatorCost(Part):
    """Time of one operator type over the profiled steps of the host.

    ``flops`` and ``moved_bytes`` are its arithmetic and its least memory traffic
    over the same steps, as far as its shapes give it; null where they do not.
    """

    op_type: Text
    operator_class: OperatorClass
    calls: Count
    total_ms: NonNegative
    share: float = Field(ge=0, le=1.0001)
    flops: NonNegative | None = None
    moved_bytes: NonNegative | None = None


class HostLatency(Part):
    """Times on the host: the first step, the steady ones after it, and where they go.

    Session creation, loading and saving are medians for all sessions of the
    package together, and for a checkpoint with the optimizer's state.
    ``steps_ms`` are those that other programs left alone; ``waited_share`` is the
    share of all steps' time that they waited for a processor, ``drift`` the ratio of
    the faster to the slower of two calibrations, and ``busy`` why no time is judged.
    """

    first_step_ms: NonNegative | None
    steps_ms: list[NonNegative]
    by_operator: list[OperatorCost]
    p50_ms: Interval | None = None
    p90_ms: Interval | None = None
    session_creation_ms: NonNegative | None = None
    checkpoint_load_ms: NonNegative | None = None
    checkpoint_save_ms: NonNegative | None = None
    checkpoint_bytes: Bytes | None = None
    waited_share: float | None = Field(default=None, ge=0, le=1)
    drift: float | None = Field(default=None, ge=1)
    busy: Text | None = None


class ClassTime(Part):
    """Time of one class of operators in a step: here, and carried to the device."""

    operator_class: OperatorClass
    host_ms: NonNegative
    device_ms: Interval


class DeviceLatency(Part):
    """Host times carried to the device; either a step time or the reason why there is none.

    ``step_ms`` is the median steady step before the device throttles, ``p90_ms``
    its 90th percentile. Loading and saving are null where the storage is unknown.
    """

    step_ms: Interval | None
    p90_ms: Interval | None = None
    first_step_ms: Interval | None = None
    session_creation_ms: Interval | None = None
    checkpoint_load_ms: Interval | None = None
    checkpoint_save_ms: Interval | None = None
    threads: int | None = Field(default=None, ge=1)
    by_class: list[ClassTime] = Field(default_factory=list)
    basis: Text
    not_judged: Text | None = None

    @model_validator(mode="after")
    def _figure_or_reason(self) -> DeviceLatency:
        if self.step_ms is None and not self.not_judged:
            msg = "latency without step_ms needs not_judged, the reason"
            raise ValueError(msg)
        return self
