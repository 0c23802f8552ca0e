"""What RNN, LSTM and GRU have in common: one direction of a node, and a loop over its steps.

Shapes: T steps, B sequences, I inputs, H hidden units, G gates. The state before and after
each step is known from the output Y, so that everything but the recursion of the
cotangents is computed for all steps at once, in rows [T B, ...]; only the recursion runs
in a Scan.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.autodiff.rules.recurrent.gate_functions import directions
from odtpack.graph.graphs import dims_of
from odtpack.graph.ops import Ops

Step = tuple[Sequence[ir.Value], Sequence[ir.Value]]
Body = Callable[..., Step]


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Where a batch has sequences shorter than T.

    Attributes:
        valid: BOOL [T, B, 1], false past the end of a sequence.
        followed: BOOL [T, B, 1], whether the next step is valid too.
        any: BOOL [B, 1], false for a sequence without any step, whose states are zero.
    """

    valid: ir.Value
    followed: ir.Value
    any: ir.Value


class Layer:
    """A recurrent node: its sizes, and how its values are cut into directions.

    Args:
        ctx: The node.
        gates: G.

    Raises:
        OdtpackError: ONNX Runtime cannot run the node, or H or I is unknown.
    """

    def __init__(self, ctx: Context, gates: int) -> None:
        self.ctx, self.op, self.gates = ctx, ctx.op, gates
        self.dtype = ctx.dtype(ctx.x())
        if self.dtype != ir.DataType.FLOAT:
            raise ctx.unsupported(
                f"its type is {self.dtype.name}, and ONNX Runtime's CPU kernel runs FLOAT only"
            )
        if ctx.int("layout", 0):
            raise ctx.unsupported(
                "ONNX Runtime's CPU kernel refuses layout 1, batches before steps; "
                "export it with layout 0 (in PyTorch batch_first=False, or a Transpose)"
            )
        self.hidden, self.inputs = ctx.size(ctx.x(2), 2), ctx.size(ctx.x(1), 2)
        self.directions = directions(ctx)
        self.steps, self.batch = ctx.dims(ctx.x())[:2]
        self.states = ctx.extra_output(0, self.dtype)  # Y [T, D, B, H]
        self.lengths = self._lengths()
        self.x = self.rows(ctx.x(), self.inputs)  # [T B, I]
        self._parts: dict[tuple[ir.Value, int], list[ir.Value]] = {}

    def latest_first(self, direction: int) -> bool:
        """Whether the forward pass of a direction runs from the last step to the first."""
        return direction == 1 or self.ctx.string("direction", "forward") == "reverse"

    def part(self, value: ir.Value, axis: int, direction: int) -> ir.Value:
        """What one direction has of a value, without the axis of directions."""
        if (value, axis) not in self._parts:
            sizes = [1] * self.directions
            whole = self.op.split(value, axis, sizes) if self.directions > 1 else (value,)
            self._parts[value, axis] = [self.op.squeeze(each, axis) for each in whole]
        return self._parts[value, axis][direction]

    def join(self, values: Sequence[ir.Value]) -> ir.Value:
        """Put what the directions have side by side along a new axis 0."""
        parts = [self.op.unsqueeze(value, 0) for value in values]
        return parts[0] if len(parts) == 1 else self.op.Concat(*parts, axis=0)

    def rows(self, value: ir.Value, width: int) -> ir.Value:
        """View [T, B, width] as [T B, width]."""
        return self.op.reshape(value, -1, width)

    def by_step(self, rows: ir.Value, width: int) -> ir.Value:
        """View [T B, width] as [T, B, width]."""
        if isinstance(self.steps, int):
            result = self.op.reshape(rows, self.steps, -1, width)
        elif isinstance(self.batch, int):
            result = self.op.reshape(rows, -1, self.batch, width)
        else:
            steps = self.op.slice(self.op.Shape(self.ctx.x()), [0], [0], [1])
            shape = self.op.Concat(steps, self.op.ints(-1, width), axis=0)
            result = self.op.Reshape(rows, shape)
        result.shape = ir.Shape([self.steps, self.batch, width])
        return result

    @functools.cached_property
    def zero_state(self) -> ir.Value:
        """Zeros [B, H]."""
        if isinstance(self.batch, int):
            return self.op.zeros(self.op.ints(self.batch, self.hidden), self.dtype)
        batch = self.op.slice(self.op.Shape(self.ctx.x()), [0], [1], [2])
        shape = self.op.Concat(batch, self.op.ints(self.hidden), axis=0)
        return self.op.zeros(shape, self.dtype)

    def _lengths(self) -> Lengths | None:
        lengths, op = self.ctx.maybe_x(4), self.op
        if lengths is None:
            return None
        if isinstance(self.steps, int):
            steps = op.constant(np.arange(self.steps, dtype=np.int32))
        else:
            count = op.slice(op.Shape(self.ctx.x()), [0], [0], [1])
            first = op.constant(np.array(0, np.int32))
            last = op.squeeze(op.cast(count, ir.DataType.INT32), 0)
            steps = op.Range(first, last, op.constant(np.array(1, np.int32)))
        column, steps = op.reshape(lengths, -1, 1), op.reshape(steps, -1, 1, 1)
        valid, followed = op.Less(steps, column), op.Less(op.Add(steps, 1), column)
        for mask in (valid, followed):
            mask.shape = ir.Shape([self.steps, self.batch, 1])
        return Lengths(valid, followed, op.Greater(column, 0))


