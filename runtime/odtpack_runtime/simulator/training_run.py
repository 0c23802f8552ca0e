"""Train a package as its app would: the part of a replay that runs in the child process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from odtpack_runtime.checkpoint import CheckpointState
from odtpack_runtime.layout import Array
from odtpack_runtime.module import Module
from odtpack_runtime.optimizer import Optimizer
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
    optimizer.set_learning_rate(job.learning_rate)
    mark("loading")
    held_out = schedule.held_out_samples >= (schedule.batch_size if job.full_batches else 1)
    if held_out:
        send("phase", name="the evaluation before training")
        send("evaluation", when="before", **evaluate(module, batches, job))
        mark("evaluation")
    for index, (loss, seconds) in enumerate(_steps(module, optimizer, batches, job, send)):
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


def _steps(
    module: Module, optimizer: Optimizer, batches: Batches, job: Job, send: Send
) -> Iterator[tuple[float, float]]:
    """Make every step of the schedule; yield its loss and its duration in seconds."""
    module.train()
    index = 0
    for epoch in range(job.epochs):
        for indices, last in _with_last(job.schedule.training_batches(epoch)):
            if index == 0:
                send("phase", name="the first step")
            elif index == 1:
                send("phase", name="training")
            batch = batches.gather(indices)
            start = time.perf_counter()
            loss = step(module, optimizer, batch, last=last)
            yield loss, time.perf_counter() - start
            index += 1


def _with_last(batches: Iterable[Indices]) -> Iterator[tuple[Indices, bool]]:
    """Yield each batch, and whether it is the last."""
    source = iter(batches)
    current = next(source, None)
    while current is not None:
        following = next(source, None)
        yield current, following is None
        current = following


def step(
    module: Module, optimizer: Optimizer, batch: Sequence[Array], *, last: bool = False
) -> float:
    """Run one batch and return its loss.

    An optimizer step follows every ``module.accumulation_steps`` batches, and the ``last``.
    """
    result = module(*batch)
    if last or module.accumulated_batches == module.accumulation_steps:
        optimizer.step()
        module.lazy_reset_grad()
    return float(result[0] if isinstance(result, tuple) else result)


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
