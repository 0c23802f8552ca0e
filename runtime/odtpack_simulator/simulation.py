"""Simulate the training of a package on devices: predict, measure, hold to limits, carry over.

What is computed with numbers runs once, whatever the number of devices: one free
training, one timing, one interrupted training, and the few replays that settle the
memory limits near the peak. Everything about a device is then judged from these.
"""

import dataclasses
import hashlib
import math
import os
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime

from odtpack_runtime.checkpoint.parameters import Array
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.scratch import scratch_folder
from odtpack_runtime.package.native import has_native_nodes
from odtpack_runtime.package.package import Package
from odtpack_runtime.package.records import SessionInfo
from odtpack_simulator.campaign import run_campaign
from odtpack_simulator.device.app import (
    AppFootprint,
    FootprintOf,
    default_footprint,
    memory_fit,
    runtime_bytes,
)
from odtpack_simulator.device.kits import Kit, kit_of
from odtpack_simulator.device.profile import DeviceProfile, OsClass
from odtpack_simulator.figures.judge import judge as judge_without_budgets
from odtpack_simulator.latency import carry, measure_sessions
from odtpack_simulator.measure.host import processor_name
from odtpack_simulator.memory.arena import SessionUse, session_use
from odtpack_simulator.memory.execution_order import trained_layers
from odtpack_simulator.memory.gpu_memory import plan_gpu_memory
from odtpack_simulator.memory.memory_plan import MEMORY_CHECKS, plan_changes, plan_memory
from odtpack_simulator.memory.planning import MemoryPlan, held_weights, whole_graph
from odtpack_simulator.replay.executor import Executor, LocalExecutor
from odtpack_simulator.replay.interruption import MAX_INTERRUPTIONS, interrupt
from odtpack_simulator.replay.job import HELD_OUT_SHARE, Job, Message, make_sample_plan
from odtpack_simulator.replay.paired_loss import held_out_fall
from odtpack_simulator.replay.replay import (
    HELD_STEPS,
    LimitOutcome,
    OnProgress,
    ProgressReporter,
    ReplayResult,
    check_limits,
    choose_rate,
    evenly_spaced,
    final_loss,
    highest,
    load_samples,
    make_job,
    resumed_phases,
    run_training_child,
    with_sessions,
    write_data,
)
from odtpack_simulator.result import (
    DataInfo,
    DeviceMemory,
    DeviceResult,
    DeviceTraining,
    HostInfo,
    InterruptionInfo,
    MemoryInfo,
    PackageInfo,
    PeakTensor,
    Policy,
    SimulationResult,
    TrainingInfo,
    find_origin,
    tool_version,
)
from odtpack_simulator.values.figure import wilson_interval
from odtpack_simulator.values.text import shown_path
from odtpack_simulator.values.units import Quantity, format_bytes


def _interrupted(job: Job, options: dict[str, int]) -> tuple[InterruptionInfo, Mapping[str, int]]:
    """How :func:`interrupt` went, and peaks by phase of a process that resumed."""
    begun: list[int] = []
    resumed: dict[str, int] = {}

    def take(message: Message) -> None:
        """Listen for a process that begins with a checkpoint, and is not warned."""
        match message["event"]:
            case "started":
                begun.clear()
            case "begun":
                begun.append(message["step"])
            case "trained" if len(begun) == 1 and begun[0] > 0:
                resumed.clear()
                resumed.update(resumed_phases(message["phase_peaks"]))

    return interrupt(job, **options, on_message=take), resumed


def _run_task(task: tuple[Any, ...]) -> Any:
    """Call a function with arguments: the work of an executor."""
    function, *arguments = task
    return function(*arguments)


MOST_STEPS: Final = 10_000
"""Steps that are really made: of a longer training a part is trained, and the rest follows."""

_STAGES: Final = 4
_SAVES: Final = 5
"""Checkpoints of the interrupted training where the policy does not say how often to save."""
_INPUT_IDS: Final = "input_ids"
"""Input with the numbers of a text's tokens, as exporters of language models name it."""