class Direction:
    """One direction of a node.

    Attributes:
        x: Inputs of each step [T B, I].
        w: Input weights [G H, I].
        r: Recurrent weights [G H, H].
        biases: Biases of both [G H], or None.
        h: Hidden state before each step [T B, H].
        y: Hidden state after each step [T B, H].
    """

    def __init__(self, layer: Layer, index: int) -> None:
        self.layer, self.op, self.index = layer, layer.op, index
        self.latest_first = layer.latest_first(index)
        self.x = layer.x
        self.w, self.r = self.part(layer.ctx.x(1)), self.part(layer.ctx.x(2))
        self.biases = None
        if (both := layer.ctx.maybe_x(3)) is not None:
            size = layer.gates * layer.hidden
            self.biases = self.op.split(self.part(both), 0, [size, size])
        states = layer.by_step(self.part(layer.states, 1), layer.hidden)
        self.y = layer.rows(states, layer.hidden)
        self.h = self.before(states, 5)

    def before(self, after: ir.Value, number: int) -> ir.Value:
        """State before each step [T B, H].

        Args:
            after: State after each step [T, B, H], zero past the end of a sequence.
            number: Input of the node that holds the initial state.
        """
        op, layer = self.op, self.layer
        given = layer.ctx.maybe_x(number)
        initial = self.initial(number)
        first = op.unsqueeze(initial, 0)
        if not self.latest_first:
            joined = op.Concat(first, op.slice(after, [0], [0], [-1]), axis=0)
        else:
            joined = op.Concat(op.slice(after, [0], [1], [2**31 - 1]), first, axis=0)
            if given is not None and layer.lengths is not None:
                # The pass starts at the end of each sequence.
                joined = op.Where(layer.lengths.followed, joined, initial)
        return layer.rows(joined, layer.hidden)

    def initial(self, number: int) -> ir.Value:
        """An initial state [B, H] of the node, zero if it has none."""
        given = self.layer.ctx.maybe_x(number)
        return self.layer.zero_state if given is None else self.part(given)

    def final(self, number: int) -> ir.Value:
        """Cotangent of a final state [B, H]: of Y_h, or of Y_c."""
        given, lengths = self.layer.ctx.maybe_dy(number), self.layer.lengths
        if given is None:
            return self.layer.zero_state
        part = self.part(given)
        return part if lengths is None else self.op.Where(lengths.any, part, 0)

    def forward(
        self, states: Sequence[ir.Value], sequences: Sequence[ir.Value], body: Body
    ) -> list[ir.Value]:
        """Write a loop over the steps in the order of the forward pass.

        Past the end of a sequence its states stay, and what is stacked is zero.

        Args:
            states: Carried from step to step, [B, H] each.
            sequences: What a step reads, [T, B, width] each.
            body: Receives a writer, a state for each of ``states`` and a slice for each of
                ``sequences``; returns the new states and what is to be stacked.

        Returns:
            The last states, then the stacked values [T, B, width].
        """
        return self._scan(states, sequences, body, falling=self.latest_first)

    def backward(
        self, states: Sequence[ir.Value], sequences: Sequence[ir.Value], body: Body
    ) -> list[ir.Value]:
        """Write a loop against the order of the forward pass.

        The first state is the cotangent of the hidden state: what Y's cotangent has at a
        step is added before the body sees it. All else is as in :meth:`forward`.
        """
        given, layer = self.layer.ctx.maybe_dy(0), self.layer
        if given is None:
            return self._scan(states, sequences, body, falling=not self.latest_first)
        dy = self.part(given, 1)
        dy.shape = ir.Shape([layer.steps, layer.batch, layer.hidden])

        def add(op: Ops, dh: ir.Value, *rest: ir.Value) -> Step:
            *others, dy = rest
            return body(op, op.Add(dh, dy), *others)

        return self._scan(states, [*sequences, dy], add, falling=not self.latest_first)

    def _scan(
        self,
        states: Sequence[ir.Value],
        sequences: Sequence[ir.Value],
        body: Body,
        *,
        falling: bool,
    ) -> list[ir.Value]:
        op, layer = self.op, self.layer
        if layer.lengths is not None:
            sequences = [*sequences, layer.lengths.valid]
        inputs = [_inner(op, state, (layer.batch, layer.hidden)) for state in states]
        inputs += [_inner(op, each, (dims_of(each) or ())[1:]) for each in sequences]
        graph = ir.Graph(inputs, [], nodes=[], name=op.fresh_name("steps"))
        inner = op.inside(graph)
        if layer.lengths is None:
            new, stacked = body(inner, *inputs)
            # A graph must not have one value as two outputs.
            stacked = [inner.Identity(each) if each in new else each for each in stacked]
        else:
            *inputs, valid = inputs
            new, stacked = body(inner, *inputs)
            stacked = [inner.Where(valid, each, 0) for each in stacked]
            old = inputs[: len(states)]
            new = [inner.Where(valid, *pair) for pair in zip(new, old, strict=True)]
        graph.outputs.extend([*new, *stacked])
        results = op.emit(
            "Scan",
            [*states, *sequences],
            outputs=len(new) + len(stacked),
            body=graph,
            num_scan_inputs=len(sequences),
            scan_input_directions=[int(falling)] * len(sequences),
            scan_output_directions=[int(falling)] * len(stacked),
        )
        return list(results)

    def part(self, value: ir.Value, axis: int = 0) -> ir.Value:
        """What this direction has of a value, without the axis of directions."""
        return self.layer.part(value, axis, self.index)


def _inner(op: Ops, like: ir.Value, dims: Sequence[int | str | None]) -> ir.Value:
    return ir.val(op.fresh_name("step"), like.dtype, list(dims))
