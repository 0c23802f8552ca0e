"""Which samples make up each batch: a function of the seed and nothing else."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.session.graph_signature import TensorSpec

HELD_OUT_SHARE = 0.2
"""Share of the samples that training does not see."""

MAX_PIECES = 10_000

EVALUATIONS = 12
"""Most evaluations of one training, the first and the last included."""

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """Split and order of the samples.

    A permutation by the seed is cut: the last fifth is held out. Every epoch
    takes the rest in an order of its own, and the last batch of an epoch holds
    what is left over, unless the model fixes the size of a batch.

    Data that arrive in pieces do so in the order in which they stand in the file.
    What is held out is a fifth of all of them; the others are cut into pieces of
    equal size (the first ones may have a sample more). Each piece is trained on
    for all epochs, by itself, before the next one arrives.

    Attributes:
        samples: Number of samples.
        batch_size: Samples per batch.
        epochs: Passes over the training samples, of each piece.
        seed: Seed of the split and of every pass's order.
        full_batches: Leave out batches that are not full.
        accumulation_steps: Batches that make one optimizer step. What is left of a pass
            makes a step too.
        pieces: Number of pieces in which the training data arrive.
    """

    samples: int
    batch_size: int
    epochs: int
    seed: int
    full_batches: bool = False
    accumulation_steps: int = 1
    pieces: int = 1

    @property
    def held_out_samples(self) -> int:
        """Number of samples held out."""
        return int(self.samples * HELD_OUT_SHARE)

    @property
    def train_samples(self) -> int:
        """Number of samples trained on."""
        return self.samples - self.held_out_samples

    @property
    def passes(self) -> int:
        """Number of passes over a piece: ``epochs`` for each piece."""
        return self.pieces * self.epochs

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one pass over all training samples, piece by piece."""
        return self._steps_of_pieces(self.pieces)

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole training."""
        return self.epochs * self.steps_per_epoch

    def sample(self, most_steps: int) -> SamplePlan:
        """This plan, or a part of it that makes about so many steps.

        The part has the first passes only, and fewer samples where one pass is longer than that.

        Args:
            most_steps: At least 1. A pass over every piece is made in any case.
        """
        if self.steps <= most_steps:
            return self
        epochs = max(1, most_steps // self.steps_per_epoch)
        if self.steps_per_epoch <= most_steps:
            return dataclasses.replace(self, epochs=epochs)
        each = max(1, most_steps // self.pieces) * self.batch_size * self.accumulation_steps
        train = max(each * self.pieces, self.pieces * self.batch_size)
        samples = math.ceil(train / (1 - HELD_OUT_SHARE))
        return dataclasses.replace(self, epochs=1, samples=min(self.samples, samples))

    @property
    def largest_batch(self) -> int:
        """Samples of the largest batch that occurs."""
        return min(self.batch_size, self.piece_samples(0))

    def piece_samples(self, piece: int) -> int:
        """Number of samples of a piece, counted from 0."""
        least, more = divmod(self.train_samples, self.pieces)
        return least + (piece < more)

    def piece_steps(self, piece: int) -> int:
        """Optimizer steps of one pass over a piece."""
        whole, rest = divmod(self.piece_samples(piece), self.batch_size)
        batches = whole + (1 if rest and not self.full_batches else 0)
        return math.ceil(batches / self.accumulation_steps)

    def steps_by_piece(self) -> list[int]:
        """Optimizer steps of the training on each piece, in all epochs."""
        return [self.epochs * self.piece_steps(piece) for piece in range(self.pieces)]

    def steps_before(self, passes: int) -> int:
        """Optimizer steps of the first ``passes`` passes of the training."""
        pieces, epochs = divmod(passes, self.epochs)
        of_last = epochs * self.piece_steps(pieces) if epochs else 0
        return self.epochs * self._steps_of_pieces(pieces) + of_last

    def evaluation_steps(self) -> tuple[int, ...]:
        """After how many steps to evaluate: 0, evenly chosen ends of passes, and all steps."""
        between = min(self.passes - 1, EVALUATIONS - 2)
        ends = [self.passes * index // (between + 1) for index in range(between + 2)]
        return tuple(self.steps_before(end) for end in ends)

    def training_batches(self, epoch: int, piece: int = 0) -> Iterator[Indices]:
        """Indices of the samples of each batch of one pass.

        Args:
            epoch: Which pass over the piece, from 0.
            piece: Which piece, from 0.
        """
        train = self._permutation()[: self.train_samples]
        start = sum(self.piece_samples(index) for index in range(piece))
        arrived = np.sort(train)[start : start + self.piece_samples(piece)]
        own = train[np.isin(train, arrived)]
        seed = [self.seed, 1 + piece * self.epochs + epoch]
        yield from self._cut(np.random.default_rng(seed).permutation(own))

    def training_steps(self, epoch: int, piece: int = 0) -> Iterator[list[Indices]]:
        """The batches of each optimizer step of one pass, see :meth:`training_batches`."""
        batches = self.training_batches(epoch, piece)
        while step := list(itertools.islice(batches, self.accumulation_steps)):
            yield step

    def steps_from(self, done: int) -> Iterator[list[Indices]]:
        """The batches of each optimizer step of the training after the first ``done`` ones."""
        for index in range(self.passes):
            if self.steps_before(index + 1) > done:
                skipped = max(0, done - self.steps_before(index))
                piece, epoch = divmod(index, self.epochs)
                yield from itertools.islice(self.training_steps(epoch, piece), skipped, None)

    def held_out_batches(self, size: int | None = None) -> Iterator[Indices]:
        """Indices of the held-out samples, in batches of ``size``, or of the training's."""
        yield from self._cut(self._permutation()[self.train_samples :], size)

    def _permutation(self) -> Indices:
        return np.random.default_rng([self.seed, 0]).permutation(self.samples)

    def _steps_of_pieces(self, pieces: int) -> int:
        """Optimizer steps of one pass over each of the first pieces."""
        # The first ones are one sample larger than the others: there are two sizes only.
        larger = min(pieces, self.train_samples % self.pieces)
        smaller = pieces - larger
        return larger * self.piece_steps(0) + smaller * self.piece_steps(self.pieces - 1)

    def _cut(self, order: Indices, size: int | None = None) -> Iterator[Indices]:
        if size is None:
            size = self.batch_size if self.full_batches else self.largest_batch
        for start in range(0, len(order), max(size, 1)):
            batch = order[start : start + size]
            if len(batch) == size or not self.full_batches:
                yield batch


