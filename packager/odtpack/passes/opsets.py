"""Reads a graph of an older opset as one of a newer opset, where its meaning stays.

From 13 to 17 the standard grew types, attributes with the old meaning as default, and new
operators; what an existing model means did not change, but for two operators. In return
gradients may use LayerNormalization and scatters that add. Every runtime since ONNX
Runtime 1.12 (2022) loads opset 17.
"""

from __future__ import annotations

import onnx_ir as ir

from odtpack.graph.graphs import Ops, nodes_of

_FROM, TO = 13, 17
BLOCKS = 21
"""The opset whose DequantizeLinear takes 4 bits and blocks."""

_REDUCTIONS = {  # whose axes became an input in 18
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean",
    "ReduceMin", "ReduceProd", "ReduceSumSquare",
}  # fmt: skip
_CHANGED = {"DFT", "GridSample", "GroupNormalization", "Resize", "Scatter", "Upsample"}


def upgrade(graph: ir.Graph) -> bool:
    """Stamp opset 17 on a graph of opset 13 to 16 if its meaning stays; return whether."""
    opset = graph.opset_imports[""]
    if not _FROM <= opset < TO or _changed_meaning(graph, opset):
        return False
    graph.opset_imports[""] = TO
    return True


def _changed_meaning(graph: ir.Graph, opset: int) -> bool:
    # RoiAlign's default coordinates moved by half a pixel (16); the training mode of
    # BatchNormalization turned from a count of outputs into an attribute (14).
    return any(
        node.op_type == "RoiAlign"
        or (node.op_type == "BatchNormalization" and opset < 14 and len(node.outputs) > 1)
        for node in nodes_of(graph)
        if not node.domain
    )


def to_blocks(graph: ir.Graph) -> bool:
    """Write a graph of opset 17 to 20 as one of opset 21 if its meaning stays; return whether."""
    upgrade(graph)
    if not TO <= graph.opset_imports[""] < BLOCKS or _changes_before_21(graph):
        return False
    if graph.opset_imports[""] < 18:
        op = Ops(graph, "axes/")
        for node in graph:
            if node.op_type in _REDUCTIONS and "axes" in node.attributes:
                axes = node.attributes.pop("axes").as_ints()
                node.resize_inputs(2)
                node.replace_input_with(1, op.ints(*axes))
    graph.opset_imports[""] = BLOCKS
    return True


def _changes_before_21(graph: ir.Graph) -> bool:
    for node in nodes_of(graph):
        if node.domain:
            continue
        if node.op_type in _CHANGED or (node.op_type == "Split" and len(node.inputs) < 2):
            return True
        if node.op_type in _REDUCTIONS and node.graph is not graph:
            return True  # where axes would have to be written too
    return False
