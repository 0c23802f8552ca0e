"""Give an optimizer's state its place in memory, and take over what a checkpoint holds of it."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from odtpack_runtime.checkpoint.format import OptimizerState
from odtpack_runtime.checkpoint.layout import Array, Layout, allocate, view
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.training.module import Module
from odtpack_runtime.training.optimizer_contract import OptimizerContract

DEFAULT_LEARNING_RATE = 0.001

Memory = npt.NDArray[np.uint8]


def place_state(
    module: Module, contract: OptimizerContract, where: str
) -> tuple[OptimizerState, list[Memory], list[Layout]]:
    """Return a new optimizer state in flat vectors, continuing the loaded one if there is one.

    Args:
        module: The module whose state is trained.
        contract: What the optimizer model keeps.
        where: Name of the optimizer model, for messages.

    Returns:
        The state, whose moments are views; and for each state vector its memory and layout.

    Raises:
        OdtpackError: ``optimizer-mismatch`` if the loaded state is another optimizer's.
    """
    layout = module.flat.trainable
    loaded = module.state.optimizer
    if loaded is None:
        loaded = OptimizerState(0, to_float32(DEFAULT_LEARNING_RATE), {})
    layouts = [state_layout(layout, contract, index) for index in range(len(contract.state))]
    taken = _fits(loaded, contract.kind, layouts, where)
    memories = [allocate(each.nbytes) for each in layouts]
    moments: dict[str, list[Array]] = {}
    for index, slot in enumerate(layout.slots):
        # Popped one by one: what is moved is freed.
        old = loaded.moments.pop(slot.name, [])
        new = [
            view(memory, each.slots[index]) for memory, each in zip(memories, layouts, strict=True)
        ]
        if taken:
            for target, source in zip(new, old, strict=False):
                np.copyto(target, source)
        if new:
            moments[slot.name] = new
    groups = tuple(group.parameters for group in contract.groups)
    state = OptimizerState(loaded.step, loaded.learning_rate, moments, groups, contract.kind)
    return state, memories, layouts


def state_layout(parameters: Layout, contract: OptimizerContract, index: int) -> Layout:
    """Return the layout of one state vector: that of the parameters, unless it is reduced."""
    vector = contract.state[index]
    if vector.axes is None:
        return parameters
    return Layout.pack(
        (slot.name, vector.stored_shape(slot.shape), slot.dtype) for slot in parameters.slots
    )


def _fits(loaded: OptimizerState, kind: str | None, layouts: list[Layout], where: str) -> bool:
    """Check a loaded state against what the optimizer keeps; return whether it is taken over."""
    count = len(next(iter(loaded.moments.values()), ()))
    idle = not any(moment.any() for own in loaded.moments.values() for moment in own)
    # The reference saves one moment per parameter with SGD, and never uses it.
    unused = idle and (loaded.step == 0 or (count == 1 and not layouts))
    problem = None
    if count != len(layouts):
        problem = (
            f"{count} moments per parameter, and this one keeps {len(layouts)}"
            if not unused
            else None
        )
    else:
        shapes = {
            (slot.name, i): slot.shape for i, each in enumerate(layouts) for slot in each.slots
        }
        odd = next(
            (
                name
                for name, own in loaded.moments.items()
                for i, moment in enumerate(own)
                if moment.shape != shapes.get((name, i))
            ),
            None,
        )
        other = None not in (loaded.kind, kind) and loaded.kind != kind
        if odd is None and not other:
            return True
        if not unused:
            problem = (
                f"moments of '{odd}' of other shapes than this one keeps"
                if odd is not None
                else f"the kind {loaded.kind!r:.40}, and this one is {kind!r:.40}"
            )
    if problem is not None:
        raise OdtpackError(
            "optimizer-mismatch",
            f"The checkpoint holds the state of an optimizer with {problem}.",
            where=where,
            hint="use the optimizer the checkpoint was saved with, or a checkpoint without "
            "optimizer state",
        )
    return False


def to_float32(value: float) -> float:
    """Return a learning rate as float32 holds it.

    Raises:
        OdtpackError: ``bad-learning-rate`` if it is negative, or not a finite float32.
    """
    try:
        with np.errstate(over="ignore"):
            rate = float(np.float32(value))
    except (TypeError, ValueError, OverflowError):
        rate = math.nan
    if not 0 <= rate < math.inf:
        raise OdtpackError(
            "bad-learning-rate",
            f"The learning rate must be a finite number of at least 0, not {value!r:.40}.",
            hint=f"take for example {DEFAULT_LEARNING_RATE}",
        )
    return rate
