"""A made-up but plausible result: a small CNN replayed for the shipped profiles."""

import hashlib
from collections.abc import Sequence

import numpy as np

from odtpack_simulator.device.app import (
    RUNTIME_LIBRARY_BYTES,
    AppFootprint,
    default_footprint,
    with_margin,
)
from odtpack_simulator.device.kits import KITS, kit_of
from odtpack_simulator.device.profile import DeviceProfile, Quantity, list_profiles, load_profile
from odtpack_simulator.result import (
    ClassTime,
    DataInfo,
    DeviceLatency,
    DeviceMemory,
    DeviceResult,
    DeviceTraining,
    HeldOutFall,
    HostInfo,
    HostLatency,
    MemoryBreakdown,
    MemoryInfo,
    OperatorCost,
    Origin,
    PackageInfo,
    PeakTensor,
    PhasePeak,
    PlannedChange,
    Policy,
    PredictedMemory,
    SimulationResult,
    TimelinePoint,
    TrainingInfo,
)
from odtpack_simulator.values.units import Interval
from tests.simulator.factory_campaign import (
    CHECKPOINT_BYTES,
    campaign,
    evaluations,
    interruption,
    interval,
)

STEPS = 240
FORWARD = ["Conv", "Relu", "Conv", "Relu", "MaxPool", "Conv", "Relu", "Flatten", "Gemm", "Softmax"]
BACKWARD = [
    "Mul", "MatMul", "ReduceSum", "Where", "MatMul", "ConvTranspose", "Where", "Pad", "MatMul"
]  # fmt: skip


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
    predicted = PredictedMemory(peak_bytes=breakdown.total, breakdown=breakdown)
    measured = int(breakdown.total * 1.021)
    memory = MemoryInfo(
        predicted=predicted, measured_peak_bytes=measured, phases=_phases(breakdown, measured),
        timeline=_timeline(breakdown), tensors_at_peak=_tensors(breakdown),
        changes=_changes(breakdown), shapes={"input": [64, 1, 28, 28], "labels": [64]},
        sharing="shared",
    )  # fmt: skip
    generator = np.random.default_rng(7)
    host_step = 41.3
    steps = host_step * generator.lognormal(0.0, 0.03, STEPS - 1)
    devices = [
        _device(load_profile(name), breakdown.total, measured, host_step, policy, app)
        for name in (list_profiles() if names is None else names)
    ]
    return SimulationResult(
        tool_version="0.1.0",
        package=PackageInfo(
            path="build/digits-cnn", manifest_sha256="4f0c" * 16, trainable_parameters=1_205_000,
            total_parameters=1_205_000, trained_layers=4, parameter_bytes=4_820_000,
            package_bytes=5_361_200, loss="cross_entropy", optimizer="adamw",
        ),
        data=DataInfo(
            samples=6_000, train_samples=5_120, held_out_samples=880, batch_size=64,
            accumulation_steps=1, epochs=3, steps=STEPS, seed=7, trained_steps=STEPS,
            trained_samples=6_000, evaluated_apart=False, asked_batch_size=64, step_samples=64,
            evaluated_samples=880, sha256="7a31" * 16,
        ),
        origin=Origin(),
        policy=policy,
        host=HostInfo(
            cpu="AMD EPYC 9575F", cores=2, threads=1, os="Linux 6.8", python="3.11.2",
            onnxruntime="1.31.1", gemm_gflops=118.4, memory_bandwidth_gbs=13.7,
        ),
        training=TrainingInfo(
            losses=_losses(generator), learning_rate=0.001, eval_loss_before=2.318,
            eval_loss_after=0.1142, metric_name="accuracy", metric_before=0.094,
            metric_after=0.9659, metric_interval=(0.9518, 0.976), curve=evaluations(),
            held_out_fall=HeldOutFall(groups=68, samples=880, fall=2.2038, low=2.1521, high=2.2555),
        ),
        interruption=interruption(),
        latency_host=HostLatency(
            first_step_ms=96.4,
            steps_ms=[float(v) for v in steps],
            by_operator=_operators(),
            p50_ms=Interval(low=40.9, typical=41.3, high=41.8),
            p90_ms=Interval(low=42.6, typical=42.9, high=43.3),
            session_creation_ms=48.2,
            session_creation_cpu_ms=Interval(low=46.6, typical=47.1, high=47.9),
            checkpoint_load_ms=9.6, checkpoint_save_ms=21.4, checkpoint_bytes=CHECKPOINT_BYTES,
            waited_share=0.0, drift=1.02,
        ),
        memory=memory,
        devices=devices,
    )  # fmt: skip


