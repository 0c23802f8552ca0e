"""How much work a step is, counted in the graph: a stand-in for its time that repeats exactly.

Times are measured for what is left at the end, one at a time. Before that, to choose whose
training goes on, this count is enough, and it is the same in every run of a search.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from odtpack_runtime.package.package import Package
from odtpack_simulator.memory.memory_plan import step_graphs
from odtpack_simulator.memory.runtime_graph import Node, RuntimeGraph

_FLOPS_PER_BYTE: Final = 8.0
"""Balance of a small core: about 8 single-precision operations for each byte it can move."""

_VECTORS: Final = 6.0
"""Reads and writes of a parameter's four bytes by an optimizer with two moments."""


def step_work(package: Package, shapes: Mapping[str, Sequence[int]], *, threads: int = 1) -> float:
    """The work of an optimizer step, in bytes: moved ones, and arithmetic in their place.

    Matrix products and convolutions count two operations for each multiplication and
    addition. The bodies of loops count once.

    Args:
        package: The package; every optimizer step runs its training model, or all its segments,
            ``accumulation_steps`` times.
        shapes: Shape of one batch of each user input.
        threads: Intra-operator threads of the session.

    Raises:
        OdtpackError: The model does not load, or a shape does not fit.
    """
    graphs = step_graphs(package, shapes, threads)
    manifest = package.manifest
    work = sum(_graph_work(graph, {}) for graph in graphs)
    trained = sum(math.prod(p.shape) for p in manifest.parameters if p.role == "trainable")
    return manifest.accumulation_steps * work + 4 * _VECTORS * trained


def _graph_work(graph: RuntimeGraph, outer: Mapping[str, tuple[tuple[int, ...], int]]) -> float:
    """Bytes and operations of every node; ``outer`` are shapes and sizes around the graph."""
    known = dict(outer)
    for value in graph.values.values():
        if value.shape is not None:
            known[value.name] = value.shape, value.itemsize
    total = 0.0
    for node in graph.nodes:
        names = [name for name in (*node.inputs, *node.outputs) if name in known]
        moved = sum(math.prod(known[name][0]) * known[name][1] for name in names)
        total += moved + _flops(node, known) / _FLOPS_PER_BYTE
        total += sum(_graph_work(inner, known) for inner in node.subgraphs.values())
    return total


def _flops(node: Node, known: Mapping[str, tuple[tuple[int, ...], int]]) -> float:
    """Operations of a product; 0 for other operators, and where a shape is unknown."""
    used = [known.get(name, (None, 0))[0] for name in (*node.inputs[:2], *node.outputs[:1])]
    if len(used) < 3 or any(shape is None for shape in used):
        return 0.0
    left, right, out = (tuple(shape or ()) for shape in used)
    kind = node.op_type.removeprefix("Fused")
    if kind in ("MatMul", "Gemm") and left:
        transposed = node.attributes.get("transA", 0)
        return 2.0 * math.prod(out) * (left[-2] if transposed and len(left) > 1 else left[-1])
    if kind == "Conv" and right:
        return 2.0 * math.prod(out) * math.prod(right[1:])
    if kind == "ConvTranspose" and right:
        return 2.0 * math.prod(left) * math.prod(right[1:])
    return 0.0
