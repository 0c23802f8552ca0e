"""The parts of a simulation that do not wait for each other, as an executor runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from odtpack_simulator.replay.interruption import interrupt
from odtpack_simulator.replay.job import Job, Message
from odtpack_simulator.replay.replay import LimitOutcome, check_limits, resumed_phases
from odtpack_simulator.result import InterruptionInfo


@dataclass(frozen=True, slots=True)
class SettleTask:
    """Hold the training to the memory limits that the plan fits; see :func:`check_limits`."""

    job: Job
    limits: tuple[int, ...]
    planned: int  # Planned peak in bytes


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

    settled: Mapping[int, LimitOutcome] = field(default_factory=dict)
    interruption: InterruptionInfo | None = None
    # Peaks by phase of a process that went on from a checkpoint.
    resumed: Mapping[str, int] = field(default_factory=dict)


def run_task(task: Task) -> TaskResult:
    """Run one task: the work of an executor."""
    if isinstance(task, SettleTask):
        return TaskResult(check_limits(task.job, task.limits, task.planned))
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
