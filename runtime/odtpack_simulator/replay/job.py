"""What a child process is asked to do, what it reports, and where it stands."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import onnxruntime

from odtpack_runtime.checkpoint.state import CheckpointState
from odtpack_runtime.errors import OdtpackError, unreadable
from odtpack_runtime.files.atomic import file_sha256
from odtpack_runtime.session.graph_signature import TensorSpec
from odtpack_runtime.session.segments import segments_beside
from odtpack_runtime.training.lr_scheduler import LRScheduler
from odtpack_runtime.training.optimizer import Optimizer
from odtpack_runtime.training.schedules import make_schedule
from odtpack_simulator.device.kits import Sharing
from odtpack_simulator.memory.process_memory import METHODS, LimitMethod

# What a child process is asked to do, and what it reports while it does it.
#
# A job is a JSON file; messages are JSON objects, one per line. Both name plain
# values only. The parent writes jobs and checks nothing else but messages, which
# come from a process that runs a model it did not write.


@dataclass(frozen=True, slots=True)
class Job:
    """A training to run in a process of its own."""

    # `train` it once, in measured memory; or `time` some steps of it.
    task: Literal["train", "time"]
    training_model: str  # Paths of the package's files
    eval_model: str  # See training_model
    optimizer_model: str  # See training_model
    checkpoint: str  # See training_model
    folder: str  # Where the child may write
    data: dict[str, str]  # For each user input, in order, the path of an `.npy` file
    schedule: SamplePlan  # Which of their samples make up each batch
    learning_rate: float  # Learning rate of every step, or the one that `rate_kind` starts from
    threads: int  # Intra-operator threads
    # Kind of the schedule of the learning rate; None for a constant rate.
    rate_kind: str | None = None
    # The settings of that schedule.
    rate_settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    limit_bytes: int | None = None  # Memory that the training may take; None for any
    # Ways to hold it to that, in any order; see Limiter.
    limit_methods: list[LimitMethod] = dataclasses.field(default_factory=lambda: list(METHODS))
    # Index among the user outputs of scores per class, of which the accuracy is taken; None if
    # there are none.
    logits: int | None = None
    labels: int | None = None  # Index among the user inputs of the labels
    ignored_label: int | None = None  # Label of samples that do not count; None if all do
    tokens: int | None = None  # Index among the user inputs of the labels of a language model
    evaluate: bool = True  # Evaluate on the held-out samples before, during and after training
    # Make at most so many optimizer steps, 1 or more, and evaluate on at most so many batches each
    # time: the memory of a training without its time. None for all.
    max_steps: int | None = None
    # Absolute path of the checkpoint that is saved; None for `checkpoint` in `folder`.
    keep_checkpoint: str | None = None
    # Optimizer steps after which it is saved, again and again, besides the end; None for the end
    # only.
    save_every: int | None = None
    resume: bool = False  # Go on from the saved checkpoint. Where there is none yet, begin
    # Optimizer steps after which to stop and wait to be killed; None for never.
    pause_at: int | None = None
    # None to stop there before the save of that step, if there is one; or a number from 0 to 1, to
    # stop in the middle of this save, once this share of the tensors' bytes is written.
    pause_in_save: float | None = None
    # After each of these numbers of optimizer steps the system warns that memory is low. The
    # training then saves, frees everything and starts anew from the checkpoint, in the same
    # process.
    memory_warnings: list[int] = dataclasses.field(default_factory=list)
    # Path of the step model, if it makes the steps; None for the other two.
    step_model: str | None = None
    # How sessions allocate memory, as in a kit; the package's choice if None.
    sharing: Sharing | None = None
    # Path of the library whose native kernels the sessions run; None for none.
    kernels: str | None = None
    weights_bytes: int = 0  # Memory that is taken for frozen weights, which the kit holds there
    # What this machine reached before with as many threads: the `calibration` of a message `timed`,
    # which another timing takes over. None to measure it.
    calibration: dict[str, Any] | None = None

    @property
    def steps(self) -> int:
        """Optimizer steps to make."""
        whole = self.schedule.steps
        return whole if self.max_steps is None else min(whole, self.max_steps)

    @property
    def saved_checkpoint(self) -> Path:
        """Where the training saves its checkpoint."""
        return Path(self.keep_checkpoint or Path(self.folder) / "checkpoint")

    @property
    def segment_files(self) -> list[Path]:
        """Files of the package's segments, their weights included; none with one model."""
        beside = segments_beside(self.training_model)
        folder = Path(self.training_model).parent
        return [] if beside is None else [folder / name for name in beside[0].files()]

    def set_rate(self, optimizer: Optimizer) -> LRScheduler | None:
        """Set the learning rate of the first step; return what sets that of the others."""
        if self.rate_kind is None:
            optimizer.set_learning_rate(self.learning_rate)
            return None
        # JSON knows no tuples.
        settings = {
            k: tuple(v) if isinstance(v, list) else v for k, v in self.rate_settings.items()
        }
        return LRScheduler(optimizer, make_schedule(self.rate_kind, settings), self.learning_rate)

    def write(self, path: Path) -> None:
        """Write the job to a file."""
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read a job that :meth:`write` wrote."""
        content = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**content, "schedule": SamplePlan(**content["schedule"])})


Message = dict[str, Any]
"""A message of a child; the key ``event`` says which:

