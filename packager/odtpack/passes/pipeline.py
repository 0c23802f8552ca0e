"""Which passes run on the training graph, and in which order."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from odtpack.autodiff import stop_gradient
from odtpack.autodiff.registry import INTERNAL_DOMAIN
from odtpack.graph.inference import infer_shapes
from odtpack.graph.ops import Ops
from odtpack.passes import (
    batch_norm,
    fake_quant,
    fuse_layer_norm,
    gelu,
    pool_before_relu,
    small_conv,
)

# Rewrites of the forward graph that make its gradient cheaper, each exact.
_REWRITES = (fuse_layer_norm.rewrite, pool_before_relu.rewrite)


def before_gradient(model: ir.Model) -> ir.Model:
    """Prepare a forward graph whose parameters are inputs for differentiation."""
    changed = [rewrite(Ops(model.graph, "forward/"), model.graph) for rewrite in _REWRITES]
    if any(changed):
        model = infer_shapes(model, new_only=True)
    batch_norm.mark(model.graph)
    gelu.mark(model.graph)
    fake_quant.mark(model.graph)
    return model


def after_gradient(
    op: Ops, graph: ir.Graph, lower_batch_norms: Callable[[Ops, ir.Graph], None]
) -> list[batch_norm.RunningStatistic]:
    """Write internal operators out and speed up what is left of the forward graph.

    Args:
        op: Writer for the training graph.
        graph: The training graph.
        lower_batch_norms: Replaces batch normalizations by an operator of the runtime's own,
            if it has one.

    Returns:
        The updates of running statistics; none where the runtime updates them in place.
    """
    small_conv.rewrite(op, graph)
    lower_batch_norms(op, graph)
    updates = batch_norm.lower(op, graph)
    gelu.lower(op, graph)
    fake_quant.lower(graph)
    stop_gradient.lower(graph)
    graph.opset_imports.pop(INTERNAL_DOMAIN, None)
    return updates