def rebuilt(result: SimulationResult, *what: object) -> SimulationResult:
    """The result of a package that differs in ``what``: figures of the same one are chance."""
    digest = hashlib.sha256(repr(what).encode()).hexdigest()
    package = result.package.model_copy(update={"manifest_sha256": digest})
    return result.model_copy(update={"package": package})


def _losses(generator: np.random.Generator) -> list[float | None]:
    index = np.arange(STEPS)
    curve = 0.09 + 2.25 * np.exp(-index / 38.0)
    return [float(v) for v in curve * generator.lognormal(0.0, 0.13, STEPS)]


def _phases(breakdown: MemoryBreakdown, measured: int) -> list[PhasePeak]:
    """The step is the highest phase, and its figures are the result's own."""
    stored = breakdown.parameters + breakdown.session
    save = stored + breakdown.optimizer_state + CHECKPOINT_BYTES
    return [
        PhasePeak(phase="open", predicted_bytes=stored, measured_bytes=int(stored * 1.08)),
        PhasePeak(phase="step", predicted_bytes=breakdown.total, measured_bytes=measured),
        PhasePeak(phase="evaluate", predicted_bytes=stored * 4, measured_bytes=stored * 4),
        PhasePeak(phase="save", predicted_bytes=save, measured_bytes=None),
    ]


