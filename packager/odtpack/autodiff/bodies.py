"""Differentiates the bodies of If, Loop and Scan, and writes their backward loops."""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.backward import FLOATS, dependents, influences
from odtpack.autodiff.context import Context, Cotangents, WithCaptured
from odtpack.graph import inference
from odtpack.graph.graphs import (
    RANDOM_OPERATORS,
    Dims,
    Ops,
    captures,
    defined,
    dims_of,
    operand,
    reads,
    static_dims,
    subgraphs,
    typed,
)

# The backward nodes of a body read values of the forward body, which they cannot see from
# where they end up. Each such value is either handed over, as one more output of the forward
# body, or computed again from others that are:
#
# 1. what an element-wise operator or a view computes from available values is computed again;
# 2. so is what does not change from turn to turn, which would be stored once for each;
# 3. everything else, matrix products above all, is handed over, if its shape is the same in
#    every turn: outputs of turns are stacked;
# 4. otherwise it is computed again, from whatever that takes.
#
# What is drawn at random is never drawn again: rule 3 holds for it, or there is no gradient.

# Operators that take no longer than reading what they return.
_CHEAP = {
    "Abs", "Add", "And", "Cast", "Ceil", "Clip", "Concat", "Constant", "ConstantOfShape", "Cos",
    "Div", "Elu", "Equal", "Exp", "Expand", "Flatten", "Floor", "Gather", "Greater",
    "GreaterOrEqual", "HardSigmoid", "Identity", "IsNaN", "LeakyRelu", "Less", "LessOrEqual", "Log",
    "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Range", "Reciprocal", "Relu", "Reshape",
    "Selu", "Shape", "Sigmoid", "Sign", "Sin", "Size", "Slice", "Softplus", "Softsign", "Split",
    "Sqrt", "Squeeze", "Sub", "Tanh", "Transpose", "Unsqueeze", "Where",
}  # fmt: skip