- ``limit``: ``method`` (how the limit is held; null if it is not), ``problem`` (null, or why it
  is not), ``base_bytes`` (with the watchdog: what the child had when the limit began);
- ``phase``: ``name`` of what begins now;
- ``begun``: all is loaded; ``step`` is the number of optimizer steps made before: 0, or that of
  the checkpoint that the training goes on from;
- ``evaluation``: ``when`` (``before``, ``during`` or ``after``), ``step`` (optimizer steps made),
  ``loss``, ``metric``, ``right`` and ``total`` (labels; null without a metric), and
  ``groups`` (losses and sizes of the batches);
- ``step``: ``index`` from 0, ``loss``, ``skipped`` (batches whose loss or gradients were
  not finite), ``reason`` (of the last of them) and ``overflows`` (batches that only lowered the
  loss scale of mixed precision);
- ``saved``: ``step`` (optimizer steps made), after each save;
- ``paused``: ``step``, ``written`` (bytes of the save so far; null between two steps): the
  child waits to be killed;
- ``freed``: ``step``, ``before_bytes``, ``after_bytes``: memory above that of the process
  before it loaded the package, before and after a low-memory warning was heeded; null if not
  measured;
- ``out-of-memory``: ``message``;
- ``trained``: ``peak_bytes`` (null if not measured), ``phase_peaks`` (bytes of ``loading``,
  ``evaluation``, ``step``, ``saving``), ``unmeasured`` (why not);
- ``compared``, after a whole training: ``before`` and ``after``, the losses and sizes of finer
  groups of held-out samples, empty where there are none;
- ``timed``: see :mod:`odtpack_simulator.replay.child.timing_run`;
- ``error``: ``code``, ``what``, ``where``, ``hint`` of an OdtpackError;
- ``crash``: ``message``, for any other exception.

Numbers that are not finite are null.
"""


# Where a training stands, kept in its checkpoint: one atomic file holds all there is to go on.
#
# The position is one property of the state, a line of JSON::
#
#     {"optimizer_step": 24, "run": "5f0c...", "step": 24}
#
# ``step`` is the number of optimizer steps that this training has made. Batches, epoch and
# piece of the data follow from it and the seed (:class:`Schedule.steps_from
# <odtpack_simulator.replay.job.Schedule.steps_from>`); the learning rate follows from the
# optimizer's own count, which must be ``optimizer_step``. ``run`` is a digest of what is
# trained: a checkpoint of another package or another training is refused.

PROPERTY: Final = "odtpack.simulator.position"

_HINT = "remove it to begin the training anew"


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a training; see the module for the fields."""

    step: int
    optimizer_step: int
    run: str

    def attach(self, state: CheckpointState) -> None:
        """Make the position a property of a state, to be saved with it."""
        state.properties[PROPERTY] = json.dumps(asdict(self), sort_keys=True)


def load_position(state: CheckpointState, job: Job, run: str) -> Position:
    """Return the position of a state that was loaded from the job's saved checkpoint."""
    where = str(job.saved_checkpoint)
    if PROPERTY not in state.properties:
        raise _bad("it does not say at which step it was saved", where)
    try:
        position = Position(**json.loads(str(state.properties[PROPERTY])))
    except (ValueError, RecursionError, TypeError):
        raise _bad(f"its property {PROPERTY} is not a position", where) from None
    counts = (position.step, position.optimizer_step)
    if not isinstance(position.run, str) or any(type(count) is not int for count in counts):
        raise _bad(f"its property {PROPERTY} is not a position", where)
    if position.run != run:
        raise OdtpackError(
            "other-run",
            "The checkpoint was saved by the training of another package, or with other settings.",
            where=where,
            hint=_HINT,
        )
    if not 0 <= position.step <= job.schedule.steps:
        raise _bad(f"step {position.step} is not one of the {job.schedule.steps} steps", where)
    made = state.optimizer.step if state.optimizer is not None else None
    if made != position.optimizer_step:
        raise _bad(
            f"its optimizer has made {'no' if made is None else made} steps, and the position "
            f"says {position.optimizer_step}",
            where,
        )
    return position


