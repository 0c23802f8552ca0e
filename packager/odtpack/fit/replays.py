"""Short trainings of candidates, each in a process of its own whose memory is measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.atomic import scratch_folder
from odtpack_runtime.package.package import Package
from odtpack_simulator.replay.job import Job, SamplePlan
from odtpack_simulator.replay.replay import choose_rate, make_job, run_training_child


@dataclasses.dataclass(frozen=True)
class Trial:
    """A training to make.

    Attributes:
        package: Folder of the package.
        data: For each input, in order, the path of an ``.npy`` file.
        schedule: Which samples make which batch.
        learning_rate: Rate of every step, or that the package's schedule starts from.
        threads: Threads of the sessions.
    """

    package: str
    data: Mapping[str, str]
    schedule: SamplePlan
    learning_rate: float
    threads: int


@dataclasses.dataclass(frozen=True)
class Trained:
    """How a short training went.

    Attributes:
        metric: Accuracy on the held-out samples; None if there is none.
        loss: Loss on the held-out samples, else of the last step; None if not finite.
        peak_bytes: Measured peak of memory; None if it could not be measured.
        problem: Why there are no figures: it ran out of memory, or failed.
    """

    metric: float | None = None
    loss: float | None = None
    peak_bytes: int | None = None
    problem: str | None = None


def train(trial: Trial) -> Trained:
    """Train in a child process; what fails is a result."""
    with scratch_folder("fit") as folder:
        try:
            done = run_training_child(_job(trial, Path(folder)))
        except OdtpackError as error:
            return Trained(problem=f"{error.code}: {error.what}")
    if done.outcome == "killed":
        return Trained(problem=f"the training was killed: {done.detail}")
    if None in done.losses:
        return Trained(peak_bytes=done.peak_bytes, problem="the loss was not finite")
    if done.skipped:
        problem = f"{done.skipped} batches were skipped, the last in {done.not_finite}"
        return Trained(peak_bytes=done.peak_bytes, problem=problem)
    if done.eval_loss_before is not None and done.eval_loss_after is None:
        return Trained(
            peak_bytes=done.peak_bytes, problem="the loss on held-out samples was not finite"
        )
    loss = done.eval_loss_after
    if done.eval_loss_before is None and done.losses:
        loss = done.losses[-1]
    return Trained(done.metric_after, loss, done.peak_bytes)


def _job(trial: Trial, folder: Path) -> Job:
    """The job of a child that may write to ``folder``.

    Raises:
        OdtpackError: The package is damaged, or its schedule does not fit so short a training.
    """
    package = Package.open(trial.package)
    rate = choose_rate(package.manifest, trial.learning_rate, trial.schedule.steps)
    return make_job(package, trial.data, trial.schedule, rate, trial.threads, folder)
