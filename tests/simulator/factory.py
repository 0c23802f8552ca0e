"""A made-up but plausible result: a small CNN replayed for the shipped profiles."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from odtpack_simulator.device.app import (
    RUNTIME_LIBRARY_BYTES,
    AppFootprint,
    default_footprint,
    with_margin,
)
from odtpack_simulator.device.kits import KITS, kit_of
from odtpack_simulator.device.profile import DeviceProfile, Quantity, list_profiles, load_profile
from odtpack_simulator.result import MemoryBreakdown, Origin, Policy, SimulationResult
from odtpack_simulator.values.units import Interval

STEPS, STEP_MS, CHECKPOINT_BYTES = 240, 41.3, 14_462_000
FORWARD = ["Conv", "Relu", "Conv", "Relu", "MaxPool", "Conv", "Relu", "Flatten", "Gemm", "Softmax"]
BACKWARD = [
    "Mul", "MatMul", "ReduceSum", "Where", "MatMul", "ConvTranspose", "Where", "Pad", "MatMul"
]  # fmt: skip
OPERATORS = [
    ("Conv", "compute", 720, 0.331), ("MatMul", "compute", 1920, 0.243),
    ("ConvTranspose", "compute", 480, 0.148), ("Mul", "memory", 3360, 0.071),
    ("Where", "memory", 720, 0.058), ("Slice", "memory", 4320, 0.046),
    ("Pad", "memory", 720, 0.031), ("Add", "memory", 1680, 0.024),
    ("ReduceSum", "memory", 960, 0.018), ("MaxPool", "other", 480, 0.014),
    ("Transpose", "memory", 960, 0.009), ("Softmax", "other", 240, 0.003),
    ("Gather", "other", 480, 0.002), ("Reshape", "other", 2880, 0.002),
]  # fmt: skip
CURVE = [(0, 2.318, 0.094), (80, 0.371, 0.8943), (160, 0.1608, 0.95), (240, 0.1142, 0.9659)]
"""Step, loss and metric: after every epoch, and the last one as the result's own."""


def interval(typical: float, spread: float = 1.5) -> Interval:
    return Interval(low=typical / spread, typical=typical, high=typical * spread)


def same(value: float) -> Interval:
    return Interval(low=value, typical=value, high=value)


