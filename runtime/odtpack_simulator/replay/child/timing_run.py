"""Time training steps and their operators: the part of a replay's clock that runs in the child.

Arena on, memory patterns off and the package's optimization level, as
:class:`~odtpack_runtime.training.module.Module` opens sessions for an app: nothing is
limited here. Steps are timed first without a profile; a second session then
profiles a few more to see where the time goes.
"""

import dataclasses
import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import onnxruntime

from odtpack_runtime.checkpoint.state import CheckpointState
from odtpack_runtime.session.native import choose_kernels
from odtpack_runtime.session.options import default_session_options
from odtpack_runtime.session.session import open_session
from odtpack_runtime.training.module import Module
from odtpack_runtime.training.optimizer import Optimizer
from odtpack_simulator.measure import host
from odtpack_simulator.measure.calibration import (
    Calibration,
    NodeRun,
    calibrate,
    kernel_names,
    model_runs,
    rates,
    typical_step,
)
from odtpack_simulator.memory.operator_work import Work
from odtpack_simulator.replay.child.training_run import Batches, Send, Trainer
from odtpack_simulator.replay.job import Indices, Job

_TIMED_STEPS: Final = 40  # enough for a two-sided 95 % interval of the 90th percentile
_TIMED_SECONDS: Final = 4.0
_MOST_REPEATED: Final = 3
_PROFILED_STEPS: Final = 25
_PROFILED_SECONDS: Final = 2.0
_REPEATS: Final = 9  # enough for an interval of the median without its extremes
_REPEATED_SECONDS: Final = 1.5
_MAX_ROWS: Final = 4000  # Rows of operators in a message: more are put together by operator type


def time_steps(job: Job, send: Send) -> None:
    """Calibrate this machine, time steps, sessions and checkpoints, and profile a few steps."""
    # Sends `timed` with
    # - `calibration`: the fields of Calibration;
    # - `first_step_ms` and `steps_ms`; `first_waited_ms` and `waited_ms`, what each of these
    #   waited; `rates_after`: matrix rate and copy bandwidth after them; `stolen_share`,
    #   `others_share` (of the cores that the steps leave free) and `load_average`;
    # - `operators` of one typical step: rows of `op_type`, `calls`, `us` (with what the
    #   profile adds), `flops` and `moved_bytes`, put together where all of a run is alike;
    #   `profiled_steps`;
    # - `session_creation`, `checkpoint_load` and `checkpoint_save`: `ms` and `cpu_ms`,
    #   medians, and `all_cpu_ms`; `checkpoint_bytes`, `model_bytes`, those of mapped weights
    #   included.
    send("phase", name="calibrating this machine")
    known = Calibration(**job.calibration) if job.calibration else None
    calibration = known or calibrate(job.threads)
    send("phase", name="creating sessions")
    files = [job.step_model or job.training_model, job.eval_model, job.optimizer_model]
    files += map(str, job.segment_files)
    models = [file for file in files if file.endswith(".onnx")]
    creation = _repeated(lambda: [open_session(file, _options(job)) for file in models])
    send("phase", name="timing steps")
    batches = Batches(list(job.data.values()), job.schedule.largest_batch)
    trainer = open_trainer(job, batches)
    stolen, others, start = host.stolen_seconds(), host.others_seconds(), time.perf_counter()
    (first, *steps), (first_waited, *waited) = step_times(job, trainer)
    seconds = time.perf_counter() - start
    stolen, others = host.stolen_seconds() - stolen, host.others_seconds() - others
    cores = os.cpu_count() or 1
    send("phase", name="calibrating this machine again")
    after = (known.gemm_flops, known.copy_bandwidth) if known else rates(job.threads)
    send("phase", name="saving and loading")
    path = Path(job.folder) / "timed-checkpoint"
    save = _repeated(partial(CheckpointState.save_checkpoint, trainer.module.state, path, True))
    load = _repeated(lambda: CheckpointState.load_checkpoint(path))
    checkpoint_bytes = path.stat().st_size
    path.unlink()
    del trainer
    send("phase", name="profiling steps")
    count, nodes = profiled_step(job, batches)
    send(
        "timed",
        calibration=dataclasses.asdict(calibration),
        first_step_ms=first,
        first_waited_ms=first_waited,
        steps_ms=steps,
        waited_ms=waited,
        rates_after=after,
        stolen_share=stolen / (seconds * cores),
        others_share=max(0.0, others / (seconds * max(1, cores - job.threads))),
        load_average=host.load_average(),
        profiled_steps=count,
        operators=grouped(nodes),
        session_creation=creation,
        checkpoint_load=load,
        checkpoint_save=save,
        checkpoint_bytes=checkpoint_bytes,
        model_bytes=sum(Path(file).stat().st_size for file in files),
    )


def _options(job: Job) -> onnxruntime.SessionOptions:
    options = default_session_options(job.training_model, job.threads)
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    choose_kernels(options, job.kernels)
    return options


