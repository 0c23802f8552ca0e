"""Simulate the training of a package on devices: predict, measure, hold to limits, carry over."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import numpy as np
import onnxruntime

from odtpack_runtime.data import load_dataset
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.layout import Array
from odtpack_runtime.manifest import Manifest
from odtpack_runtime.optimizer_state import DEFAULT_LEARNING_RATE
from odtpack_runtime.package import Package
from odtpack_runtime.schedules import Schedule as RateSchedule
from odtpack_runtime.schedules import ScheduleSpec
from odtpack_runtime.simulator.figures import Quantity
from odtpack_runtime.simulator.job import Job, Message
from odtpack_runtime.simulator.latency import HostTiming, carry, measure_host
from odtpack_runtime.simulator.memory_plan import MemoryPlan, plan_memory
from odtpack_runtime.simulator.profile import DeviceProfile
from odtpack_runtime.simulator.replay import ReplayResult, final_loss, replay
from odtpack_runtime.simulator.result import (
    DataInfo,
    DeviceMemory,
    DeviceResult,
    DeviceTraining,
    HostInfo,
    MemoryInfo,
    PackageInfo,
    SimulationResult,
    TrainingInfo,
)
from odtpack_runtime.simulator.schedule import Schedule, make_schedule
from odtpack_runtime.simulator.units import format_bytes

Stage = Literal["predicting", "measuring", "timing", "replaying"]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a simulation is.

    Attributes:
        stage: What is being done.
        detail: On what: the devices that share a replay, or empty.
        step: Training steps done in this stage; 0 where there are none.
        steps: Training steps of this stage; 0 where there are none.
        loss: Loss of the last step.
        run: Number of this stage, from 1.
        runs: Number of stages.
    """

    stage: Stage
    detail: str = ""
    step: int = 0
    steps: int = 0
    loss: float | None = None
    run: int = 1
    runs: int = 1


OnProgress = Callable[[Progress], None]


def simulate(
    package_path: str | os.PathLike[str],
    data_path: str | os.PathLike[str],
    profiles: Sequence[DeviceProfile],
    *,
    batch_size: int,
    epochs: int,
    learning_rate: float | None = None,
    seed: int,
    threads: int = 1,
    progress: OnProgress | None = None,
) -> SimulationResult:
    """Train a package for real, once freely and once within each device's memory.

    Everything in the result but measurements (memory, time, and through them
    what is killed at a limit) is a function of the arguments. Checks and
    verdicts are left to :func:`~odtpack_runtime.simulator.judge.judge`.

    Args:
        package_path: The package's folder or its manifest.
        data_path: ``.npz`` file with one array per input.
        profiles: The devices; devices with the same memory limit share a replay.
        batch_size: Samples per batch; the package says how many batches make a step.
        epochs: Passes over the training samples, four fifths of the data.
        learning_rate: Learning rate of every step, or where the package has a schedule the
            one that this starts from; None for that of the package's schedule, else 0.001.
        seed: Seed of the split and of the order of samples.
        threads: Intra-operator threads of ONNX Runtime.
        progress: Called as the simulation proceeds.

    Raises:
        OdtpackError: The package, the data or an argument is wrong; the free
            training crashed, or was killed by this machine.
    """
    package = Package.open(package_path)
    package.require_stock()
    manifest = package.manifest
    _check_arguments(learning_rate, threads, profiles)
    arrays = load_dataset(
        data_path,
        manifest.input_specs(),
        class_count=manifest.class_count,
        ignored_label=manifest.ignored_label,
    )
    samples = len(next(iter(arrays.values())))
    schedule = make_schedule(
        manifest.input_specs(),
        samples,
        batch_size=batch_size,
        epochs=epochs,
        seed=seed,
        accumulation_steps=manifest.accumulation_steps,
    )
    rate = _rate(manifest, learning_rate, schedule.steps)
    limits = sorted({limit for p in profiles if (limit := p.memory_limit_bytes()) is not None})
    tell = _Teller(progress, runs=3 + len(limits), steps=schedule.steps)
    with tempfile.TemporaryDirectory(prefix="odtpack-simulate-") as folder:
        job = _make_job(package, arrays, schedule, rate, threads, Path(folder))
        shapes = {
            name: (schedule.largest_batch, *array.shape[1:]) for name, array in arrays.items()
        }
        del arrays
        tell.begin("predicting")
        plan = plan_memory(package, shapes, threads=threads)
        tell.begin("measuring")
        free = replay(job, on_message=tell.message)
        if free.outcome == "killed":
            raise OdtpackError(
                "replay-killed",
                f"The training was killed without any limit set: {free.detail}.",
                hint="this machine has too little memory: use a smaller batch",
            )
        tell.begin("timing")
        timing = measure_host(dataclasses.replace(job, task="time"), on_message=tell.message)
        runs: dict[int, ReplayResult] = {}
        for limit in limits:
            names = [p.title for p in profiles if p.memory_limit_bytes() == limit]
            tell.begin("replaying", f"{', '.join(names)} ({format_bytes(limit)})")
            held = dataclasses.replace(job, limit_bytes=limit)
            runs[limit] = replay(held, on_message=tell.message)
    return SimulationResult(
        tool_version=_version(),
        package=_package_info(package, Path(package_path)),
        data=_data_info(schedule),
        host=_host_info(timing, threads),
        training=_training_info(free, job),
        latency_host=timing.host_latency(),
        memory=MemoryInfo(
            predicted=plan.predicted(),
            measured_peak_bytes=free.peak_bytes,
            timeline=list(plan.timeline),
            tensors_at_peak=plan.tensors_at_peak(),
        ),
        devices=[_device(p, plan, free, runs, timing, schedule) for p in profiles],
    )


