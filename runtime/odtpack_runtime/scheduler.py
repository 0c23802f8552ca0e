"""Let the learning rate follow the number of steps."""

from __future__ import annotations

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.optimizer import Optimizer


class LinearLRScheduler:
    """Linear warm-up from 0 to ``initial_lr``, then linear decay to 0.

    After ``s`` optimizer steps the learning rate is ``initial_lr * factor(s)``::

        factor(s) = s / warmup                                  while s < warmup
                    max(0, (total - s) / (total - warmup))      from then on

    The rate is set at once on construction, and by every :meth:`step`. It
    follows the optimizer's own step count, so a run resumed from a checkpoint
    with optimizer state continues on the same line.

    This is what the arguments of ``onnxruntime.training.api.LinearLRScheduler``
    say. The class itself, in 1.19.2, hands them on in the wrong order and warms
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
        self,
        optimizer: Optimizer,
        warmup_step_count: int,
        total_step_count: int,
        initial_lr: float,
    ) -> None:
        if not 0 <= warmup_step_count <= total_step_count or total_step_count == 0:
            raise OdtpackError(
                "bad-schedule",
                f"A warm-up of {warmup_step_count} steps does not fit into "
                f"{total_step_count} steps.",
                hint="LinearLRScheduler(optimizer, warmup_step_count=100, "
                "total_step_count=1000, initial_lr=0.001)",
            )
        self._optimizer = optimizer
        self._warmup = warmup_step_count
        self._total = total_step_count
        self._initial_lr = initial_lr
        self.step()

    def factor(self, step: int) -> float:
        """Return the fraction of ``initial_lr`` that holds after ``step`` optimizer steps."""
        if step < self._warmup:
            return step / self._warmup
        if step >= self._total:
            return 0.0
        return (self._total - step) / (self._total - self._warmup)

    def step(self) -> None:
        """Set the learning rate for the optimizer's next step."""
        rate = self._initial_lr * self.factor(self._optimizer.step_count)
        self._optimizer.set_learning_rate(rate)
