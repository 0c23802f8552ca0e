"""The training loop: one optimizer step, and an evaluation, over batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from odtpack_runtime.checkpoint.layout import Array
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.training.lr_scheduler import LRScheduler
from odtpack_runtime.training.module import Module
from odtpack_runtime.training.optimizer import Optimizer
from odtpack_runtime.training.private import Normal, private_gradient, secure_normal


def train_step(
    module: Module,
    optimizer: Optimizer,
    batches: Iterable[Sequence[Array]],
    scheduler: LRScheduler | None = None,
    *,
    on_loss: Callable[[float], None] = lambda loss: None,
    before_update: Callable[[], None] | None = None,
    noise: Normal = secure_normal,
    expected: int | None = None,
) -> float:
    """Make one optimizer step from the gradients of some batches.

    One batch, given in a sequence, makes the step in the step model if the module has one and
    nothing asks for its gradients. If the package asks for privacy, gradients are computed sample
    by sample, clipped, and noise is added (:mod:`odtpack_runtime.training.private`).

    Args:
        module: Module in training mode, without accumulated gradients.
        optimizer: Its optimizer.
        batches: The inputs of each batch. The next one is asked for when the last one is done,
            so it may take the same memory.
        scheduler: Sets the learning rate after the step.
        on_loss: Called with each batch's loss, before the step is made, but for a private batch
            without samples.
        before_update: Called once the gradients are complete, which it may change; None if nothing
            looks at them.
        noise: Draws the noise of private gradients.
        expected: Expected samples of a batch whose gradients are private, where the batches differ
            because samples are drawn independently; the samples of the batch if None.

    Returns:
        The mean of the batches' losses; NaN of a private batch without samples. A loss that is not
        finite makes it so; if no step was made because of that (``Module.skipped_steps``), the
        scheduler makes none either.

    Raises:
        OdtpackError: What calls of the module and steps raise; ``private-batch``: also if a private
            step is given a second batch.
    """
    losses: list[float] = []
    done = optimizer.step_count
    if (
        isinstance(batches, Sequence)
        and len(batches) == 1
        and before_update is None
        and optimizer.has_step_model
        and not module.accumulated_batches
    ):
        losses.append(loss_of(optimizer.step_on(*batches[0])))
        on_loss(losses[0])
        if scheduler is not None and optimizer.step_count > done:
            scheduler.step()
        return losses[0]
    for index, batch in enumerate(batches):
        if optimizer.privacy is None:
            own = [loss_of(module(*batch))]
        elif index:
            raise OdtpackError(
                "private-batch",
                "A private step takes one batch: it clips and adds noise to the whole of it.",
                hint="give the samples as one batch; they are computed one by one anyway",
            )
        else:
            own = private_gradient(module, batch, optimizer.privacy, expected, noise)
        if own:
            losses.append(sum(own) / len(own))
            on_loss(losses[-1])
    if before_update is not None:
        before_update()
    optimizer.step(privatized=optimizer.privacy is not None)
    module.lazy_reset_grad()
    if scheduler is not None and optimizer.step_count > done:
        scheduler.step()
    return sum(losses) / len(losses) if losses else math.nan


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation saw.

    Attributes:
        losses: Mean loss of each batch.
        sizes: Samples of each batch.
        right: Labels that the highest score names.
        total: Labels that count; 0 where there are none, or no scores.
    """

    losses: tuple[float, ...]
    sizes: tuple[int, ...]
    right: int
    total: int

    @property
    def loss(self) -> float | None:
        """Mean loss per sample; None without a batch."""
        if not self.sizes:
            return None
        weighted = (loss * size for loss, size in zip(self.losses, self.sizes, strict=True))
        return sum(weighted) / sum(self.sizes)

    @property
    def accuracy(self) -> float | None:
        """Share of the labels that the highest score names; None where there are none."""
        return self.right / self.total if self.total else None


def evaluate(
    module: Module,
    batches: Iterable[Sequence[Array]],
    *,
    scores: int | None = None,
    labels: int | None = None,
    ignored_label: int | None = None,
    on_labels: Callable[[Array, Array], None] = lambda right, counted: None,
) -> Evaluation:
    """Run batches in evaluation mode; the module is then in the mode in which it was.

    Args:
        module: The module.
        batches: The inputs of each batch.
        scores: Index among the outputs of scores per class; None if there are none.
        labels: Index among the inputs of the labels; None if there are none.
        ignored_label: Label of samples that do not count; None if all do.
        on_labels: Called with each batch's labels that the highest score names, and with all that
            count.
    """
    was_training = module.training
    module.eval()
    losses: list[float] = []
    sizes: list[int] = []
    right = total = 0
    for batch in batches:
        results: Any = module(*batch)
        outputs = results if isinstance(results, tuple) else (results,)
        losses.append(loss_of(results))
        sizes.append(next((len(array) for array in batch if np.ndim(array)), 1))
        if scores is not None and labels is not None:
            named, counted = right_labels(outputs[scores], batch[labels], ignored_label)
            right, total = right + len(named), total + len(counted)
            on_labels(named, counted)
    module.train(was_training)
    return Evaluation(tuple(losses), tuple(sizes), right, total)


def loss_of(results: Any) -> float:
    """Return the loss among the results of a call."""
    return float(np.ravel(results[0] if isinstance(results, tuple) else results)[0])


def right_labels(scores: Array, labels: Array, ignored_label: int | None) -> tuple[Array, Array]:
    """Labels that the highest score names, and all that count, each in one axis.

    Args:
        scores: One number per class, ``[N, C, ...]``.
        labels: Class numbers, ``[N, ...]``.
        ignored_label: Label of samples that do not count; None if all do.
    """
    counted = labels != ignored_label
    return labels[(scores.argmax(axis=1) == labels) & counted], labels[counted]
