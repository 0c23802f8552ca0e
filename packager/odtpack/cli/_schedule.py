"""Which schedule of the learning rate a training follows."""

from __future__ import annotations

from odtpack_runtime import LRScheduler, OdtpackError, Optimizer
from odtpack_runtime.package.manifest import Manifest
from odtpack_runtime.training.lr_scheduler import PROPERTY
from odtpack_runtime.training.schedules import ScheduleSpec


def choose_scheduler(
    optimizer: Optimizer, manifest: Manifest, text: str | None, lr: float | None, steps: int
) -> LRScheduler | None:
    """Set the learning rate, and return what changes it from step to step.

    The schedule is the one asked for; else that of the checkpoint, which goes on; else that of
    the package.

    Args:
        optimizer: The optimizer.
        manifest: That of the package.
        text: ``--schedule``: a schedule, ``none``, or None if it was not given.
        lr: ``--lr``: the rate that the schedule starts from, or None.
        steps: Optimizer steps to come.

    Raises:
        OdtpackError: The schedule cannot be read, or does not fit the training.
    """
    properties = optimizer.checkpoint_state.properties
    if text is None and PROPERTY in properties:
        resumed = LRScheduler.restore(optimizer)
        if resumed is None or lr is None:
            return resumed
        return LRScheduler(optimizer, resumed.schedule, lr)
    spec = None
    if text is not None:
        spec = None if text == "none" else ScheduleSpec.parse(text)
    elif manifest.schedule is not None:
        kind, settings = manifest.schedule.kind, manifest.schedule.settings
        spec = ScheduleSpec(kind, settings, manifest.schedule.learning_rate)
    if spec is None:
        if PROPERTY in properties:
            del properties[PROPERTY]
        if lr is not None:
            optimizer.set_learning_rate(lr)
        return None
    rate = lr if lr is not None else spec.learning_rate
    try:
        schedule = spec.schedule(optimizer.step_count + steps)
    except OdtpackError as error:
        error.hint = f"the training makes {steps} steps: pass a shorter warm-up or more --epochs"
        raise
    return LRScheduler(optimizer, schedule, optimizer.get_learning_rate() if rate is None else rate)
