"""Gives a GELU that an exporter wrote out the gradient of the whole.

    y = x (1 + erf(x / sqrt 2)) / 2, in any order of the factors

is replaced by an internal operator before differentiation (:func:`mark`), so that its
gradient reads only x, and written out again after it (:func:`lower`), in the order that
ONNX Runtime fuses into one kernel. Written out, differentiation would keep three tensors.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from odtpack.autodiff.registry import INTERNAL_DOMAIN
from odtpack.graph import match
from odtpack.graph.ops import Ops


def mark(graph: ir.Graph) -> None:
    """Replace every written-out GELU by the internal operator."""
    for erf in list(graph):
        if erf.op_type != "Erf" or erf.domain or erf.graph is not graph:
            continue
        found = _find(erf)
        if found is None:
            continue
        x, nodes = found
        last = nodes[0]
        new = ir.node("Gelu", [x], domain=INTERNAL_DOMAIN, name=last.name)
        graph.insert_before(last, new)
        match.replace(last.outputs[0], new.outputs[0], nodes)


def _find(erf: ir.Node) -> tuple[ir.Value, list[ir.Node]] | None:
    """(x, nodes from last to first) of the GELU around an Erf."""
    inner = match.producer(erf.inputs[0], "Div", "Mul")
    plus = _only_user(erf, "Add")
    if inner is None or plus is None:
        return None
    if inner.op_type == "Div":
        x = inner.inputs[0] if match.is_scalar(inner.inputs[1], math.sqrt(2)) else None
    else:
        x = match.split_scalar(inner, math.sqrt(0.5))
    if x is None or match.split_scalar(plus, 1.0) is not erf.outputs[0]:
        return None
    # Two products follow, with x and with 1/2, in either order, or x/2 comes from outside.
    first = _only_user(plus, "Mul")
    if first is None:
        return None
    other = next((v for v in first.inputs if v is not plus.outputs[0]), None)
    if other is not x and not match.is_scalar(other, 0.5):
        half = match.producer(other, "Mul")
        if half is None or match.split_scalar(half, 0.5) is not x:
            return None
        nodes = [first, plus, erf, inner, half]
    else:
        second = _only_user(first, "Mul")
        if second is None:
            return None
        last = next((v for v in second.inputs if v is not first.outputs[0]), None)
        if {other is x, last is x} != {True, False}:
            return None
        if not match.is_scalar(other if last is x else last, 0.5):
            return None
        nodes = [second, first, plus, erf, inner]
    found = match.private(nodes, nodes[0]) and match.same_rank(x, nodes[0].outputs[0])
    return (x, nodes) if found else None


def _only_user(node: ir.Node, op_type: str) -> ir.Node | None:
    """The one node that reads a node's output, if it is a standard operator of that type."""
    users = list(node.outputs[0].consumers())
    if len(users) != 1 or users[0].domain or users[0].op_type != op_type:
        return None
    return users[0]


def lower(op: Ops, graph: ir.Graph) -> None:
    """Write the internal operators out again."""
    for node in list(graph):
        if node.op_type == "Gelu" and node.domain == INTERNAL_DOMAIN:
            x = node.inputs[0]
            with op.before(node):
                # Div, not Mul: the gradient has the Mul, and a shared node would keep the
                # runtime from fusing these five.
                grown = op.Add(op.Erf(op.Div(x, math.sqrt(2))), 1.0)
                y = op.Mul(op.Mul(x, grown), 0.5)
            match.replace(node.outputs[0], y, [node])
