"""Trains a package in a process of its own, within a memory limit if asked."""

import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import numpy as np

import odtpack_runtime
from odtpack_runtime.apart.worker import Watch
from odtpack_runtime.checkpoint.parameters import Array
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.package.manifest import Manifest
from odtpack_runtime.package.package import Package
from odtpack_runtime.session.native import native_library
from odtpack_runtime.training.optimizer import DEFAULT_LEARNING_RATE
from odtpack_runtime.training.schedules import LearningRateSchedule, ScheduleSpec
from odtpack_simulator.device.app import with_margin
from odtpack_simulator.memory.arena import SessionUse
from odtpack_simulator.memory.process_memory import Limiter, LimitMethod, child_environment
from odtpack_simulator.replay.job import Job, Message, SamplePlan
from odtpack_simulator.replay.paired_loss import Groups, accuracy_inputs
from odtpack_simulator.result import EvaluationPoint
from odtpack_simulator.values.units import format_bytes

# From a package and data to the training that a child process is asked to do.


Rate = tuple[float, LearningRateSchedule | None]
"""The learning rate: what it starts from, and what it follows."""


def choose_rate(manifest: Manifest, learning_rate: float | None, steps: int) -> Rate:
    """The rate of a training of so many steps, as ``odtpack train`` chooses it."""
    proposed, follows = None, None
    if (info := manifest.schedule) is not None:
        proposed = info.learning_rate
        try:
            follows = ScheduleSpec(info.kind, info.settings, proposed).schedule(steps)
        except OdtpackError as error:
            error.hint = f"the training makes {steps} steps: replay more epochs"
            raise
    rates = (learning_rate, proposed, DEFAULT_LEARNING_RATE)
    return next(rate for rate in rates if rate is not None), follows


def load_samples(
    package: Package, data: str | os.PathLike[str], evaluation: str | os.PathLike[str] | None
) -> tuple[dict[str, Array], int]:
    """The training data and, after them, those to evaluate on; how many the latter are."""
    arrays = package.load_data(data)
    if evaluation is None:
        return arrays, 0
    others = package.load_data(evaluation)
    for name, array in arrays.items():
        if array.shape[1:] != others[name].shape[1:]:
            raise OdtpackError(
                "data-shape",
                f"A sample of '{name}' has the shape {list(others[name].shape[1:])}, and that of "
                f"the training data {list(array.shape[1:])}.",
                where=str(evaluation),
                hint="pad both to the same size",
            )
    both = {name: np.concatenate((array, others[name])) for name, array in arrays.items()}
    return both, len(next(iter(others.values())))