def make_result(
    names: Sequence[str] | None = None, *, scale: float = 1.0, policy: Policy | None = None,
    app: bool = False,
) -> SimulationResult:  # fmt: skip
    """A result without checks.

    Args:
        names: Shipped profiles to include, all by default.
        scale: Factor on the memory of everything that grows with the batch.
        policy: How the app trains, in the foreground by default.
        app: Whether the app around the training and ONNX Runtime's library take memory; without
            them the whole limit is the training's, which makes for plain figures.
    """
    policy = policy or Policy()
    breakdown = MemoryBreakdown(
        parameters=4_820_000, gradients=4_820_000, optimizer_state=9_640_000,
        inputs=int(1_605_632 * scale), activations=int(151_400_000 * scale), session=6_200_000,
    )  # fmt: skip
    measured = int(breakdown.total * 1.021)
    random = np.random.default_rng(7)
    steps = STEP_MS * random.lognormal(0.0, 0.03, STEPS - 1)
    losses = (0.09 + 2.25 * np.exp(-np.arange(STEPS) / 38.0)) * random.lognormal(0.0, 0.13, STEPS)
    devices = [
        _device(load_profile(name), breakdown.total, measured, policy, app)
        for name in (list_profiles() if names is None else names)
    ]
    content: dict[str, Any] = {
        "schema_version": 4, "tool_version": "0.1.0", "origin": Origin(), "policy": policy,
        "devices": devices,
        "package": {
            "path": "build/digits-cnn", "manifest_sha256": "4f0c" * 16,
            "trainable_parameters": 1_205_000, "total_parameters": 1_205_000, "trained_layers": 4,
            "parameter_bytes": 4_820_000, "package_bytes": 5_361_200, "loss": "cross_entropy",
            "optimizer": "adamw",
        },
        "data": {
            "samples": 6_000, "train_samples": 5_120, "held_out_samples": 880, "batch_size": 64,
            "accumulation_steps": 1, "epochs": 3, "steps": STEPS, "seed": 7, "trained_steps": STEPS,
            "trained_samples": 6_000, "evaluated_apart": False, "asked_batch_size": 64,
            "step_samples": 64, "evaluated_samples": 880, "sha256": "7a31" * 16,
        },
        "host": {
            "cpu": "AMD EPYC 9575F", "cores": 2, "threads": 1, "os": "Linux 6.8",
            "python": "3.11.2", "onnxruntime": "1.31.1", "gemm_gflops": 118.4,
            "memory_bandwidth_gbs": 13.7,
        },
        "training": {
            "losses": [float(v) for v in losses], "learning_rate": 0.001,
            "eval_loss_before": 2.318, "eval_loss_after": 0.1142, "metric_name": "accuracy",
            "metric_before": 0.094, "metric_after": 0.9659, "metric_interval": (0.9518, 0.976),
            "curve": [{"step": s, "loss": loss, "metric": metric} for s, loss, metric in CURVE],
            "held_out_fall": {
                "groups": 68, "samples": 880, "fall": 2.2038, "low": 2.1521, "high": 2.2555,
            },
        },
        "interruption": {  # killed between steps, in a save, and warned once; equal in the end
            "interruptions": [
                {"at": at, "step": step, "resumed_from_step": start, "repeated_steps": step - start}
                for at, step, start in
                (("step", 37, 30), ("save", 120, 110), ("memory warning", 181, 181))
            ],
            "save_every": 10, "saves": 24, "equal": True,
        },
        "latency_host": {
            "first_step_ms": 96.4, "steps_ms": [float(v) for v in steps],
            "by_operator": [
                {"op_type": op, "operator_class": kind, "calls": calls, "share": share,
                 "total_ms": share * (STEPS * STEP_MS)}
                for op, kind, calls, share in OPERATORS
            ],
            "p50_ms": Interval(low=40.9, typical=41.3, high=41.8),
            "p90_ms": Interval(low=42.6, typical=42.9, high=43.3), "session_creation_ms": 48.2,
            "session_creation_cpu_ms": Interval(low=46.6, typical=47.1, high=47.9),
            "checkpoint_load_ms": 9.6, "checkpoint_save_ms": 21.4,
            "checkpoint_bytes": CHECKPOINT_BYTES, "waited_share": 0.0, "drift": 1.02,
        },
        "memory": {
            "predicted": {"peak_bytes": breakdown.total, "breakdown": breakdown},
            "measured_peak_bytes": measured, "phases": _phases(breakdown, measured),
            "timeline": _timeline(breakdown), "tensors_at_peak": _tensors(breakdown),
            "changes": _changes(breakdown), "sharing": "shared",
            "shapes": {"input": [64, 1, 28, 28], "labels": [64]},
        },
    }  # fmt: skip
    return SimulationResult(**content)


def rebuilt(result: SimulationResult, *what: object) -> SimulationResult:
    """The result of a package that differs in ``what``: figures of the same one are chance."""
    digest = hashlib.sha256(repr(what).encode()).hexdigest()
    package = result.package.model_copy(update={"manifest_sha256": digest})
    return result.model_copy(update={"package": package})


def _phases(breakdown: MemoryBreakdown, measured: int) -> list[dict[str, object]]:
    """The step is the highest phase, and its figures are the result's own."""
    stored = breakdown.parameters + breakdown.session
    save = stored + breakdown.optimizer_state + CHECKPOINT_BYTES
    return [
        {"phase": "open", "predicted_bytes": stored, "measured_bytes": int(stored * 1.08)},
        {"phase": "step", "predicted_bytes": breakdown.total, "measured_bytes": measured},
        {"phase": "evaluate", "predicted_bytes": stored * 4, "measured_bytes": stored * 4},
        {"phase": "save", "predicted_bytes": save, "measured_bytes": None},
    ]


