"""Training on the host, for commands: batches, evaluation, schedules, gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from odtpack.cli import _console
from odtpack_runtime import CheckpointState, LRScheduler, Module, OdtpackError, Optimizer
from odtpack_runtime.apart import worker as apart
from odtpack_runtime.checkpoint.state import SCHEDULE_PROPERTY
from odtpack_runtime.package.manifest import Manifest
from odtpack_runtime.package.package import Package
from odtpack_runtime.session.options import default_session_options
from odtpack_runtime.training import loop as training_loop
from odtpack_runtime.training.loop import Evaluation
from odtpack_runtime.training.private import poisson_batches
from odtpack_runtime.training.schedules import ScheduleSpec
from odtpack_simulator.replay.job import Indices, batch_count, in_batches, seed_dropout
from odtpack_simulator.replay.paired_loss import accuracy_inputs


def choose_scheduler(
    optimizer: Optimizer, manifest: Manifest, text: str | None, lr: float | None, steps: int
) -> LRScheduler | None:
    """Set the learning rate, and return what changes it from step to step."""
    properties = optimizer.checkpoint_state.properties
    if text is None and SCHEDULE_PROPERTY in properties:
        resumed = LRScheduler.restore(optimizer)
        if resumed is not None:
            _check_goes_on(resumed, "checkpoint's", optimizer.step_count, steps)
        if resumed is None or lr is None:
            return resumed
        return LRScheduler(optimizer, resumed.schedule, lr)
    began = _initial_rate(optimizer)
    spec, own = None, manifest.schedule
    if text is not None:
        spec = None if text == "none" else ScheduleSpec.parse(text)
    elif own is not None:
        spec = ScheduleSpec(own.kind, own.settings, own.learning_rate)
    if spec is None:
        if SCHEDULE_PROPERTY in properties:
            del properties[SCHEDULE_PROPERTY]
        rate = began if lr is None else lr
        if rate is not None:
            optimizer.set_learning_rate(rate)
        return None
    rate = next((each for each in (lr, spec.learning_rate, began) if each is not None), None)
    try:
        schedule = spec.schedule(optimizer.step_count + steps)
    except OdtpackError as error:
        error.hint = f"the training makes {steps} steps: pass a shorter warm-up or more --epochs"
        raise
    chosen = LRScheduler(
        optimizer, schedule, optimizer.get_learning_rate() if rate is None else rate
    )
    _check_goes_on(chosen, "package's" if text is None else "given", optimizer.step_count, steps)
    return chosen


def _initial_rate(optimizer: Optimizer) -> float | None:
    """The rate at which the checkpoint's schedule began, None without one."""
    now = optimizer.get_learning_rate()
    try:
        resumed = LRScheduler.restore(optimizer)
    except OdtpackError:  # another schedule takes its place
        resumed = None
    optimizer.set_learning_rate(now)
    return None if resumed is None else resumed.initial_lr


def _check_goes_on(scheduler: LRScheduler, whose: str, made: int, steps: int) -> None:
    """Refuse further steps with a learning rate of 0, and say it of the last ones."""
    schedule = scheduler.schedule
    ends = (n for n in range(steps, 0, -1) if scheduler.factor(made + n - 1) > 0)
    moving = max(next(ends, 0), min(steps, schedule.warmup_steps - made))  # which begins with 0
    if moving == steps:
        return
    hint = "--schedule none --lr RATE for one rate, or --schedule KIND for a new one over all steps"
    if moving == 0:
        what = f"the {whose} {schedule.kind} schedule has ended: its learning rate is 0"
        raise OdtpackError("bad-schedule", what, hint=hint)
    _console.say(
        f"warning: the {whose} {schedule.kind} schedule ends after {moving:,} of "
        f"{steps:,} steps, and its learning rate is 0 from then on: {hint}",
        style="yellow",
    )


def report_zero_gradients(package: Path, data: Path) -> list[str]:
    """Run steps on sample data and warn of the parameters whose gradient stays zero."""
    opened = Package.open(package)
    manifest = opened.manifest
    arrays = opened.load_data(data)
    samples = len(next(iter(arrays.values())))
    size = choose_batch_size(opened, None)
    if manifest.fixed_batch is None:
        size = min(size, samples)
    if samples < size:
        what = f"the sample data have {samples} samples, and the models take batches of {size}"
        hint = f"pass a file with {size} samples or more"
        raise OdtpackError("sample-too-small", what, where=str(data), hint=hint)
    files = [*(opened.path / file.path for file in manifest.files.all()), data]
    silent: list[str] = apart.call(
        "odtpack.cli._fit:find_silent", apart.Limits.of(files), package=str(package),
        data=str(data), size=size,
    )  # fmt: skip
    for name in silent:
        _console.say(
            f"warning: the gradient of {name} is zero on {data}: it would not train", style="yellow"
        )
    if not silent:
        count = sum(parameter.role == "trainable" for parameter in manifest.parameters)
        _console.say(f"  on {data} each of {count} trained parameters gets a gradient")
    return silent


def find_silent(package: str, data: str, size: int) -> list[str]:
    """The parameters whose gradient stays zero; to be called apart, as it runs the models."""
    from odtpack_runtime.package.self_check import zero_gradients

    opened = Package.open(package)
    return list(zero_gradients(opened, opened.load_data(Path(data)), size))


