"""Take what was trained with one package to the next one."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from odtpack_runtime.checkpoint.format import OptimizerState
from odtpack_runtime.checkpoint.state import CheckpointState
from odtpack_runtime.errors import OdtpackError


def carry_over(
    trained: CheckpointState,
    fresh: CheckpointState,
    names: Collection[str] | None = None,
    *,
    optimizer_state: bool = True,
) -> CheckpointState:
    """Bring trained parameters into the state of a newer package.

    Everything else comes from the newer package: frozen parameters with its values, and
    parameters that the old one did not have. ``odtpack diff OLD NEW`` says which parameters
    are to be carried over and whether the optimizer's state can be::

        trained = CheckpointState.load_checkpoint("trained.ckpt")
        fresh = CheckpointState.load_checkpoint("package/checkpoint")
        state = carry_over(trained, fresh)

    Args:
        trained: State that was trained with the old package.
        fresh: State of the new package's checkpoint, before a Module is made of it. It is
            changed.
        names: Parameters whose values are taken over, ``verdict.carry_over`` of the diff;
            by default those that were trained. Running statistics of batch normalization
            are trained as well, but a checkpoint does not distinguish them from frozen parameters:
            they must be named.
        optimizer_state: Also take over step count, learning rate and moments. Without it the
            optimizer starts afresh.

    Returns:
        ``fresh``, with the user's properties of ``trained`` as well.

    Raises:
        OdtpackError: ``carry-over-parameter``: the new package has no such parameter, or one
            of another shape or type. ``carry-over-optimizer``: it trains parameters that the
            old one did not train, so that their moments are missing. ``fresh`` is then as
            it was. ``nominal-state``: one of them has no values.
    """
    if names is None:
        names = trained.arrays(trainable=True)
    values = {}
    for name in names:
        source = trained.parameters[name].data
        if name not in fresh.parameters:
            _refuse(f"the new package has no parameter '{name}'")
        target = fresh.parameters[name].data
        if (source.shape, source.dtype) != (target.shape, target.dtype):
            _refuse(
                f"'{name}' is {source.dtype}{list(source.shape)}, and in the new package "
                f"{target.dtype}{list(target.shape)}"
            )
        values[name] = source
    state = _optimizer_state(trained, fresh) if optimizer_state else None
    for name, value in values.items():
        np.copyto(fresh.parameters[name].data, value)
    for name, attached in trained.properties:
        fresh.properties[name] = attached
    fresh.optimizer = state
    return fresh


def _optimizer_state(trained: CheckpointState, fresh: CheckpointState) -> OptimizerState | None:
    old = trained.optimizer
    if old is None:
        return None
    if not old.moments:
        return OptimizerState(old.step, old.learning_rate, {})
    wanted = fresh.arrays(trainable=True)
    before = trained.arrays(trainable=True)
    for name, array in wanted.items():
        if name not in old.moments or before[name].shape != array.shape:
            raise OdtpackError(
                "carry-over-optimizer",
                f"The optimizer's state does not go over: there is none for '{name}', which the "
                "new package trains.",
            )
    moments = {name: [moment.copy() for moment in old.moments[name]] for name in wanted}
    return OptimizerState(old.step, old.learning_rate, moments)


def _refuse(problem: str) -> None:
    raise OdtpackError("carry-over-parameter", f"The trained parameters do not go over: {problem}.")