def _changes(breakdown: MemoryBreakdown) -> list[dict[str, object]]:
    """Micro-batches that save what grows with the batch, frozen layers, SGD, and all of it."""
    growing = breakdown.inputs + breakdown.activations
    fixed = breakdown.total - growing
    frozen = {"freeze": "the first 3 of 4 trained layers (up to 'features.6.weight')"}
    sgd = {"stateless_optimizer": True}
    return [
        *(
            {"micro_batch": n, "peak_bytes": fixed + growing * n // 64}
            for n in (32, 16, 8, 4, 2, 1)
        ),
        {**frozen, "peak_bytes": breakdown.total - breakdown.activations // 2},
        {**sgd, "peak_bytes": breakdown.total - breakdown.optimizer_state},
        {"micro_batch": 1, **frozen, **sgd, "peak_bytes": fixed // 2},
    ]


def _timeline(breakdown: MemoryBreakdown) -> list[dict[str, object]]:
    base = breakdown.total - breakdown.activations
    shape = np.concatenate([np.linspace(0.03, 1.0, 62) ** 0.9, np.linspace(1.0, 0.02, 88) ** 1.3])
    wobble = 1.0 - 0.09 * np.abs(np.sin(np.arange(150) * 1.7))
    wobble[61] = 1.0
    points = []
    for index in range(150):
        part, kinds = ("forward", FORWARD) if index < 62 else ("backward", BACKWARD)
        op_type = kinds[index % len(kinds)]
        side = "features" if part == "forward" else "grad/features"
        live = base + int(breakdown.activations * min(1.0, shape[index] * wobble[index]))
        node = f"{side}.{index}/{op_type}"
        row = {"index": index, "node": node, "op_type": op_type, "live_bytes": live, "part": part}
        points.append(row)
    return points


def _tensors(breakdown: MemoryBreakdown) -> list[dict[str, object]]:
    big = breakdown.activations
    rows = [
        ("features.0/Conv_output_0", int(big * 0.34), "activations"),
        ("features.1/Relu_output_0", int(big * 0.34), "activations"),
        ("features.3/Conv_output_0", int(big * 0.17), "activations"),
        ("features.4/Relu_output_0", int(big * 0.085), "activations"),
        ("optimizer moments", breakdown.optimizer_state, "optimizer_state"),
        ("classifier.1.weight", 3_211_264, "parameters"),
        ("classifier.1.weight_grad.accumulation.buffer", 3_211_264, "gradients"),
        ("input", breakdown.inputs, "inputs"),
    ]
    return [{"name": name, "bytes": nbytes, "kind": kind} for name, nbytes, kind in rows]


def _device(
    profile: DeviceProfile, predicted: int, measured: int, policy: Policy, app: bool
) -> dict[str, object]:
    limit = profile.memory_limit(policy.state)
    entitled = profile.memory.app_limit_entitled
    limit_bytes = profile.memory_limit_bytes(policy.state)
    kit = kit_of(profile.os)
    own = default_footprint(profile) if app else AppFootprint(0, "assumed", "no app")
    library = RUNTIME_LIBRARY_BYTES if app else 0
    room = None if limit_bytes is None else max(0, limit_bytes - own.nbytes - library)
    near = room is not None and with_margin(predicted) <= room < 2 * predicted
    latency = _latency(profile)
    return {
        "name": profile.name, "title": profile.title, "os": profile.os,
        "validated": profile.validated, "profile_digest": profile.digest, "latency": latency,
        "memory": {
            "limit_bytes": limit_bytes, "limit_kind": limit.kind if limit else None,
            "limit_source": limit.source if limit else None, "limit_state": policy.state,
            "entitled_limit_bytes": int(entitled.interval("bytes").typical)
            if isinstance(entitled, Quantity) else None,
            "predicted_peak_bytes": predicted, "measured_peak_bytes": measured,
            "held": "rlimit" if near else None, "held_bytes": room if near else None,
            "warning_bytes": None if limit_bytes is None else int(0.7 * limit_bytes),
            "phase": "step", "app_bytes": own.nbytes, "app_kind": own.kind,
            "app_source": own.source, "runtime_bytes": library, "kit": kit, "loop": "step",
            "sharing": "shared" if KITS[kit] else "own",
        },
        "campaign": _campaign(profile, latency["step_ms"], policy),
        "training": {"outcome": "completed", "steps_done": STEPS, "final_loss": 0.0931},
        "figures": profile.figures(),
    }  # fmt: skip


def _latency(profile: DeviceProfile) -> dict[str, Any]:
    gemm, copy = profile.gemm_flops(), profile.copy_bandwidth()
    basis = "host times by operator class"
    if gemm is None or copy is None:
        missing = "matrix rate" if gemm is None else "memory bandwidth"
        return {"step_ms": None, "basis": basis, "not_judged": f"the profile gives no {missing}"}
    compute, moved = 0.722 * STEP_MS * 118.4e9, 0.278 * STEP_MS * 13.7e9
    step = Interval(
        low=compute / gemm.high + moved / copy.high,
        typical=compute / gemm.typical + moved / copy.typical,
        high=compute / gemm.low + moved / copy.low,
    )
    return {
        "step_ms": step, "p90_ms": step.scaled(1.04), "first_step_ms": step.scaled(2.3),
        "session_creation_ms": step.scaled(1.2), "checkpoint_load_ms": interval(14.0),
        "checkpoint_save_ms": interval(31.0), "threads": profile.training_threads() or 1,
        "by_class": [
            {"operator_class": kind, "host_ms": here * STEP_MS, "device_ms": step.scaled(there)}
            for kind, here, there in
            (("compute", 0.722, 0.7), ("memory", 0.257, 0.28), ("other", 0.021, 0.02))
        ],
        "basis": f"{basis}, carried over by matrix rate and memory bandwidth",
    }  # fmt: skip


def _campaign(
    profile: DeviceProfile, step_ms: Interval | None, policy: Policy
) -> dict[str, object]:
    """A campaign whose parts agree: phones draw 3 W, boards have neither battery nor windows."""
    if step_ms is None:
        return {"not_judged": [{"figure": "active_s", "reason": "the step time is unknown"}]}
    overhead_s = 0.9
    active = Interval(
        low=step_ms.low * STEPS / 1e3 + overhead_s,
        typical=step_ms.typical * STEPS / 1e3 * 1.2 + overhead_s,
        high=step_ms.high * STEPS / 1e3 * 1.8 + overhead_s,
    )
    sessions, repeated = same(1.0), same(0.0)
    if policy.state == "background":
        windows = [math.ceil(s / 30.0) for s in (active.low, active.typical, active.high)]
        sessions = Interval.of(*windows)
        repeated = Interval.of(0.0, 5.0 * (windows[1] - 1), 9.0 * (windows[2] - 1))
    written = STEPS // (policy.save_every or STEPS) * CHECKPOINT_BYTES
    days = sessions.scaled(1.0 / policy.sessions_per_day)
    per_day = [written / max(1.0, each) for each in (days.high, days.typical, days.low)]
    energy = share = None
    if profile.os in ("android", "ios"):
        energy = Interval.of(2.0 * active.low, 3.0 * active.typical, 4.5 * active.high)
        share = energy.scaled(1.0 / 60_000.0)
    reason = "the profile gives no power under load and no battery"
    unknown = ("energy_j", "battery_share", "battery_share_per_session")
    return {
        "active_s": active, "sessions": sessions, "days": days, "energy_j": energy,
        "battery_share": share,
        "battery_share_per_session": share and share.scaled(1.0 / sessions.typical),
        "written_bytes": same(written), "written_bytes_per_day": Interval.of(*per_day),
        "throttled_share": Interval(low=0.0, typical=0.35, high=0.8), "repeated_steps": repeated,
        "curve": [
            {
                "step": step, "active_s": overhead_s + (active.typical - overhead_s) * step / STEPS,
                "energy_j": None if energy is None else energy.typical * step / STEPS,
                "session": max(1, math.ceil(sessions.typical * step / STEPS)), "loss": loss,
                "metric": metric,
            }
            for step, loss, metric in CURVE
        ],
        "not_judged": [
            {"figure": name, "reason": reason} for name in unknown if energy is None
        ],
    }  # fmt: skip
