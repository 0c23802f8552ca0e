"""Reads a model of opset 13 to 16 as one of opset 17.

From 13 to 17 the standard grew types, attributes with the old meaning as default, and new
operators; what an existing model means did not change, but for two operators. In return
gradients may use LayerNormalization and scatters that add. Every runtime since ONNX
Runtime 1.12 (2022) loads opset 17.
"""

from __future__ import annotations

import onnx_ir as ir

from odtpack.graph.graphs import subgraphs
from odtpack.graph.ops import Ops

_FROM, TO = 13, 17


def upgrade(graph: ir.Graph) -> bool:
    """Stamp opset 17 on a graph of opset 13 to 16 if its meaning stays; return whether."""
    opset = graph.opset_imports[""]
    if not _FROM <= opset < TO or _changed_meaning(graph, opset):
        return False
    graph.opset_imports[""] = TO
    return True


def _changed_meaning(graph: ir.Graph, opset: int) -> bool:
    for node in graph:
        if node.domain in ("", "ai.onnx"):
            # RoiAlign's default coordinates moved by half a pixel (16); the training mode
            # of BatchNormalization turned from a count of outputs into an attribute (14).
            if node.op_type == "RoiAlign":
                return True
            if node.op_type == "BatchNormalization" and opset < 14 and len(node.outputs) > 1:
                return True
        if any(_changed_meaning(subgraph, opset) for subgraph in subgraphs(node)):
            return True
    return False


BLOCKS = 21
"""The opset whose DequantizeLinear takes 4 bits and blocks."""

_REDUCTIONS = {  # whose axes became an input in 18
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean",
    "ReduceMin", "ReduceProd", "ReduceSumSquare",
}  # fmt: skip
_CHANGED = {"DFT", "GridSample", "GroupNormalization", "Resize", "Scatter", "Upsample"}


def to_blocks(graph: ir.Graph) -> bool:
    """Write a graph of opset 17 to 20 as one of opset 21 if its meaning stays; return whether."""
    upgrade(graph)
    if not TO <= graph.opset_imports[""] < BLOCKS or _changes_before_21(graph):
        return False
    if graph.opset_imports[""] < 18:
        _reduce_by_inputs(Ops(graph, "axes/"), graph)
    graph.opset_imports[""] = BLOCKS
    return True


def _changes_before_21(graph: ir.Graph) -> bool:
    for node in graph:
        if node.domain in ("", "ai.onnx"):
            if node.op_type in _CHANGED or (node.op_type == "Split" and len(node.inputs) < 2):
                return True
            if any(node.op_type in _REDUCTIONS for sub in subgraphs(node) for node in sub):
                return True  # where axes would have to be written too
        if any(_changes_before_21(subgraph) for subgraph in subgraphs(node)):
            return True
    return False


def _reduce_by_inputs(op: Ops, graph: ir.Graph) -> None:
    for node in graph:
        if node.op_type in _REDUCTIONS and "axes" in node.attributes:
            axes = node.attributes.pop("axes").as_ints()
            node.resize_inputs(2)
            node.replace_input_with(1, op.ints(*axes))
