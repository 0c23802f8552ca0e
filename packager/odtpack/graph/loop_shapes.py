"""Shapes of what a Loop carries, which the standard's shape inference leaves open.

The standard lets a carried value change its shape from turn to turn, so that inference
forgets it even where it stays the same. Here it is assumed to stay that of the first value,
and the assumption is given up, axis by axis, where the body contradicts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import onnx_ir as ir

from odtpack.graph.graphs import Dims, defined, dims_of, nodes_of

_ROUNDS = 10
VARIES = "odtpack.shape_varies"
"""Set in the meta data of an input of a body that is known to change its shape."""

_OPEN = "odtpack.shape_open"  # the same where nothing is known, lest it is tried again


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
    known = {value: value.shape for graph in model.graphs() for value in defined(graph)}
    guesses: dict[_State, Dims | None] = {}
    judged = False
    for _ in range(_ROUNDS):
        # Of a loop inside a loop the first value gets its shape from a guess about the other.
        new = [s for s in states if s not in guesses and s.first.shape is not None]
        guesses |= {state: dims_of(state.first) for state in new}
        if not new:
            if not judged:  # these are the shapes of the first turn, assumed or not
                _mark_varying(states)
            judged = True
            found = {state: _common(state, guess) for state, guess in guesses.items()}
            if found == guesses:
                break
            guesses = found
        _restore(known)
        for state, dims in guesses.items():
            if dims is not None:
                if state.before.shape is None:
                    state.before.shape = ir.Shape(dims)
                state.last.shape = ir.Shape(dims)
        model = infer_others(model)
    else:
        _restore(known)
        guesses = dict.fromkeys(states)
    for state, dims in guesses.items():
        if dims is None:
            state.before.meta[_OPEN] = True
    return model


def _restore(shapes: Mapping[ir.Value, ir.Shape | None]) -> None:
    for value, shape in shapes.items():
        value.shape = shape


def _mark_varying(states: list[_State]) -> None:
    for state in states:
        first, after = dims_of(state.first), dims_of(state.after)
        if first is None or after is None or dims_of(state.before) != dims_of(state.first):
            continue
        pairs = zip(first, after, strict=False)
        sizes = [(a, b) for a, b in pairs if isinstance(a, int) and isinstance(b, int)]
        if len(first) != len(after) or any(a != b for a, b in sizes):
            state.before.meta[VARIES] = True


def _states(model: ir.Model) -> Iterator[_State]:
    for node in nodes_of(model.graph):
        if node.op_type != "Loop" or node.domain not in ("", "ai.onnx"):
            continue
        body = node.attributes["body"].as_graph()
        rows = zip(node.inputs[2:], body.inputs[2:], body.outputs[1:], node.outputs, strict=False)
        for first, before, after, last in rows:
            if first is not None:
                yield _State(first, before, after, last)


def _is_open(state: _State) -> bool:
    if state.before.meta.get(_OPEN) or not isinstance(state.first.type, ir.TensorType):
        return False
    return state.before.shape is None or state.last.shape is None


def _common(state: _State, guess: Dims | None) -> Dims | None:
    """The guess without what the values before and after a turn contradict."""
    for value in (state.before, state.after):
        dims = dims_of(value)
        if guess is None or dims is None or len(dims) != len(guess):
            return None
        pairs = zip(guess, dims, strict=True)
        guess = tuple(dim if dim == other else None for dim, other in pairs)
    return guess
