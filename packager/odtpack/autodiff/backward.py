"""The backward walk: reverse order, ask the registry, add up, un-broadcast."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping

import onnx_ir as ir

from odtpack.autodiff import context, discards
from odtpack.autodiff.context import REGISTRY, Context, Registry, Rule, WithCaptured
from odtpack.autodiff.stop_gradient import STRAIGHT_THROUGH
from odtpack.errors import OdtpackError, quoted
from odtpack.graph.graphs import Ops, ancestors, captures, dims_of, maker, reads, subgraphs, wider

# It knows no operators. A rule gives the cotangents of a node's inputs, and of what its
# subgraphs read from around them, from those of its outputs; the walk decides which are
# needed and sums the contributions of every use.

SUM_OF_COTANGENTS = "odtpack.sum-of-cotangents"
"""Metadata of an Add that sums cotangents of one value, which are all of its shape."""

REASON = "odtpack.reason"
"""Metadata of a node that has no gradient: why it was not rewritten into nodes that have one."""

FLOATS = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE, ir.DataType.BFLOAT16}


def opset_of(node: ir.Node, graph: ir.Graph) -> int:
    """Opset under which a node is to be read."""
    return graph.opset_imports.get(node.domain, 1)


def dependents(
    graph: ir.Graph, sources: Iterable[ir.Value], registry: Registry = REGISTRY
) -> set[ir.Value]:
    """Values that depend on ``sources`` through differentiable operators, sources included."""
    reached = set(sources)
    for node in graph:
        if any(value in reached for value in reads(node)):
            rule = registry.lookup(node.domain, node.op_type, opset_of(node, graph))
            if rule is None or rule.differentiable:
                reached.update(y for y in node.outputs if y.dtype is None or y.dtype in FLOATS)
    return reached


def influences(graph: ir.Graph, outputs: Iterable[ir.Value]) -> set[ir.Value]:
    """Values on which ``outputs`` depend through differentiable operators."""
    found = set(outputs)
    for node in reversed(graph):
        if any(value in found for value in node.outputs):
            rule = REGISTRY.lookup(node.domain, node.op_type, opset_of(node, graph))
            if node.op_type == STRAIGHT_THROUGH and node.domain == context.INTERNAL_DOMAIN:
                found.update(value for value in node.inputs[1:] if value is not None)
            elif rule is None or rule.differentiable:
                found.update(reads(node))
    return found


def differentiate(
    graph: ir.Graph,
    seeds: Mapping[ir.Value, ir.Value],
    wrt: Iterable[ir.Value],
    ops: Ops,
    registry: Registry = REGISTRY,
    refused: Callable[[ir.Node, OdtpackError], None] | None = None,
) -> dict[ir.Value, ir.Value]:
    """Append the nodes that compute vector-Jacobian products to ``graph``.

    Args:
        graph: Forward graph in topological order; types and ranks inferred.
        seeds: Cotangent of each output to start from, of the output's shape.
        wrt: Values whose cotangents are wanted.
        ops: Writer for ``graph``.
        registry: Rules to use.
        refused: Takes each node that cannot be differentiated, and why; the walk then goes
            on after it, and its result is of no use. Without it the first one is raised.

    Returns:
        Cotangent of each value in ``wrt`` that a seed depends on.

    Raises:
        OdtpackError: A node on the way has no rule (code ``no-gradient``), or its rule
            does not cover the node's attributes (``unsupported-node``).
    """
    sources = list(wrt)
    try:
        return _walk(graph, seeds, sources, ops, registry, refused)
    except _NoRuleError as missing:
        raise _no_gradient(missing, graph, sources, registry) from None


class _NoRuleError(Exception):
    """A node on the way back has no rule."""

    def __init__(self, node: ir.Node, opset: int) -> None:
        super().__init__(node.op_type)
        self.node = node
        self.opset = opset  # opset under which it is read
        self.around: list[ir.Node] = []  # nodes in whose subgraphs it lies, innermost first


def _walk(
    graph: ir.Graph,
    seeds: Mapping[ir.Value, ir.Value],
    wrt: Iterable[ir.Value],
    ops: Ops,
    registry: Registry,
    refused: Callable[[ir.Node, OdtpackError], None] | None = None,
) -> dict[ir.Value, ir.Value]:
    """:func:`differentiate` in a graph or in the body of one of its nodes."""
    sources = list(wrt)
    needed = dependents(graph, sources, registry)
    upstream = ancestors(seeds, graph)
    rooted = discards.roots(graph, needed)
    discarded = discards.find(graph, set(sources), needed, rooted)
    unbounded = discards.before_poles(graph, needed, rooted)
    contributions: dict[ir.Value, list[ir.Value]] = {y: [dy] for y, dy in seeds.items()}

    def total(value: ir.Value) -> ir.Value | None:
        parts = contributions.get(value)
        if not parts:
            return None
        parts = context.join(ops, parts)
        contributions[value] = [functools.reduce(functools.partial(_add, ops), parts)]
        return contributions[value][0]

    for node in reversed(list(graph)):
        if node not in upstream or not any(value in needed for value in reads(node)):
            continue
        if not any(output in contributions for output in node.outputs):
            continue
        rule = registry.lookup(node.domain, node.op_type, opset_of(node, graph))
        if rule is not None and not rule.differentiable:
            continue
        cotangents = [total(output) for output in node.outputs]
        wanted = [value is not None and value in needed for value in node.inputs]
        taken = dict.fromkeys(v for body in subgraphs(node) for v in captures(body) if v in needed)
        inner = functools.partial(_walk, registry=registry)
        ctx = Context(
            node, ops, cotangents, wanted, list(taken), inner,
            discarded=node in discarded, unbounded=node in unbounded, rooted=node in rooted,
        )  # fmt: skip
        try:
            if rule is None:
                raise _NoRuleError(node, opset_of(node, graph))
            found = list(_apply(rule, ctx))
        except (_NoRuleError, OdtpackError) as error:
            if isinstance(error, _NoRuleError) and error.node is not node:
                error.around.append(node)
            if refused is None:
                cause = _unknown_operator_before(node, graph, needed, registry)
                if cause is None or isinstance(error, _NoRuleError):
                    raise
                raise _NoRuleError(cause, opset_of(cause, graph)) from None
            if isinstance(error, _NoRuleError):
                refused(node, _no_gradient(error, graph, sources, registry))
            else:
                refused(node, error)
            found = [(value, value) for value in reads(node) if value in needed]
        for value, cotangent in found:
            contributions.setdefault(value, []).append(cotangent)
    return {value: gradient for value in sources if (gradient := total(value)) is not None}


def _add(ops: Ops, left: ir.Value, right: ir.Value) -> ir.Value:
    total = ops.Add(left, right)
    maker(total).meta[SUM_OF_COTANGENTS] = True
    return total


def _unknown_operator_before(
    node: ir.Node, graph: ir.Graph, needed: set[ir.Value], registry: Registry
) -> ir.Node | None:
    """A node without a rule whose outputs' shapes are unknown: what follows it suffers."""
    before_node = ancestors([v for v in node.inputs if v is not None], graph)
    for before in reversed(list(graph)):
        if before not in before_node:
            continue
        rule = registry.lookup(before.domain, before.op_type, opset_of(before, graph))
        unknown = any(y.shape is None or y.dtype is None for y in before.outputs)
        if rule is None and unknown and any(value in needed for value in reads(before)):
            return before
    return None