class _Teller:
    """Turn the messages of children into progress."""

    def __init__(self, progress: OnProgress | None, *, runs: int, steps: int) -> None:
        self._progress = progress
        self._steps = steps
        self._now = Progress("predicting", run=0, runs=runs)

    def begin(self, stage: Stage, detail: str = "") -> None:
        steps = self._steps if stage in ("measuring", "replaying") else 0
        self._tell(Progress(stage, detail, 0, steps, None, self._now.run + 1, self._now.runs))

    def message(self, message: Message) -> None:
        if message["event"] == "step":
            done = self._now.step + 1
            self._tell(dataclasses.replace(self._now, step=done, loss=message["loss"]))

    def _tell(self, now: Progress) -> None:
        self._now = now
        if self._progress is not None:
            self._progress(now)


@dataclass(frozen=True, slots=True)
class _Rate:
    """The learning rate: what it starts from, and what it follows."""

    initial: float
    schedule: RateSchedule | None


def _rate(manifest: Manifest, learning_rate: float | None, steps: int) -> _Rate:
    """The rate of a training of so many steps, as ``odtpack train`` chooses it.

    Raises:
        OdtpackError: ``bad-schedule`` if the package's schedule does not fit the training.
    """
    proposed, follows = None, None
    if manifest.schedule is not None:
        info = manifest.schedule
        proposed = info.learning_rate
        try:
            follows = ScheduleSpec(info.kind, info.settings, proposed).schedule(steps)
        except OdtpackError as error:
            error.hint = f"the training makes {steps} steps: replay more epochs"
            raise
    rates = (learning_rate, proposed, DEFAULT_LEARNING_RATE)
    return _Rate(next(rate for rate in rates if rate is not None), follows)


def _check_arguments(
    learning_rate: float | None, threads: int, profiles: Sequence[DeviceProfile]
) -> None:
    if learning_rate is not None and not 0 <= learning_rate < math.inf:
        raise OdtpackError(
            "bad-learning-rate",
            f"The learning rate must be a finite number and not negative, not {learning_rate!r}.",
        )
    if not 1 <= threads <= 1024:
        raise OdtpackError("bad-threads", f"There must be at least one thread, not {threads!r}.")
    names = [profile.name for profile in profiles]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise OdtpackError("device-twice", f"Device '{min(twice)}' is given twice.")


def _make_job(
    package: Package,
    arrays: Mapping[str, Array],
    schedule: Schedule,
    rate: _Rate,
    threads: int,
    folder: Path,
) -> Job:
    """Write the data where children can map them, and describe the training."""
    data = {}
    for index, (name, array) in enumerate(arrays.items()):
        path = folder / f"data{index}.npy"
        np.save(path, array, allow_pickle=False)
        data[name] = str(path)
    logits, labels = _accuracy_inputs(package.manifest)
    return Job(
        task="train",
        training_model=str(package.training_model),
        eval_model=str(package.eval_model),
        optimizer_model=str(package.optimizer_model),
        checkpoint=str(package.checkpoint),
        folder=str(folder),
        data=data,
        samples=schedule.samples,
        batch_size=schedule.batch_size,
        epochs=schedule.epochs,
        seed=schedule.seed,
        full_batches=schedule.full_batches,
        accumulation_steps=schedule.accumulation_steps,
        learning_rate=rate.initial,
        rate_kind=rate.schedule.kind if rate.schedule is not None else None,
        rate_settings=rate.schedule.settings() if rate.schedule is not None else {},
        threads=threads,
        logits=logits,
        labels=labels,
        ignored_label=package.manifest.ignored_label,
    )


