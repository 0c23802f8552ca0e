"""Which passes run, in which order: the list of them all, stage by stage.

A pass is a function of a graph, or of a writer and its graph, which it changes in place. It returns
whether it changed something; None counts as yes. A model is made small last (:mod:`.compact`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import onnx_ir as ir
import onnx_ir.passes.common as common_passes
from onnx_ir.passes import PostconditionError, PreconditionError

from odtpack.autodiff import stop_gradient
from odtpack.autodiff.context import INTERNAL_DOMAIN
from odtpack.graph import graphs
from odtpack.graph.graphs import Ops
from odtpack.graph.inference import infer_shapes
from odtpack.passes import (
    attention,
    batch_norm,
    feed_forward,
    finishing,
    layout,
    opsets,
    patterns,
    precision,
)

ALL = "*"  # every internal operator


def apply(
    model: ir.Model,
    rewrite: Callable[..., object],
    op: Ops | None = None,
    *,
    lowers: str | None = None,
) -> bool:
    """Run a pass over the main graph; return whether it changed it."""
    # op: Writer, which several passes may share: they share its constants then. lowers: Internal
    # operator, or :data:`ALL`, of which no node is left afterwards.
    if op is not None and op.graph is not model.graph:
        raise PreconditionError(f"{rewrite.__qualname__} has a writer for another graph")
    changed = rewrite(*(() if op is None else (op,)), model.graph) is not False
    for node in model.graph if lowers else ():
        if node.domain == INTERNAL_DOMAIN and lowers in (node.op_type, ALL):
            raise PostconditionError(f"{rewrite.__qualname__} left a node {node.op_type}")
    return changed


def on_reading(model: ir.Model, newest_opset: int) -> None:
    """Bring a forward model into a form that has kernels everywhere."""
    if newest_opset >= opsets.TO:
        apply(model, opsets.upgrade)
    apply(model, precision.widen)


def in_segments(model: ir.Model, *, whole: bool) -> None:
    """Rewrite a piece of a network that is trained segment by segment, in little memory."""
    # whole: Whether feed-forward layers stay as they are.
    apply(model, attention.by_blocks, Ops(model.graph, "attention/"))
    if not whole:
        apply(model, feed_forward.by_blocks, Ops(model.graph, "feed_forward/"))


def for_evaluation(model: ir.Model) -> None:
    """Let a model with its loss evaluate, not train."""
    apply(model, batch_norm.to_evaluation)
    apply(model, stop_gradient.lower, lowers=ALL)
    apply(model, graphs.turn_dropout_off)


def before_gradient(model: ir.Model, *, mixed_precision: bool = False) -> None:
    """Prepare a forward graph whose parameters are inputs for differentiation."""
    # Rewrites of the forward graph that make its gradient cheaper, each exact.
    changed = [
        apply(model, rewrite, Ops(model.graph, "forward/"))
        for rewrite in (patterns.fuse_layer_norm, patterns.pool_before_relu)
    ]
    if any(changed):
        infer_shapes(model, new_only=True)
    apply(model, patterns.mark_gelu)
    apply(model, patterns.mark_fake_quant)
    apply(model, batch_norm.mark)
    if mixed_precision:
        infer_shapes(model, new_only=True)
        apply(model, precision.narrow)
        apply(model, precision.widen)
        drop_unused(model)


def after_gradient(
    op: Ops, model: ir.Model, own: Iterable[Callable[[Ops, ir.Graph], None]]
) -> list[batch_norm.RunningStatistic]:
    """Write internal operators out and speed up what is left of the forward graph."""
    # own: Passes of the runtime, which write operators of its own.
    # Returns the updates of running statistics; none where the runtime updates them in place.
    updates: list[batch_norm.RunningStatistic] = []
    apply(model, layout.small_convolutions, op)
    for rewrite in own:
        apply(model, rewrite, op)
    apply(
        model, lambda *given: updates.extend(batch_norm.lower(*given)), op,
        lowers=batch_norm.OP_TYPE,
    )  # fmt: skip
    apply(model, layout.keep_channels_first, op)
    apply(model, patterns.lower_gelu, op, lowers="Gelu")
    apply(model, patterns.lower_fake_quant, lowers=patterns.OP_TYPE)
    apply(model, stop_gradient.lower, lowers=ALL)
    return updates


def drop_unused(model: ir.Model) -> None:
    """Drop what no output needs."""
    bodies = [(node, body) for node in model.graph for body in graphs.subgraphs(node)]
    common_passes.RemoveUnusedNodesPass()(model)
    gone = [body for node, body in bodies if node.graph is None]
    for inner in (node for body in gone for node in graphs.nodes_of(body)):
        for index in range(len(inner.inputs)):  # or else what it captured would count as read
            inner.replace_input_with(index, None)
    if gone:
        common_passes.RemoveUnusedNodesPass()(model)


def finish(model: ir.Model) -> None:
    """Drop what no output needs, and write what ONNX Runtime would misread or lacks."""
    drop_unused(model)
    apply(model, graphs.drop_unused_constants)  # of subgraphs, which that pass leaves
    apply(model, finishing.keep_epsilon, Ops(model.graph, "sum/"))
    apply(model, finishing.unpack_late, Ops(model.graph, "unpack/"))
    drop_unused(model)  # the chains that were copied
    apply(model, finishing.keep_dropout, Ops(model.graph, "dropout/"))
    finishing.lower_doubles(model)
    if not graphs.is_sorted(model.graph):
        common_passes.TopologicalSortPass()(model)
