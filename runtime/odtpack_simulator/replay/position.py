"""Where a training stands, kept in its checkpoint: one atomic file holds all there is to go on.

The position is one property of the state, a line of JSON::

    {"optimizer_step": 24, "run": "5f0c...", "step": 24}

``step`` is the number of optimizer steps that this training has made. Batches, epoch and
piece of the data follow from it and the seed (:class:`Schedule.steps_from
<odtpack_simulator.replay.sample_plan.Schedule.steps_from>`); the learning rate follows from the
optimizer's own count, which must be ``optimizer_step``. ``run`` is a digest of what is
trained: a checkpoint of another package or another training is refused.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from odtpack_runtime.checkpoint.state import CheckpointState
from odtpack_runtime.errors import OdtpackError, unreadable
from odtpack_runtime.files.digest import file_sha256
from odtpack_simulator.replay.job import Job

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
    """Return the position of a state that was loaded from the job's saved checkpoint.

    Args:
        state: The state.
        job: The training.
        run: Its digest, of :func:`run_digest`.

    Raises:
        OdtpackError: ``bad-position``: there is none, it is out of range, the optimizer's
            state is missing or stands elsewhere; ``other-run``: it is of another package
            or training.
    """
    where = str(job.saved_checkpoint)
    if PROPERTY not in state.properties:
        raise _bad("it does not say at which step it was saved", where)
    try:
        content = json.loads(str(state.properties[PROPERTY]))
        position = Position(**content)
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
    """A digest of what a training computes: its models, first checkpoint, order and rates.

    Of the data, only the number of samples counts.

    Raises:
        OdtpackError: ``model-not-found``.
    """
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
        f"The training cannot go on from the checkpoint: {problem}.",
        where=where,
        hint=_HINT,
    )