def _accuracy_inputs(manifest: Manifest) -> tuple[int | None, int | None]:
    """Indices of the output with one score per class and of the labels; None without them."""
    roles = [item.role for item in manifest.inputs]
    classes = manifest.class_count
    if "labels" not in roles or classes is None:
        return None, None
    labels = roles.index("labels")
    rank = len(manifest.inputs[labels].shape)
    for index, output in enumerate(manifest.outputs):
        scores = output.dtype.startswith("float") and len(output.shape) == rank + 1
        if output.role == "additional" and scores and output.shape[1] == classes:
            return index, labels
    return None, None


def _package_info(package: Package, given: Path) -> PackageInfo:
    manifest = package.manifest
    manifest_bytes = (package.path / package.manifest_name).stat().st_size
    counts = [(p.role, math.prod(p.shape)) for p in manifest.parameters]
    return PackageInfo(
        path=str(given),
        manifest_sha256=package.manifest_sha256,
        trainable_parameters=sum(count for role, count in counts if role == "trainable"),
        total_parameters=sum(count for _, count in counts),
        parameter_bytes=sum(
            math.prod(p.shape) * np.dtype(p.dtype).itemsize for p in manifest.parameters
        ),
        package_bytes=manifest_bytes + sum(file.size_bytes for file in manifest.files.all()),
        loss=manifest.loss,
        optimizer=manifest.optimizer.kind,
    )


def _data_info(schedule: Schedule) -> DataInfo:
    return DataInfo(
        samples=schedule.samples,
        train_samples=schedule.train_samples,
        held_out_samples=schedule.held_out_samples,
        batch_size=schedule.batch_size,
        accumulation_steps=schedule.accumulation_steps,
        epochs=schedule.epochs,
        steps=schedule.steps,
        seed=schedule.seed,
    )


def _host_info(timing: HostTiming, threads: int) -> HostInfo:
    return HostInfo(
        cpu=_cpu_name(),
        cores=os.cpu_count() or 1,
        threads=threads,
        os=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        onnxruntime=onnxruntime.__version__,
        gemm_gflops=timing.gemm_flops / 1e9,
        memory_bandwidth_gbs=timing.copy_bandwidth / 1e9,
    )


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine() or "unknown"


def _training_info(run: ReplayResult, job: Job) -> TrainingInfo:
    return TrainingInfo(
        losses=run.losses,
        eval_loss_before=run.eval_loss_before,
        eval_loss_after=run.eval_loss_after,
        metric_name="accuracy" if job.logits is not None else None,
        metric_before=run.metric_before,
        metric_after=run.metric_after,
    )


def _device(
    profile: DeviceProfile,
    plan: MemoryPlan,
    free: ReplayResult,
    runs: Mapping[int, ReplayResult],
    timing: HostTiming,
    schedule: Schedule,
) -> DeviceResult:
    limit = profile.memory_limit()
    limit_bytes = profile.memory_limit_bytes()
    run = free if limit_bytes is None else runs[limit_bytes]
    entitled = profile.memory.app_limit_entitled
    return DeviceResult(
        name=profile.name,
        title=profile.title,
        os=profile.os,
        validated=profile.validated,
        profile_digest=profile.digest,
        memory=DeviceMemory(
            limit_bytes=limit_bytes,
            limit_kind=limit.kind if limit else None,
            limit_source=limit.source if limit else None,
            entitled_limit_bytes=(
                int(entitled.interval("bytes").typical) if isinstance(entitled, Quantity) else None
            ),
            predicted_peak_bytes=plan.peak.nbytes,
            measured_peak_bytes=run.peak_bytes,
            outcome="killed" if run.outcome == "killed" else "not judged",
            detail=run.detail,
        ),
        latency=carry(timing, profile, steps=schedule.steps),
        training=DeviceTraining(
            outcome=run.outcome,
            steps_done=run.steps_done,
            final_loss=final_loss(run),
            detail=run.detail if limit else "the limit is unknown: trained without one",
        ),
        figures=profile.figures(),
    )


def _version() -> str:
    try:
        return metadata.version("odtpack")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"
