"""Train a package as its app would: the part of a replay that runs in the child process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from odtpack_runtime.checkpoint import CheckpointState
from odtpack_runtime.layout import Array
from odtpack_runtime.module import Module
from odtpack_runtime.optimizer import Optimizer
from odtpack_runtime.scheduler import LRScheduler
from odtpack_runtime.simulator.job import Job
from odtpack_runtime.simulator.process_memory import MemoryMeter, limit_memory
from odtpack_runtime.simulator.schedule import Indices

Send = Callable[..., None]


def memory_options(threads: int) -> onnxruntime.SessionOptions:
    """Options under which memory can be measured, predicted and held to a limit.

    Arena and memory patterns are off: every tensor is one allocation that goes
    back to the system when it is freed, so that the resident memory is what is
    alive, to the page.
    """
    options = onnxruntime.SessionOptions()
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return options


class Batches:
    """Batches of the data in memory that stays where it is.

    The data remain in their files, mapped; only one batch is ever in memory.
    """

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
    """Train, evaluate before and after, and save; send what happens.

    Raises:
        OdtpackError: The package or the data do not fit each other.
    """
    schedule = job.schedule
    meter = MemoryMeter()

    def mark(phase: str) -> None:
        peaks[phase] = max(peaks.get(phase, 0), meter.mark())

    peaks: dict[str, int] = {}
    if job.limit_bytes is not None:
        send("limit", problem=limit_memory(job.limit_bytes, job.threads))
    send("phase", name="loading the package")
    batches = Batches(list(job.data.values()), schedule.largest_batch)
    state = CheckpointState.load_checkpoint(job.checkpoint)
    module = Module(
        job.training_model, state, job.eval_model, session_options=memory_options(job.threads)
    )
    optimizer = Optimizer(job.optimizer_model, module)
    scheduler = job.set_rate(optimizer)
    mark("loading")
    held_out = schedule.held_out_samples >= (schedule.batch_size if job.full_batches else 1)
    if held_out:
        send("phase", name="the evaluation before training")
        send("evaluation", when="before", **evaluate(module, batches, job))
        mark("evaluation")
    steps = _steps(Trainer(module, optimizer, batches, scheduler), job, send)
    for index, (loss, seconds) in enumerate(steps):
        mark("step")
        send("step", index=index, loss=number(loss), ms=seconds * 1e3)
    if held_out:
        send("phase", name="the evaluation after training")
        send("evaluation", when="after", **evaluate(module, batches, job))
        mark("evaluation")
    send("phase", name="saving the checkpoint")
    path = Path(job.folder) / "checkpoint"
    CheckpointState.save_checkpoint(state, path, include_optimizer_state=True)
    mark("saving")
    meter.close()
    measured = meter.unavailable is None
    send(
        "trained",
        peak_bytes=meter.peak if measured else None,
        phase_peaks=peaks if measured else {},
        unmeasured=meter.unavailable,
    )


@dataclass(frozen=True, slots=True)
class Trainer:
    """What makes optimizer steps; the batches' size is at most that of ``batches``."""

    module: Module
    optimizer: Optimizer
    batches: Batches
    scheduler: LRScheduler | None = None

    def step(self, indices: Sequence[Indices]) -> tuple[float, float]:
        """Run the batches of one optimizer step.

        Returns:
            The mean of their losses, and the duration in seconds without that of gathering.
        """
        losses = seconds = 0.0
        for number, of_batch in enumerate(indices, 1):
            batch = self.batches.gather(of_batch)
            start = time.perf_counter()
            result = self.module(*batch)
            if number == len(indices):
                self.optimizer.step()
                self.module.lazy_reset_grad()
                if self.scheduler is not None:
                    self.scheduler.step()
            losses += float(result[0] if isinstance(result, tuple) else result)
            seconds += time.perf_counter() - start
        return losses / len(indices), seconds


def _steps(trainer: Trainer, job: Job, send: Send) -> Iterator[tuple[float, float]]:
    """Make every optimizer step of the schedule; yield its loss and its duration in seconds."""
    trainer.module.train()
    epochs = (job.schedule.training_steps(epoch) for epoch in range(job.epochs))
    for index, indices in enumerate(chain.from_iterable(epochs)):
        if index == 0:
            send("phase", name="the first step")
        elif index == 1:
            send("phase", name="training")
        yield trainer.step(indices)


def evaluate(module: Module, batches: Batches, job: Job) -> dict[str, float | None]:
    """Mean loss per held-out sample, and the share of labels that the highest score names."""
    module.eval()
    losses = right = labels_seen = samples = 0.0
    for indices in job.schedule.held_out_batches():
        batch = batches.gather(indices)
        results: Any = module(*batch)
        outputs = results if isinstance(results, tuple) else (results,)
        losses += float(outputs[0]) * len(indices)
        samples += len(indices)
        if job.logits is not None and job.labels is not None:
            labels = batch[job.labels]
            counted = labels != job.ignored_label
            right += np.count_nonzero((outputs[job.logits].argmax(axis=1) == labels) & counted)
            labels_seen += np.count_nonzero(counted)
    module.train()
    return {
        "loss": number(losses / samples),
        "metric": right / labels_seen if labels_seen else None,
    }


def number(value: float) -> float | None:
    """A number that JSON has; None for the others."""
    return value if math.isfinite(value) else None