def evenly_spaced(arrays: Mapping[str, Array], samples: int, apart: int = 0) -> dict[str, Array]:
    """So many samples of all, evenly spaced, with the last ones that are held out apart."""
    there, wanted = len(next(iter(arrays.values()))), samples - apart
    stride = max(1, (there - apart) // wanted)
    found = {name: array[: wanted * stride : stride] for name, array in arrays.items()}
    if not apart:
        return found  # views: nothing is copied
    if stride == 1 and there == samples:
        return dict(arrays)
    return {name: np.concatenate((each, arrays[name][-apart:])) for name, each in found.items()}


def write_data(arrays: Mapping[str, Array], folder: Path) -> dict[str, str]:
    """Write each array where children can map it; return the paths."""
    data = {}
    try:
        for index, (name, array) in enumerate(arrays.items()):
            path = folder / f"data{index}.npy"
            np.save(path, array, allow_pickle=False)
            data[name] = str(path)
    except OSError as error:  # NumPy's own has no number, where only a part was written
        size = sum(array.nbytes for array in arrays.values())
        raise OdtpackError(
            "data-not-written",
            f"The data could not be copied to where training processes map them: {error}.",
            where=str(folder),
            hint=f"make room for {format_bytes(size)} there, or set TMPDIR to a folder with more",
        ) from error
    return data


def with_sessions(job: Job, package: Package, use: SessionUse) -> Job:
    """The job with sessions as a kit has them; the package says what is shared."""
    step = str(package.step_model) if use.step_model else None
    library = native_library() if use.native else None
    kernels = None if library is None else str(library.resolve())
    return dataclasses.replace(
        job, sharing=use.sharing, step_model=step, weights_bytes=use.weights_bytes, kernels=kernels
    )


def make_job(
    package: Package,
    data: Mapping[str, str],
    schedule: SamplePlan,
    rate: Rate,
    threads: int,
    folder: Path,
) -> Job:
    """Describe a training to a child."""
    if package.manifest.privacy is not None:
        raise OdtpackError(
            "private-training",
            "Memory and time of private steps, which go sample by sample, are not simulated.",
            where=str(package.path),
            hint="simulate the package built without privacy and with a batch size of 1",
        )
    logits, labels = accuracy_inputs(package.manifest)
    initial, follows = rate
    return Job(
        task="train",
        training_model=str(package.training_model),
        eval_model=str(package.eval_model),
        optimizer_model=str(package.optimizer_model),
        checkpoint=str(package.checkpoint),
        folder=str(folder),
        data=dict(data),
        schedule=schedule,
        learning_rate=initial,
        rate_kind=None if follows is None else follows.kind,
        rate_settings={} if follows is None else follows.settings(),
        threads=threads,
        logits=logits,
        labels=labels,
        tokens=package.manifest.token_labels,
        ignored_label=package.manifest.ignored_label,
    )


# What a simulation reports while it runs.

Stage = Literal["predicting", "timing", "measuring", "replaying"]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a simulation is."""

    stage: Stage  # What is being done. `replaying`: under memory limits and with interruptions
    step: int = 0  # Training steps, or replays, done in this stage; 0 where there are none
    steps: int = 0  # Their number in this stage; 0 where there are none
    loss: float | None = None  # Loss of the last step
    run: int = 1  # Number of this stage, from 1
    runs: int = 1  # Number of stages


OnProgress = Callable[[Progress], None]


class ProgressReporter:
    """Turns messages of children, and numbers of finished replays, into progress."""

    def __init__(self, progress: OnProgress | None, *, runs: int) -> None:
        self._progress = progress
        self._now = Progress("predicting", run=0, runs=runs)

    def begin(self, stage: Stage, *, steps: int = 0) -> None:
        """Begin the next stage."""
        self._tell(Progress(stage, 0, steps, None, self._now.run + 1, self._now.runs))

    def message(self, message: Message) -> None:
        """Take a child's message; what is not a step is not progress."""
        if message["event"] == "step":
            done = self._now.step + 1
            self._tell(dataclasses.replace(self._now, step=done, loss=message["loss"]))

    def done(self, count: int, of: int) -> None:
        """Say how many replays of this stage have ended."""
        self._tell(dataclasses.replace(self._now, step=count, steps=of))

    def _tell(self, now: Progress) -> None:
        self._now = now
        if self._progress is not None:
            self._progress(now)


# Train a package for real in a process of its own, if asked within a memory limit.
#
# The parent keeps its hands off: it starts the child, reads its messages, and makes
# sure that it ends, whatever happens here. A child that runs out of memory, or is
# killed by the system, is a result.

_POLL_SECONDS = 1.0

_STALL_SECONDS = 900.0
"""Longest silence of a child: one step, or loading a package, must not take longer."""

_END_SECONDS = 10.0
_ENDED = "the end"
_MAX_LINE = 1 << 20

_REFUSED = ("cannot allocate memory", "bad_alloc", "out of memory")
"""Last words of libraries that end the process themselves where memory is refused."""

OnMessage = Callable[[Message], None]


@dataclass(slots=True)
class Evaluated:
    """What an evaluation on the held-out samples found; None where it is not defined."""

    loss: float | None = None  # Mean loss
    metric: float | None = None  # Accuracy
    perplexity: float | None = None  # Of a language model
    tokens: int | None = None  # Tokens that this is of
    # Labels that the accuracy counts as right, and all that it counts: see wilson_interval for what
    # they prove.
    right: int | None = None
    total: int | None = None
    # Losses of the samples in ever smaller groups, see held_out_fall.
    groups: list[Groups] = field(default_factory=list)


@dataclass(slots=True)
class ReplayResult:
    """How one training went."""

    limit_bytes: int | None  # The memory it was held to; None for no limit
    # `completed`; or `killed` when it ran out of memory or was killed.
    outcome: Literal["completed", "killed"] = "killed"
    steps_done: int = 0  # Steps made
    # Training loss of each step; None where it was not finite.
    losses: list[float | None] = field(default_factory=list)
    skipped: int = 0  # Batches whose loss or gradients were not finite
    overflows: int = 0  # Batches that only lowered the loss scale of mixed precision
    not_finite: str = ""  # What was not, of the last of them
    before: Evaluated = field(default_factory=Evaluated)  # The evaluation before training
    after: Evaluated = field(default_factory=Evaluated)  # The one after it
    # Every evaluation, those before and after training included.
    curve: list[EvaluationPoint] = field(default_factory=list)
    # Peak of anonymous memory above the process's state before the package was loaded; None if
    # killed, or if this system does not report it.
    peak_bytes: int | None = None
    # The same by phase: `loading`, `evaluation`, `step`, `saving`.
    phase_peaks: dict[str, int] = field(default_factory=dict)
    detail: str = ""  # What happened, for people; empty if there is nothing to say
    limit_method: LimitMethod | None = None  # How it was held to it; None if it was not


def run_training_child(job: Job, *, on_message: OnMessage | None = None) -> ReplayResult:
    """Train in a child process."""
    result = ReplayResult(job.limit_bytes)
    phase = "starting"
    # Closed here, not when the garbage collector comes by: an exception below keeps it alive.
    with closing(run_child(job)) as messages:
        for message in messages:
            phase = _take(message, result, phase)
            if on_message is not None:
                on_message(message)
    return result


def _take(message: Message, result: ReplayResult, phase: str) -> str:
    """Enter what a message says into the result; return the phase that is under way."""
    match message["event"]:
        case "phase":
            return str(message["name"])
        case "limit":
            result.limit_method = message["method"]
            if message["problem"]:
                result.detail = f"the memory limit was not held: {message['problem']}"
        case "evaluation":
            found = Evaluated(**{name: message[name] for name in Evaluated.__slots__})
            found.groups = [(*group,) for group in found.groups]  # JSON knows no tuples
            result.curve.append(
                EvaluationPoint(step=message["step"], loss=found.loss, metric=found.metric)
            )
            if message["when"] == "before":
                result.before = found
            elif message["when"] == "after":
                result.after = found
        case "step":
            result.losses.append(message["loss"])
            result.steps_done += 1
            result.skipped += message["skipped"]
            result.overflows += message["overflows"]
            result.not_finite = message["reason"] or result.not_finite
        case "out-of-memory":
            result.detail = f"out of memory in {phase}: {message['message']}"
            return _ENDED
        case "trained":
            result.outcome = "completed"
            result.peak_bytes = message["peak_bytes"]
            result.phase_peaks = message["phase_peaks"]
            result.detail = result.detail or message["unmeasured"] or ""
            return _ENDED
        case "compared":
            result.before.groups += map(tuple, message["before"])
            result.after.groups += map(tuple, message["after"])
        case "exit" if phase != _ENDED:
            result.detail = _cause_of_exit(message, result.limit_bytes is not None, phase)
    return phase


def _cause_of_exit(message: Message, limited: bool, phase: str) -> str:
    """Distinguish a child that was killed, which is a result, from one that failed."""
    # SIGKILL is the system's out-of-memory killer, SIGABRT an uncaught C++ exception;
    # under a limit, code that does not check its allocations may crash as well.
    names = {"SIGKILL", "SIGABRT"} | ({"SIGSEGV"} if limited else set())
    code, last_words = message["code"], message["stderr"]
    by = next((known.name for known in signal.Signals if known == -code), None)
    if by in names:
        return f"the process was {message['ended'] or f'ended by {by}'} in {phase}"
    if limited and any(words in last_words.lower() for words in _REFUSED):
        return f"out of memory in {phase}: {last_words}"
    raise OdtpackError(
        "replay-crashed",
        f"The training process ended with exit code {code} in {phase}.",
        hint=f"its last words were: {last_words}" if last_words else None,
    )


def run_child(job: Job) -> Generator[Message, None, None]:
    """Run a job in a child process and yield its messages."""
    # Two more are added: `started` (`pid`) before, `exit` (`code`, `stderr`: the last line of it,
    # `ended`: how a limit ended it, or empty) after them. The child is gone when the generator
    # ends, is closed, or raises.
    path = Path(job.folder) / "job.json"
    job.write(path)
    # This process's environment, its import path, and steady memory. Temporary files go with the
    # job's: a child that is killed leaves them.
    package_root = str(Path(odtpack_runtime.__file__).resolve().parents[1])
    inherited = os.environ.get("PYTHONPATH")
    paths = [package_root, *(inherited.split(os.pathsep) if inherited else [])]
    environment = os.environ | child_environment() | {"PYTHONPATH": os.pathsep.join(paths)}
    environment |= dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(job.folder))
    with tempfile.TemporaryFile() as stderr, Limiter(job.limit_bytes, job.limit_methods) as limiter:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "odtpack_simulator.replay.child", str(path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment | limiter.environment,
            cwd=job.folder,
            # Ctrl-C reaches this process, which ends the child.
            start_new_session=os.name == "posix",
        )
        try:
            yield {"event": "started", "pid": process.pid}
            for message in _messages(process):
                if message["event"] == "limit":
                    limiter.take(process.pid, message)
                yield message
            try:
                code = process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired as error:
                raise _stalled(f"it did not end in {_END_SECONDS:g} s") from error
            stderr.seek(0)
            said = stderr.read()[-4000:].decode(errors="replace").strip().splitlines()
            last = said[-1] if said else ""
            yield {"event": "exit", "code": code, "stderr": last, "ended": limiter.ended()}
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _messages(process: subprocess.Popen[bytes]) -> Iterator[Message]:
    """Yield messages until the child closes its end."""
    assert process.stdout is not None  # noqa: S101 - it is a pipe
    stream = process.stdout
    lines: queue.Queue[bytes | None] = queue.Queue()

    def read() -> None:
        try:
            while line := stream.readline(_MAX_LINE):
                lines.put(line)
        except (OSError, ValueError):
            pass  # closed by the other thread
        finally:
            lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    watch = Watch(_STALL_SECONDS)
    while True:
        try:
            line = lines.get(timeout=_POLL_SECONDS)
        except queue.Empty as error:
            if reason := watch.overdue([process.pid]):
                raise _stalled(reason) from error
            continue
        if line is None:
            return
        watch.heard()
        message = _parse(line)
        if message["event"] == "error":
            raise OdtpackError(
                message["code"], message["what"], where=message["where"], hint=message["hint"]
            )
        if message["event"] == "crash":
            raise OdtpackError(
                "replay-crashed", f"The training process failed: {message['message']}"
            )
        yield message