Data = Mapping[str, np.ndarray]


def choose_batch_size(package: Package, wanted: int | None) -> int:
    """The batch size to train with."""
    demanded = package.manifest.fixed_batch
    if demanded is None:
        return wanted or 32
    if wanted not in (None, demanded):
        what = f"the batch size is {wanted}, and the models of the package take only {demanded}"
        hint = f"pass --batch-size {demanded}, or export the model with a free batch size"
        raise OdtpackError("batch-size-fixed", what, where=str(package.path), hint=hint)
    return demanded


def evaluate(
    package: Package, module: Module, data: Data, indices: Indices, batch_size: int
) -> Evaluation:
    """Evaluate samples in evaluation mode; no figures without a batch to evaluate on."""
    cut = in_batches(indices, batch_size, whole=package.manifest.fixed_batch is not None)
    scores, labels = accuracy_inputs(package.manifest)
    return training_loop.evaluate(
        module,
        ([data[name][batch] for name in module.input_names()] for batch in cut),
        scores=scores,
        labels=labels,
        ignored_label=package.manifest.ignored_label,
        tokens=package.manifest.token_labels,
        numbers={o.name: i for i, o in enumerate(package.manifest.outputs) if i and not o.shape},
    )


@dataclass(frozen=True)
class Epoch:
    """One pass over the training samples."""

    number: int  # from 1
    loss: float  # mean over the batches whose loss is finite
    steps: int  # optimizer steps that were due
    skipped: int = 0  # batches whose loss or gradients were not finite
    reason: str | None = None  # the last of those, as text; None without one


def fit(
    module: Module,
    optimizer: Optimizer,
    data: Data,
    indices: Indices,
    *,
    batch_size: int,
    epochs: int,
    seed: int,
    whole: bool,
    first_epoch: int = 0,
    scheduler: LRScheduler | None = None,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Epoch]:
    """Train, and yield after every epoch."""
    # What is left of an epoch makes a smaller step: each batch's gradient counts as in all others,
    # and nothing is carried from one epoch into the next. The order of the samples depends only on
    # the seed and the epoch's number, and what Dropout draws on the seed and the step, so that a
    # resumed training is bit-identical, and the simulator replays it. A private training draws each
    # sample for each batch independently, from the system's generator, and cannot be repeated.
    names = module.input_names()
    count = batch_count(len(indices), batch_size, whole=whole)
    if count == 0:
        what = f"{len(indices)} samples are left to train on, and a batch takes {batch_size}"
        raise OdtpackError("too-few-samples", what)
    expected = min(batch_size, len(indices))  # of a private batch
    done, losses = 0, list[float]()

    def gathered(batches: list[Indices]) -> Iterator[list[np.ndarray[Any, Any]]]:
        for place, batch in enumerate(batches, 1):
            seed_dropout(seed, optimizer.step_count, place, private=optimizer.privacy is not None)
            yield [data[name][batch] for name in names]

    def seen(loss: float) -> None:
        nonlocal done
        losses.append(loss)
        done += 1
        on_step(done, count * epochs)

    for number in range(first_epoch + 1, first_epoch + epochs + 1):
        if optimizer.privacy is None:
            order = np.random.default_rng([seed, number]).permutation(indices)
            cut = in_batches(order, batch_size, whole=whole)
        else:
            cut = poisson_batches(indices, expected / len(indices), count)
        losses, steps, skipped = [], 0, module.skipped_steps
        tried = list[Indices]()
        while of_step := list(itertools.islice(cut, module.accumulation_steps)):
            tried += [batch for batch in of_step if len(batch)]  # an empty one gives no loss
            fed = [*gathered(of_step)] if len(of_step) == 1 else gathered(of_step)
            training_loop.train_step(
                module, optimizer, fed, scheduler, on_loss=seen, expected=expected
            )
            steps += 1
        skipped = module.skipped_steps - skipped
        good = [index for index, loss in enumerate(losses) if math.isfinite(loss)]
        # One bad batch is skipped. Parameters that give no finite loss are another matter: for
        # them every batch is bad, also one that was not before.
        if losses and not math.isfinite(losses[-1]):
            known = [data[name][tried[good[-1]]] for name in names] if good else None
            if known is None or not math.isfinite(_evaluated(module, known)):
                raise OdtpackError(
                    "diverged",
                    f"the training diverged: epoch {number} ends with parameters for which no "
                    "loss is finite",
                )
        mean = sum(losses[index] for index in good) / max(len(good), 1)
        reason = str(module.last_not_finite) if skipped else None
        yield Epoch(number, mean, steps, skipped, reason)


def _evaluated(module: Module, batch: list[np.ndarray[Any, Any]]) -> float:
    """Loss of a batch in evaluation mode."""
    module.eval()
    try:
        return training_loop.loss_of(module(*batch))
    finally:
        module.train()


def open_module(
    package: Package, state: CheckpointState, activations: Path | None = None
) -> Module:
    """The package's models on a state; ONNX Runtime logs no error that is raised as well."""
    options = default_session_options(package.training_model)
    options.log_severity_level = 4
    return Module(
        package.training_model,
        state,
        package.eval_model,
        session_options=options,
        step_model_uri=package.step_model,
        activations=activations,
    )