def open_trainer(job: Job, batches: Batches, *, profile: bool = False) -> Trainer:
    """Load the package as an app does; profiles go to ``training*`` and ``optimizer*.json``."""
    options = _options(job)
    options.enable_profiling = profile
    options.profile_file_prefix = str(Path(job.folder) / "training")
    state = CheckpointState.load_checkpoint(job.checkpoint)
    module = Module(
        job.training_model, state, session_options=options, step_model_uri=job.step_model
    )
    options.profile_file_prefix = str(Path(job.folder) / "optimizer")
    optimizer = Optimizer(job.optimizer_model, module)
    return Trainer(module, optimizer, batches, job.set_rate(optimizer))


def whole_steps(job: Job) -> Iterator[list[Indices]]:
    """The largest steps that occur, for ever."""
    schedule = job.schedule
    steps = itertools.chain.from_iterable(map(schedule.training_steps, itertools.count()))
    largest = schedule.step_samples
    return (step for step in steps if sum(map(len, step)) == largest)


def step_times(job: Job, trainer: Trainer) -> tuple[list[float], list[float]]:
    """Milliseconds of the first step and of those after it, three at least, and their waits."""
    # Steps that waited for a processor are made up for by more, in up to three times the time.
    times: list[float] = []
    waited: list[float] = []
    quiet = 0
    clock = host.WaitingClock(job.threads)
    start = time.perf_counter()
    for indices in itertools.islice(whole_steps(job), 1 + _MOST_REPEATED * _TIMED_STEPS):
        before = clock.seconds()
        times.append(trainer.step(indices)[1] * 1e3)
        waited.append(1e3 * (clock.seconds() - before))
        quiet += len(times) > 1 and waited[-1] <= host.QUIET_SHARE * times[-1]
        spent = time.perf_counter() - start
        enough = quiet >= host.ENOUGH_STEPS or quiet == len(times) - 1
        seconds = _TIMED_SECONDS if enough else _MOST_REPEATED * _TIMED_SECONDS
        if quiet == _TIMED_STEPS or (len(times) > 3 and spent > seconds):
            break
    clock.close()
    return times, waited


def profiled_step(
    job: Job, batches: Batches, *, seconds: float = _PROFILED_SECONDS, most: int = _PROFILED_STEPS
) -> tuple[int, list[NodeRun]]:
    """Number of profiled steps, and the nodes of a typical one, training before optimizer."""
    trainer = open_trainer(job, batches, profile=True)
    source = whole_steps(job)
    trainer.step(next(source))  # the first one is not like the others
    made = 1
    end = time.perf_counter() + seconds
    while made < 1 + most and (made == 1 or time.perf_counter() < end):
        trainer.step(next(source))
        made += 1
    del trainer
    gc.collect()  # a session writes its profile when it goes
    nodes: list[NodeRun] = []
    steps = job.step_model or job.training_model
    for prefix, model in (("training", steps), ("optimizer", job.optimizer_model)):
        kernels = {} if job.kernels is None else kernel_names(model)
        for file in sorted(Path(job.folder).glob(f"{prefix}*.json")):  # one for each session
            if prefix == "training" or job.step_model is None:
                nodes += typical_step(model_runs(file, kernels), made)
            file.unlink()
    return made - 1, nodes


def grouped(nodes: Sequence[NodeRun]) -> list[dict[str, Any]]:
    """Rows of a step's nodes, those of one operator with the same work put together."""
    groups: dict[tuple[str, Work], list[NodeRun]] = {}
    for node in nodes:
        groups.setdefault((node.op_type, node.work), []).append(node)
    order = sorted(groups.values(), key=lambda own: -sum(node.us for node in own))
    rest: dict[str, list[NodeRun]] = {}
    for own in order[_MAX_ROWS:]:
        rest.setdefault(own[0].op_type, []).extend(own)
    return [_row(own) for own in (*order[:_MAX_ROWS], *(rest[op] for op in sorted(rest)))]


def _row(nodes: Sequence[NodeRun]) -> dict[str, Any]:
    """Work and time of all runs of some nodes of one operator type together."""
    known = [node.work.flops for node in nodes if node.work.flops is not None]
    return {
        "op_type": nodes[0].op_type,
        "calls": len(nodes),
        "us": sum(node.us for node in nodes),
        "flops": sum(known) if len(known) == len(nodes) else None,
        "moved_bytes": sum(node.work.moved_bytes for node in nodes),
    }


def _repeated(work: Callable[[], object]) -> dict[str, Any]:
    """Median wall time and processor time of some work in milliseconds, and all of the latter."""
    times: list[tuple[float, float]] = []
    end = time.perf_counter() + _REPEATED_SECONDS
    while len(times) < _REPEATS and (len(times) < 2 or time.perf_counter() < end):
        start, cpu = time.perf_counter(), time.thread_time()
        work()
        times.append((time.perf_counter() - start, time.thread_time() - cpu))
    wall, processor = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    every = [1e3 * cpu for _, cpu in times]
    return {"ms": wall, "cpu_ms": min(processor, wall), "all_cpu_ms": every}
