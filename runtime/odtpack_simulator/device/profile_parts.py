"""The sections of a device profile: memory, processor, storage, power."""

from __future__ import annotations

from pydantic import Field, model_validator

from odtpack_simulator.device.data_sheet import Extension
from odtpack_simulator.values.quantities import (
    Bandwidth,
    Bytes,
    Compute,
    Count,
    Duration,
    Energy,
    Fraction,
    Frequency,
    Power,
    Quantity,
    Ratio,
    Strict,
    ThreadedQuantity,
    bounds,
)


class MemoryFigures(Strict):
    """What the device's memory holds, what one app gets of it, and how fast it copies."""

    ram: Bytes | None = None
    """Memory of the device as sold."""
    app_limit_foreground: Bytes | None = None
    """Memory at which an app in the foreground is ended."""
    app_limit_background: Bytes | None = None
    """Memory at which an app in the background is ended."""
    app_limit_entitled: Bytes | None = None
    """Foreground limit with the platform's entitlement for more memory (iOS)."""
    low_memory_warning: Fraction | None = None
    """Share of the limit from which the system warns the app that memory is low."""
    bandwidth: Bandwidth | None = None
    """Rate of a large ``memcpy`` by one thread, in bytes copied (the traffic is twice that)."""
    dram_bandwidth: Bandwidth | None = None
    """Peak of the memory chips, as a data sheet has it; without ``bandwidth`` it stands in."""
    arena_overhead: Ratio | None = None
    """Bytes that ONNX Runtime takes from the system per byte its tensors hold, with its arena."""
    heap_overhead: Ratio | None = None
    """The same with the arena off, where every tensor comes from the system's allocator."""

    @model_validator(mode="after")
    def _limits_within_ram(self) -> MemoryFigures:
        ram = bounds(self.ram, "bytes")
        for key in ("app_limit_foreground", "app_limit_background", "app_limit_entitled"):
            limit = bounds(getattr(self, key), "bytes")
            if ram and limit and limit.typical > ram.typical:
                msg = f"{key} is more than ram"
                raise ValueError(msg)
        return self


class Cluster(Strict):
    """Cores of one kind."""

    core: str = Field(min_length=1, max_length=64)
    cores: Count
    clock: Frequency
    fp32_peak: Compute | None = None
    """Single-precision rate of the cluster's cores together."""


class CpuFigures(Strict):
    """What the processor computes.

    ``fp32_gemm`` is the rate of a large single-precision matrix product. Where
    it was not measured, it is ``fp32_peak`` times ``gemm_efficiency``, for which
    :mod:`odtpack_simulator.device.data_sheet` has a share by the kind of core.
    """

    extensions: list[Extension] = Field(default_factory=list, max_length=16)
    """Instructions for which ONNX Runtime has kernels of their own."""
    clusters: list[Cluster] = Field(default_factory=list, max_length=16)
    fp32_peak: Compute | None = None
    gemm_efficiency: Fraction | None = None
    fp32_gemm: Compute | None = None
    fp32_gemm_single: Compute | None = None
    """``fp32_gemm`` with one thread."""
    int8_gemm: Compute | None = None
    """Rate of a large int8 matrix product, two operations for each product and sum."""
    fp32_conv: Compute | None = None
    """Rate of a 3 x 3 convolution, in the floating-point operations of its definition."""
    training_threads: Count | None = None
    """Threads that a training should use: more would wait for slower cores."""

    @model_validator(mode="after")
    def _efficiency_is_an_interval(self) -> CpuFigures:
        efficiency = self.gemm_efficiency
        if isinstance(efficiency, Quantity) and efficiency.low is None:
            msg = "gemm_efficiency needs low and high: it is never known as a point"
            raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _single_is_one_thread(self) -> CpuFigures:
        single = self.fp32_gemm_single
        if isinstance(single, ThreadedQuantity) and single.threads != 1:
            msg = f"fp32_gemm_single is the rate of one thread, found threads = {single.threads}"
            raise ValueError(msg)
        return self


class StorageFigures(Strict):
    """The storage that holds checkpoints: sequential rates, and what a small write costs."""

    read: Bandwidth | None = None
    write: Bandwidth | None = None
    """Rate until the bytes are on the medium (``fsync``), not in a cache."""
    sync_latency: Duration | None = None
    """Time until a small write is on the medium: write of a few kilobytes, then ``fsync``."""


class PowerFigures(Strict):
    """Power of the whole device at the wall or battery, and the battery's energy."""

    idle: Power | None = None
    load: Power | None = None
    battery: Energy | None = None
