"""From a package and data to the training that a child process is asked to do."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from odtpack_runtime.checkpoint.layout import Array
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.package.manifest import Manifest
from odtpack_runtime.package.package import Package
from odtpack_runtime.training.optimizer_state import DEFAULT_LEARNING_RATE
from odtpack_runtime.training.schedules import LearningRateSchedule, ScheduleSpec
from odtpack_simulator.memory.arena_use import SessionUse
from odtpack_simulator.replay.accuracy import accuracy_inputs
from odtpack_simulator.replay.job import Job
from odtpack_simulator.replay.sample_plan import SamplePlan
from odtpack_simulator.values.units import format_bytes


@dataclass(frozen=True, slots=True)
class Rate:
    """The learning rate: what it starts from, and what it follows."""

    initial: float
    schedule: LearningRateSchedule | None


def choose_rate(manifest: Manifest, learning_rate: float | None, steps: int) -> Rate:
    """The rate of a training of so many steps, as ``odtpack train`` chooses it.

    Raises:
        OdtpackError: ``bad-schedule`` if the package's schedule does not fit the training.
    """
    proposed, follows = None, None
    if manifest.schedule is not None:
        info = manifest.schedule
        proposed = info.learning_rate
        try:
            follows = ScheduleSpec(info.kind, info.settings, proposed).schedule(steps)
        except OdtpackError as error:
            error.hint = f"the training makes {steps} steps: replay more epochs"
            raise
    rates = (learning_rate, proposed, DEFAULT_LEARNING_RATE)
    return Rate(next(rate for rate in rates if rate is not None), follows)


def evenly_spaced(arrays: Mapping[str, Array], samples: int) -> dict[str, Array]:
    """So many samples of all, evenly spaced: views, nothing is copied.

    Args:
        arrays: Inputs with one row per sample each.
        samples: At most as many as there are.
    """
    stride = max(1, len(next(iter(arrays.values()))) // samples)
    return {name: array[: samples * stride : stride] for name, array in arrays.items()}


def write_data(arrays: Mapping[str, Array], folder: Path) -> dict[str, str]:
    """Write each array where children can map it; return the paths.

    Raises:
        OdtpackError: ``data-not-written``: the folder has no space left.
    """
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
    return dataclasses.replace(
        job, sharing=use.sharing, step_model=step, weights_bytes=use.weights_bytes
    )


def make_job(
    package: Package,
    data: Mapping[str, str],
    schedule: SamplePlan,
    rate: Rate,
    threads: int,
    folder: Path,
) -> Job:
    """Describe a training to a child.

    Args:
        package: What is trained.
        data: For each input, in order, the path of an ``.npy`` file.
        schedule: Which samples make which batch.
        rate: The learning rate.
        threads: Intra-operator threads.
        folder: Where the child may write.

    Raises:
        OdtpackError: ``private-training``: its steps go sample by sample, for which there is
            neither a plan of memory nor a time.
    """
    if package.manifest.privacy is not None:
        raise OdtpackError(
            "private-training",
            "Memory and time of private steps, which go sample by sample, are not simulated.",
            where=str(package.path),
            hint="simulate the package built without privacy and with a batch size of 1",
        )
    logits, labels = accuracy_inputs(package.manifest)
    return Job(
        task="train",
        training_model=str(package.training_model),
        eval_model=str(package.eval_model),
        optimizer_model=str(package.optimizer_model),
        checkpoint=str(package.checkpoint),
        folder=str(folder),
        data=dict(data),
        samples=schedule.samples,
        batch_size=schedule.batch_size,
        epochs=schedule.epochs,
        seed=schedule.seed,
        full_batches=schedule.full_batches,
        accumulation_steps=schedule.accumulation_steps,
        pieces=schedule.pieces,
        learning_rate=rate.initial,
        rate_kind=rate.schedule.kind if rate.schedule is not None else None,
        rate_settings=rate.schedule.settings() if rate.schedule is not None else {},
        threads=threads,
        logits=logits,
        labels=labels,
        ignored_label=package.manifest.ignored_label,
    )
