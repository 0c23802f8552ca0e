"""A step model on the memory of its parameters and of the optimizer's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from odtpack_runtime.checkpoint.layout import Array
from odtpack_runtime.session.graph_signature import (
    KEPT_NAME,
    RATE_NAME,
    STEP_NAME,
    UPDATE_SUFFIX,
    model_mismatch,
)
from odtpack_runtime.session.segmented_graph import SegmentedGraph
from odtpack_runtime.session.session import BoundGraph
from odtpack_runtime.session.step_signature import StepSignature


class StepGraph:
    """A step model, whose new values are written over the old ones.

    Args:
        graph: The model on the parameters' memory, which it reads.
        signature: Its inputs and outputs by role.

    Attributes:
        kept: After a step, whether each trainable parameter and its state kept their values because
            the loss or its gradient was not finite; in the order of the model's inputs.
    """

    def __init__(self, graph: BoundGraph | SegmentedGraph, signature: StepSignature) -> None:
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
        """Give it what the optimizer keeps.

        Args:
            state: The vectors, contiguous, by the names of their inputs.
            rates: FLOAT, the learning rate of each group.
            step: INT64 [1], the number of the step, from 1.
            where: Name of the optimizer model, for messages.

        Raises:
            OdtpackError: ``model-mismatch``: the step model was written for another optimizer.
        """
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
