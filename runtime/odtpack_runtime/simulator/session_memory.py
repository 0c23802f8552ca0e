"""What an ONNX Runtime session takes besides the tensors of a run: measured constants.

Measured on x86-64 Linux with ONNX Runtime 1.31.1, arena off, as growth of
anonymous memory while one model was loaded in a new process. A line through
thirteen models (training, evaluation and optimizer models of four networks, the
training model of a fifth; 8 to 4641 nodes, 6 to 423 inputs) gives the constants
below with errors of at most 0.33 MB for sessions of 1.4 to 23 MB.

What constant weights take was measured on models of one operator with 16.8 MB of
them, and on networks whose layers are frozen in part or all but the last.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import onnx

from odtpack_runtime.simulator.missing_shapes import NCHWC_DOMAIN
from odtpack_runtime.simulator.runtime_graph import RuntimeGraph

RUNTIME_BYTES: Final = 1_405_000
"""Once per process: registries of schemas and kernels, pages of the library that are written."""

PROCESS_BYTES: Final = 450_000
"""Once per process: objects of the training runtime, and modules that it imports on first use."""

BYTES_PER_NODE: Final = 3_700
"""Per node of the model as stored, those of subgraphs included."""

BYTES_PER_VALUE: Final = 3_900
"""Per graph input and output."""

BYTES_PER_SUBGRAPH: Final = 20_800
"""Per branch or loop body, which has a session state of its own."""

_REORDERING_COPIES: Final = 3
"""Copies of the largest weight among those brought into the blocked layout for convolutions,
while that is done; besides, the originals of all of them are still there."""

_PACKERS: Final = {
    "ConvTranspose": (1,),
    "FusedGemm": (1,),
    "FusedMatMul": (1,),
    "GRU": (1, 2),
    "Gemm": (1,),
    "LSTM": (1, 2),
    "MatMul": (1,),
}
"""Operators that keep a rearranged copy of constant inputs, by the index of those inputs."""


def session_bytes(model: str | os.PathLike[str]) -> int:
    """Bytes that a session of a model takes, without constants and without :data:`RUNTIME_BYTES`.

    Args:
        model: The model as stored: what optimization removes has left its mark on the heap.
    """
    graph = onnx.load(str(Path(model)), load_external_data=False).graph
    nodes, subgraphs = _count(graph)
    values = len(graph.input) + len(graph.output)
    return nodes * BYTES_PER_NODE + values * BYTES_PER_VALUE + subgraphs * BYTES_PER_SUBGRAPH


def _count(graph: onnx.GraphProto) -> tuple[int, int]:
    nodes, subgraphs = len(graph.node), 0
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                inner_nodes, inner_subgraphs = _count(attribute.g)
                nodes += inner_nodes
                subgraphs += 1 + inner_subgraphs
    return nodes, subgraphs


def constant_bytes(graph: RuntimeGraph) -> int:
    """Bytes of constants in a loaded session.

    A kernel that rearranges a weight keeps its own copy. The original goes when
    all of its readers have one.
    """
    return sum(_constants(graph))


def _constants(graph: RuntimeGraph) -> Iterable[int]:
    packed = dict.fromkeys(graph.initializers, 0)
    plain = dict.fromkeys(graph.initializers, 0)
    for node in graph.walk():
        for index, name in enumerate(node.inputs):
            if name in packed:
                packs = index in _PACKERS.get(node.op_type, ())
                (packed if packs else plain)[name] += 1
    for name, nbytes in graph.initializers.items():
        copies = packed[name] + (1 if plain[name] or not packed[name] else 0)
        yield copies * nbytes


def loading_bytes(graph: RuntimeGraph) -> int:
    """Bytes that constants take at most while a model is loaded, besides :func:`constant_bytes`.

    Constants are converted one after the other, so that one of them exists twice.
    """
    reordered = [
        graph.initializers.get(node.inputs[1], 0)
        for node in graph.nodes
        if node.domain == NCHWC_DOMAIN and node.op_type == "Conv"
    ]
    reordering = sum(reordered) + _REORDERING_COPIES * max(reordered, default=0)
    return max(reordering, *graph.initializers.values(), 0)
