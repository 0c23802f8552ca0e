"""Which memory limits a training keeps, found with few replays.

Memory is monotonic: a training that a limit ends is ended by every lower one, and one
that a limit lets through is let through by every higher one. So the limits of any
number of devices are settled by a binary search over those near the measured peak.
A limit far above the peak needs no replay: there is nothing that would reach it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Final

from odtpack_simulator.replay.job import Job
from odtpack_simulator.replay.replay import ReplayResult, run_training_child

FAR: Final = 1.5  # From this multiple of the measured peak on, a limit is not replayed

HELD_STEPS: Final = 3
"""Optimizer steps under a limit: memory is the same in every step from the second on."""


@dataclasses.dataclass(frozen=True, slots=True)
class Peaks:
    """The most memory that a training took."""

    nbytes: int | None  # Bytes; None where they were not measured
    phases: Mapping[str, int]  # The same of each phase that was measured

    def with_phases(self, phases: Mapping[str, int]) -> Peaks:
        """The higher of both, phase by phase."""
        names = {**self.phases, **phases}
        both = {n: max(self.phases.get(n, 0), phases.get(n, 0)) for n in names}
        nbytes = None if self.nbytes is None else max(self.nbytes, *both.values(), 0)
        return Peaks(nbytes, both)


@dataclasses.dataclass(frozen=True, slots=True)
class LimitOutcome:
    """How a training goes under one limit."""

    run: ReplayResult  # The replay that shows it
    # Whether that replay ran under exactly this limit. Otherwise it ran under a higher one that
    # ended it, or under a lower one that did not.
    exact: bool


def hold(job: Job, peak: int | None) -> ReplayResult:
    """Replay the start of a training within the job's limit, and go on from it in a new process."""
    # Every phase, but few steps: the first process loads, evaluates, trains and saves. The second
    # finds its checkpoint, as an app does that was ended, and does the same from there.
    # Returns: How both went: the steps that were made, the highest peak of each phase, and as
    # `resuming` that of loading in the second.
    job = dataclasses.replace(job, resume=True, keep_checkpoint=None)
    job.saved_checkpoint.unlink(missing_ok=True)
    first = _held(dataclasses.replace(job, max_steps=HELD_STEPS), peak)
    if first.outcome == "killed":
        return first
    second = _held(dataclasses.replace(job, max_steps=2 * HELD_STEPS), peak)
    if second.outcome == "killed":
        second.detail = f"resumed after it was ended: {second.detail}"
    second.steps_done += first.steps_done
    second.losses = first.losses + second.losses
    second.skipped += first.skipped
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


def _held(job: Job, peak: int | None) -> ReplayResult:
    """Run a part of a training within the job's limit."""
    # `RLIMIT_DATA` also counts memory that is never touched. Where it ends a training whose
    # measured peak is within the limit, what is resident decides.
    run = run_training_child(job)
    refused = run.outcome == "killed" and run.limit_method == "rlimit"
    if refused and peak is not None and job.limit_bytes is not None and peak <= job.limit_bytes:
        run = run_training_child(dataclasses.replace(job, limit_methods=["watchdog"]))
    return run


def bisect_limits(
    job: Job,
    limits: Collection[int],
    peak: int | None,
    *,
    on_run: Callable[[int], None] | None = None,
) -> Mapping[int, LimitOutcome]:
    """Find out which limits end a training."""
    # `peak`: Peak that was measured without a limit; None if it is unknown, which makes every limit
    # one to be replayed.
    # Returns: For every limit below `FAR` times the peak, the replay that settles it.
    near = sorted({limit for limit in limits if peak is None or limit < FAR * peak})
    runs: dict[int, ReplayResult] = {}
    low, high = 0, len(near)  # near[:low] end it, near[high:] do not
    while low < high:
        middle = (low + high) // 2
        limit = near[middle]
        if on_run is not None:
            on_run(limit)
        runs[limit] = hold(dataclasses.replace(job, limit_bytes=limit), peak)
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
