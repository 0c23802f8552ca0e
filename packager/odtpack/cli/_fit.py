"""The training loop of ``train`` and ``demo``, on the training runtime."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from odtpack_runtime import CheckpointState, LRScheduler, Module, OdtpackError, Optimizer
from odtpack_runtime.package.package import Package
from odtpack_runtime.training import loop as training_loop
from odtpack_runtime.training.loop import Evaluation
from odtpack_runtime.training.private import poisson_batches
from odtpack_simulator.replay.accuracy import accuracy_inputs

Indices = npt.NDArray[np.int64]
Data = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Split:
    """Which samples are trained on and which are held out for evaluation."""

    train: Indices
    held_out: Indices


def split(samples: int, share: float, seed: int) -> Split:
    """Hold out a random share of the samples, the same ones as the simulator does.

    Args:
        samples: Number of samples.
        share: Share to hold out, from 0 to below 1; rounded down to whole samples.
        seed: The same seed holds out the same samples.
    """
    count = samples - int(samples * share)
    order = np.random.default_rng([seed, 0]).permutation(samples)
    return Split(train=order[:count], held_out=order[count:])


def fixed_batch(package: Package) -> int | None:
    """The batch size that the models demand; None if they take any."""
    sizes = [item.shape[0] for item in package.manifest.inputs if item.shape]
    return next((size for size in sizes if isinstance(size, int)), None)


def choose_batch_size(package: Package, wanted: int | None, default: int = 32) -> int:
    """The batch size to train with.

    Raises:
        OdtpackError: The models demand another one.
    """
    demanded = fixed_batch(package)
    if demanded is None:
        return wanted or default
    if wanted not in (None, demanded):
        raise OdtpackError(
            "batch-size-fixed",
            f"the batch size is {wanted}, and the models of the package take only {demanded}",
            where=str(package.path),
            hint=f"pass --batch-size {demanded}, or export the model with a free batch size",
        )
    return demanded


def batches(indices: Indices, size: int, *, whole: bool) -> Iterator[Indices]:
    """Yield the indices batch by batch; with ``whole`` a shorter last one is left out."""
    for start in range(0, len(indices), size):
        batch = indices[start : start + size]
        if len(batch) == size or not whole:
            yield batch


def evaluate(
    package: Package, module: Module, data: Data, indices: Indices, batch_size: int
) -> Evaluation:
    """Evaluate samples in evaluation mode; no figures without a batch to evaluate on."""
    cut = batches(indices, batch_size, whole=fixed_batch(package) is not None)
    scores, labels = accuracy_inputs(package.manifest)
    return training_loop.evaluate(
        module,
        ([data[name][batch] for name in module.input_names()] for batch in cut),
        scores=scores,
        labels=labels,
        ignored_label=package.manifest.ignored_label,
    )


@dataclass(frozen=True)
class Epoch:
    """One pass over the training samples.

    Attributes:
        number: From 1.
        loss: Mean over the batches whose loss is finite.
        steps: Optimizer steps that were due.
        skipped: Batches whose loss or gradients were not finite.
        reason: The last of those, in words; None without one.
    """

    number: int
    loss: float
    steps: int
    skipped: int = 0
    reason: str | None = None


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
    """Train, and yield after every epoch.

    Gradients of ``module.accumulation_steps`` batches make one step. What is left of an
    epoch makes a step too, a smaller one: each batch's gradient counts as in all others, and
    nothing is carried from one epoch into the next, so that a checkpoint between them is all
    there is.

    The order of the samples depends on the seed and the number of the epoch alone, so
    that a resumed training goes on as if it had not been interrupted. It is the order in
    which the simulator replays. Where the package asks for privacy, each sample is drawn for each
    batch independently, from the system's entropy, and neither order nor noise can be repeated.

    Args:
        module: Module in training mode.
        optimizer: Its optimizer.
        data: Arrays by name of input.
        indices: Samples to train on.
        batch_size: Samples per batch.
        epochs: Passes over the samples.
        seed: Seed of the order.
        whole: Leave out the last batch of an epoch if it is shorter.
        first_epoch: Number of epochs made before.
        scheduler: Sets the learning rate after every step.
        on_step: Called with the batches done and the batches in all.

    Raises:
        OdtpackError: There are fewer samples than a batch needs, or an epoch ends with
            parameters that give no finite loss (``diverged``).
    """
    names = module.input_names()
    count = batch_count(len(indices), batch_size, whole=whole)
    if count == 0:
        raise OdtpackError(
            "too-few-samples",
            f"{len(indices)} samples are left to train on, and a batch takes {batch_size}",
        )
    done, losses = 0, list[float]()
    drawn = np.random.default_rng()  # the privacy guarantee assumes that the draw is secret

    def seen(loss: float) -> None:
        nonlocal done
        losses.append(loss)
        done += 1
        on_step(done, count * epochs)

    for number in range(first_epoch + 1, first_epoch + epochs + 1):
        if optimizer.privacy is None:
            order = np.random.default_rng([seed, number]).permutation(indices)
            cut = batches(order, batch_size, whole=whole)
        else:
            cut = poisson_batches(indices, min(1.0, batch_size / len(indices)), count, drawn)
        losses, steps, skipped = [], 0, module.skipped_steps
        tried = list[Indices]()
        while of_step := list(itertools.islice(cut, module.accumulation_steps)):
            tried += of_step
            each = ([data[name][batch] for name in names] for batch in of_step)
            fed = [*each] if len(of_step) == 1 else each
            training_loop.train_step(
                module, optimizer, fed, scheduler, on_loss=seen, expected=batch_size
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
                    hint="pass a smaller --lr",
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


def batch_count(samples: int, batch_size: int, *, whole: bool) -> int:
    """Batches of one epoch."""
    return samples // batch_size if whole else math.ceil(samples / batch_size)


def step_count(samples: int, batch_size: int, accumulation_steps: int, *, whole: bool) -> int:
    """Optimizer steps of one epoch."""
    return math.ceil(batch_count(samples, batch_size, whole=whole) / accumulation_steps)


def open_module(
    package: Package, state: CheckpointState, activations: Path | None = None
) -> Module:
    """The package's models on a state."""
    return Module(
        package.training_model,
        state,
        package.eval_model,
        step_model_uri=package.step_model,
        activations=activations,
    )
