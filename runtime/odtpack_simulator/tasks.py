"""The parts of a simulation that do not wait for each other, as an executor runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from odtpack_simulator.replay.interruption import interrupt
from odtpack_simulator.replay.job import Job
from odtpack_simulator.replay.limits_search import LimitOutcome, bisect_limits
from odtpack_simulator.result.result import InterruptionInfo


@dataclass(frozen=True, slots=True)
class SettleTask:
    """Find out which memory limits end the training; see :func:`settle`."""

    job: Job
    limits: tuple[int, ...]
    peak: int | None


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
    """What a task found; the other field is empty."""

    settled: Mapping[int, LimitOutcome] = field(default_factory=dict)
    interruption: InterruptionInfo | None = None


def run_task(task: Task) -> TaskResult:
    """Run one task: the work of an executor.

    Raises:
        OdtpackError: A child failed.
    """
    if isinstance(task, SettleTask):
        return TaskResult(settled=bisect_limits(task.job, task.limits, task.peak))
    return TaskResult(
        interruption=interrupt(
            task.job, seed=task.seed, count=task.count, save_every=task.save_every
        )
    )