class BackwardBody:
    """The subgraph that takes a body's cotangents back, while it is written."""

    def __init__(self, ctx: Context, body: ir.Graph) -> None:
        self.body = body  # The forward body. It gets more outputs and, for shapes, more nodes.
        name = ctx.op.fresh_name(f"{body.name or ctx.node.op_type}.backward")
        self.graph = ir.Graph([], [], nodes=[], name=name)  # the backward body
        self.op = ctx.op.inside(self.graph)  # writes into ``graph``
        self._forward = ctx.op.inside(body)
        self._ctx = ctx
        self._again: list[ir.Node] = []  # nodes to compute again, last first
        self._needed: set[ir.Value] = set()
        self._kept: list[ir.Value] = []
        self._first = 0  # index of the first node that may read the forward body

    def differentiate(
        self, seeds: Iterable[tuple[ir.Value, ir.Value]], wrt: Iterable[ir.Value]
    ) -> dict[ir.Value, ir.Value]:
        """Write the vector-Jacobian product of the body."""
        # seeds: Outputs of the body with their cotangents, values that ``graph`` sees. An output
        # may stand there more than once. wrt: Inputs of the body, and values that it captures.
        # Returns cotangent of each value in ``wrt`` that has one.
        self._first = len(self.graph)
        summed: dict[ir.Value, ir.Value] = {}
        for value, cotangent in seeds:
            both = value in summed
            summed[value] = self.op.Add(summed[value], cotangent) if both else cotangent
        return self._ctx.differentiate(self.body, summed, wrt, self.op)

    def input(self, stem: str, like: ir.Value) -> ir.Value:
        """Append an input of the type and shape of ``like``."""
        value = ir.Value(name=self.op.fresh_name(stem), type=like.type, shape=like.shape)
        self.graph.inputs.append(value)
        return value

    def output(self, value: ir.Value, like: ir.Value) -> None:
        """Append an output of the type and shape of ``like``."""
        node = value.producer()
        if node is None or node.graph is not self.graph or value in self.graph.outputs:
            value = self.op.Identity(value)
        self.graph.outputs.append(typed(value, like))

    def zeros_like(self, value: ir.Value) -> ir.Value:
        """Zeros of the shape of a value that the backward body sees."""
        return self.op.zeros(self.op.shape_of(value), self._ctx.dtype(value))

    def append(self, value: ir.Value) -> int:
        """Make a value one more output of the forward body; return which."""
        node, result = value.producer(), value
        if node is None or node.graph is not self.body or value in self.body.outputs:
            result = typed(self._forward.Identity(value), value)
        self.body.outputs.append(result)
        return len(self.body.outputs) - 1

    def append_dummy(self, like: ir.Value) -> None:
        """Give the forward body an output that is not read, of the type of ``like``."""
        sizes = static_dims(like) or (0,) * len(dims_of(like) or ())
        dummy = self._forward.zeros(self._forward.ints(*sizes), self._ctx.dtype(like))
        dummy.shape = ir.Shape(sizes)
        self.body.outputs.append(dummy)

    def plan(self, is_fixed: Callable[[ir.Value], bool]) -> list[ir.Value]:
        """Choose what of the forward body is handed over and what is computed again."""
        # is_fixed: Whether a value has the same shape in every turn.
        # Returns values to hand over: inputs of the forward body, and outputs of its nodes.
        self._keep_shapes_forward()
        own = defined(self.body)
        self._needed = needed = {value for value in captures(self.graph) if value in own}
        light, kept = self._sort_out(own, is_fixed)
        for node in reversed(list(self.body)):
            wanted = [y for y in node.outputs if y in needed and y not in kept]
            if not wanted:
                continue
            fixed = all(is_fixed(value) for value in wanted)
            if node in light or (not fixed and not _is_unrepeatable(node)):
                self._again.append(node)
                needed.update(value for value in reads(node) if value in own)
            elif fixed:
                kept.update(wanted)
            else:
                raise self._ctx.unsupported(
                    f"{node.name!r} ({node.op_type}) inside it must not run twice, and the shape "
                    "of its result may differ between iterations"
                )
        self._kept = [value for value in self.body.inputs if value in needed]
        self._kept += [y for node in self.body for y in node.outputs if y in kept]
        return self._kept

    def _keep_shapes_forward(self) -> None:
        """Let the forward body take the shapes of its values: they are all that is read of some."""
        own = defined(self.body)
        for node in list(self.graph):
            value = node.inputs[0] if node.op_type in ("Shape", "Size") else None
            if value is None or node.domain or value not in own:
                continue
            self.graph.remove(node)
            self.body.append(node)
            dims = dims_of(value)
            if dims is not None and not node.attributes:
                node.outputs[0].shape = ir.Shape([len(dims)] if node.op_type == "Shape" else [])

    def _sort_out(
        self, own: set[ir.Value], is_fixed: Callable[[ir.Value], bool]
    ) -> tuple[set[ir.Node], set[ir.Value]]:
        """Nodes that are quickly repeated from what is available, and results to hand over."""
        constant = set(self.body.initializers.values())
        at_hand = constant | {value for value in self.body.inputs if is_fixed(value)}
        light: set[ir.Node] = set()
        kept: set[ir.Value] = set()
        for node in self.body:
            operands = [value for value in reads(node) if value in own]
            repeatable = not _is_unrepeatable(node)
            if repeatable and all(value in constant for value in operands):
                constant.update(node.outputs)
            elif not (
                repeatable
                and node.op_type in _CHEAP
                and all(value in at_hand for value in operands)
            ):
                found = [y for y in node.outputs if y in self._needed and is_fixed(y)]
                kept.update(found)
                at_hand.update(found)
                continue
            light.add(node)
            at_hand.update(node.outputs)
        return light, kept

    def complete(self, standin: Callable[[ir.Value], ir.Value]) -> None:
        """Write what is computed again, and let the backward body read stand-ins."""
        # standin: Gives the value by which ``graph`` sees a value of the plan; may write nodes,
        # which go before those of the cotangents.
        first = next(itertools.islice(self.graph, self._first, None), None)
        with nullcontext() if first is None else self.op.before(first):
            mapping = {value: standin(value) for value in self._kept}
        for value in list(self.body.initializers.values()):
            if value in self._needed and value.const_value is not None:
                name = self.op.fresh_name(str(value.name))
                mapping[value] = ir.val(name, const_value=value.const_value)
                self.graph.register_initializer(mapping[value])
        copies = [copy_node(node, self.op) for node in reversed(self._again)]
        for node, copy in zip(reversed(self._again), copies, strict=True):
            for old, new in zip(node.outputs, copy.outputs, strict=True):
                mapping.setdefault(old, new)
        if first is None:
            self.graph.extend(copies)
        else:
            self.graph.insert_before(first, copies)
        rewire(self.graph, mapping)


def may_be_float(value: ir.Value) -> bool:
    """Whether a value, or an element of it if it is a sequence, is or may be a float."""
    return value.dtype is None or value.dtype in FLOATS