def simulate(
    package_path: str | os.PathLike[str],
    data_path: str | os.PathLike[str],
    profiles: Sequence[DeviceProfile],
    *,
    batch_size: int,
    epochs: int,
    learning_rate: float | None = None,
    seed: int,
    threads: int | None = None,
    policy: Policy | None = None,
    interruptions: int = 0,
    executor: Executor | None = None,
    progress: OnProgress | None = None,
    judge: Callable[[SimulationResult], SimulationResult] = judge_without_budgets,
    footprint: FootprintOf = default_footprint,
    most_steps: int = MOST_STEPS,
    evaluation: str | os.PathLike[str] | None = None,
    holdout: float = HELD_OUT_SHARE,
) -> SimulationResult:
    """Train a package for real: freely, within memory limits, and interrupted.

    Everything in the result but measurements (memory, time, and through them
    what is killed at a limit) is a function of the arguments. Checks and
    verdicts are left to :func:`~odtpack_simulator.figures.judge.judge`.

    Args:
        package_path: The package's folder or its manifest.
        data_path: ``.npz`` file with one array per input.
        profiles: The devices. They share all that is computed.
        batch_size: Samples per batch; the package says how many batches make a step.
        epochs: Passes over the training samples.
        learning_rate: Learning rate of every step, or where the package has a schedule the
            one that this starts from; None for that of the package's schedule, else 0.001.
        seed: Seed of the split, of the order of samples, and of the interruptions.
        threads: Intra-operator threads of ONNX Runtime, for memory and times; the package's
            choice if None.
        policy: How the app trains; by default in one session in the foreground.
        interruptions: How many times a second training is interrupted; 0 for none.
        executor: Runs the replays under limits and the interrupted one; by default one
            after the other.
        progress: Called as the simulation proceeds.
        judge: How the result will be judged. Where a check about memory would fail, changes
            of the package that need less are planned and become part of the result.
        footprint: What the app holds besides the training; by default the stated one of each
            system.
        most_steps: Steps that are trained for real. Of a longer training these are its first
            passes, over evenly spaced samples where one pass is longer; times, energy and days
            on the devices are those of the whole schedule.
        evaluation: ``.npz`` file with the samples to evaluate on; None to hold out a share.
        holdout: Share of the data that is held out, if there is no such file; 0 for none, and then
            nothing is evaluated.

    Raises:
        OdtpackError: The package, the data or an argument is wrong; the free
            training crashed, or was killed by this machine.
    """
    package = Package.open(package_path)
    package.require_stock()
    manifest = package.manifest
    policy = policy or Policy()
    threads = manifest.threads if threads is None else threads
    _check_arguments(learning_rate, threads, interruptions, profiles)
    arrays, apart = load_samples(package, data_path, evaluation)
    data_sha256 = _sha256(arrays, apart)
    whole_schedule = make_sample_plan(
        manifest.input_specs(),
        len(next(iter(arrays.values()))),
        batch_size=batch_size,
        epochs=epochs,
        seed=seed,
        accumulation_steps=manifest.accumulation_steps,
        pieces=policy.pieces,
        holdout=holdout,
        apart=apart,
    )
    rate = choose_rate(manifest, learning_rate, whole_schedule.steps)
    schedule = whole_schedule.sample(most_steps)
    arrays = evenly_spaced(arrays, schedule.samples, apart)
    reporter = ProgressReporter(progress, runs=_STAGES)
    with scratch_folder("simulate") as folder:
        data = write_data(arrays, Path(folder))
        opened = package
        if policy.session_options == "default":
            opened = _with_default_options(package, Path(folder) / "package")
            manifest = opened.manifest
        job = make_job(opened, data, schedule, rate, threads, Path(folder))
        largest = whole_schedule.largest_batch
        shapes = {name: (largest, *array.shape[1:]) for name, array in arrays.items()}
        # Tokens of a sequence [samples, tokens].
        ids = arrays.get(_INPUT_IDS)
        tokens = ids.shape[1] if ids is not None and ids.ndim == 2 else None
        del arrays, ids
        reporter.begin("predicting")
        kits = [policy.kit or kit_of(profile.os) for profile in profiles]
        own = [
            _session_use(opened, kit, profile.os, policy)
            for kit, profile in zip(kits, profiles, strict=True)
        ]
        uses = dict.fromkeys(own) or [session_use(manifest)]
        plans = {
            use: plan_memory(
                opened,
                shapes,
                use,
                threads=threads,
                evaluated=whole_schedule.evaluated_samples,
                samples={whole_schedule.piece_samples(n) for n in (0, policy.pieces - 1)},
                steps=whole_schedule.steps,
            )
            for use in uses
        }
        native = has_native_nodes(manifest)
        memories = [
            _memory(profile, policy, kit, use, plans[use], footprint(profile), native=native)
            for profile, kit, use in zip(profiles, kits, own, strict=True)
        ]
        most = max(plans, key=lambda use: plans[use].peak.nbytes)
        reporter.begin("timing")  # alone on the machine: nothing else of this runs beside it
        timings = measure_sessions(job, opened, uses, reporter.message)
        timing = timings[most.work]
        reporter.begin("measuring", steps=schedule.steps)
        # The end of an interrupted training is compared with the end of this one.
        whole = with_sessions(
            dataclasses.replace(job, keep_checkpoint=str(Path(folder) / "trained")), opened, most
        )
        free = run_training_child(whole, on_message=reporter.message)
        if free.outcome == "killed":
            raise OdtpackError(
                "replay-killed", f"The training was killed without any limit set: {free.detail}."
            )
        tasks: list[tuple[Any, ...]] = []
        for number, use in enumerate(plans):
            rooms = {m.room_bytes for m, each in zip(memories, own, strict=True) if each == use}
            held = with_sessions(_within(job, f"limits-{number}"), opened, use)
            limits = tuple(filter(None, rooms))
            tasks.append((check_limits, held, limits, plans[use].peak.nbytes))
        if interruptions:
            every = policy.save_every or max(1, schedule.steps // _SAVES)
            options = {"seed": seed, "count": interruptions, "save_every": every}
            tasks.append((_interrupted, _within(whole, "kills"), options))
        reporter.begin("replaying", steps=len(tasks))
        done = (executor or LocalExecutor()).map(
            _run_task, tasks, files=[opened.path, Path(folder)], on_done=reporter.done
        )
    interrupted, resumed = done[-1] if interruptions else (None, {})
    phases = highest(free.phase_peaks, resumed)
    measured = free.peak_bytes and max([free.peak_bytes, *phases.values()])
    settled = dict(zip(plans, done, strict=False))
    modules, segments = manifest.module_names(), manifest.segments
    mapped = () if segments is None or most.weights_bytes else segments.tensors
    by_piece = whole_schedule.steps_by_piece()
    # The largest step is timed, and a window of the background must hold it.
    share = whole_schedule.mean_step if policy.state == "foreground" else 1.0

    def on_device(profile: DeviceProfile, use: SessionUse, memory: DeviceMemory) -> DeviceResult:
        """Everything about one device, not yet judged; its memory is that before anything ran."""
        held = settled[use].get(memory.room_bytes or 0)
        latency = carry(timings[use.work], profile, threads)
        step = latency.step_ms
        return DeviceResult(
            name=profile.name,
            title=profile.title,
            os=profile.os,
            validated=profile.validated,
            profile_digest=profile.digest,
            # The free training ran in one way.
            memory=_replayed(memory, measured if use == most else None, held),
            latency=latency,
            campaign=run_campaign(
                profile,
                latency.model_copy(update={"step_ms": step and step.scaled(share)}),
                policy,
                steps=by_piece,
                checkpoint_bytes=timings[use.work].checkpoint_bytes,
                curve=free.curve,
            ),
            training=_training(memory.room_bytes, plans[use], free, held),
            figures=profile.figures(),
        )

    result = SimulationResult(
        schema_version=4,
        tool_version=tool_version(),
        origin=find_origin(package.path),
        package=_package_info(package, Path(package_path)),
        data=DataInfo(
            samples=whole_schedule.samples,
            train_samples=whole_schedule.train_samples,
            held_out_samples=whole_schedule.held_out_samples,
            batch_size=largest,
            asked_batch_size=batch_size,
            step_samples=whole_schedule.step_samples,
            evaluated_samples=schedule.evaluated_samples,
            accumulation_steps=whole_schedule.accumulation_steps,
            epochs=epochs,
            steps=whole_schedule.steps,
            seed=seed,
            trained_steps=schedule.steps,
            trained_samples=schedule.samples,
            tokens_per_sample=tokens,
            evaluated_apart=bool(apart),
            sha256=data_sha256,
        ),
        policy=policy,
        host=HostInfo(
            cpu=processor_name() or platform.processor() or platform.machine() or "unknown",
            cores=os.cpu_count() or 1,
            threads=threads,
            os=f"{platform.system()} {platform.release()}",
            python=platform.python_version(),
            onnxruntime=onnxruntime.__version__,
            gemm_gflops=timing.calibration.gemm_flops / 1e9,
            memory_bandwidth_gbs=timing.calibration.copy_bandwidth / 1e9,
        ),
        training=_training_info(free, job),
        interruption=interrupted,
        latency_host=timing.host_latency(),
        memory=MemoryInfo(
            predicted=plans[most].predicted(),
            measured_peak_bytes=measured,
            phases=plans[most].phase_peaks(phases),
            sharing=most.sharing,
            timeline=list(plans[most].timeline),
            tensors_at_peak=[_renamed(each, modules) for each in plans[most].tensors_at_peak()],
            shapes={name: list(shape) for name, shape in shapes.items()},
            gpu_bytes=plan_gpu_memory(opened, shapes, step_model=most.step_model)
            if timing.gpu and segments is None
            else None,
            mapped_bytes=sum(tensor.nbytes for tensor in mapped) or None,
        ),
        devices=[on_device(*each) for each in zip(profiles, own, memories, strict=True)],
    )
    # Changes are planned for an app that follows the manifest.
    if policy.session_options == "default" or _fits(judge(result)):
        return result
    return _with_changes(result, package, most)


def _sha256(arrays: Mapping[str, Array], apart: int) -> str:
    """A digest of all samples, of which the last ones may be a file's own."""
    found = hashlib.sha256(str(apart).encode())
    for name, array in sorted(arrays.items()):
        found.update(repr((name, array.dtype.str, array.shape)).encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


def _fits(judged: SimulationResult) -> bool:
    checks = [check for _, check in judged.all_checks()]
    return not any(c.status == "fail" and c.metric in MEMORY_CHECKS for c in checks)


def _with_changes(result: SimulationResult, package: Package, use: SessionUse) -> SimulationResult:
    """The result with the changes that need less memory, planned."""
    shapes = result.memory.shapes
    data, pieces = result.data, result.policy.pieces
    held, train = data.held_out_samples, data.train_samples
    evaluated = held - held % (package.manifest.fixed_batch or 1)
    samples = {-(-train // pieces), train // pieces}
    threads = result.host.threads
    changes = plan_changes(package, shapes, use, threads, evaluated, samples, data.steps)
    return result.model_copy(
        update={"memory": result.memory.model_copy(update={"changes": changes})}
    )


def judge_again(
    result: SimulationResult, judge: Callable[[SimulationResult], SimulationResult]
) -> SimulationResult:
    """Judge a result by other limits; what would be enough is planned if its package is there."""
    judged, memory = judge(result), result.memory
    if _fits(judged) or memory.changes is not None:
        return judged
    if result.policy.session_options == "default":
        return judged
    try:
        package = Package.open(result.package.path)
        if package.manifest_sha256 != result.package.manifest_sha256:
            return judged
        most = max(result.devices, key=lambda device: device.memory.predicted_peak_bytes)
        use = _session_use(package, most.memory.kit, most.os, result.policy)
    except OdtpackError:  # or there is no library to plan with
        return judged
    return judge(_with_changes(result, package, use))


def _with_default_options(package: Package, folder: Path) -> Package:
    """A copy of a package whose manifest asks for what ONNX Runtime does by itself."""
    shutil.copytree(package.path, folder)
    session = SessionInfo(optimization_level="all", threads=package.manifest.threads)
    manifest = dataclasses.replace(package.manifest, session=session)
    (folder / package.manifest_name).write_text(manifest.to_json(), encoding="utf-8")
    return Package.open(folder)


def _session_use(package: Package, kit: Kit, os_class: OsClass, policy: Policy) -> SessionUse:
    """How an app trains on a device."""
    held = held_weights(package, kit, fetched=os_class == "web")
    use = session_use(package.manifest, kit, policy.loop, policy.native)
    return use._replace(weights_bytes=held)


def _check_arguments(
    learning_rate: float | None,
    threads: int,
    interruptions: int,
    profiles: Sequence[DeviceProfile],
) -> None:
    if learning_rate is not None and not 0 <= learning_rate < math.inf:
        raise OdtpackError(
            "bad-learning-rate",
            f"The learning rate must be a finite number and not negative, not {learning_rate!r}.",
        )
    if not 1 <= threads <= 256:
        raise OdtpackError(
            "bad-threads", f"The number of threads is {threads!r}; it must be from 1 to 256."
        )
    if not 0 <= interruptions <= MAX_INTERRUPTIONS:
        raise OdtpackError(
            "bad-interruptions",
            f"A training is interrupted 0 to {MAX_INTERRUPTIONS} times, not {interruptions!r}.",
        )
    names = [profile.name for profile in profiles]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise OdtpackError(
            "device-twice", f"Device '{min(twice)}' is given twice.", hint="name it once"
        )


def _within(job: Job, name: str) -> Job:
    """The job with a folder of its own: tasks run side by side."""
    folder = Path(job.folder) / name
    folder.mkdir()
    return dataclasses.replace(job, folder=str(folder))


def _package_info(package: Package, given: Path) -> PackageInfo:
    manifest = package.manifest
    manifest_bytes = (package.path / package.manifest_name).stat().st_size
    counts = [(p.role, math.prod(p.shape)) for p in manifest.parameters]
    sizes = {p.name: math.prod(p.shape) * np.dtype(p.dtype).itemsize for p in manifest.parameters}
    return PackageInfo(
        path=shown_path(given),
        manifest_sha256=package.manifest_sha256,
        trainable_parameters=sum(count for role, count in counts if role == "trainable"),
        total_parameters=sum(count for _, count in counts),
        trained_layers=len(trained_layers(whole_graph(package), manifest)),
        parameter_bytes=sum(sizes.values()),
        package_bytes=manifest_bytes + sum(file.size_bytes for file in manifest.files.all()),
        adapter_bytes=(
            None
            if manifest.adapter is None
            else sum(sizes[name] for name in manifest.adapter.parameters)
        ),
        loss=manifest.loss,
        optimizer=manifest.optimizer.kind,
    )


def _training_info(run: ReplayResult, job: Job) -> TrainingInfo:
    before, after = run.before, run.after
    return TrainingInfo(
        losses=run.losses,
        learning_rate=job.learning_rate,
        eval_loss_before=before.loss,
        eval_loss_after=after.loss,
        metric_name="accuracy" if job.logits is not None else None,
        metric_before=before.metric,
        metric_after=after.metric,
        metric_interval=wilson_interval(after.right or 0, after.total) if after.total else None,
        perplexity_before=before.perplexity,
        perplexity_after=after.perplexity,
        tokens=after.tokens,
        curve=run.curve,
        held_out_fall=held_out_fall(before.groups, after.groups),
        skipped_batches=run.skipped,
        overflows=run.overflows,
        not_finite=run.not_finite,
    )


def _renamed(tensor: PeakTensor, modules: Mapping[str, str]) -> PeakTensor:
    """With the parameter's name in the module: ``gradient of onnx::MatMul_8`` says little."""
    what, of, name = tensor.name.rpartition(" of ")
    return tensor.model_copy(update={"name": f"{what}{of}{modules.get(name, name)}"})


# What the shared measurements say about one device.


def _memory(
    profile: DeviceProfile,
    policy: Policy,
    kit: Kit,
    use: SessionUse,
    plan: MemoryPlan,
    app: AppFootprint,
    *,
    native: bool,
) -> DeviceMemory:
    """What the device leaves a training, and what that is planned to take."""
    # `native`: Whether the package has nodes for native kernels.
    limit = profile.memory_limit(policy.state, entitled=policy.entitled)
    entitled = profile.memory.app_limit_entitled
    foreground = policy.state == "foreground"
    return DeviceMemory(
        limit_bytes=profile.memory_limit_bytes(policy.state, entitled=policy.entitled),
        limit_low_bytes=None if limit is None else int(limit.interval("bytes").low),
        limit_kind=limit.kind if limit else None,
        limit_source=limit.source if limit else None,
        limit_state=policy.state,
        limit_entitled=policy.entitled and foreground and profile.has_entitled_limit,
        entitled_limit_bytes=(
            int(entitled.interval("bytes").typical)
            if isinstance(entitled, Quantity) and foreground
            else None
        ),
        predicted_peak_bytes=plan.peak.nbytes,
        measured_peak_bytes=None,
        warning_bytes=profile.warning_bytes(policy.state, entitled=policy.entitled),
        gpu_own_bytes=int(own.low) if (own := profile.gpu_memory()) else None,
        phase=plan.highest_phase,
        unbounded=plan.unbounded,
        app_bytes=app.nbytes,
        app_kind=app.kind,
        app_source=app.source,
        runtime_bytes=runtime_bytes(kit, profile.os, plan.peak.nbytes),
        kit=kit,
        loop="step" if use.step_model else "train",
        sharing=use.sharing,
        native=use.native if native else None,
    )


def _replayed(
    memory: DeviceMemory, measured: int | None, held: LimitOutcome | None
) -> DeviceMemory:
    """The same with what replays showed."""
    if held is None:
        return memory.model_copy(update={"measured_peak_bytes": measured})
    changes: dict[str, object] = {
        "measured_peak_bytes": measured,
        "held": held.run.limit_method if held.exact else None,
        "held_bytes": held.run.limit_bytes,
    }
    if held.run.outcome == "killed":
        changes |= {"measured_peak_bytes": None, "outcome": "killed", "detail": _ending(held)}
    return memory.model_copy(update=changes)


def _ending(held: LimitOutcome) -> str:
    """How the replay ended, and at which limit where it was not this one."""
    if held.exact or held.run.limit_bytes is None:
        return held.run.detail
    return f"held to {format_bytes(held.run.limit_bytes)}, which is more: {held.run.detail}"


def _training(
    room: int | None, plan: MemoryPlan, free: ReplayResult, held: LimitOutcome | None
) -> DeviceTraining:
    if held is not None and held.run.outcome == "killed":
        run = held.run
        return DeviceTraining(
            outcome="killed",
            steps_done=run.steps_done,
            final_loss=final_loss(run),
            detail=_ending(held),
        )
    if room is None:
        detail = "the limit is unknown: trained without one"
    elif held is None and memory_fit(plan.peak.nbytes, room) == "fits":
        detail = "trained without a limit: this one is far above what was needed"
    elif held is None:
        detail = "trained without a limit: this one is not enough by the plan"
    elif held.run.detail:
        detail = held.run.detail
    elif held.exact:
        detail = f"held to the limit for {HELD_STEPS} steps, loading, evaluation and saving"
    else:
        lower = format_bytes(held.run.limit_bytes or 0)
        detail = f"held to {lower}, which is less, for {HELD_STEPS} steps"
    return DeviceTraining(
        outcome="completed",
        steps_done=free.steps_done,
        final_loss=final_loss(free),
        detail=detail,
    )