def run_digest(job: Job) -> str:
    """A digest of what a training computes: its models, first checkpoint, order and rates."""
    # Of the data, only the number of samples counts.
    digest = hashlib.sha256()
    step = () if job.step_model is None else (job.step_model,)
    files = (job.training_model, job.optimizer_model, *step, job.checkpoint, *job.segment_files)
    for name in map(str, files):
        try:
            digest.update(bytes.fromhex(file_sha256(Path(name))))
        except OSError as error:
            raise unreadable("model-not-found", name, error) from error
    settings = (asdict(job.schedule), job.learning_rate, job.rate_kind, job.rate_settings)
    digest.update(json.dumps(settings, sort_keys=True).encode())
    return digest.hexdigest()


def _bad(problem: str, where: str) -> OdtpackError:
    return OdtpackError(
        "bad-position",
        f"The training cannot resume from the checkpoint: {problem}.",
        where=where,
        hint=_HINT,
    )


# Which samples make up each batch: a function of the seed and nothing else.

HELD_OUT_SHARE = 0.2  # Share of the samples that training does not see

MAX_PIECES = 10_000

EVALUATIONS = 12  # Most evaluations of one training, the first and the last included

Indices = npt.NDArray[np.int64]


class Split(NamedTuple):
    """Which samples are trained on and which are held out for evaluation."""

    train: Indices
    held_out: Indices


def split(samples: int, share: float, seed: int) -> Split:
    """Hold out a random share of the samples."""
    order = np.random.default_rng([seed, 0]).permutation(samples)
    count = samples - int(samples * share)
    return Split(order[:count], order[count:])


def in_batches(order: Indices, size: int, *, whole: bool) -> Iterator[Indices]:
    """Yield the indices batch by batch; with ``whole`` a shorter last one is left out."""
    for start in range(0, len(order), max(size, 1)):
        batch = order[start : start + size]
        if len(batch) == size or not whole:
            yield batch


def batch_count(samples: int, size: int, *, whole: bool) -> int:
    """How many batches :func:`in_batches` yields."""
    return samples // size if whole else math.ceil(samples / size)


def step_count(samples: int, size: int, accumulation_steps: int, *, whole: bool) -> int:
    """Optimizer steps of one pass over the samples; what is left of it makes a step too."""
    return math.ceil(batch_count(samples, size, whole=whole) / accumulation_steps)


