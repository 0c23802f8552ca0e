"""Train a package as its app would: the part of a replay that runs in the child process.

A training that was interrupted goes on from its last whole checkpoint and makes, from there,
the same steps with the same bits. Everything that a step depends on is in that one file
(see :mod:`odtpack_simulator.replay.job`) or a function of the position: the samples of
its batches, and the seed of ONNX Runtime's generator, from which Dropout draws.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

import numpy as np
import numpy.random  # numpy loads it on first use, which would count as the training's memory
import onnxruntime

from odtpack_runtime.checkpoint.format import CheckpointData
from odtpack_runtime.checkpoint.parameters import Array
from odtpack_runtime.checkpoint.state import CheckpointState
from odtpack_runtime.checkpoint.writer import write_checkpoint
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.atomic import atomic_write
from odtpack_runtime.session.mapped_weights import MappedWeights
from odtpack_runtime.session.native import choose_kernels
from odtpack_runtime.session.options import (
    manifest_beside,
    release_arena,
    session_info,
    session_of,
    session_options,
)
from odtpack_runtime.training.loop import evaluate, train_step
from odtpack_runtime.training.lr_scheduler import LRScheduler
from odtpack_runtime.training.module import Module
from odtpack_runtime.training.optimizer import Optimizer
from odtpack_simulator.memory.process_memory import (
    MemoryMeter,
    give_back_memory,
    hold_memory,
    methods_for,
)
from odtpack_simulator.replay.job import (
    Indices,
    Job,
    Position,
    load_position,
    run_digest,
    seed_dropout,
)
from odtpack_simulator.replay.paired_loss import Groups, finer_groups, pooled

Send = Callable[..., None]

_MOST_REASON = 1000  # Characters of a reason, which names parameters


class Batches:
    """Batches of the data in memory that stays where it is."""

    # The data remain in their files, mapped; only one batch is ever in memory.

    def __init__(self, files: Sequence[str], rows: int) -> None:
        self._data = [np.load(file, mmap_mode="r", allow_pickle=False) for file in files]
        self._memory = [np.empty((rows, *data.shape[1:]), data.dtype) for data in self._data]

    def gather(self, indices: Indices) -> list[Array]:
        """The samples of one batch; valid until the next call."""
        batch = []
        for data, memory in zip(self._data, self._memory, strict=True):
            rows = memory[: len(indices)]
            # Another mode than clip would gather into a temporary first. Indices are in range.
            np.take(data, indices, axis=0, out=rows, mode="clip")
            batch.append(rows)
        return batch


def train(job: Job, send: Send) -> None:
    """Train, evaluate and save; send what happens."""
    # Whether the training can go on from the saved checkpoint, which then holds the position.
    again = job.save_every or job.memory_warnings or job.resume or job.keep_checkpoint is not None
    run = run_digest(job) if again else None
    meter = MemoryMeter(files_change=bool(job.segment_files))
    MappedWeights.releasing = meter.dropping
    if job.limit_bytes is not None:
        methods = methods_for(job.limit_methods, arena=session_info(job.training_model).arena)
        held = hold_memory(job.limit_bytes, job.threads, methods)
        send("limit", **held)
        if held["method"] == "watchdog":
            meter.limit = job.limit_bytes
    training = _Training(job, send, meter, run)
    training.go()
    meter.close()
    measured = meter.unavailable is None
    send(
        "trained",
        peak_bytes=meter.peak if measured else None,
        phase_peaks=training.peaks if measured else {},
        unmeasured=meter.unavailable,
    )
    if job.evaluate and job.max_steps is None:  # what is not the app's work comes after it
        send("compared", **training.compare())


class _Training:
    # `peaks`: Most memory of each phase so far, in bytes.

    def __init__(self, job: Job, send: Send, meter: MemoryMeter, run: str | None) -> None:
        self.peaks: dict[str, int] = {}
        self._job, self._send, self._meter, self._run = job, send, meter, run
        self._weights: Array | None = None
        schedule = job.schedule
        enough = job.evaluate and schedule.evaluated_samples > 0
        self._evaluated = schedule.evaluation_steps() if enough else ()
        self._phase = ""
        self._step = 0
        self._saved: int | None = None
        self._whole: dict[str, float | None] = {}
        self._trainer = self._open(resume=job.resume)

    def go(self) -> None:
        """Make the steps that are left."""
        job = self._job
        if self._evaluated and self._step == 0:
            self._evaluate("before")
        while self._step < job.steps:
            self._steps()
        if self._evaluated:
            self._evaluate("after")
        if self._saved != self._step:
            self._save()

    def compare(self) -> dict[str, list[Groups]]:
        """Evaluate finer groups of held-out samples; the parameters are then the package's."""
        module, batches = self._trainer.module, self._trainer.batches
        after = small_groups(module, batches, self._job, self._whole.get("after"))
        if after:
            module.state.load_parameters(self._job.checkpoint)
        whole = self._whole.get("before") if after else None
        return {"before": small_groups(module, batches, self._job, whole), "after": after}

    def _steps(self) -> None:
        """Make steps until the last one, or until the training starts anew in this process."""
        job = self._job
        self._enter("the first step")
        for indices in itertools.islice(
            job.schedule.steps_from(self._step), job.steps - self._step
        ):
            before = self._trainer.module.skipped_steps
            overflows = self._trainer.module.overflows
            loss, _ = self._trainer.step(indices)
            self._step += 1
            self._mark("step")
            # No name for the module: a memory warning drops it, and it would stay alive.
            overflows = self._trainer.module.overflows - overflows
            skipped = self._trainer.module.skipped_steps - before - overflows
            reason = str(self._trainer.module.last_not_finite)[:_MOST_REASON] if skipped else ""
            self._send(
                "step", index=self._step - 1, loss=number(loss),
                skipped=skipped, reason=reason, overflows=overflows,
            )  # fmt: skip
            if job.pause_at == self._step and job.pause_in_save is None:
                wait_to_be_killed(self._send, step=self._step, written=None)
            if self._step == job.steps:
                return  # what comes then comes after every training
            # The evaluation first: a training that goes on from the save has made it.
            if self._step in self._evaluated:
                self._evaluate("during")
            if job.save_every is not None and self._step % job.save_every == 0:
                self._save()
            if self._step in job.memory_warnings:
                for _ in range(job.memory_warnings.count(self._step)):
                    self._start_anew()
                return
            self._enter("training")

    def _open(self, *, resume: bool) -> Trainer:
        """Load the saved checkpoint if there is one and the training goes on, else the package."""
        job = self._job
        self._enter("loading the package")
        # Nodes that draw without the help of Dropout's generator take their seed when they load.
        onnxruntime.set_seed(job.schedule.seed)
        batches = Batches(list(job.data.values()), job.schedule.largest_batch)
        resume = resume and job.saved_checkpoint.is_file()
        state = CheckpointState.load_checkpoint(job.saved_checkpoint if resume else job.checkpoint)
        if resume:
            self._saved = self._step = load_position(state, job, str(self._run)).step
        manifest = manifest_beside(Path(job.training_model))
        session = session_of(manifest, Path(job.training_model))
        if job.sharing is not None:
            session = dataclasses.replace(
                session,
                arena=job.sharing != "none",
                shared_allocator=job.sharing == "shared",
            )
        if job.weights_bytes and self._weights is None:
            self._weights = np.ones(job.weights_bytes, np.uint8)  # written: its pages are there
        options = session_options(session, job.threads)
        options.log_severity_level = 3
        choose_kernels(options, job.kernels, manifest)
        module = Module(
            job.training_model,
            state,
            job.eval_model,
            session_options=options,
            step_model_uri=job.step_model,
        )
        optimizer = Optimizer(job.optimizer_model, module)
        scheduler = LRScheduler.restore(optimizer) if resume else job.set_rate(optimizer)
        self._mark("loading")
        self._send("begun", step=self._step)
        return Trainer(module, optimizer, batches, scheduler, job.schedule.seed)

    def _evaluate(self, when: str) -> None:
        self._enter(f"the evaluation {when} training")
        module, batches, job = self._trainer.module, self._trainer.batches, self._job
        figures = evaluate_held_out(module, batches, job)
        self._whole[when] = figures["loss"]
        self._send("evaluation", when=when, step=self._step, **figures)
        self._mark("evaluation")

    def _save(self) -> None:
        """Save everything that is needed to go on, in one file."""
        job, optimizer = self._job, self._trainer.optimizer
        self._enter("saving the checkpoint")
        state = optimizer.checkpoint_state
        if self._run is not None:
            Position(self._step, optimizer.step_count, self._run).attach(state)
        data = state.snapshot(include_optimizer_state=True)
        write_checkpoint(job.saved_checkpoint, data, open_file=self._opener(data))
        self._saved = self._step
        self._mark("saving")
        self._send("saved", step=self._step)

    def _opener(self, data: CheckpointData) -> OpenFile:
        """How the checkpoint's file is opened: if the job says so, to stop in its write."""
        share = self._job.pause_in_save
        if self._job.pause_at != self._step or share is None:
            return atomic_write
        moments = data.optimizer.moments.values() if data.optimizer else ()
        arrays = itertools.chain(data.trainable.values(), data.frozen.values(), *moments)
        after = max(1, int(share * sum(array.nbytes for array in arrays)))

        def stop(written: int) -> NoReturn:
            wait_to_be_killed(self._send, step=self._step, written=written)

        return stopping_write(after, stop)

    def _start_anew(self) -> None:
        """Save, give back all memory that the training took, and load the checkpoint."""
        if self._saved != self._step:
            self._save()
        self._enter("giving memory back")
        before = self._now()
        del self._trainer
        release_arena()
        give_back_memory()
        self._send("freed", step=self._step, before_bytes=before, after_bytes=self._now())
        self._trainer = self._open(resume=True)

    def _enter(self, phase: str) -> None:
        if phase != self._phase:
            self._phase = phase
            self._send("phase", name=phase)

    def _mark(self, phase: str) -> None:
        self.peaks[phase] = max(self.peaks.get(phase, 0), self._meter.mark())

    def _now(self) -> int | None:
        """Memory above that of the process before it loaded the package."""
        self._meter.mark()  # the peak of what came before
        return None if self._meter.unavailable else self._meter.mark()


