"""Shapes of what a Loop carries, which the standard's shape inference leaves open.

The standard lets a carried value change its shape from turn to turn, so that inference
forgets it even where it stays the same. Here it is assumed to stay that of the first value,
and the assumption is given up, axis by axis, where the body contradicts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import onnx_ir as ir

from odtpack.graph.graphs import Dims, defined, dims_of, nodes_of, static_dims

_ROUNDS = 10
_SIZE = 5040  # of an axis that is known only when the model runs: it has many divisors
VARIES = "odtpack.shape_varies"
"""Set in the meta data of an input of a body that is known to change its shape."""

_OPEN = "odtpack.shape_open"  # the same where nothing is known, lest it is tried again


class _State(NamedTuple):
    """The same carried value before the loop, in a turn, after the turn, and after the loop."""

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


def may_change(
    graph: ir.Graph, value: ir.Value, infer_others: Callable[[ir.Model], ir.Model]
) -> bool:
    """Whether a carried value may have another shape in another turn.

    Sizes that are known only when the model runs are set to numbers for that: then inference
    separates what has as many elements as before from what has more.

    Args:
        graph: The main graph; not changed.
        value: Input of the body of a Loop in it.
        infer_others: Infers all shapes but those of carried values.
    """
    model = ir.Model(graph, ir_version=8)
    twin = model.clone()
    numbers: dict[str, int] = {}
    for given in twin.graph.inputs:
        given.shape = _with_numbers(given, numbers, new=True)
    for inner in twin.graphs():
        for each in defined(inner) - set(twin.graph.inputs):
            each.shape = _with_numbers(each, numbers, new=False)
    states, twins = list(_states(model)), list(_states(twin))
    for _ in range(_ROUNDS):  # a loop inside a loop begins with what the outer one carries
        infer_others(twin)
        unknown = [s for s in twins if static_dims(s.before) is None and static_dims(s.first)]
        if not unknown:
            break
        for state in unknown:
            state.before.shape = state.last.shape = state.first.shape
    known = next(other for state, other in zip(states, twins, strict=True) if state.before is value)
    dims = static_dims(known.first)
    return dims is None or dims != static_dims(known.before) or dims != static_dims(known.after)


def _with_numbers(value: ir.Value, numbers: dict[str, int], *, new: bool) -> ir.Shape | None:
    """The shape with a number for each size, and None where one is not known."""
    dims = dims_of(value)
    if dims is None:
        return None
    found = []
    for axis, dim in enumerate(dims):
        name = f"{value.name}:{axis}" if dim is None else str(dim)
        if not isinstance(dim, int) and new:
            numbers.setdefault(name, _SIZE * (len(numbers) + 1))
        found.append(dim if isinstance(dim, int) else numbers.get(name))
    return None if None in found else ir.Shape([dim for dim in found if dim is not None])


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
