"""Signatures of step models and of the state they read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from odtpack_runtime.checkpoint.parameters import Array
from odtpack_runtime.checkpoint.state import CheckpointState
from odtpack_runtime.session.graph_signature import (
    KEPT_NAME,
    RATE_NAME,
    STEP_NAME,
    UPDATE_SUFFIX,
    StepSignature,
    model_mismatch,
)
from odtpack_runtime.session.session import BoundGraph

# What models take and give, read against the parameters of a state.


def roles(
    state: CheckpointState, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Trainable parameters and the others; those of a nominal state without values."""
    both = (state.arrays(trainable=True), state.arrays(trainable=False))
    for arrays in both:
        for name in arrays.keys() & shapes.keys():
            # An array of that shape without memory of its own: only shape and dtype count.
            arrays[name] = np.broadcast_to(arrays[name].dtype.type(), shapes[name])
    return both


def nominal_shapes(
    state: CheckpointState, models: Sequence[tuple[str, Sequence[Any], Sequence[Any]]]
) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of a nominal state, which only the models know."""
    shapes: dict[str, tuple[int, ...]] = {}
    for where, inputs, _ in models:
        for node in inputs:
            if node.name in state.parameters:
                if not all(isinstance(size, int) for size in node.shape):
                    raise model_mismatch(where, f"the shape of '{node.name}' is not known")
                shapes.setdefault(node.name, tuple(node.shape))
    return shapes


# A step model on the memory of its parameters and of the optimizer's state.


class StepGraph:
    """A step model, whose new values are written over the old ones."""

    # `kept`: after a step, whether each trainable parameter and its state kept their values because
    # the loss or its gradient was not finite; in the order of the model's inputs.

    def __init__(self, graph: BoundGraph, signature: StepSignature) -> None:
        self.graph = graph
        self._signature = signature
        self.kept = np.zeros(signature.kept, np.bool_)
        graph.bind_output(KEPT_NAME, self.kept)

    def bind_updated(self, name: str, memory: Array) -> None:
        """Let the new value of an input lie in its memory."""
        shape = self._signature.updates[name]
        self.graph.bind_output(name + UPDATE_SUFFIX, memory.reshape(shape))

    def bind_optimizer(
        self, state: Mapping[str, Array], rates: Array, step: Array, where: str
    ) -> None:
        """Give it what the optimizer keeps."""
        # `state`: the vectors, contiguous, by the names of their inputs.
        # `rates`: FLOAT, the learning rate of each group.
        # `step`: INT64 [1], the number of the step, from 1.
        known = self._signature.state
        odd = known.keys() ^ state.keys()
        odd |= {name for name in known.keys() - odd if np.prod(known[name]) != state[name].size}
        if odd:
            raise model_mismatch(where, f"the step model knows another state '{min(odd)}'")
        if len(rates) != self._signature.groups:
            raise model_mismatch(where, "the step model knows other parameter groups")
        for name, memory in state.items():
            self.graph.bind_input(name, memory.reshape(known[name]))
            self.bind_updated(name, memory)
        self.graph.bind_input(RATE_NAME, rates)
        self.graph.bind_input(STEP_NAME, step)

    def __call__(self, values: Sequence[object]) -> list[Any]:
        """Make one step with a batch; see :meth:`BoundGraph.__call__`."""
        return self.graph(values)