@dataclass(frozen=True, slots=True)
class Trainer:
    """What makes optimizer steps; the batches' size is at most that of ``batches``."""

    # What Dropout draws is a function of `seed`, the optimizer's step count and the number of the
    # batch in the step.
    module: Module
    optimizer: Optimizer
    batches: Batches
    scheduler: LRScheduler | None = None
    seed: int = 0

    def step(self, indices: Sequence[Indices]) -> tuple[float, float]:
        """Run the batches of one optimizer step."""
        # Returns: The mean of their losses, and the duration in seconds without that of gathering.
        gathering = 0.0

        def gathered() -> Iterator[list[Array]]:
            nonlocal gathering
            for number, of_batch in enumerate(indices, 1):
                start = time.perf_counter()
                batch = self.batches.gather(of_batch)
                seed_dropout(self.seed, self.optimizer.step_count, number)
                gathering += time.perf_counter() - start
                yield batch

        begin = time.perf_counter()
        # A batch of its own may be a step of the step model; several take the same memory in turn.
        batches = [*gathered()] if len(indices) == 1 else gathered()
        loss = train_step(self.module, self.optimizer, batches, self.scheduler)
        return loss, time.perf_counter() - begin - gathering


def evaluate_held_out(module: Module, batches: Batches, job: Job) -> dict[str, Any]:
    """Mean loss per held-out sample, and the share of labels that the highest score names."""
    # Returns: `loss`, `metric`, `perplexity` and its number of `tokens`, the counts `right` and
    # `total` that the metric is made of, and `groups`, with the losses and sizes of the batches as
    # its only entry.
    found = evaluate(
        module,
        map(batches.gather, itertools.islice(job.schedule.held_out_batches(), job.max_steps)),
        scores=job.logits,
        labels=job.labels,
        ignored_label=job.ignored_label,
        tokens=job.tokens,
    )
    assert found.loss is not None  # noqa: S101 - evaluated is only what has a batch
    return {
        "loss": number(found.loss),
        "groups": [pooled(found.losses, found.sizes)],
        "metric": found.accuracy,
        "perplexity": None if found.perplexity is None else number(found.perplexity),
        "tokens": sum(found.tokens) or None,
        "right": found.right if found.total else None,
        "total": found.total or None,
    }


