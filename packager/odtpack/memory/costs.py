"""The forward pass of a training model, and how long its operators take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import onnx_ir as ir

from odtpack.graph.graphs import dims_of, reads
from odtpack_simulator.memory.operator_work import SMALL, Roof, Tensor, operator_work
from odtpack_simulator.memory.runtime_graph import Node, RuntimeGraph, Value

# What of a training model is its forward pass.


def named_values(graph: ir.Graph) -> dict[str, ir.Value]:
    """What the nodes of a graph compute, by name."""
    return {v.name: v for node in graph for v in node.outputs if v.name}


def nameable(graph: ir.Graph) -> frozenset[str]:
    """Values of a graph that a control edge can be put on: those of a known rank."""
    return frozenset(n for n, v in named_values(graph).items() if dims_of(v) is not None)


def take_ranks(graph: ir.Graph, executed: RuntimeGraph) -> None:
    """Give values of the forward pass whose rank is unknown the one that ONNX Runtime infers."""
    # With the sizes that are the same for every batch.
    for node in ancestors(graph.outputs[:1]):
        for value in node.outputs:
            known = executed.values.get(value.name or "")
            if value.shape is None and known is not None and known.dims is not None:
                value.shape = ir.Shape(d if isinstance(d, int) else None for d in known.dims)


def ancestors(outputs: Iterable[ir.Value]) -> set[ir.Node]:
    """Nodes that some values need; for the loss those are the forward pass."""
    found: set[ir.Node] = set()
    stack = [value.producer() for value in outputs]
    while stack:
        node = stack.pop()
        if node is None or node in found:
            continue
        found.add(node)
        stack += [value.producer() for value in reads(node)]
    return found


# How long an operator takes, to weigh what is computed again against what is kept.
#
# Only ratios count: which of two tensors is cheaper to compute, and which part of a step that is.
# The rates are those of one core of an x86-64 server with AVX-512 running ONNX Runtime; the sums
# over the benchmarks' transformer, ViT and MobileNetV2 are within 20 % of its profiles. A core of a
# phone is two to four times slower in all of them alike. A tensor of a step is read from a cache
# more often than from memory.

_FLOPS: Final = 100e9
_CONVOLUTION_FLOPS: Final = 60e9
_GROUPED_FLOPS: Final = 5e9
_BANDWIDTH: Final = 50e9
MEMORY_BANDWIDTH: Final = 20e9
"""Bytes a second where tensors come from memory, and from no cache."""
_NODE_SECONDS: Final = 2e-6
_CONVOLUTIONS: Final = {"Conv", "ConvTranspose", "FusedConv"}

_NANOSECONDS: Final = {
    "BiasGelu": 0.8, "Erf": 0.5, "Exp": 0.4, "FastGelu": 0.8, "Gelu": 0.8,
    "LayerNormalization": 0.5, "Log": 0.5, "LogSoftmax": 0.5, "Pow": 1.0, "QuickGelu": 0.8,
    "ReduceSum": 0.3, "ScatterElements": 3.0, "Sigmoid": 0.4, "Softmax": 0.5, "Sqrt": 0.4,
    "Tanh": 0.4, "Transpose": 0.4, "Where": 0.5,
}  # fmt: skip
"""Nanoseconds an element of the largest tensor, of operators that arithmetic or scattered
accesses make slower than their traffic."""


def node_seconds(node: Node, values: Mapping[str, Value], bandwidth: float = _BANDWIDTH) -> float:
    """Estimated time of one run of a node: of its first branch, or of one turn of its body."""
    # values: Every value that it and its subgraphs may name. bandwidth: Bytes a second that are
    # read and written.
    if node.subgraphs:
        body = next(iter(node.subgraphs.values()))
        inner = {**values, **body.values}
        return 5 * _NODE_SECONDS + sum(node_seconds(each, inner, bandwidth) for each in body.nodes)
    if node.op_type in SMALL:
        return _NODE_SECONDS
    inputs, outputs = (
        [
            Tensor(values[name].shape or (), values[name].itemsize)
            for name in names
            if name and name in values
        ]
        for names in (node.inputs, node.outputs)
    )
    work = operator_work(node.op_type, inputs, outputs)
    elements = max((tensor.size for tensor in (*inputs, *outputs)), default=0)
    return _NODE_SECONDS + max(
        Roof(_rate(node), bandwidth).seconds(work),
        elements * _NANOSECONDS.get(node.op_type, 0.0) * 1e-9,
    )


def _rate(node: Node) -> float:
    """Operations per second; convolutions by groups, depthwise ones above all, are no products."""
    if node.op_type not in _CONVOLUTIONS:
        return _FLOPS
    return _CONVOLUTION_FLOPS if node.attributes.get("group", 1) == 1 else _GROUPED_FLOPS
