"""Writes the backward loop of a Loop or a Scan.

It goes over the turns of the forward loop in reverse order, and carries the cotangents of
what that carried and the sums of the cotangents of what every turn reads from around it.
The forward loop hands over what its turns computed as further scan outputs.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.backward import dependents, influences
from odtpack.autodiff.bodies import BackwardBody, add_output, may_be_float
from odtpack.autodiff.context import Context
from odtpack.autodiff.hoist_sums import Product, take_products
from odtpack.autodiff.registry import Cotangents, WithCaptured
from odtpack.graph import loop_shapes
from odtpack.graph.graphs import dims_of, static_dims


@dataclasses.dataclass(frozen=True)
class State:
    """A value that a loop carries: its first one, in a turn, after it, and its last one."""

    index: int
    first: ir.Value
    before: ir.Value
    after: ir.Value
    last: ir.Value
    cotangent: ir.Value | None


@dataclasses.dataclass(frozen=True)
class Slices:
    """A stacked value outside of a Scan, and the slice of it in a turn."""

    index: int
    whole: ir.Value
    part: ir.Value
    axis: int
    direction: int


@dataclasses.dataclass(frozen=True)
class Form:
    """What Loop and Scan have in common.

    Attributes:
        body: The subgraph that is run in every turn.
        states: What it carries.
        scanned: Inputs that it takes in slices.
        stacked: Outputs of turns that are stacked, each with its cotangent (None: unused).
        length: Number of turns, if it is known.
    """

    body: ir.Graph
    states: list[State]
    scanned: list[Slices]
    stacked: list[tuple[Slices, ir.Value | None]]
    length: int | None


class Turns(abc.ABC):
    """How values enter and leave the turns of a backward loop."""

    first_output = 0  # of the body that is an output of the node

    def __init__(self, ctx: Context, loop: Form) -> None:
        self.ctx = ctx
        self.loop = loop
        self.back = BackwardBody(ctx, loop.body)
        self._stacks: dict[ir.Value, Slices] = {}

    @abc.abstractmethod
    def enter(self, slices: Slices) -> ir.Value:
        """The part of a whole that the forward loop had in the same turn."""

    @abc.abstractmethod
    def write(
        self, initial: Sequence[ir.Value], collected: Sequence[Slices]
    ) -> tuple[ir.Value, ...]:
        """Write the loop.

        Args:
            initial: First values of what is carried, the first inputs of the body.
            collected: What the last outputs of the body are parts of.
        """

    @abc.abstractmethod
    def in_order(self, whole: ir.Value) -> ir.Value:
        """An output that stacks parts along its first axis, in the order of the forward loop."""

    def whole(self, value: ir.Value) -> ir.Value:
        """All turns' values of the forward body, along a new first axis."""
        for slices in self.loop.scanned:
            if slices.part is value and slices.axis == slices.direction == 0:
                return slices.whole
        return self.stack(value).whole

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

    def stack(self, value: ir.Value) -> Slices:
        """The output of the forward loop that stacks a value, added if there is none."""
        for slices, _ in self.loop.stacked:
            if slices.part is value and slices.axis == slices.direction == 0:
                return slices
        if value in self._stacks:
            return self._stacks[value]
        if (how := self.changing(value)) is not None:
            raise self.ctx.unsupported(
                f"its gradient reads {value.name!r}, which it carries and whose shape {how}"
            )
        if not isinstance(value.type, ir.TensorType):
            raise self.ctx.unsupported(f"its gradient reads {value.name!r}, which is not a tensor")
        index, dims = self.back.append(value), dims_of(value)
        shape = None if dims is None else (self.loop.length, *dims)
        whole = add_output(self.ctx, index - self.first_output, f"{value.name}.stack", value, shape)
        self._stacks[value] = Slices(index, whole, value, 0, 0)
        return self._stacks[value]

    def changing(self, value: ir.Value) -> str | None:
        """How the shape of a carried value changes; None if it does not, as in every Scan."""
        return None