def small_groups(module: Module, batches: Batches, job: Job, whole: float | None) -> list[Groups]:
    """Loss and size of many small groups of held-out samples; none where batches are fixed."""
    schedule = job.schedule

    def evaluated(size: int) -> tuple[Sequence[float], Sequence[int]]:
        found = evaluate(module, map(batches.gather, schedule.held_out_batches(size)))
        return found.losses, found.sizes

    largest = 0 if schedule.full_batches else schedule.largest_batch
    return finer_groups(schedule.held_out_samples, largest, whole, evaluated)


def number(value: float) -> float | None:
    """A number that JSON has; None for the others."""
    return value if math.isfinite(value) else None


# Stop a training at a chosen point, so that its parent can kill it exactly there.
#
# The child stands still between two steps, or inside the write of a checkpoint whose
# temporary file holds a part of it, notifies its parent, and waits for SIGKILL. Nothing is
# cleaned up: no exception is raised and no ``finally`` runs.

OpenFile = Callable[[Path], AbstractContextManager[BinaryIO]]

PATIENCE_SECONDS = 120.0  # How long a child waits to be killed before it gives up


def wait_to_be_killed(send: Callable[..., None], *, step: int, written: int | None) -> NoReturn:
    """Report to the parent where the training stands, and wait."""
    send("paused", step=step, written=written)
    time.sleep(PATIENCE_SECONDS)
    raise OdtpackError("not-killed", "The simulated kill did not end the training.")


def stopping_write(after_bytes: int, stop: Callable[[int], NoReturn]) -> OpenFile:
    """Return what opens a file whose write stops once so many bytes are on their way to disk."""
    # The temporary file then holds exactly so many bytes. A file that is shorter is written whole,
    # and the write stops before it takes its name.
    # `stop`: Called with the number of bytes written; does not return.
    # Returns: The `open_file` of write_checkpoint.

    @contextmanager
    def torn(path: Path) -> Iterator[BinaryIO]:
        with atomic_write(path) as stream:
            yield cast(BinaryIO, _Torn(stream, after_bytes, stop))
            stream.flush()
            stop(stream.tell())

    return torn


class _Torn:
    """A file whose write stops after a number of bytes."""

    def __init__(self, stream: Any, after_bytes: int, stop: Callable[[int], NoReturn]) -> None:
        self._stream, self._left, self._stop = stream, after_bytes, stop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, data: Any) -> int:
        part = memoryview(data).cast("B")
        if len(part) >= self._left:
            self._stream.write(part[: self._left])
            self._stream.flush()
            self._stop(self._stream.tell())
        self._left -= len(part)
        return int(self._stream.write(part))
