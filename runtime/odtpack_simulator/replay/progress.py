"""What a simulation reports while it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from odtpack_simulator.replay.job import Message

Stage = Literal["predicting", "timing", "measuring", "replaying"]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a simulation is.

    Attributes:
        stage: What is being done. ``replaying``: under memory limits and with interruptions.
        detail: On what, or empty.
        step: Training steps, or replays, done in this stage; 0 where there are none.
        steps: Their number in this stage; 0 where there are none.
        loss: Loss of the last step.
        run: Number of this stage, from 1.
        runs: Number of stages.
    """

    stage: Stage
    detail: str = ""
    step: int = 0
    steps: int = 0
    loss: float | None = None
    run: int = 1
    runs: int = 1


OnProgress = Callable[[Progress], None]


class ProgressReporter:
    """Turns messages of children, and numbers of finished replays, into progress."""

    def __init__(self, progress: OnProgress | None, *, runs: int) -> None:
        self._progress = progress
        self._now = Progress("predicting", run=0, runs=runs)

    def begin(self, stage: Stage, detail: str = "", *, steps: int = 0) -> None:
        """Begin the next stage."""
        self._tell(Progress(stage, detail, 0, steps, None, self._now.run + 1, self._now.runs))

    def message(self, message: Message) -> None:
        """Take a child's message; what is not a step is not progress."""
        if message["event"] == "step":
            done = self._now.step + 1
            self._tell(dataclasses.replace(self._now, step=done, loss=message["loss"]))

    def done(self, count: int, of: int) -> None:
        """Say how many replays of this stage have ended."""
        self._tell(dataclasses.replace(self._now, step=count, steps=of))

    def _tell(self, now: Progress) -> None:
        self._now = now
        if self._progress is not None:
            self._progress(now)