def _parse(line: bytes) -> Message:
    try:
        message = json.loads(line)
        if isinstance(message, dict) and isinstance(message.get("event"), str):
            return message
    except ValueError:
        pass
    raise OdtpackError(
        "replay-crashed",
        f"The training process wrote something that is not a message: {line[:80]!r}",
    )


def _stalled(reason: str) -> OdtpackError:
    return OdtpackError("replay-stalled", f"The training process was ended: {reason}.")


def final_loss(result: ReplayResult) -> float | None:
    """The last training loss; None if there is none or it is not finite."""
    return result.losses[-1] if result.losses else None


# Replays under the memory limits that a plan fits: whether they bear the plan out.
#
# Memory is monotonic: a training that a limit lets through is let through by every higher one. So
# one replay under the lowest limit that the plan fits shows it for any number of devices. Where it
# is ended the plan is too low, and a binary search over the other limits says for which. A limit
# far above the peak needs no replay: there is nothing that would reach it.

FAR: Final = 1.5  # From this multiple of the planned peak on, a limit is not replayed

HELD_STEPS: Final = 3
"""Optimizer steps under a limit of each of two processes, if there are as many: with whole batches
memory is the same in every step from a process's second on."""


@dataclasses.dataclass(frozen=True, slots=True)
class LimitOutcome:
    """How a training goes under one limit."""

    run: ReplayResult  # The replay that shows it
    # Whether that replay ran under exactly this limit. Otherwise it ran under a higher one that
    # ended it, or under a lower one that did not.
    exact: bool