def _apply(rule: Rule, ctx: Context) -> Iterable[tuple[ir.Value, ir.Value]]:
    """Run a rule; yield (input, cotangent) for each input that is needed."""
    if rule.function is None:
        return
    given = rule.function(ctx)
    if isinstance(given, WithCaptured):
        yield from given.captured.items()
        given = given.inputs
    cotangents = [given] if isinstance(given, ir.Value) else list(given)
    for index, (value, cotangent) in enumerate(zip(ctx.node.inputs, cotangents, strict=False)):
        if value is None or cotangent is None or not ctx.needs(index):
            continue
        result = cotangent
        if ctx.discarded and ctx.node.op_type in discards.SCALING:
            result = ctx.op.Where(ctx.op.Equal(ctx.dy(), 0), 0, cotangent)
        if rule.broadcasts:
            result = ctx.op.sum_to(result, dims_of(ctx.y()), value)
        if result.type is None:
            result.type = value.type
        yield value, result


def _no_gradient(
    missing: _NoRuleError, graph: ir.Graph, sources: list[ir.Value], registry: Registry
) -> OdtpackError:
    node, inside = missing.node, "".join(f", in {n.op_type} {n.name!r}" for n in missing.around)
    outermost = [node, *missing.around][-1]
    read = set(reads(outermost))
    reaching = [str(v.name) for v in sources if read & dependents(graph, [v], registry)]
    shown = ", ".join(repr(name) for name in reaching[:3]) + (" and others" if reaching[3:] else "")
    domain, why = node.domain or "ai.onnx", node.metadata_props.get(REASON)
    hint = (
        f"freeze {'it' if len(reaching) == 1 else 'them'} "
        f"(--freeze {quoted(str(reaching[0])) if reaching else 'GLOB'}), "
        "or replace the operator in the model"
    )
    if node.op_type == "ConcatFromSequence":
        hint = (
            "write the loop that fills the list with torch's scan, and export it with dynamo=True"
        )
    return OdtpackError(
        "no-gradient",
        f"operator {node.op_type} (domain {domain}, opset {missing.opset}) has no "
        f"gradient; {shown} cannot be trained through it{f': {why}' if why else ''}",
        where=f"node {node.name!r}, output {node.outputs[0].name!r}{inside}",
        hint=hint,
    )


def add_at(
    op: Ops,
    shape: ir.Value,
    indices: ir.Value,
    updates: ir.Value,
    axis: int = 0,
    reduction: str | None = "add",
) -> ir.Value:
    """Zeros, plus each of ``updates`` at its index along ``axis``."""
    # ONNX Runtime adds no float16, so such sums run in float32, and are rounded once.
    # indices: Of the shape of ``updates``, whose type the result has. reduction: None before opset
    # 16, where the last update of an index counts.
    dtype = updates.dtype or ir.DataType.FLOAT
    wide = wider(dtype)
    summed = op.ScatterElements(
        op.zeros(shape, wide), indices, op.cast(updates, wide), axis=axis, reduction=reduction
    )
    return op.cast(summed, dtype)
