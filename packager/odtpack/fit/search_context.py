"""What a search stands on: the package that the recipe builds as it is, and the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from odtpack.build import build, forward_model
from odtpack.fit.space import Freeze, freezes
from odtpack.model.loading import load_model
from odtpack.package.parameters import resolve
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.scratch import scratch_folder
from odtpack_runtime.package.package import Package
from odtpack_runtime.session.graph_signature import TensorSpec
from odtpack_simulator.replay.job import Job, SamplePlan, make_sample_plan
from odtpack_simulator.replay.replay import choose_rate, make_job, run_training_child, write_data

if TYPE_CHECKING:
    from odtpack.recipe import BuildSpec


@dataclasses.dataclass(frozen=True)
class SearchContext:
    """What all candidates share."""

    base: BuildSpec  # what recipe and options say
    inputs: tuple[TensorSpec, ...]  # what the models take
    files: dict[str, str]  # for each input, the path of an `.npy` file that children map
    shapes: dict[str, tuple[int, ...]]  # shape of one sample of each input
    samples: int  # number of samples
    seed: int  # seed of the split and of the order
    fixed_batch: int | None  # size of every batch if the model fixes it
    freezes: tuple[Freeze, ...]  # choices of what to freeze

    def schedule(self, micro_batch: int, accumulation_steps: int, epochs: int) -> SamplePlan:
        """Which samples make which batch."""
        return make_sample_plan(
            self.inputs,
            self.samples,
            batch_size=micro_batch,
            epochs=epochs,
            seed=self.seed,
            accumulation_steps=accumulation_steps,
        )

    def open_sizes(self) -> tuple[str, ...]:
        """The data's sizes of axes that the model leaves open, ``"tokens=128"``."""
        sizes = {
            dim: size
            for spec in self.inputs
            for dim, size in zip(spec.shape[1:], self.shapes[spec.name], strict=True)
            if isinstance(dim, str)
        }
        return tuple(f"{dim}={size}" for dim, size in sizes.items())

    @property
    def whole(self) -> SamplePlan:
        """One epoch in the smallest batches, for the numbers of samples."""
        return self.schedule(self.fixed_batch or 1, 1, 1)


def make_search_context(settings: BuildSpec, data: Path, folder: Path, seed: int) -> SearchContext:
    """Build what the recipe says, so that its errors show, and read the data."""
    build(settings, folder / "recipe")
    package = Package.open(folder / "recipe")
    inputs = tuple(package.manifest.input_specs())
    arrays = package.load_data(data)
    (folder / "data").mkdir()
    files = write_data(arrays, folder / "data")
    sizes = [spec.shape[0] for spec in inputs if spec.shape]
    return SearchContext(
        settings,
        inputs,
        files,
        {name: array.shape[1:] for name, array in arrays.items()},
        len(next(iter(arrays.values()))),
        seed,
        next((size for size in sizes if isinstance(size, int)), None),
        tuple(_freezes(settings)),
    )


def _freezes(base: BuildSpec) -> Sequence[Freeze]:
    """What may be frozen; nothing more where the recipe says what is trained, or an adapter is."""
    model = load_model(forward_model(base), named=(*base.train, *base.freeze), untie=base.untie)
    read = base.loss_inputs or tuple(str(value.name) for value in model.graph.outputs)
    trained, frozen = resolve(model, base.train, base.freeze, read)
    found = freezes(model, trained, frozen)
    return found[:1] if base.train or base.adapter is not None else found


@dataclasses.dataclass(frozen=True)
class Trial:
    """A training to make."""

    package: str  # folder of the package
    data: Mapping[str, str]  # for each input, in order, the path of an `.npy` file
    schedule: SamplePlan  # which samples make which batch
    learning_rate: float  # rate of every step, or that the package's schedule starts from
    threads: int  # threads of the sessions


@dataclasses.dataclass(frozen=True)
class Trained:
    """How a short training went."""

    metric: float | None = None  # accuracy on the held-out samples; None if there is none
    # loss on the held-out samples, else of the last step; None if not finite
    loss: float | None = None
    peak_bytes: int | None = None  # measured peak of memory; None if it could not be measured
    problem: str | None = None  # why there are no figures: it ran out of memory, or failed


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
    """The job of a child that may write to ``folder``."""
    package = Package.open(trial.package)
    rate = choose_rate(package.manifest, trial.learning_rate, trial.schedule.steps)
    return make_job(package, trial.data, trial.schedule, rate, trial.threads, folder)
