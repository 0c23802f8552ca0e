"""A round of checkpoints: what devices send that do not run Flower, from a kit of any language."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from odtpack.flower.records import crossing
from odtpack_runtime.checkpoint.state import CheckpointState
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.package.package import Package
from odtpack_simulator.fleet.local_training import Arrays
from odtpack_simulator.fleet.updates import MOST_TIMES_MEDIAN, capped, refusals, weighted_mean


def fedavg(
    package: str | os.PathLike[str],
    answers: Sequence[tuple[str | os.PathLike[str], float]],
    destination: str | os.PathLike[str],
    *,
    begun: str | os.PathLike[str] | None = None,
    most_times_median: float = MOST_TIMES_MEDIAN,
) -> list[str | None]:
    """Average the checkpoints of a round by their numbers of samples (McMahan et al. 2017).

    The sum runs in the order of the answers: give them in one that does not depend on their
    arrival, and a round is bit-identical each time. Answers that cannot be read, do not fit the
    package or would spoil the model are left out, as :func:`guarded` does on Flower.

    Args:
        package: Folder of the package that all of them trained.
        answers: The checkpoint of each client, and how many samples it trained on.
        destination: Checkpoint to write: the package's own, with the mean of the parameters.
        begun: Checkpoint that the round began with; by default the package's own.
        most_times_median: See :func:`~odtpack_simulator.fleet.updates.refusals`.

    Returns:
        For each answer why it was left out; None if it counts.

    Raises:
        OdtpackError: The package or ``begun`` cannot be read; ``fleet-arrays``: no answer counts;
            or the file cannot be written.
    """
    opened = Package.open(package)
    names = crossing(opened)

    def read(path: str | os.PathLike[str]) -> Arrays:
        state = CheckpointState.load_checkpoint(path)
        return {name: p.data for name, p in state.parameters if name in names}

    reference = read(begun or opened.checkpoint)
    reasons: dict[int, str] = {}
    found: dict[int, Arrays] = {}
    for index, (path, examples) in enumerate(answers):
        if not 0 < examples < math.inf:
            reasons[index] = f"its number of samples is {examples}"
            continue
        try:
            found[index] = read(path)
        except OdtpackError as error:
            reasons[index] = error.what
    unsound = refusals(reference, list(found.values()), most_times_median)
    reasons |= {
        index: reason for index, reason in zip(found, unsound, strict=True) if reason is not None
    }
    kept = [index for index in found if index not in reasons]
    if not kept:
        first = next(iter(reasons.values()), "there is none")
        raise OdtpackError("fleet-arrays", f"No answer can be averaged: {first}"[:500])
    mean = weighted_mean(
        [found[index] for index in kept], capped([answers[index][1] for index in kept])
    )
    state = CheckpointState.load_checkpoint(opened.checkpoint)
    for name in names:
        state.parameters[name].data = mean[name]
    CheckpointState.save_checkpoint(state, destination)
    return [reasons.get(index) for index in range(len(answers))]
