"""Training in a result: losses, the metric on held-out data, and what interrupted it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from odtpack_simulator.result.base import Count, Loss, Text
from odtpack_simulator.values.part import Part


class EvaluationPoint(Part):
    """Loss and metric on the held-out samples after so many optimizer steps (0: before any)."""

    step: Count
    loss: Loss
    metric: float | None = None


class HeldOutFall(Part):
    """By how much the loss on held-out samples fell, with the interval that chance leaves open.

    The ends of the interval are one-sided 95 % bounds, see
    :mod:`odtpack_simulator.replay.paired_loss`. ``groups`` of samples were compared, each
    with itself.
    """

    groups: Count
    samples: Count
    fall: float
    low: float
    high: float


class TrainingInfo(Part):
    """What the training did to the loss and to the metric on the held-out samples.

    ``metric_interval`` is the 95 % Wilson score interval of ``metric_after``:
    on few held-out samples it is wide, and a floor inside it proves little. ``skipped_batches`` are
    those whose loss or gradients were not finite, and ``not_finite`` says what was, of the last.
    """

    losses: list[Loss]
    eval_loss_before: Loss
    eval_loss_after: Loss
    metric_name: Text | None = None
    metric_before: float | None = None
    metric_after: float | None = None
    metric_interval: tuple[float, float] | None = None
    curve: list[EvaluationPoint] = Field(default_factory=list)
    held_out_fall: HeldOutFall | None = None
    skipped_batches: Count = 0
    not_finite: Text = ""

    @property
    def diverged(self) -> bool:
        """Whether any loss was not finite: of a step, or on held-out samples after a step."""
        return None in self.losses or any(point.step and point.loss is None for point in self.curve)


class DeviceTraining(Part):
    """How the replay under this device's limits ended."""

    outcome: Literal["completed", "killed"]
    steps_done: Count
    final_loss: Loss
    detail: Text = ""


class Interruption(Part):
    """One time that the training process was ended or had to give up its memory.

    ``at``: killed between two steps, killed while it wrote a checkpoint, or a
    low-memory warning, on which it saves, frees everything and starts anew.
    """

    at: Literal["step", "save", "memory warning"]
    step: Count
    resumed_from_step: Count
    repeated_steps: Count


class InterruptionInfo(Part):
    """A training that was interrupted on purpose, against the one that was not.

    ``equal``: whether it ended with the same bits in every parameter and moment;
    null where that cannot be expected, and ``detail`` says why.
    """

    interruptions: list[Interruption]
    save_every: Count
    saves: Count
    equal: bool | None
    detail: Text = ""
