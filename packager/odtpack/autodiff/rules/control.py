"""Control flow: If, Loop and Scan, whose bodies are differentiated (autodiff.bodies).

The gradient of an If is an If on the same condition. That of a loop is a loop over the
turns in reverse order, which carries the cotangents of the carried state, and the sums of
the cotangents of what every turn reads from around the loop. The forward loop hands over
what its turns computed as further scan outputs.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from odtpack import loop_shapes
from odtpack.autodiff.backward import FLOATS, dependents, influences
from odtpack.autodiff.bodies import BackwardBody
from odtpack.autodiff.context import Context
from odtpack.autodiff.ops import Dims, dims_of
from odtpack.autodiff.registry import Cotangents, WithCaptured, vjp

_LISTS = ("axes", "directions")


def _is_float(value: ir.Value) -> bool:
    """Whether a value, or an element of it if it is a sequence, is or may be a float."""
    return value.dtype is None or value.dtype in FLOATS


@vjp("If")
def if_(ctx: Context) -> Cotangents:
    """Each branch returns the cotangents of everything that either of them captures."""
    for name in ("then_branch", "else_branch"):
        outputs = ctx.node.attributes[name].as_graph().outputs
        _check(ctx, len(outputs) == len(ctx.node.outputs))
    branches = {
        name: BackwardBody(ctx, ctx.node.attributes[name].as_graph())
        for name in ("then_branch", "else_branch")
    }
    found = {}
    for name, back in branches.items():
        given = ((y, ctx.maybe_dy(i)) for i, y in enumerate(back.body.outputs))
        seeds = [(y, dy) for y, dy in given if dy is not None and _is_float(y)]
        found[name] = back.differentiate(seeds, ctx.captured)
    reached = [v for v in ctx.captured if any(v in cotangents for cotangents in found.values())]
    if not reached:
        return []
    for name, back in branches.items():
        for value in reached:
            back.output(found[name].get(value) or back.zeros_like(value), like=value)
    for back in branches.values():
        others = [other for other in branches.values() if other is not back]
        results = {v: _branch_result(ctx, back, others, v) for v in back.plan(lambda value: True)}
        back.complete(results.__getitem__)
    graphs: dict[str, Any] = {n: ir.AttrGraph(n, back.graph) for n, back in branches.items()}
    cotangents = ctx.op.emit("If", [ctx.node.inputs[0]], outputs=len(reached), **graphs)
    return WithCaptured([], _typed(reached, cotangents))


def _branch_result(
    ctx: Context, back: BackwardBody, others: Sequence[BackwardBody], value: ir.Value
) -> ir.Value:
    """The output of the If that holds a value of one branch, added if there is none."""
    if not isinstance(value.type, ir.TensorType):
        raise ctx.unsupported(f"its gradient reads {value.name!r}, which is no tensor")
    if value in back.body.outputs:
        return ctx.node.outputs[back.body.outputs.index(value)]
    index = back.append(value)
    dims = dims_of(value)
    for other in others:
        other.append_dummy(value)
    fixed = dims is not None and all(isinstance(dim, int) for dim in dims)
    return _add_output(ctx, index, f"{value.name}.kept", value, dims if fixed else None)


def _add_output(ctx: Context, index: int, stem: str, like: ir.Value, dims: Dims | None) -> ir.Value:
    ctx.node.resize_outputs(index + 1)
    result = ctx.node.outputs[index]
    result.name, result.type = ctx.op.fresh_name(stem), like.type
    result.shape = None if dims is None else ir.Shape(dims)
    return result


def _typed(values: Sequence[ir.Value], cotangents: Sequence[ir.Value]) -> dict[ir.Value, ir.Value]:
    for value, cotangent in zip(values, cotangents, strict=True):
        cotangent.type, cotangent.shape = value.type, value.shape
    return dict(zip(values, cotangents, strict=True))


def _check(ctx: Context, holds: bool) -> None:
    if not holds:
        raise ctx.unsupported("its body has another number of inputs or outputs than it needs")


def _complete(ctx: Context, outputs: int) -> None:
    """Give the node the outputs at the end that nobody reads and that were left out."""
    count = len(ctx.node.outputs)
    if count < outputs:
        ctx.node.resize_outputs(outputs)
    for value in ctx.node.outputs[count:]:
        value.name = ctx.op.fresh_name(f"{ctx.node.name}.unused")


@dataclasses.dataclass(frozen=True)
class _State:
    """A value that a loop carries: its first one, in a turn, after it, and its last one."""

    index: int
    first: ir.Value
    before: ir.Value
    after: ir.Value
    last: ir.Value
    cotangent: ir.Value | None


@dataclasses.dataclass(frozen=True)
class _Slices:
    """A stacked value outside of a Scan, and the slice of it in a turn."""

    index: int
    whole: ir.Value
    part: ir.Value
    axis: int
    direction: int


@dataclasses.dataclass(frozen=True)
class _Loop:
    """What Loop and Scan have in common.

    Attributes:
        body: The subgraph that is run in every turn.
        states: What it carries.
        scanned: Inputs that it takes in slices.
        stacked: Outputs of turns that are stacked, each with its cotangent (None: unused).
        length: Number of turns, if it is known.
    """

    body: ir.Graph
    states: list[_State]
    scanned: list[_Slices]
    stacked: list[tuple[_Slices, ir.Value | None]]
    length: int | None


@vjp("Scan", since=9)
def scan(ctx: Context) -> Cotangents:
    """A Scan in the opposite direction."""
    node, body = ctx.node, ctx.node.attributes["body"].as_graph()
    scans = ctx.int("num_scan_inputs", 0)
    count, total = len(body.inputs) - scans, len(body.outputs)
    stacks = total - count
    _check(ctx, count >= 0 <= stacks and len(node.inputs) == count + scans > 0 < scans)
    _complete(ctx, total)
    in_axes, in_ways = (ctx.ints(f"scan_input_{n}", [0] * scans) for n in _LISTS)
    out_axes, out_ways = (ctx.ints(f"scan_output_{n}", [0] * stacks) for n in _LISTS)
    _check(ctx, len(in_axes) == len(in_ways) == scans and len(out_axes) == len(out_ways) == stacks)
    states = [
        _State(i, ctx.x(i), body.inputs[i], body.outputs[i], ctx.y(i), ctx.maybe_dy(i))
        for i in range(count)
    ]
    scanned, stacked = [], []
    for i in range(scans):
        whole = ctx.x(count + i)
        axis = in_axes[i] if in_axes[i] >= 0 else in_axes[i] + ctx.rank(whole)
        scanned.append(_Slices(count + i, whole, body.inputs[count + i], axis, in_ways[i]))
    for i in range(count, total):
        part, axis = body.outputs[i], out_axes[i - count]
        axis = axis if axis >= 0 else axis + ctx.rank(part) + 1
        slices = _Slices(i, ctx.y(i), part, axis, out_ways[i - count])
        stacked.append((slices, ctx.maybe_dy(i)))
    sizes = [dims[s.axis] for s in scanned if (dims := dims_of(s.whole)) is not None]
    length = next((size for size in sizes if isinstance(size, int)), None)
    turns = _ScanTurns(ctx, _Loop(body, states, scanned, stacked, length))
    cotangents = _reverse(ctx, turns)
    added = [0] * (len(body.outputs) - total)
    for name, values in zip(_LISTS, (out_axes, out_ways), strict=True):
        key = f"scan_output_{name}"
        node.attributes[key] = ir.AttrInt64s(key, [*values, *added])
    return cotangents


@vjp("Loop", since=11)
def loop(ctx: Context) -> Cotangents:
    """A Loop that makes as many turns as the forward Loop made and reads its stacks backwards."""
    body = ctx.node.attributes["body"].as_graph()
    count = len(body.inputs) - 2
    _check(ctx, 0 <= count == max(0, len(ctx.node.inputs) - 2) and len(body.outputs) > count)
    _complete(ctx, len(body.outputs) - 1)
    states = [
        _State(2 + i, ctx.x(2 + i), body.inputs[2 + i], body.outputs[1 + i], ctx.y(i),
               ctx.maybe_dy(i))
        for i in range(count)
    ]  # fmt: skip
    stacked = [
        (_Slices(i, ctx.y(i), body.outputs[1 + i], 0, 0), ctx.maybe_dy(i))
        for i in range(count, len(body.outputs) - 1)
    ]
    found = _Loop(body, states, [], stacked, _trip_count(ctx, body))
    return _reverse(ctx, _LoopTurns(ctx, found))


def _trip_count(ctx: Context, body: ir.Graph) -> int | None:
    """Number of turns of a Loop that runs for a constant number of them, else None."""
    trips, condition, goes_on = ctx.constant(0), ctx.maybe_x(1), body.outputs[0]
    start = np.array(True) if condition is None else ctx.constant(1)
    while (node := goes_on.producer()) is not None and node.op_type == "Identity":
        goes_on = node.inputs[0] or goes_on
    tensor = ir.convenience.get_const_tensor(goes_on)
    always = goes_on is body.inputs[1] or (tensor is not None and bool(tensor.numpy().all()))
    if trips is None or not always or start is None or not start.all():
        return None
    return max(0, int(trips.item()))


class _Turns(abc.ABC):
    """How values enter and leave the turns of a backward loop."""

    first_output = 0  # of the body that is an output of the node

    def __init__(self, ctx: Context, loop: _Loop) -> None:
        self.ctx = ctx
        self.loop = loop
        self.back = BackwardBody(ctx, loop.body)

    @abc.abstractmethod
    def enter(self, slices: _Slices) -> ir.Value:
        """The part of a whole that the forward loop had in the same turn."""

    @abc.abstractmethod
    def write(
        self, initial: Sequence[ir.Value], collected: Sequence[_Slices]
    ) -> tuple[ir.Value, ...]:
        """Write the loop.

        Args:
            initial: First values of what is carried, the first inputs of the body.
            collected: What the last outputs of the body are parts of.
        """

    def is_fixed(self, value: ir.Value) -> bool:
        """Whether a value has the same shape in every turn, so that it can be stacked."""
        dims, symbols = dims_of(value), self.ctx.op.symbols
        return dims is not None and all(isinstance(d, int) or d in symbols for d in dims)

    def standin(self, value: ir.Value) -> ir.Value:
        """A value of the forward body in the backward body."""
        for slices in self.loop.scanned:
            if slices.part is value:
                return self.enter(slices)
        return self.enter(self.stack(value))

    def stack(self, value: ir.Value) -> _Slices:
        """The output of the forward loop that stacks a value, added if there is none."""
        for slices, _ in self.loop.stacked:
            if slices.part is value and slices.axis == slices.direction == 0:
                return slices
        if value.meta.get(loop_shapes.VARIES):
            raise self.ctx.unsupported(
                f"its gradient reads {value.name!r}, which it carries and whose shape changes"
            )
        if not isinstance(value.type, ir.TensorType):
            raise self.ctx.unsupported(f"its gradient reads {value.name!r}, which is no tensor")
        index, dims = self.back.append(value), dims_of(value)
        shape = None if dims is None else (self.loop.length, *dims)
        whole = _add_output(
            self.ctx, index - self.first_output, f"{value.name}.stack", value, shape
        )
        return _Slices(index, whole, value, 0, 0)


class _ScanTurns(_Turns):
    def __init__(self, ctx: Context, loop: _Loop) -> None:
        super().__init__(ctx, loop)
        self._entered: list[tuple[_Slices, ir.Value]] = []

    def enter(self, slices: _Slices) -> ir.Value:
        name, part = self.back.op.fresh_name(f"{slices.whole.name}.part"), slices.part
        value = ir.Value(name=name, type=part.type, shape=part.shape)
        self._entered.append((slices, value))
        return value

    def write(
        self, initial: Sequence[ir.Value], collected: Sequence[_Slices]
    ) -> tuple[ir.Value, ...]:
        if not self._entered:  # the turns must be counted
            self.enter(self.loop.scanned[0])
        entered = [slices for slices, _ in self._entered]
        graph = self.back.graph
        graph.inputs.extend(value for _, value in self._entered)
        return self.ctx.op.emit(
            "Scan",
            [*initial, *(slices.whole for slices in entered)],
            outputs=len(graph.outputs),
            body=ir.AttrGraph("body", graph),
            num_scan_inputs=len(entered),
            scan_input_axes=[slices.axis for slices in entered],
            scan_input_directions=[1 - slices.direction for slices in entered],
            scan_output_axes=[slices.axis for slices in collected] or None,
            scan_output_directions=[1 - slices.direction for slices in collected] or None,
        )


class _LoopTurns(_Turns):
    first_output = 1

    def __init__(self, ctx: Context, loop: _Loop) -> None:
        super().__init__(ctx, loop)
        turn, going = loop.body.inputs[:2]
        self._turn = self.back.input("turn", turn)
        self.back.output(self.back.input("going", going), going)
        self._count: ir.Value | None = None
        self._position: ir.Value | None = None

    def enter(self, slices: _Slices) -> ir.Value:
        op = self.ctx.op
        if self._count is None or self._position is None:
            self._count = self._count_turns(slices)
            self._position = self.back.op.Sub(op.Sub(self._count, 1), self._turn)
        value: ir.Value = self.back.op.Gather(slices.whole, self._position, axis=0)
        value.type, value.shape = slices.part.type, slices.part.shape
        return value

    def _count_turns(self, slices: _Slices) -> ir.Value:
        op, zero = self.ctx.op, self.ctx.op.constant(np.array(0))
        if self.loop.length is not None:
            return op.constant(np.array(self.loop.length))
        return op.Gather(op.Shape(slices.whole), zero, axis=0)

    def write(
        self, initial: Sequence[ir.Value], collected: Sequence[_Slices]
    ) -> tuple[ir.Value, ...]:
        if self._count is None:
            self._count = self._count_turns(self.stack(self.loop.body.inputs[0]))
        graph = self.back.graph
        return self.ctx.op.emit(
            "Loop",
            [self._count, None, *initial],
            outputs=len(graph.outputs) - 1,
            body=ir.AttrGraph("body", graph),
        )


def _reverse(ctx: Context, turns: _Turns) -> Cotangents:
    """Write the backward loop."""
    loop, back, op = turns.loop, turns.back, ctx.op
    for state in loop.states:
        state.before.type = state.before.type or state.first.type
    carried = _carried(ctx, loop)
    ends = [back.input(f"{state.after.name}.cotangent", state.before) for state in carried]
    seeds = [(state.after, end) for state, end in zip(carried, ends, strict=True)]
    for slices, cotangent in loop.stacked:
        if cotangent is not None and _is_float(slices.part):
            seeds.append((slices.part, turns.enter(dataclasses.replace(slices, whole=cotangent))))
    scanned = [slices for slices in loop.scanned if ctx.needs(slices.index)]
    wrt = [*(s.before for s in carried), *(s.part for s in scanned), *ctx.captured]
    found = back.differentiate(seeds, wrt)
    scanned = [slices for slices in scanned if slices.part in found]
    captured = [value for value in ctx.captured if value in found]
    initial = []
    for state, end in zip(carried, ends, strict=True):
        back.output(found.get(state.before) or back.zeros_like(end), end)
        zeros = op.zeros(op.shape_of(state.first), ctx.dtype(state.first))
        initial.append(state.cotangent or zeros)
    for value in captured:
        total = back.input(f"{value.name}.cotangent", value)
        back.output(back.op.Add(total, found[value]), value)
        initial.append(op.zeros(op.shape_of(value), ctx.dtype(value)))
    for slices in scanned:
        back.output(found[slices.part], slices.part)
    if not (carried or captured or scanned):
        return []
    back.plan(turns.is_fixed)
    back.complete(turns.standin)
    results = turns.write(initial, scanned)
    targets = [*(s.first for s in carried), *captured, *(s.whole for s in scanned)]
    for value, cotangent in zip(targets, results, strict=True):
        cotangent.type, cotangent.shape = value.type, value.shape
    inputs: list[ir.Value | None] = [None] * len(ctx.node.inputs)
    for state, cotangent in zip(carried, results, strict=False):
        inputs[state.index] = cotangent
    for slices, cotangent in zip(reversed(scanned), reversed(results), strict=False):
        inputs[slices.index] = cotangent
    sums = results[len(carried) : len(carried) + len(captured)]
    return WithCaptured(inputs, dict(zip(captured, sums, strict=True)))


def _carried(ctx: Context, loop: _Loop) -> list[_State]:
    """States that depend on what is wanted, and that the outputs with cotangents depend on."""
    body, states = loop.body, [state for state in loop.states if _is_float(state.before)]
    sources = {s.part for s in loop.scanned if ctx.needs(s.index)} | set(ctx.captured)
    sources |= {state.before for state in states if ctx.needs(state.index)}
    results = {part.part for part, cotangent in loop.stacked if cotangent is not None}
    results |= {state.after for state in states if state.cotangent is not None}
    # What one turn passes on is a source, or a result, of another.
    for _ in states:
        reached, before = dependents(body, sources), len(sources)
        sources |= {state.before for state in states if state.after in reached}
        if len(sources) == before:
            break
    for _ in states:
        found, before = influences(body, results), len(results)
        results |= {state.after for state in states if state.before in found}
        if len(results) == before:
            break
    carried = [state for state in states if state.before in sources and state.after in results]
    for state in carried:
        if not isinstance(state.first.type, ir.TensorType):
            raise ctx.unsupported(f"it carries {state.before.name!r}, which is no tensor")
    return carried