def _changes(breakdown: MemoryBreakdown) -> list[PlannedChange]:
    """Micro-batches that save what grows with the batch, frozen layers, SGD, and all of it."""
    growing = breakdown.inputs + breakdown.activations
    fixed = breakdown.total - growing
    half = breakdown.total - breakdown.activations // 2
    frozen = "the first 3 of 4 trained layers (up to 'features.6.weight')"
    return [
        *(
            PlannedChange(micro_batch=n, peak_bytes=fixed + growing * n // 64)
            for n in (32, 16, 8, 4, 2, 1)
        ),
        PlannedChange(freeze=frozen, peak_bytes=half),
        PlannedChange(
            stateless_optimizer=True, peak_bytes=breakdown.total - breakdown.optimizer_state
        ),
        PlannedChange(
            micro_batch=1, freeze=frozen, stateless_optimizer=True, peak_bytes=fixed // 2
        ),
    ]


def _timeline(breakdown: MemoryBreakdown) -> list[TimelinePoint]:
    base = breakdown.total - breakdown.activations
    grow = np.linspace(0.03, 1.0, 62) ** 0.9
    shrink = np.linspace(1.0, 0.02, 88) ** 1.3
    shape = np.concatenate([grow, shrink])
    wobble = 1.0 - 0.09 * np.abs(np.sin(np.arange(150) * 1.7))
    wobble[61] = 1.0
    points = []
    for index in range(150):
        forward = index < 62
        kinds = FORWARD if forward else BACKWARD
        op_type = kinds[index % len(kinds)]
        live = base + int(breakdown.activations * min(1.0, shape[index] * wobble[index]))
        side = "features" if forward else "grad/features"
        points.append(
            TimelinePoint(
                index=index, node=f"{side}.{index}/{op_type}", op_type=op_type, live_bytes=live,
                part="forward" if forward else "backward",
            )
        )  # fmt: skip
    return points


def _tensors(breakdown: MemoryBreakdown) -> list[PeakTensor]:
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
    return [PeakTensor(name=name, bytes=nbytes, kind=kind) for name, nbytes, kind in rows]  # type: ignore[arg-type]


def _operators() -> list[OperatorCost]:
    rows = [
        ("Conv", "compute", 720, 0.331),
        ("MatMul", "compute", 1920, 0.243),
        ("ConvTranspose", "compute", 480, 0.148),
        ("Mul", "memory", 3360, 0.071),
        ("Where", "memory", 720, 0.058),
        ("Slice", "memory", 4320, 0.046),
        ("Pad", "memory", 720, 0.031),
        ("Add", "memory", 1680, 0.024),
        ("ReduceSum", "memory", 960, 0.018),
        ("MaxPool", "other", 480, 0.014),
        ("Transpose", "memory", 960, 0.009),
        ("Softmax", "other", 240, 0.003),
        ("Gather", "other", 480, 0.002),
        ("Reshape", "other", 2880, 0.002),
    ]
    total = STEPS * 41.3
    return [
        OperatorCost(
            op_type=op, operator_class=kind, calls=calls, total_ms=share * total, share=share
        )  # type: ignore[arg-type]
        for op, kind, calls, share in rows
    ]


def _device(
    profile: DeviceProfile, predicted: int, measured: int, host_step: float, policy: Policy,
    app: bool,
) -> DeviceResult:  # fmt: skip
    limit = profile.memory_limit(policy.state)
    entitled = profile.memory.app_limit_entitled
    limit_bytes = profile.memory_limit_bytes(policy.state)
    entitled_bytes = (
        int(entitled.interval("bytes").typical) if isinstance(entitled, Quantity) else None
    )
    kit = kit_of(profile.os)
    own = default_footprint(profile) if app else AppFootprint(0, None, "no app")
    library = RUNTIME_LIBRARY_BYTES if app else 0
    room = None if limit_bytes is None else max(0, limit_bytes - own.nbytes - library)
    near = room is not None and with_margin(predicted) <= room < 2 * predicted
    latency = _latency(profile, host_step)
    return DeviceResult(
        name=profile.name, title=profile.title, os=profile.os, validated=profile.validated,
        profile_digest=profile.digest,
        memory=DeviceMemory(
            limit_bytes=limit_bytes, limit_kind=limit.kind if limit else None,
            limit_source=limit.source if limit else None, limit_state=policy.state,
            entitled_limit_bytes=entitled_bytes, predicted_peak_bytes=predicted,
            measured_peak_bytes=measured, held="rlimit" if near else None,
            held_bytes=room if near else None,
            warning_bytes=None if limit_bytes is None else int(0.7 * limit_bytes),
            phase="step", app_bytes=own.nbytes, app_kind=own.kind, app_source=own.source,
            runtime_bytes=library, kit=kit, loop="step",
            sharing="shared" if KITS[kit] else "own",
        ),
        latency=latency,
        campaign=campaign(profile, latency.step_ms, policy, STEPS),
        training=DeviceTraining(outcome="completed", steps_done=STEPS, final_loss=0.0931),
        figures=profile.figures(),
    )  # fmt: skip


def _latency(profile: DeviceProfile, host_step: float) -> DeviceLatency:
    gemm, copy = profile.gemm_flops(), profile.copy_bandwidth()
    if gemm is None or copy is None:
        missing = "matrix rate" if gemm is None else "memory bandwidth"
        return DeviceLatency(
            step_ms=None,
            basis="host times by operator class",
            not_judged=f"the profile gives no {missing}",
        )
    compute, moved = 0.722 * host_step * 118.4e9, 0.278 * host_step * 13.7e9
    step = Interval(
        low=compute / gemm.high + moved / copy.high,
        typical=compute / gemm.typical + moved / copy.typical,
        high=compute / gemm.low + moved / copy.low,
    )
    return DeviceLatency(
        step_ms=step,
        p90_ms=step.scaled(1.04),
        first_step_ms=step.scaled(2.3),
        session_creation_ms=step.scaled(1.2),
        checkpoint_load_ms=interval(14.0),
        checkpoint_save_ms=interval(31.0),
        threads=profile.training_threads() or 1,
        by_class=[
            ClassTime(operator_class=kind, host_ms=here * host_step, device_ms=step.scaled(there))  # type: ignore[arg-type]
            for kind, here, there in (
                ("compute", 0.722, 0.7),
                ("memory", 0.257, 0.28),
                ("other", 0.021, 0.02),
            )
        ],
        basis="host times by operator class, carried over by matrix rate and memory bandwidth",
    )