def hold(job: Job) -> ReplayResult:
    """Replay the start of a training within the job's limit, and go on from it in a new process."""
    # Every phase, but few steps: the first process loads, evaluates, trains and saves. The second
    # finds its checkpoint, as an app does that was ended, and does the same from there.
    # Returns: How both went: the steps that were made, the highest peak of each phase, and as
    # `resuming` that of loading in the second.
    job = dataclasses.replace(job, resume=True, keep_checkpoint=None)
    job.saved_checkpoint.unlink(missing_ok=True)
    # The second makes two steps, if there are three in all: an arena that no evaluation came
    # before may hold more.
    steps = max(1, min(HELD_STEPS, job.schedule.steps - 2))
    first = _held(dataclasses.replace(job, max_steps=steps))
    if first.outcome == "killed":
        return first
    second = _held(dataclasses.replace(job, max_steps=2 * HELD_STEPS))
    if second.outcome == "killed":
        second.detail = f"resumed after it was ended: {second.detail}"
    second.steps_done += first.steps_done
    second.losses = first.losses + second.losses
    second.skipped += first.skipped
    second.overflows += first.overflows
    second.not_finite = second.not_finite or first.not_finite
    second.phase_peaks = highest(first.phase_peaks, resumed_phases(second.phase_peaks))
    if second.peak_bytes is not None and first.peak_bytes is not None:
        second.peak_bytes = max(first.peak_bytes, second.peak_bytes)
    return second