def make_sample_plan(
    inputs: Sequence[TensorSpec],
    samples: int,
    *,
    batch_size: int,
    epochs: int,
    seed: int,
    accumulation_steps: int = 1,
    pieces: int = 1,
) -> SamplePlan:
    """Check the parameters of a training and return its schedule.

    Raises:
        OdtpackError: ``bad-batch-size``, ``bad-epochs``, ``bad-seed``, ``bad-pieces``, or
            ``too-few-samples`` if not even one batch can be made of every piece.
    """
    for name, value, least, most in (
        ("batch size", batch_size, 1, 2**31 - 1),
        ("number of epochs", epochs, 1, 2**31 - 1),
        ("seed", seed, 0, 2**31 - 1),
        ("number of pieces", pieces, 1, MAX_PIECES),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            code = f"bad-{name.removeprefix('number of ').replace(' ', '-')}"
            raise OdtpackError(
                code, f"The {name} is {value!r}; it must be a whole number from {least} to {most}."
            )
    fixed = {spec.shape[0] for spec in inputs if spec.shape and isinstance(spec.shape[0], int)}
    if fixed - {batch_size}:
        raise OdtpackError(
            "bad-batch-size",
            f"The model takes batches of {min(fixed - {batch_size})} samples only, "
            f"and {batch_size} were asked for.",
            hint="give the model a named first dimension to train with any batch size",
        )
    schedule = SamplePlan(
        samples, batch_size, epochs, seed, bool(fixed), accumulation_steps, pieces
    )
    _check_enough(schedule)
    return schedule


def _check_enough(schedule: SamplePlan) -> None:
    """Check that every piece has a batch."""
    each = schedule.batch_size if schedule.full_batches else 1
    if schedule.piece_samples(schedule.pieces - 1) >= each:
        return
    needed = each * schedule.pieces
    while needed - int(needed * HELD_OUT_SHARE) < each * schedule.pieces:
        needed += 1
    in_pieces = f" in {schedule.pieces} pieces" if schedule.pieces > 1 else ""
    raise OdtpackError(
        "too-few-samples",
        f"The data have {schedule.samples} samples, and training{in_pieces} needs at least "
        f"{needed}.",
        hint="a fifth is held out"
        + (f", and the model takes batches of {each} only" if each > 1 else "")
        + ("; let the data arrive in fewer pieces" if in_pieces else ""),
    )