class ScanTurns(Turns):
    """The turns of a Scan in the opposite direction, whose parts are inputs of its body."""

    def __init__(self, ctx: Context, loop: Form) -> None:
        super().__init__(ctx, loop)
        self._entered: list[tuple[Slices, ir.Value]] = []

    def enter(self, slices: Slices) -> ir.Value:
        """See the base class."""
        name, part = self.back.op.fresh_name(f"{slices.whole.name}.part"), slices.part
        value = ir.Value(name=name, type=part.type, shape=part.shape)
        self._entered.append((slices, value))
        return value

    def write(
        self, initial: Sequence[ir.Value], collected: Sequence[Slices]
    ) -> tuple[ir.Value, ...]:
        """See the base class."""
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

    def in_order(self, whole: ir.Value) -> ir.Value:
        """See the base class."""
        return whole


class LoopTurns(Turns):
    """The turns of a Loop, as many as the forward Loop made, which pick parts by number."""

    first_output = 1

    def __init__(self, ctx: Context, loop: Form) -> None:
        super().__init__(ctx, loop)
        turn, going = loop.body.inputs[:2]
        self._turn = self.back.input("turn", turn)
        self.back.output(self.back.input("going", going), going)
        self._count: ir.Value | None = None
        self._position: ir.Value | None = None

    def enter(self, slices: Slices) -> ir.Value:
        """See the base class."""
        op = self.ctx.op
        if self._count is None or self._position is None:
            self._count = self._count_turns(slices)
            self._position = self.back.op.Sub(op.Sub(self._count, 1), self._turn)
        value: ir.Value = self.back.op.Gather(slices.whole, self._position, axis=0)
        value.type, value.shape = slices.part.type, slices.part.shape
        return value

    def _count_turns(self, slices: Slices) -> ir.Value:
        op, zero = self.ctx.op, self.ctx.op.constant(np.array(0))
        if self.loop.length is not None:
            return op.constant(np.array(self.loop.length))
        return op.Gather(op.Shape(slices.whole), zero, axis=0)

    def changing(self, value: ir.Value) -> str | None:
        """See the base class."""
        from odtpack.graph.inference import infer_by_standard

        if self.is_fixed(value) or value not in self.loop.body.inputs[2:]:
            return None
        if value.meta.get(loop_shapes.VARIES):
            return "changes from turn to turn"
        outermost = self.ctx.op
        while outermost.outer is not None:
            outermost = outermost.outer
        open_ = loop_shapes.may_change(outermost.graph, value, infer_by_standard)
        if not open_:
            return None
        return "may change from turn to turn (declare it in the body where it does not)"

    def write(
        self, initial: Sequence[ir.Value], collected: Sequence[Slices]
    ) -> tuple[ir.Value, ...]:
        """See the base class."""
        if self._count is None:
            self._count = self._count_turns(self.stack(self.loop.body.inputs[0]))
        graph = self.back.graph
        return self.ctx.op.emit(
            "Loop",
            [self._count, None, *initial],
            outputs=len(graph.outputs) - 1,
            body=ir.AttrGraph("body", graph),
        )

    def in_order(self, whole: ir.Value) -> ir.Value:
        """See the base class."""
        return self.ctx.op.slice(whole, [0], [-1], [np.iinfo(np.int64).min], [-1])