def add_output(ctx: Context, index: int, stem: str, like: ir.Value, dims: Dims | None) -> ir.Value:
    """Add output ``index`` to the forward node, of the element type of ``like``."""
    ctx.node.resize_outputs(index + 1)
    result = ctx.node.outputs[index]
    result.name, result.type = ctx.op.fresh_name(stem), like.type
    result.shape = None if dims is None else ir.Shape(dims)
    return result


def _is_unrepeatable(node: ir.Node) -> bool:
    """Whether a second run may give another result: random draws, unknown operators."""
    if node.op_type in RANDOM_OPERATORS or node.domain:
        return True
    return any(_is_unrepeatable(inner) for body in subgraphs(node) for inner in body)


def copy_node(node: ir.Node, op: Ops) -> ir.Node:
    """Copy a node with its subgraphs; what it and they compute gets names of its own."""
    attributes = []
    for name, attribute in node.attributes.items():
        if attribute.type != ir.AttributeType.GRAPH:
            attributes.append(attribute)
            continue
        graph = attribute.as_graph().clone(allow_outer_scope_values=True)
        _rename(graph, op)
        attributes.append(ir.AttrGraph(name, graph))
    copy = ir.Node(
        node.domain,
        node.op_type,
        node.inputs,
        attributes,
        num_outputs=len(node.outputs),
        name=op.fresh_name(node.name or node.op_type),
    )
    for old, new in zip(node.outputs, copy.outputs, strict=True):
        typed(new, old)
        new.name = op.fresh_name(old.name) if old.name else old.name
    return copy


def _rename(graph: ir.Graph, op: Ops) -> None:
    for value in graph.inputs:
        value.name = op.fresh_name(value.name or "input")
    for value in list(graph.initializers.values()):
        graph.initializers.pop(str(value.name))
        value.name = op.fresh_name(str(value.name))
        graph.register_initializer(value)
    for node in graph:
        node.name = op.fresh_name(node.name or node.op_type)
        for value in node.outputs:
            value.name = op.fresh_name(value.name) if value.name else value.name
        for subgraph in subgraphs(node):
            _rename(subgraph, op)


def rewire(graph: ir.Graph, mapping: Mapping[ir.Value, ir.Value]) -> None:
    """Replace values wherever a graph or one of its subgraphs reads them."""
    for node in graph:
        for index, value in enumerate(node.inputs):
            if value is not None and value in mapping:
                node.replace_input_with(index, mapping[value])
        for subgraph in subgraphs(node):
            rewire(subgraph, mapping)
    for index, value in enumerate(graph.outputs):
        if value in mapping:
            graph.outputs[index] = mapping[value]


# Writes the backward loop of a Loop or a Scan.
#
# It goes over the turns of the forward loop in reverse order, and carries the cotangents of
# what that carried and the sums of the cotangents of what every turn reads from around it.
# The forward loop hands over what its turns computed as further scan outputs.


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


class Turns(abc.ABC):
    """How values enter and leave the turns of a backward loop."""

    first_output = 0  # of the body that is an output of the node

    def __init__(
        self,
        ctx: Context,
        body: ir.Graph,  # that is run in every turn
        states: list[State],  # what it carries
        scanned: list[Slices],  # inputs that it takes in slices
        # Outputs of turns that are stacked, each with its cotangent (None: unused).
        stacked: list[tuple[Slices, ir.Value | None]],
        length: int | None,  # number of turns, if it is known
    ) -> None:
        self.ctx, self.body, self.states = ctx, body, states
        self.scanned, self.stacked, self.length = scanned, stacked, length
        self.back = BackwardBody(ctx, body)
        self._stacks: dict[ir.Value, Slices] = {}

    @abc.abstractmethod
    def enter(self, slices: Slices) -> ir.Value:
        """The part of a whole that the forward loop had in the same turn."""

    @abc.abstractmethod
    def write(
        self, initial: Sequence[ir.Value], collected: Sequence[Slices]
    ) -> tuple[ir.Value, ...]:
        """Write the loop."""
        # initial: First values of what is carried, the first inputs of the body. collected: What
        # the last outputs of the body are parts of.

    def in_order(self, whole: ir.Value) -> ir.Value:
        """An output that stacks parts along its first axis, in the order of the forward loop."""
        return whole

    def whole(self, value: ir.Value) -> ir.Value:
        """All turns' values of the forward body, along a new first axis."""
        for slices in self.scanned:
            if slices.part is value and slices.axis == slices.direction == 0:
                return slices.whole
        return self.stack(value).whole

    def is_fixed(self, value: ir.Value) -> bool:
        """Whether a value has the same shape in every turn, so that it can be stacked."""
        dims, symbols = dims_of(value), self.ctx.op.symbols
        return dims is not None and all(isinstance(d, int) or d in symbols for d in dims)

    def standin(self, value: ir.Value) -> ir.Value:
        """A value of the forward body in the backward body."""
        for slices in self.scanned:
            if slices.part is value:
                return self.enter(slices)
        return self.enter(self.stack(value))

    def stack(self, value: ir.Value) -> Slices:
        """The output of the forward loop that stacks a value, added if there is none."""
        for slices, _ in self.stacked:
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
        shape = None if dims is None else (self.length, *dims)
        whole = add_output(self.ctx, index - self.first_output, f"{value.name}.stack", value, shape)
        self._stacks[value] = Slices(index, whole, value, 0, 0)
        return self._stacks[value]

    def changing(self, value: ir.Value) -> str | None:
        """How the shape of a carried value changes; None if it does not, as in every Scan."""
        return None


