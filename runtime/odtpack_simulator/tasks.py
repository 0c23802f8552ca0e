"""The parts of a simulation that do not wait for each other, as an executor runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from odtpack_simulator.replay.interruption import interrupt
from odtpack_simulator.replay.job import Job, Message
from odtpack_simulator.replay.limits_search import (
    LimitOutcome,
    Peaks,
    bisect_limits,
    hold,
    resumed_phases,
)
from odtpack_simulator.result.result import InterruptionInfo


@dataclass(frozen=True, slots=True)
class SettleTask:
    """Find out which memory limits end the training; see :func:`bisect_limits`."""

    # Where its `peaks` without a limit are not known (None), they are measured first.

    job: Job
    limits: tuple[int, ...]
    peaks: Peaks | None


@dataclass(frozen=True, slots=True)
class InterruptTask:
    """Interrupt a training and compare it with an undisturbed one; see :func:`interrupt`."""

    job: Job
    seed: int
    count: int
    save_every: int


Task = SettleTask | InterruptTask


@dataclass(frozen=True, slots=True)
class TaskResult:
    """What a task found; the fields of the other kind are empty."""

    # `resumed` has the peaks by phase of a process that went on from a checkpoint.

    settled: Mapping[int, LimitOutcome] = field(default_factory=dict)
    peaks: Peaks | None = None
    interruption: InterruptionInfo | None = None
    resumed: Mapping[str, int] = field(default_factory=dict)


def run_task(task: Task) -> TaskResult:
    """Run one task: the work of an executor."""
    if isinstance(task, SettleTask):
        peaks = task.peaks
        if peaks is None:
            free = hold(task.job, None)
            peaks = Peaks(free.peak_bytes, free.phase_peaks)
        return TaskResult(bisect_limits(task.job, task.limits, peaks.nbytes), peaks)
    begun: list[int] = []
    resumed: dict[str, int] = {}

    def take(message: Message) -> None:
        """Listen for a process that begins with a checkpoint, and is not warned of low memory."""
        match message["event"]:
            case "started":
                begun.clear()
            case "begun":
                begun.append(message["step"])
            case "trained" if len(begun) == 1 and begun[0] > 0:
                resumed.clear()
                resumed.update(resumed_phases(message["phase_peaks"]))

    info = interrupt(
        task.job, seed=task.seed, count=task.count, save_every=task.save_every, on_message=take
    )
    return TaskResult(interruption=info, resumed=resumed)
