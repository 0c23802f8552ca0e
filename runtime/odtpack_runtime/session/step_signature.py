"""What a step graph takes and gives: a training graph that updates the parameters itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from odtpack_runtime.checkpoint.layout import Array
from odtpack_runtime.session.graph_signature import (
    KEPT_NAME,
    ORDER_PREFIX,
    RATE_NAME,
    STEP_NAME,
    UPDATE_SUFFIX,
    GraphSignature,
    TensorSpec,
    model_mismatch,
)

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepSignature:
    """The inputs and outputs of a step graph, by role.

    Attributes:
        graph: What it has in common with a training graph; it has no gradients.
        updates: Shape of the new value of each trainable parameter and of each vector of the
            optimizer's state, by the name of the input, whose memory it may take. It may cut
            what it updates into parts: only the number of elements is that of the input.
        state: Shape of the inputs with the optimizer's state, by name.
        groups: Number of parameter groups, each with a learning rate.
        kept: Length of the output that says which trainable parameters kept their values.
    """

    graph: GraphSignature
    updates: Mapping[str, Shape]
    state: Mapping[str, Shape]
    groups: int
    kept: int

    @classmethod
    def read(
        cls,
        where: str,
        inputs: Iterable[Any],
        outputs: Iterable[Any],
        trainable: Mapping[str, Array],
        frozen: Mapping[str, Array],
    ) -> StepSignature:
        """Classify a graph's names: takes and raises what :meth:`GraphSignature.read` does."""
        nodes = {node.name: node for node in inputs}
        given = {node.name: node for node in outputs if not node.name.startswith(ORDER_PREFIX)}
        updated = {
            name.removesuffix(UPDATE_SUFFIX): TensorSpec.of_node(node, where)
            for name, node in given.items()
            if name.endswith(UPDATE_SUFFIX) and name.removesuffix(UPDATE_SUFFIX) not in frozen
        }
        taken = {name: nodes.get(name) for name in (*updated, RATE_NAME, STEP_NAME)}
        specs: dict[str, TensorSpec] = {}
        for name, node in taken.items():
            if node is None:
                raise model_mismatch(where, f"it has no input '{name}'")
            specs[name] = TensorSpec.of_node(node, where)
        rate, step = specs[RATE_NAME], specs[STEP_NAME]
        groups = rate.shape[0] if len(rate.shape) == 1 else None
        if rate.dtype != np.float32 or not isinstance(groups, int) or groups < 1:
            raise model_mismatch(where, f"its input '{RATE_NAME}' is {rate}")
        if step.dtype != np.int64 or step.shape != (1,):
            raise model_mismatch(where, f"its input '{STEP_NAME}' is {step}")
        kept = given.pop(KEPT_NAME, None)
        if kept is None:
            raise model_mismatch(where, f"it has no output '{KEPT_NAME}'")
        kept_spec = TensorSpec.of_node(kept, where)
        if kept_spec.dtype != np.bool_ or kept_spec.shape != (len(trainable),):
            raise model_mismatch(where, f"its output '{KEPT_NAME}' is {kept_spec}")
        for name, spec in updated.items():
            sizes = [_size(each) for each in (spec, specs[name])]
            if None in sizes or sizes[0] != sizes[1] or spec.dtype != specs[name].dtype:
                raise model_mismatch(where, f"its input '{name}' and its update differ")
        apart = {RATE_NAME, STEP_NAME, *(name for name in updated if name not in trainable)}
        graph = GraphSignature.read(
            where,
            [node for name, node in nodes.items() if name not in apart],
            [node for name, node in given.items()
             if name.removesuffix(UPDATE_SUFFIX) not in updated],
            trainable,
            frozen,
        )  # fmt: skip
        for name in trainable:
            if name in graph.parameters and name not in updated:
                raise model_mismatch(where, f"it does not update '{name}', which is trainable")
        return cls(
            graph,
            {name: _shape(spec) for name, spec in updated.items()},
            {name: _shape(specs[name]) for name in updated if name not in trainable},
            groups,
            len(trainable),
        )


def _shape(spec: TensorSpec) -> Shape:
    return tuple(dim for dim in spec.shape if isinstance(dim, int))


def _size(spec: TensorSpec) -> int | None:
    """Number of elements, if it is fixed."""
    shape = _shape(spec)
    return math.prod(shape) if len(shape) == len(spec.shape) else None
