"""Which samples make up each batch: a function of the seed and nothing else."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.signature import TensorSpec

HELD_OUT_SHARE = 0.2
"""Share of the samples that training does not see."""

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Split and order of the samples.

    A permutation by the seed is cut: the last fifth is held out. Every epoch
    takes the rest in an order of its own, and the last batch of an epoch holds
    what is left over, unless the model fixes the size of a batch.

    Attributes:
        samples: Number of samples.
        batch_size: Samples per batch.
        epochs: Passes over the training samples.
        seed: Seed of the split and of every epoch's order.
        full_batches: Leave out batches that are not full.
        accumulation_steps: Batches that make one optimizer step. What is left of an epoch
            makes a step too.
    """

    samples: int
    batch_size: int
    epochs: int
    seed: int
    full_batches: bool = False
    accumulation_steps: int = 1

    @property
    def held_out_samples(self) -> int:
        """Number of samples held out."""
        return int(self.samples * HELD_OUT_SHARE)

    @property
    def train_samples(self) -> int:
        """Number of samples trained on."""
        return self.samples - self.held_out_samples

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch."""
        whole, rest = divmod(self.train_samples, self.batch_size)
        batches = whole + (1 if rest and not self.full_batches else 0)
        return math.ceil(batches / self.accumulation_steps)

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole training."""
        return self.epochs * self.steps_per_epoch

    @property
    def largest_batch(self) -> int:
        """Samples of the largest batch that occurs."""
        return min(self.batch_size, self.train_samples)

    def training_batches(self, epoch: int) -> Iterator[Indices]:
        """Indices of the samples of each batch of one epoch, counted from 0."""
        train = self._permutation()[: self.train_samples]
        order = np.random.default_rng([self.seed, 1 + epoch]).permutation(train)
        yield from self._cut(order)

    def training_steps(self, epoch: int) -> Iterator[list[Indices]]:
        """The batches of each optimizer step of one epoch."""
        batches = self.training_batches(epoch)
        while step := list(itertools.islice(batches, self.accumulation_steps)):
            yield step

    def held_out_batches(self) -> Iterator[Indices]:
        """Indices of the held-out samples, in batches."""
        yield from self._cut(self._permutation()[self.train_samples :])

    def _permutation(self) -> Indices:
        return np.random.default_rng([self.seed, 0]).permutation(self.samples)

    def _cut(self, order: Indices) -> Iterator[Indices]:
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            if len(batch) == self.batch_size or not self.full_batches:
                yield batch


def make_schedule(
    inputs: Sequence[TensorSpec],
    samples: int,
    *,
    batch_size: int,
    epochs: int,
    seed: int,
    accumulation_steps: int = 1,
) -> Schedule:
    """Check the parameters of a training and return its schedule.

    Raises:
        OdtpackError: ``bad-batch-size``, ``bad-epochs``, ``bad-seed``, or
            ``too-few-samples`` if not even one batch can be made.
    """
    for name, value, least in (
        ("batch-size", batch_size, 1),
        ("epochs", epochs, 1),
        ("seed", seed, 0),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
            raise OdtpackError(
                f"bad-{name}",
                f"The {name.replace('-', ' ')} is {value!r}; it must be a whole number "
                f"of at least {least}.",
            )
    fixed = {spec.shape[0] for spec in inputs if spec.shape and isinstance(spec.shape[0], int)}
    if fixed - {batch_size}:
        raise OdtpackError(
            "bad-batch-size",
            f"The model takes batches of {min(fixed - {batch_size})} samples only, "
            f"and {batch_size} were asked for.",
            hint="give the model a named first dimension to train with any batch size",
        )
    schedule = Schedule(samples, batch_size, epochs, seed, bool(fixed), accumulation_steps)
    if schedule.steps == 0:
        needed = math.ceil(batch_size / (1 - HELD_OUT_SHARE)) if fixed else 1
        raise OdtpackError(
            "too-few-samples",
            f"The data have {samples} samples, and training needs at least {needed}.",
        )
    return schedule