def reverse(ctx: Context, turns: Turns) -> Cotangents:
    """Write the backward loop."""
    loop, back, op = turns.loop, turns.back, ctx.op
    for state in loop.states:
        state.before.type = state.before.type or state.first.type
    carried = _carried(ctx, loop)
    ends = [back.input(f"{state.after.name}.cotangent", state.before) for state in carried]
    seeds = [(state.after, end) for state, end in zip(carried, ends, strict=True)]
    for slices, cotangent in loop.stacked:
        if cotangent is not None and may_be_float(slices.part):
            seeds.append((slices.part, turns.enter(dataclasses.replace(slices, whole=cotangent))))
    scanned = [slices for slices in loop.scanned if ctx.needs(slices.index)]
    wrt = [*(s.before for s in carried), *(s.part for s in scanned), *ctx.captured]
    found = back.differentiate(seeds, wrt)
    scanned = [slices for slices in scanned if slices.part in found]
    captured = [value for value in ctx.captured if value in found]
    products = _take_products(turns, captured, found)
    summed = [value for value in captured if value in found]
    initial = []
    for state, end in zip(carried, ends, strict=True):
        back.output(found.get(state.before) or back.zeros_like(end), end)
        zeros = op.zeros(op.shape_of(state.first), ctx.dtype(state.first))
        initial.append(state.cotangent or zeros)
    for value in summed:
        total = back.input(f"{value.name}.cotangent", value)
        back.output(back.op.Add(total, found[value]), value)
        initial.append(op.zeros(op.shape_of(value), ctx.dtype(value)))
    for slices in scanned:
        back.output(found[slices.part], slices.part)
    # Of the shapes of these rows nothing is said; they are of the weights' type.
    rows = {p.ours: ir.Value(type=w.type) for w, each in products.items() for p in each}
    for value, like in rows.items():
        back.output(value, like)
    if not (carried or captured or scanned):
        return []
    back.plan(turns.is_fixed)
    back.complete(turns.standin)
    stacks = [Slices(-1, value, value, 0, 0) for value in rows]
    results = iter(turns.write(initial, [*scanned, *stacks]))
    inputs: list[ir.Value | None] = [None] * len(ctx.node.inputs)
    for state in carried:
        inputs[state.index] = _typed(next(results), state.first)
    sums = {value: [_typed(next(results), value)] for value in summed}
    for slices in scanned:
        inputs[slices.index] = _typed(next(results), slices.whole)
    wholes = {v: turns.in_order(_typed(next(results), like)) for v, like in rows.items()}
    for value, each in products.items():
        sums.setdefault(value, []).extend(_multiply(turns, p, wholes, value) for p in each)
    totals = {value: functools.reduce(op.Add, sums[value]) for value in captured}
    return WithCaptured(inputs, totals)


def _typed(cotangent: ir.Value, like: ir.Value) -> ir.Value:
    cotangent.type, cotangent.shape = like.type, like.shape
    return cotangent


def _take_products(
    turns: Turns, captured: Sequence[ir.Value], found: dict[ir.Value, ir.Value]
) -> dict[ir.Value, list[Product]]:
    """Take products out of the cotangents of captured weights; what is left stays in ``found``."""
    values = [*turns.loop.body.inputs, *(y for node in turns.loop.body for y in node.outputs)]
    rows = {v for v in values if len(dims_of(v) or ()) == 2 and turns.is_fixed(v)}
    products = {}
    for value in captured:
        total, dims = found[value], static_dims(value)
        if dims is None or len(dims) != 2 or list(found.values()).count(total) > 1:
            continue
        rest, taken = take_products(turns.back, total, rows)
        if taken:
            products[value] = taken
        if rest is None:
            del found[value]
        else:
            found[value] = rest
    return products


def _multiply(
    turns: Turns, product: Product, wholes: dict[ir.Value, ir.Value], weight: ir.Value
) -> ir.Value:
    """The sum over all turns of a product, which is of the shape of ``weight``."""
    op, (rows, columns) = turns.ctx.op, static_dims(weight) or (-1, -1)
    dtype = turns.ctx.dtype(weight)
    left, right = (
        turns.whole(value) if value is product.forward else wholes[value]
        for value in (product.left, product.right)
    )
    left, right = op.reshape(left, -1, rows), op.reshape(right, -1, columns)
    if isinstance(turns, LoopTurns) and not turns.loop.length:
        # There may have been no turn, and older runtimes fail on a product of no rows, or
        # return what happens to lie in memory.
        left, right = (
            op.Concat(op.constant(np.zeros((1, size), dtype.numpy())), value, axis=0)
            for value, size in ((left, rows), (right, columns))
        )
    y: ir.Value = op.Gemm(left, right, transA=1)
    return _typed(y, weight)


def _carried(ctx: Context, loop: Form) -> list[State]:
    """States that depend on what is wanted, and that the outputs with cotangents depend on."""
    body, states = loop.body, [state for state in loop.states if may_be_float(state.before)]
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
            raise ctx.unsupported(f"it carries {state.before.name!r}, which is not a tensor")
    return carried
