"""Let the learning rate follow the number of steps."""

from __future__ import annotations

import json
import math

from odtpack_runtime.checkpoint.state import SCHEDULE_PROPERTY
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.training.optimizer import Optimizer, to_float32
from odtpack_runtime.training.schedules import LearningRateSchedule, Linear, make_schedule


class LRScheduler:
    """Sets the learning rate of an optimizer by a schedule.

    After ``s`` optimizer steps the rate is ``initial_lr * schedule.factor(s)``. It is set at
    once on construction, and by every :meth:`step`.

    LearningRateSchedule and initial rate become a property of the state and are saved with it; the
    position is the optimizer's own step count. :meth:`restore` makes the same scheduler from a
    loaded checkpoint with optimizer state, and the run continues with the same rates, bit by
    bit.

    Args:
        optimizer: The optimizer whose learning rate is set.
        schedule: One of :mod:`odtpack_runtime.training.schedules`.
        initial_lr: The rate at factor 1.

    Raises:
        OdtpackError: ``bad-learning-rate``.
    """

    def __init__(
        self, optimizer: Optimizer, schedule: LearningRateSchedule, initial_lr: float
    ) -> None:
        self._optimizer = optimizer
        self._schedule = schedule
        to_float32(initial_lr)  # also where the factor is 0 at first
        self._initial_lr = initial_lr
        self.step()
        content = {"kind": schedule.kind, "initial_lr": float(initial_lr), **schedule.settings()}
        optimizer.checkpoint_state.properties[SCHEDULE_PROPERTY] = json.dumps(
            content, sort_keys=True
        )

    def __repr__(self) -> str:
        now, steps = self._optimizer.get_learning_rate(), self._optimizer.step_count
        made = f"{now:g} after {steps:,} steps"
        return f"{type(self).__name__}({self._schedule.kind} from {self._initial_lr:g}, {made})"

    @classmethod
    def restore(cls, optimizer: Optimizer) -> LRScheduler | None:
        """Return the scheduler that the optimizer's state was saved with, None without one.

        Raises:
            OdtpackError: ``bad-schedule`` if the property is not a schedule.
        """
        properties = optimizer.checkpoint_state.properties
        if SCHEDULE_PROPERTY not in properties:
            return None
        try:
            content = json.loads(str(properties[SCHEDULE_PROPERTY]))
        except (ValueError, RecursionError):
            content = None
        rate = content.pop("initial_lr", None) if isinstance(content, dict) else None
        if type(rate) is not float or not 0 <= rate < math.inf:
            what = f"The state's property {SCHEDULE_PROPERTY} is not a schedule."
            hint = "make an LRScheduler with a schedule of your own, which replaces it"
            raise OdtpackError("bad-schedule", what, hint=hint)
        if isinstance(content.get("milestones"), list):
            content["milestones"] = tuple(content["milestones"])
        return LRScheduler(optimizer, make_schedule(content.pop("kind", None), content), rate)

    @property
    def schedule(self) -> LearningRateSchedule:
        """The schedule."""
        return self._schedule

    @property
    def initial_lr(self) -> float:
        """The rate at factor 1."""
        return self._initial_lr

    def factor(self, step: int) -> float:
        """Return the fraction of ``initial_lr`` that holds after ``step`` optimizer steps."""
        return self._schedule.factor(step)

    def step(self) -> None:
        """Set the learning rate for the optimizer's next step."""
        rate = self._initial_lr * self._schedule.factor(self._optimizer.step_count)
        self._optimizer.set_learning_rate(rate)


class LinearLRScheduler(LRScheduler):
    """Linear warm-up from 0 to ``initial_lr``, then linear decay to 0.

    After ``s`` optimizer steps the learning rate is ``initial_lr * factor(s)``::

        factor(s) = s / warmup                                  while s < warmup
                    max(0, (total - s) / (total - warmup))      from then on

    This is what the arguments of ``onnxruntime.training.api.LinearLRScheduler``
    say. The class itself, in 1.19.2, passes them on in the wrong order and warms
    up for ``total_step_count`` steps.

    Args:
        optimizer: The optimizer whose learning rate is set.
        warmup_step_count: Length of the warm-up in steps; 0 for none.
        total_step_count: The step at which the rate reaches 0.
        initial_lr: The highest rate, reached at the end of the warm-up.

    Raises:
        OdtpackError: ``bad-schedule`` unless 0 <= warmup <= total and total > 0.
    """

    def __init__(
        self, optimizer: Optimizer, warmup_step_count: int, total_step_count: int, initial_lr: float
    ) -> None:
        try:
            schedule = Linear(warmup_step_count, total_step_count)
        except OdtpackError as error:
            raise OdtpackError(
                "bad-schedule",
                f"A warm-up of {warmup_step_count} steps does not fit into "
                f"{total_step_count} steps.",
                hint="LinearLRScheduler(optimizer, warmup_step_count=100, "
                "total_step_count=1000, initial_lr=0.001)",
            ) from error
        super().__init__(optimizer, schedule, initial_lr)
