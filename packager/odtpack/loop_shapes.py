"""Shapes of what a Loop carries, which the standard's shape inference leaves open.

The standard lets a carried value change its shape from turn to turn, so that inference
forgets it even where it stays the same. Here it is assumed to stay that of the first value,
and the assumption is given up, axis by axis, where the body contradicts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import onnx_ir as ir

from odtpack.autodiff.ops import Dims, defined, dims_of

_ROUNDS = 6
_VARIES = "odtpack.shape_varies"  # in the meta data of an input of a body


class _State(NamedTuple):
    """The same carried value before the loop, in a turn, after it, and behind the loop."""

    first: ir.Value
    before: ir.Value
    after: ir.Value
    last: ir.Value


def infer(model: ir.Model, infer_others: Callable[[ir.Model], ir.Model]) -> ir.Model:
    """Infer shapes, those of carried values included.

    Args:
        model: Changed in place.
        infer_others: Infers all shapes but these.
    """
    model = infer_others(model)
    states = [state for state in _states(model) if _is_open(state)]
    if not states:
        return model
    graphs = list(model.graphs())
    values = [value for graph in graphs for value in defined(graph)]
    known = {value: value.shape for value in values}
    guesses = {state: dims_of(state.first) for state in states}
    for _ in range(_ROUNDS):
        for value, shape in known.items():
            value.shape = shape
        for state, dims in guesses.items():
            if state.before.shape is None and dims is not None:
                state.before.shape = ir.Shape(dims)
            if dims is not None:
                state.last.shape = ir.Shape(dims)
        model = infer_others(model)
        found = {state: _common(state, guesses[state]) for state in states}
        if found == guesses:
            break
        guesses = found
    else:
        for value, shape in known.items():
            value.shape = shape
        guesses = dict.fromkeys(states)
    for state, dims in guesses.items():
        if dims is None:
            state.before.meta[_VARIES] = True
    return model


def _states(model: ir.Model) -> Iterator[_State]:
    for node in model.graph.all_nodes():
        if node.op_type != "Loop" or node.domain or "body" not in node.attributes:
            continue
        body = node.attributes["body"].as_graph()
        rows = zip(node.inputs[2:], body.inputs[2:], body.outputs[1:], node.outputs, strict=False)
        for first, before, after, last in rows:
            if first is not None:
                yield _State(first, before, after, last)


def _is_open(state: _State) -> bool:
    if state.before.meta.get(_VARIES) or not isinstance(state.first.type, ir.TensorType):
        return False
    return state.first.shape is not None and (
        state.before.shape is None or state.last.shape is None
    )


def _common(state: _State, guess: Dims | None) -> Dims | None:
    """The guess without what the values before and after a turn contradict."""
    for value in (state.before, state.after):
        dims = dims_of(value)
        if guess is None or dims is None or len(dims) != len(guess):
            return None
        pairs = zip(guess, dims, strict=True)
        guess = tuple(dim if dim == other else None for dim, other in pairs)
    return guess
