"""What a search stands on: the package that the recipe builds as it is, and the data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from odtpack.build import build, load
from odtpack.errors import OdtpackError
from odtpack.fit.space import Freeze, SearchConstraints, freezes
from odtpack.fit.study import stopper
from odtpack.package.candidates import choose
from odtpack.recipe import BuildSpec, Recipe
from odtpack_runtime.files.scratch import scratch_folder
from odtpack_runtime.package.package import Package
from odtpack_runtime.session.graph_signature import TensorSpec
from odtpack_simulator.device.profile import DeviceProfile
from odtpack_simulator.figures.limits import Budgets
from odtpack_simulator.replay import replay
from odtpack_simulator.replay.job import HELD_OUT_SHARE, Message, SamplePlan, make_sample_plan


@dataclasses.dataclass(frozen=True)
class FitRequest:
    """What to search.

    Attributes:
        settings: What recipe and options say.
        data: ``.npz`` file with one array per input.
        profiles: The devices, at least one.
        recipe: The recipe, whose keys are fixed; None for none.
        wishes: What the options fix.
        budgets: Limits; without them only the devices' own memory limits hold.
        budget_source: Path of the budget file, or its tables, for the recipes to paste.
        device_names: The devices as they were named, for the recipes to paste.
        folder: Where the recipes to paste will lie.
        epochs: Passes over the training samples.
        trials: Candidates to train.
        finalists: Candidates of these to train to the end and to time.
        seed: Seed of the choice of candidates, of the split and of the order.
        evaluation: ``.npz`` file with the samples to evaluate on; None to hold out a share.
        holdout: Share of the data that is held out, if there is no such file.
        study: File that keeps the search, to go on from; None to keep nothing.
    """

    settings: BuildSpec
    data: Path
    profiles: tuple[DeviceProfile, ...]
    recipe: Recipe | None = None
    wishes: SearchConstraints = dataclasses.field(default_factory=SearchConstraints)
    budgets: Budgets = dataclasses.field(default_factory=Budgets)
    budget_source: Path | Mapping[str, Any] | None = None
    device_names: tuple[str, ...] = ()
    folder: Path = Path()
    epochs: int = 3
    trials: int = 24
    finalists: int = 6
    seed: int = 0
    study: Path | None = None
    evaluation: Path | None = None
    holdout: float = HELD_OUT_SHARE

    def __post_init__(self) -> None:
        if not self.profiles:
            raise OdtpackError("no-device", "no device was named to fit to")
        for name in ("epochs", "trials", "finalists"):
            value = getattr(self, name)
            if not 1 <= value < 2**31:
                what = f"{name} is {value}; it must be from 1 to {2**31 - 1}"
                raise OdtpackError(f"bad-{name}", what, hint=f"write for example: --{name} 4")
        if self.settings.runtime != "onnxruntime":
            raise OdtpackError(
                "target-cannot",
                "the recipe builds for onnxruntime-training, which this ONNX Runtime cannot replay",
            )


@dataclasses.dataclass(frozen=True)
class SearchContext:
    """What all candidates share."""

    base: BuildSpec  # what recipe and options say
    inputs: tuple[TensorSpec, ...]  # what the models take
    files: dict[str, str]  # for each input, the path of an `.npy` file that children map
    shapes: dict[str, tuple[int, ...]]  # shape of one sample of each input
    samples: int  # number of samples
    apart: int  # how many of them are a file's own, to evaluate on
    holdout: float  # share to evaluate on if there is no such file
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
            holdout=self.holdout,
            apart=self.apart,
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


def make_search_context(
    settings: BuildSpec,
    data: Path,
    folder: Path,
    seed: int,
    evaluation: Path | None = None,
    holdout: float = HELD_OUT_SHARE,
) -> SearchContext:
    """Build what the recipe says, so that its errors show, and read the data."""
    build(settings, folder / "recipe")
    package = Package.open(folder / "recipe")
    inputs = tuple(package.manifest.input_specs())
    arrays, apart = replay.load_samples(package, data, evaluation)
    (folder / "data").mkdir()
    files = replay.write_data(arrays, folder / "data")
    model = load(settings)
    read = settings.loss_inputs or tuple(str(value.name) for value in model.graph.outputs)
    chosen = choose(model, settings, settings.train, read)
    found = freezes(model, chosen.trained, chosen.frozen)
    return SearchContext(
        settings,
        inputs,
        files,
        {name: array.shape[1:] for name, array in arrays.items()},
        len(next(iter(arrays.values()))),
        apart,
        holdout,
        seed,
        package.manifest.fixed_batch,
        # Nothing more is frozen where the recipe says what is trained, or an adapter is.
        tuple(found[:1] if settings.train or settings.adapter is not None else found),
    )


@dataclasses.dataclass(frozen=True)
class Trial:
    """A training to make."""

    package: str  # folder of the package
    data: Mapping[str, str]  # for each input, in order, the path of an `.npy` file
    schedule: SamplePlan  # which samples make which batch
    learning_rate: float  # rate of every step, or that the package's schedule starts from
    rivals: tuple[tuple[float, ...], ...] = ()  # see :func:`~odtpack.fit.study.stopper`


@dataclasses.dataclass(frozen=True)
class Trained:
    """How a training went."""

    metric: float | None = None  # accuracy on the held-out samples; None if there is none
    # loss on the held-out samples, else of the last step; None if not finite
    loss: float | None = None
    peak_bytes: int | None = None  # measured peak of memory; None if it could not be measured
    problem: str | None = None  # why there are no figures: it ran out of memory, or failed
    # what is compared after each pass: the error rate, or the loss where there is no metric
    curve: tuple[float, ...] = ()
    stopped_after: int | None = None  # epochs after which it was stopped; None if it was not

    @property
    def cost(self) -> float:
        """The error rate, or the loss where there is no metric; infinite if unknown."""
        cost = self.loss if self.metric is None else 1.0 - self.metric
        return math.inf if cost is None else cost


class _StoppedError(Exception):
    """The training is not worth going on with."""


def train(trial: Trial) -> Trained:
    """Train in a child process; what fails is a result, and what others beat is stopped."""
    stop = stopper(trial.rivals)
    metric, loss, epochs, curve = None, None, 0, list[float]()

    def seen(message: Message) -> None:
        nonlocal metric, loss, epochs
        if message["event"] != "evaluation" or message["when"] == "before":
            return
        metric, loss = message["metric"], message["loss"]
        epochs = message["step"] // trial.schedule.steps_per_epoch
        curve.append(Trained(metric, loss).cost)
        if message["when"] == "during" and stop(len(curve) - 1, curve[-1]):
            raise _StoppedError

    with scratch_folder("fit") as folder:
        try:
            package = Package.open(trial.package)
            rate = replay.choose_rate(package.manifest, trial.learning_rate, trial.schedule.steps)
            job = replay.make_job(
                package, trial.data, trial.schedule, rate, package.manifest.threads, Path(folder)
            )
            done = replay.run_training_child(job, on_message=seen)
        except _StoppedError:
            return Trained(metric, loss, curve=tuple(curve), stopped_after=epochs)
        except OdtpackError as error:
            return Trained(problem=f"{error.code}: {error.what}")
    if done.outcome == "killed":
        return Trained(problem=f"the training was killed: {done.detail}")
    if None in done.losses:
        return Trained(peak_bytes=done.peak_bytes, problem="the loss was not finite")
    if done.skipped:
        problem = f"{done.skipped} batches were skipped, the last in {done.not_finite}"
        return Trained(peak_bytes=done.peak_bytes, problem=problem)
    if done.before.loss is not None and done.after.loss is None:
        return Trained(
            peak_bytes=done.peak_bytes, problem="the loss on held-out samples was not finite"
        )
    loss = done.after.loss
    if done.before.loss is None and done.losses:
        loss = done.losses[-1]
    return Trained(done.after.metric, loss, done.peak_bytes, curve=tuple(curve))
