"""Control flow: If, Loop and Scan, whose bodies are differentiated (autodiff.bodies).

The gradient of an If is an If on the same condition, that of a loop a loop backwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.bodies import (
    BackwardBody,
    LoopTurns,
    ScanTurns,
    Slices,
    State,
    add_output,
    may_be_float,
    reverse,
)
from odtpack.autodiff.context import Context, Cotangents, WithCaptured, vjp
from odtpack.graph.graphs import dims_of, static_dims, typed

_LISTS = ("axes", "directions")


@vjp("If")
def if_(ctx: Context) -> Cotangents:
    """Each branch returns the cotangents of everything that either of them captures."""
    branches = {
        name: BackwardBody(ctx, ctx.node.attributes[name].as_graph())
        for name in ("then_branch", "else_branch")
    }
    counts = {len(back.body.outputs) for back in branches.values()}
    _check(ctx, counts == {len(ctx.node.outputs)})
    found = {}
    for name, back in branches.items():
        given = ((y, ctx.maybe_dy(i)) for i, y in enumerate(back.body.outputs))
        seeds = [(y, dy) for y, dy in given if dy is not None and may_be_float(y)]
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
    pairs = zip(reached, cotangents, strict=True)
    return WithCaptured([], {value: typed(cotangent, value) for value, cotangent in pairs})


def _branch_result(
    ctx: Context, back: BackwardBody, others: Sequence[BackwardBody], value: ir.Value
) -> ir.Value:
    """The output of the If that holds a value of one branch, added if there is none."""
    if not isinstance(value.type, ir.TensorType):
        raise ctx.unsupported(f"its gradient reads {value.name!r}, which is not a tensor")
    if value in back.body.outputs:
        return ctx.node.outputs[back.body.outputs.index(value)]
    index, dims = back.append(value), static_dims(value)
    for other in others:
        other.append_dummy(value)
    return add_output(ctx, index, f"{value.name}.kept", value, dims)


def _check(ctx: Context, holds: bool) -> None:
    if not holds:
        raise ctx.unsupported("its body has another number of inputs or outputs than it needs")


def _complete(ctx: Context, outputs: int) -> None:
    """Give the node the outputs at the end that are not read and that were left out."""
    count = len(ctx.node.outputs)
    if count < outputs:
        ctx.node.resize_outputs(outputs)
    for value in ctx.node.outputs[count:]:
        value.name = ctx.op.fresh_name(f"{ctx.node.name}.unused")


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
        State(i, ctx.x(i), body.inputs[i], body.outputs[i], ctx.y(i), ctx.maybe_dy(i))
        for i in range(count)
    ]
    scanned, stacked = [], []
    for i in range(scans):
        whole = ctx.x(count + i)
        axis = in_axes[i] if in_axes[i] >= 0 else in_axes[i] + ctx.rank(whole)
        scanned.append(Slices(count + i, whole, body.inputs[count + i], axis, in_ways[i]))
    for i in range(count, total):
        part, axis = body.outputs[i], out_axes[i - count]
        axis = axis if axis >= 0 else axis + ctx.rank(part) + 1
        slices = Slices(i, ctx.y(i), part, axis, out_ways[i - count])
        stacked.append((slices, ctx.maybe_dy(i)))
    sizes = [dims[s.axis] for s in scanned if (dims := dims_of(s.whole)) is not None]
    length = next((size for size in sizes if isinstance(size, int)), None)
    cotangents = reverse(ctx, ScanTurns(ctx, body, states, scanned, stacked, length))
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
        State(2 + i, ctx.x(2 + i), body.inputs[2 + i], body.outputs[1 + i], ctx.y(i),
               ctx.maybe_dy(i))
        for i in range(count)
    ]  # fmt: skip
    stacked = [
        (Slices(i, ctx.y(i), body.outputs[1 + i], 0, 0), ctx.maybe_dy(i))
        for i in range(count, len(body.outputs) - 1)
    ]
    return reverse(ctx, LoopTurns(ctx, body, states, [], stacked, _trip_count(ctx, body)))


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
