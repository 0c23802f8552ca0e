"""What machine the replay runs on."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import onnxruntime

from odtpack_simulator.latency.latency import HostTiming
from odtpack_simulator.measure.host import processor_name
from odtpack_simulator.result.result import HostInfo


def host_info(timing: HostTiming, threads: int) -> HostInfo:
    """This machine, as the result of a simulation stores it."""
    return HostInfo(
        cpu=processor_name() or platform.processor() or platform.machine() or "unknown",
        cores=os.cpu_count() or 1,
        threads=threads,
        os=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        onnxruntime=onnxruntime.__version__,
        gemm_gflops=timing.gemm_flops / 1e9,
        memory_bandwidth_gbs=timing.copy_bandwidth / 1e9,
    )


def tool_version() -> str:
    """The version of odtpack."""
    try:
        return metadata.version("odtpack")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"