def resumed_phases(peaks: Mapping[str, int]) -> dict[str, int]:
    """Peaks of a process that went on from a checkpoint: what it loads is ``resuming``."""
    return {"resuming" if name == "loading" else name: peak for name, peak in peaks.items()}


def highest(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """The higher peak of each phase."""
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in {**one, **other}}


def _held(job: Job) -> ReplayResult:
    """Run a part of a training within the job's limit."""
    # `RLIMIT_DATA` also counts memory that is never touched. Where it ends a training that is
    # planned to fit, what is resident decides.
    run = run_training_child(job)
    if run.outcome == "killed" and run.limit_method == "rlimit":
        run = run_training_child(dataclasses.replace(job, limit_methods=["watchdog"]))
    return run


def check_limits(job: Job, limits: Collection[int], planned: int) -> Mapping[int, LimitOutcome]:
    """Hold a training to the limits that its planned peak fits: which of them end it."""
    # Returns: For every such limit below `FAR` times the peak, the replay that settles it.
    near = sorted(limit for limit in {*limits} if with_margin(planned) <= limit < FAR * planned)
    runs: dict[int, ReplayResult] = {}
    low, high = 0, len(near)  # near[:low] end it, near[high:] do not
    while low < high:
        middle = (low + high) // 2 if runs else 0
        limit = near[middle]
        runs[limit] = hold(dataclasses.replace(job, limit_bytes=limit))
        if runs[limit].outcome == "killed":
            low = middle + 1
        else:
            high = middle

    def nearest(limit: int, ends: bool) -> LimitOutcome:
        """The replay that settles a limit: of those with the same outcome the nearest one."""
        outcome = "killed" if ends else "completed"
        same = (tried for tried, run in runs.items() if run.outcome == outcome)
        tried = min(
            (t for t in same if (t >= limit if ends else t <= limit)), key=lambda t: abs(t - limit)
        )
        return LimitOutcome(runs[tried], tried == limit)

    return {limit: nearest(limit, index < low) for index, limit in enumerate(near)}
