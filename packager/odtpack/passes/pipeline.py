"""Which passes run, in which order: the list of them all, stage by stage.

Each is a pass of onnx-ir (``requires``, ``call``, ``ensures``), its own or a
:class:`~odtpack.passes.patterns.GraphPass`.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from odtpack.autodiff import backward, expand
from odtpack.graph.graphs import drop_unused_constants, is_sorted, turn_dropout_off
from odtpack.graph.inference import infer_shapes
from odtpack.graph.ops import Ops
from odtpack.passes import batch_norm, layout, patterns, precision
from odtpack.passes.compact import compact
from odtpack.passes.patterns import ALL, GraphPass, ModelPass, run


def on_reading(model: ir.Model, newest_opset: int) -> None:
    """Bring a forward model into a form that has kernels everywhere."""
    if newest_opset >= patterns.TO:
        run(model, GraphPass(patterns.upgrade))
    run(model, GraphPass(precision.refuse_bfloat16), GraphPass(precision.widen))


def for_evaluation(model: ir.Model) -> None:
    """Let a model with its loss evaluate, not train."""
    run(
        model,
        GraphPass(batch_norm.to_evaluation),
        GraphPass(backward.lower, lowers=ALL),
        GraphPass(turn_dropout_off),
    )


def before_gradient(model: ir.Model) -> None:
    """Prepare a forward graph whose parameters are inputs for differentiation."""
    # Rewrites of the forward graph that make its gradient cheaper, each exact.
    changed = [
        run(model, GraphPass(rewrite, Ops(model.graph, "forward/")))
        for rewrite in (patterns.fuse_layer_norm, patterns.pool_before_relu)
    ]
    if any(changed):
        run(model, ModelPass(infer_shapes, new_only=True))
    run(
        model,
        GraphPass(batch_norm.mark),
        GraphPass(patterns.mark_gelu),
        GraphPass(patterns.mark_fake_quant),
    )


def after_gradient(
    op: Ops, model: ir.Model, lower_batch_norms: Callable[[Ops, ir.Graph], None]
) -> list[batch_norm.RunningStatistic]:
    """Write internal operators out and speed up what is left of the forward graph."""
    # op: Writer for the training graph. lower_batch_norms: Replaces batch normalizations by an
    # operator of the runtime's own, if it has one.
    # Returns the updates of running statistics; none where the runtime updates them in place.
    updates: list[batch_norm.RunningStatistic] = []

    def lower_the_rest(op: Ops, graph: ir.Graph) -> None:
        updates.extend(batch_norm.lower(op, graph))

    run(
        model,
        GraphPass(layout.small_convolutions, op),
        GraphPass(lower_batch_norms, op),
        GraphPass(lower_the_rest, op, lowers=batch_norm.OP_TYPE),
        GraphPass(layout.keep_channels_first, op),
        GraphPass(patterns.lower_gelu, op, lowers="Gelu"),
        GraphPass(patterns.lower_fake_quant, lowers=patterns.OP_TYPE),
        GraphPass(backward.lower, lowers=ALL),
    )
    return updates


def drop_unused(model: ir.Model) -> None:
    """Drop what no output needs."""
    run(model, common_passes.RemoveUnusedNodesPass())


def finish(model: ir.Model) -> None:
    """Drop what no output needs, and write what ONNX Runtime would misread or lacks."""
    run(
        model,
        common_passes.RemoveUnusedNodesPass(),
        GraphPass(drop_unused_constants),  # of subgraphs, which that pass leaves
        GraphPass(patterns.keep_epsilon, Ops(model.graph, "sum/")),
        GraphPass(expand.rewrite, Ops(model.graph, "unpack/")),
        common_passes.RemoveUnusedNodesPass(),  # the chains that were copied
        ModelPass(precision.lower),
    )
    if not is_sorted(model.graph):
        run(model, common_passes.TopologicalSortPass())


def on_writing(model: ir.Model, *, keep_names: bool) -> ir.Model:
    """Make a finished model small; return it."""
    run(model, ModelPass(compact, keep_names=keep_names))
    return model
