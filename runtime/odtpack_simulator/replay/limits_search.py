"""Replays under the memory limits that a plan fits: whether they bear the plan out.

Memory is monotonic: a training that a limit lets through is let through by every higher one. So
one replay under the lowest limit that the plan fits shows it for any number of devices. Where it
is ended the plan is too low, and a binary search over the other limits says for which. A limit
far above the peak needs no replay: there is nothing that would reach it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Final

from odtpack_simulator.replay.job import Job
from odtpack_simulator.replay.replay import ReplayResult, run_training_child
from odtpack_simulator.values.memory_fit import with_margin

FAR: Final = 1.5  # From this multiple of the planned peak on, a limit is not replayed

HELD_STEPS: Final = 3
"""Optimizer steps under a limit: memory is the same in every step from the second on."""


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
    first = _held(dataclasses.replace(job, max_steps=HELD_STEPS))
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
    phases = resumed_phases(second.phase_peaks)
    second.phase_peaks = {
        name: max(run.get(name, 0) for run in (first.phase_peaks, phases))
        for name in {**first.phase_peaks, **phases}
    }
    if second.peak_bytes is not None and first.peak_bytes is not None:
        second.peak_bytes = max(first.peak_bytes, second.peak_bytes)
    return second


def resumed_phases(peaks: Mapping[str, int]) -> dict[str, int]:
    """Peaks of a process that went on from a checkpoint: what it loads is ``resuming``."""
    return {"resuming" if name == "loading" else name: peak for name, peak in peaks.items()}


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
