"""What a child process is asked to do, and what it reports while it does it.

A job is a JSON file; messages are JSON objects, one per line. Both name plain
values only. The parent writes jobs and checks nothing else but messages, which
come from a process that runs a model it did not write.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from odtpack_runtime.session.segments import segments_beside
from odtpack_runtime.training.lr_scheduler import LRScheduler
from odtpack_runtime.training.optimizer import Optimizer
from odtpack_runtime.training.schedules import make_schedule
from odtpack_simulator.device.kits import Sharing
from odtpack_simulator.replay.limits import METHODS, LimitMethod
from odtpack_simulator.replay.sample_plan import SamplePlan


@dataclass(frozen=True, slots=True)
class Job:
    """A training to run in a process of its own.

    Attributes:
        task: ``train`` it once, in measured memory; or ``time`` some steps of it.
        training_model: Paths of the package's files.
        eval_model: See training_model.
        optimizer_model: See training_model.
        checkpoint: See training_model.
        folder: Where the child may write.
        data: For each user input, in order, the path of an ``.npy`` file.
        samples: Number of samples in each of these.
        batch_size: See :class:`~odtpack_simulator.replay.sample_plan.Schedule`.
        epochs: See SamplePlan.
        seed: See SamplePlan.
        full_batches: See SamplePlan.
        accumulation_steps: See SamplePlan.
        learning_rate: Learning rate of every step, or the one that ``rate_kind`` starts from.
        threads: Intra-operator threads.
        rate_kind: Kind of the schedule of the learning rate; None for a constant rate.
        rate_settings: The settings of that schedule.
        limit_bytes: Memory that the training may take; None for any.
        limit_methods: Ways to hold it to that, in any order; see
            :class:`~odtpack_simulator.replay.limits.Limiter`.
        logits: Index among the user outputs of scores per class, of which the
            accuracy is taken; None if there are none.
        labels: Index among the user inputs of the labels.
        ignored_label: Label of samples that do not count; None if all do.
        pieces: See SamplePlan.
        evaluate: Evaluate on the held-out samples before, during and after training.
        max_steps: Make at most so many optimizer steps, 1 or more, and evaluate on at most so
            many batches each time: the memory of a training without its time. None for all.
        keep_checkpoint: Absolute path of the checkpoint that is saved; None for ``checkpoint``
            in ``folder``.
        save_every: Optimizer steps after which it is saved, again and again, besides the
            end; None for the end only.
        resume: Go on from the saved checkpoint. Where there is none yet, begin.
        pause_at: Optimizer steps after which to stop and wait to be killed; None for never.
        pause_in_save: None to stop there before the save of that step, if there is one; or a
            number from 0 to 1, to stop in the middle of this save, once this share of the
            tensors' bytes is written.
        memory_warnings: After each of these numbers of optimizer steps the system warns that
            memory is low. The training then saves, frees everything and starts anew from the
            checkpoint, in the same process.
        step_model: Path of the step model, if it makes the steps; None for the other two.
        sharing: How sessions come by their memory, as in a kit; the package's choice if None.
        weights_bytes: Memory that is taken for frozen weights, which the kit holds there.
        calibration: What this machine reached before with as many threads: the ``calibration``
            of a message ``timed``, which another timing takes over. None to measure it.
    """

    task: Literal["train", "time"]
    training_model: str
    eval_model: str
    optimizer_model: str
    checkpoint: str
    folder: str
    data: dict[str, str]
    samples: int
    batch_size: int
    epochs: int
    seed: int
    full_batches: bool
    learning_rate: float
    threads: int
    accumulation_steps: int = 1
    rate_kind: str | None = None
    rate_settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    limit_bytes: int | None = None
    limit_methods: list[LimitMethod] = dataclasses.field(default_factory=lambda: list(METHODS))
    logits: int | None = None
    labels: int | None = None
    ignored_label: int | None = None
    pieces: int = 1
    evaluate: bool = True
    max_steps: int | None = None
    keep_checkpoint: str | None = None
    save_every: int | None = None
    resume: bool = False
    pause_at: int | None = None
    pause_in_save: float | None = None
    memory_warnings: list[int] = dataclasses.field(default_factory=list)
    step_model: str | None = None
    sharing: Sharing | None = None
    weights_bytes: int = 0
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

    @property
    def keeps_position(self) -> bool:
        """Whether the saved checkpoint holds the position, so that the training can go on."""
        again = self.save_every is not None or bool(self.memory_warnings)
        return again or self.resume or self.keep_checkpoint is not None

    def saves_after(self, step: int) -> bool:
        """Whether the training saves after so many steps."""
        return step == self.steps or (self.save_every is not None and step % self.save_every == 0)

    @property
    def schedule(self) -> SamplePlan:
        """The order of the samples."""
        return SamplePlan(
            self.samples,
            self.batch_size,
            self.epochs,
            self.seed,
            self.full_batches,
            self.accumulation_steps,
            self.pieces,
        )

    def set_rate(self, optimizer: Optimizer) -> LRScheduler | None:
        """Set the learning rate of the first step; return what sets that of the others."""
        if self.rate_kind is None:
            optimizer.set_learning_rate(self.learning_rate)
            return None
        # JSON knows no tuples.
        settings = {
            k: tuple(v) if isinstance(v, list) else v for k, v in self.rate_settings.items()
        }
        schedule = make_schedule(self.rate_kind, settings)
        return LRScheduler(optimizer, schedule, self.learning_rate)

    def write(self, path: Path) -> None:
        """Write the job to a file."""
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read a job that :meth:`write` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


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
- ``step``: ``index`` from 0, ``loss``, ``ms``, ``skipped`` (batches whose loss or gradients were
  not finite) and ``reason`` (of the last of them);
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