def seed_dropout(*position: int, private: bool = False) -> None:
    """Let what Dropout draws next, from the process's generator, follow from a position."""
    # `private`: From the system instead, as known masks tie samples to each other.
    entropy = secrets.randbits(128) if private else position
    onnxruntime.set_seed(int(np.random.SeedSequence(entropy).generate_state(1)[0]))


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """Split and order of the samples."""

    # A permutation by the seed is cut: the last share is held out. Every epoch takes the rest in an
    # order of its own, and the last batch of an epoch holds what is left over, unless the model
    # fixes the size of a batch.
    # Data that arrive in pieces do so in the order in which they stand in the file. What is held
    # out is a share of all of them; the others are cut into pieces of equal size (the first ones
    # may have a sample more). Each piece is trained on for all epochs, by itself, before the next
    # one arrives.
    samples: int  # Number of samples
    batch_size: int  # Samples per batch
    epochs: int  # Passes over the training samples, of each piece
    seed: int  # Seed of the split and of every pass's order
    full_batches: bool = False  # Leave out batches that are not full
    # Batches that make one optimizer step. What is left of a pass makes a step too.
    accumulation_steps: int = 1
    pieces: int = 1  # Number of pieces in which the training data arrive
    holdout: float = HELD_OUT_SHARE  # Share of the samples that is held out
    # The last samples that are held out instead, if they are not of the training data; 0 if none.
    apart: int = 0

    @property
    def held_out_samples(self) -> int:
        """Number of samples held out."""
        return self.apart or int(self.samples * self.holdout)

    @property
    def evaluated_samples(self) -> int:
        """Number of those that are evaluated: all but what fills no batch of a fixed size."""
        return self.held_out_samples - self.held_out_samples % (
            self.batch_size if self.full_batches else 1
        )

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
        """This plan, or a part of it that makes about so many steps."""
        # The part has the first passes only, and fewer samples where one pass is longer than that.
        # `most_steps`: At least 1. A pass over every piece is made in any case.
        if self.steps <= most_steps:
            return self
        epochs = max(1, most_steps // self.steps_per_epoch)
        if self.steps_per_epoch <= most_steps:
            return dataclasses.replace(self, epochs=epochs)
        each = max(1, most_steps // self.pieces) * self.batch_size * self.accumulation_steps
        train = max(each * self.pieces, self.pieces * self.batch_size)
        samples = train + self.apart if self.apart else math.ceil(train / (1 - self.holdout))
        return dataclasses.replace(self, epochs=1, samples=min(self.samples, samples))

    @property
    def largest_batch(self) -> int:
        """Samples of the largest batch that occurs."""
        return min(self.batch_size, self.piece_samples(0))

    def piece_samples(self, piece: int) -> int:
        """Number of samples of a piece, counted from 0."""
        least, more = divmod(self.train_samples, self.pieces)
        return least + (piece < more)

    @property
    def step_samples(self) -> int:
        """Samples of the largest optimizer step that occurs: of one pass over a piece at most."""
        most = self.piece_samples(0)
        most -= most % self.batch_size if self.full_batches else 0
        return min(self.accumulation_steps * self.batch_size, most)

    @property
    def mean_step(self) -> float:
        """Batches of a step, of all on average, as a share of those of the largest step."""
        batches = sum(map(self.piece_batches, range(self.pieces)))
        largest = min(self.accumulation_steps, self.piece_batches(0))
        return batches / (self.steps_per_epoch * largest)

    def piece_batches(self, piece: int) -> int:
        """Batches of one pass over a piece."""
        return batch_count(self.piece_samples(piece), self.batch_size, whole=self.full_batches)

    def piece_steps(self, piece: int) -> int:
        """Optimizer steps of one pass over a piece."""
        samples, size = self.piece_samples(piece), self.batch_size
        return step_count(samples, size, self.accumulation_steps, whole=self.full_batches)

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
        """Indices of the samples of each batch of one pass."""
        train = self._split().train
        start = sum(self.piece_samples(index) for index in range(piece))
        own = train[np.isin(train, np.sort(train)[start : start + self.piece_samples(piece)])]
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
        yield from self._cut(self._split().held_out, size)

    def _split(self) -> Split:
        if not self.apart:
            return split(self.samples, self.holdout, self.seed)
        parts = split(self.train_samples, 0.0, self.seed)
        return parts._replace(held_out=np.arange(self.train_samples, self.samples))

    def _steps_of_pieces(self, pieces: int) -> int:
        """Optimizer steps of one pass over each of the first pieces."""
        # The first ones are one sample larger than the others: there are two sizes only.
        larger = min(pieces, self.train_samples % self.pieces)
        smaller = pieces - larger
        return larger * self.piece_steps(0) + smaller * self.piece_steps(self.pieces - 1)

    def _cut(self, order: Indices, size: int | None = None) -> Iterator[Indices]:
        if size is None:
            size = self.batch_size if self.full_batches else self.largest_batch
        return in_batches(order, size, whole=self.full_batches)


def make_sample_plan(
    inputs: Sequence[TensorSpec],
    samples: int,
    *,
    batch_size: int,
    epochs: int,
    seed: int,
    accumulation_steps: int = 1,
    pieces: int = 1,
    holdout: float = HELD_OUT_SHARE,
    apart: int = 0,
) -> SamplePlan:
    """Check the parameters of a training and return its schedule."""
    for name, value, least, most in (
        ("batch size", batch_size, 1, 2**31 - 1),
        ("number of epochs", epochs, 1, 2**31 - 1),
        ("seed", seed, 0, 2**31 - 1),
        ("number of pieces", pieces, 1, MAX_PIECES),
    ):
        code = f"bad-{name.removeprefix('number of ').replace(' ', '-')}"
        check_whole(code, name, value, least, most)
    if not 0 <= holdout < 1:
        raise OdtpackError(
            "bad-holdout", f"The share that is held out is {holdout:g}; it must be 0 to below 1."
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
        samples, batch_size, epochs, seed, bool(fixed), accumulation_steps, pieces, holdout, apart
    )
    # Every piece needs a batch.
    each = batch_size if schedule.full_batches else 1
    if schedule.piece_samples(pieces - 1) >= each:
        return schedule
    needed, share = each * pieces, 0.0 if apart else holdout
    while needed - int(needed * share) < each * pieces:
        needed += 1
    in_pieces = f" in {pieces} pieces" if pieces > 1 else ""
    raise OdtpackError(
        "too-few-samples",
        f"The data have {samples - apart} samples, and training{in_pieces} needs at least "
        f"{needed}.",
        hint=f"a share of {share:g} is held out"
        + (f", and the model takes batches of {each} only" if each > 1 else "")
        + ("; let the data arrive in fewer pieces" if in_pieces else ""),
    )


def check_whole(code: str, what: str, value: object, least: int, most: int) -> None:
    """Refuse what is not a whole number in its range."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise OdtpackError(
            code, f"The {what} is {value!r}; it must be a whole number from {least} to {most}."
        )
