"""Made-up measurements of a timing child."""

from typing import Any

from odtpack_simulator.latency import HostTiming
from odtpack_simulator.measure.calibration import Calibration

GIGA = 1e9

CALIBRATION = Calibration(
    threads=1, gemm_flops=100 * GIGA, copy_bandwidth=10 * GIGA, core_flops=100 * GIGA, node_us=0.5,
    profile_us=0.0, clock_hz=None, int8_ops=200 * GIGA,
)  # fmt: skip
"""A ridge at 5 FLOP per byte: a copy moves every byte twice."""


def row(
    op_type: str, calls: int, ms: float, flops: float | None, moved_bytes: float
) -> dict[str, Any]:
    return {
        "op_type": op_type, "calls": calls, "us": 1e3 * ms, "flops": flops,
        "moved_bytes": moved_bytes,
    }  # fmt: skip


def message(**changes: Any) -> dict[str, Any]:
    """Ten milliseconds: 5 of products, 3 of elementwise work, 1 of small operators, 1 outside.

    The products reach 80 % of their roof, the elementwise work half of its.
    """
    calibration = {name: getattr(CALIBRATION, name) for name in CALIBRATION.__slots__}
    calibration |= changes.pop("calibration", {})
    steps = changes.get("steps_ms", [10.0] * 11)
    return {
        "calibration": calibration,
        "first_step_ms": 30.0,
        "first_waited_ms": 0.0,
        "steps_ms": steps,
        "waited_ms": changes.get("waited_ms", [0.0] * len(steps)),
        "rates_after": (calibration["gemm_flops"], calibration["copy_bandwidth"]),
        "stolen_share": 0.0,
        "others_share": 0.0,
        "load_average": 0.1,
        "profiled_steps": 2,
        "operators": [
            row("Reshape", 4, 1.0, None, 0),
            row("Gemm", 4, 5.0, 400e6, 4e6),
            row("Mul", 6, 3.0, None, 30e6),
        ],
        "session_creation": {"ms": 50.0, "cpu_ms": 40.0, "all_cpu_ms": [40.0]},
        "checkpoint_load": {"ms": 5.0, "cpu_ms": 2.0, "all_cpu_ms": [2.0]},
        "checkpoint_save": {"ms": 20.0, "cpu_ms": 3.0, "all_cpu_ms": [3.0]},
        "checkpoint_bytes": 12_000_000,
        "model_bytes": 600_000,
    } | changes


def timing(**changes: Any) -> HostTiming:
    return HostTiming.from_message(message(**changes))