class ScanTurns(Turns):
    """The turns of a Scan in the opposite direction, whose parts are inputs of its body."""

    def __init__(self, ctx: Context, *loop: Any) -> None:
        super().__init__(ctx, *loop)
        self._entered: list[tuple[Slices, ir.Value]] = []

    def enter(self, slices: Slices) -> ir.Value:
        name, part = self.back.op.fresh_name(f"{slices.whole.name}.part"), slices.part
        value = ir.Value(name=name, type=part.type, shape=part.shape)
        self._entered.append((slices, value))
        return value

    def write(
        self, initial: Sequence[ir.Value], collected: Sequence[Slices]
    ) -> tuple[ir.Value, ...]:
        if not self._entered:  # the turns must be counted
            self.enter(self.scanned[0])
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


class LoopTurns(Turns):
    """The turns of a Loop, as many as the forward Loop made, which pick parts by number."""

    first_output = 1

    def __init__(self, ctx: Context, *loop: Any) -> None:
        super().__init__(ctx, *loop)
        turn, going = self.body.inputs[:2]
        self._turn = self.back.input("turn", turn)
        self.back.output(self.back.input("going", going), going)
        self._count: ir.Value | None = None
        self._position: ir.Value | None = None

    def enter(self, slices: Slices) -> ir.Value:
        op = self.ctx.op
        if self._count is None or self._position is None:
            self._count = self._count_turns(slices)
            self._position = self.back.op.Sub(op.Sub(self._count, 1), self._turn)
        return typed(self.back.op.Gather(slices.whole, self._position, axis=0), slices.part)

    def _count_turns(self, slices: Slices) -> ir.Value:
        op, zero = self.ctx.op, self.ctx.op.constant(np.array(0))
        if self.length is not None:
            return op.constant(np.array(self.length))
        return op.Gather(op.Shape(slices.whole), zero, axis=0)

    def changing(self, value: ir.Value) -> str | None:
        if self.is_fixed(value) or value not in self.body.inputs[2:]:
            return None
        if value.meta.get(inference.VARIES):
            return "changes from turn to turn"
        outermost = self.ctx.op
        while outermost.outer is not None:
            outermost = outermost.outer
        if not inference.may_change(outermost.graph, value):
            return None
        return "may change from turn to turn (declare it in the body where it does not)"

    def write(
        self, initial: Sequence[ir.Value], collected: Sequence[Slices]
    ) -> tuple[ir.Value, ...]:
        if self._count is None:
            self._count = self._count_turns(self.stack(self.body.inputs[0]))
        graph = self.back.graph
        return self.ctx.op.emit(
            "Loop",
            [self._count, None, *initial],
            outputs=len(graph.outputs) - 1,
            body=ir.AttrGraph("body", graph),
        )

    def in_order(self, whole: ir.Value) -> ir.Value:
        return self.ctx.op.slice(whole, [0], [-1], [np.iinfo(np.int64).min], [-1])


def reverse(ctx: Context, turns: Turns) -> Cotangents:
    """Write the backward turns."""
    back, op = turns.back, ctx.op
    for state in turns.states:
        state.before.type = state.before.type or state.first.type
    carried = _carried(ctx, turns)
    ends = [back.input(f"{state.after.name}.cotangent", state.before) for state in carried]
    seeds = [(state.after, end) for state, end in zip(carried, ends, strict=True)]
    for slices, cotangent in turns.stacked:
        if cotangent is not None and may_be_float(slices.part):
            seeds.append((slices.part, turns.enter(dataclasses.replace(slices, whole=cotangent))))
    scanned = [slices for slices in turns.scanned if ctx.needs(slices.index)]
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
        inputs[state.index] = typed(next(results), state.first)
    sums = {value: [typed(next(results), value)] for value in summed}
    for slices in scanned:
        inputs[slices.index] = typed(next(results), slices.whole)
    wholes = {v: turns.in_order(typed(next(results), like)) for v, like in rows.items()}
    for value, each in products.items():
        sums.setdefault(value, []).extend(_multiply(turns, p, wholes, value) for p in each)
    totals = {value: functools.reduce(op.Add, sums[value]) for value in captured}
    return WithCaptured(inputs, totals)


