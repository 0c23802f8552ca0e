"""The check that a training teaches the model anything: its held-out loss falls."""

from __future__ import annotations

from typing import Final

from odtpack_simulator.budgets import advice
from odtpack_simulator.replay.paired_loss import ENOUGH_GROUPS, FEWEST_GROUPS
from odtpack_simulator.result.result import Check, CheckStatus, SimulationResult
from odtpack_simulator.result.training import HeldOutFall
from odtpack_simulator.values.units import format_number

LEAST_SHARE: Final = 0.001
"""Share of its loss by which a model that learns improves at the least."""


def learns_check(result: SimulationResult) -> Check:
    """Whether the loss on held-out samples fell by more than its noise.

    It passes where the whole interval of the fall is above zero, and fails where none of it
    is, or where the fall is less than a thousandth of the loss: any difference shows if only
    the samples agree on it. In between the samples do not show it: with :data:`ENOUGH_GROUPS` of
    them to compare, a training that is worth shipping would show, and the check fails; with
    fewer it is not judged.
    """
    fall = result.training.held_out_fall
    status, message = _outcome(result, fall)
    return Check(
        metric="learns",
        limit=None if fall is None else fall.fall - fall.low,
        actual=None if fall is None else fall.fall,
        unit="1",
        level="error",
        status=status,
        message=message,
        advice=advice.for_learning(result) if status == "fail" else None,
    )


def _outcome(result: SimulationResult, fall: HeldOutFall | None) -> tuple[CheckStatus, str]:
    held, training = result.data.held_out_samples, result.training
    if fall is None or fall.groups < FEWEST_GROUPS:
        if held and (training.eval_loss_before is None or training.eval_loss_after is None):
            return "not judged", "the loss on held-out samples is not known before and after"
        groups = 0 if fall is None else fall.groups
        what = (
            f"{groups} batches of held-out samples" if held > groups else f"{held} held-out samples"
        )
        return "not judged", (
            f"{what} are too few to tell whether the model learned: "
            f"at least {FEWEST_GROUPS} are needed"
        )
    noise = format_number(fall.fall - fall.low)
    change = f"{'fell' if fall.fall > 0 else 'rose'} by {format_number(abs(fall.fall))}"
    if fall.fall == 0:
        change = "did not change"
    if training.eval_loss_before is not None and training.eval_loss_after is not None:
        start, end = map(format_number, (training.eval_loss_before, training.eval_loss_after))
        change += f" ({start} to {end})"
    what = f"the loss on {fall.samples} held-out samples {change}"
    least = LEAST_SHARE * abs(training.eval_loss_before or 0.0)
    if fall.low > 0 and fall.fall <= least:
        return "fail", f"{what}, less than a thousandth: the model learned nothing to speak of"
    if fall.low > 0:
        return "pass", f"{what}; ± {noise} would be noise"
    if fall.high <= 0:
        return "fail", f"{what}: the training does not improve the model"
    if fall.groups >= ENOUGH_GROUPS:
        return "fail", f"{what}, and ± {noise} is noise: nothing shows that the model learned"
    return "not judged", (
        f"{what}, and ± {noise} is noise on so few: hold out more samples to tell"
    )