def _take_products(
    turns: Turns, captured: Sequence[ir.Value], found: dict[ir.Value, ir.Value]
) -> dict[ir.Value, list[Product]]:
    """Take products out of the cotangents of captured weights; what is left stays in ``found``."""
    values = [*turns.body.inputs, *(y for node in turns.body for y in node.outputs)]
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
        wholes[value] if value is product.ours else turns.whole(value)
        for value in (product.left, product.right)
    )
    left, right = op.reshape(left, -1, rows), op.reshape(right, -1, columns)
    if isinstance(turns, LoopTurns) and not turns.length:
        # There may have been no turn, and older runtimes fail on a product of no rows, or
        # return what happens to lie in memory.
        left, right = (
            op.Concat(op.constant(np.zeros((1, size), dtype.numpy())), value, axis=0)
            for value, size in ((left, rows), (right, columns))
        )
    return typed(op.Gemm(left, right, transA=1), weight)


def _carried(ctx: Context, turns: Turns) -> list[State]:
    """States that depend on what is wanted, and that the outputs with cotangents depend on."""
    body, states = turns.body, [state for state in turns.states if may_be_float(state.before)]
    sources = {s.part for s in turns.scanned if ctx.needs(s.index)} | set(ctx.captured)
    sources |= {state.before for state in states if ctx.needs(state.index)}
    results = {part.part for part, cotangent in turns.stacked if cotangent is not None}
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


# Takes sums of matrix products over turns out of a backward loop.
#
# A weight that every turn multiplies by gets in each turn the cotangent p' q, of rows p of
# the forward body and rows q of the backward body, and
#
#     sum over turns of p' q  =  P' Q,  the rows of all turns one below the other.
#
# One product of many rows is several times faster than many of few rows, each followed by an
# addition of the size of the weight; and P often is stacked anyway.


@dataclasses.dataclass(frozen=True)
class Product:
    """A product p' q, of which one operand is the forward body's."""

    left: ir.Value  # rows p, by turn
    right: ir.Value  # rows q, by turn
    ours: ir.Value  # which of the two is the backward body's


def take_products(
    back: BackwardBody, total: ir.Value, rows: Collection[ir.Value]
) -> tuple[ir.Value | None, list[Product]]:
    """Take the products out of a sum in a backward body."""
    # back: The body; the nodes of the products are removed from it. total: A sum that nothing
    # reads. rows: Matrices of the forward body that can be stacked.
    # Returns what is left of the sum (None: nothing), and the products.
    additions, products, rest, queue = [], [], [], [total]
    while queue:
        value = queue.pop()
        node = value.producer()
        private = len(value.uses()) == (0 if value is total else 1)
        if node is None or node.graph is not back.graph or not private:
            rest.append(value)
        elif node.op_type == "Add" and not node.domain:
            additions.append(node)
            queue.extend(v for v in node.inputs if v is not None)
        elif _is_product(node, back, rows):
            products.append(node)
        else:
            rest.append(value)
    if not products:
        return total, []
    taken = []
    for node in additions:
        back.graph.remove(node, safe=True)
    for node in products:
        left, right = operand(node, 0), operand(node, 1)
        taken.append(Product(left, right, right if left in rows else left))
        back.graph.remove(node, safe=True)
    return functools.reduce(back.op.Add, rest) if rest else None, taken


def _is_product(node: ir.Node, back: BackwardBody, rows: Collection[ir.Value]) -> bool:
    """Whether a node is p' q of a known matrix of the forward body and one of this body."""
    if node.op_type != "Gemm" or node.domain or len(node.inputs) != 2:
        return False
    if (node.attributes.get_int("transA", 0), node.attributes.get_int("transB", 0)) != (1, 0):
        return False
    if node.attributes.get_float("alpha", 1.0) != 1.0:
        return False
    forward = [value for value in node.inputs if value in rows]
    producers = [(v, v.producer()) for v in node.inputs if v is not None]
    ours = [v in back.graph.inputs if p is None else p.graph is back.graph for v, p in producers]
    return len(forward) == 1 and ours.count(True) == 1
