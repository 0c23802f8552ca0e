"""What an ONNX Runtime session takes besides the tensors of a run: measured constants.

Measured on x86-64 Linux with ONNX Runtime 1.32.0. ``python -m benchmarks.session_constants`` fits
them to six networks with two optimizers: those of a session to the models of their packages, each
opened in a process of its own (32 models of 10 to 1,900 nodes, root mean square error 4 %; nodes
and bodies alone leave 16 %), those of the process to trainings on one and two threads, whose peaks
are then met with a median error of 0.4 % and 1.8 % at most.

What constant weights take was measured on models of one operator with up to 16.8 MB of
them, and on networks whose layers are frozen in part or all but the last. A branch with a
constant of 4 MB that was folded in it takes these, and as much again for a rearranged copy.
"""

import itertools
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import onnx

from odtpack_runtime.package.checks import read_model
from odtpack_runtime.session.native import DOMAIN as NATIVE_DOMAIN
from odtpack_simulator.memory.allocation import Allocation
from odtpack_simulator.memory.execution_order import graphs
from odtpack_simulator.memory.kernel_memory import NCHWC_DOMAIN, native_scratch
from odtpack_simulator.memory.operator_work import Tensor, operator_work
from odtpack_simulator.memory.runtime_graph import Node, RuntimeGraph, Value

LOADED_BYTES: Final = 1_441_000
"""Once per process, when a package is loaded: registries of schemas and kernels, pages of the
library that are written, objects of the training runtime. What was loaded does not grow by running:
for that the fit has nothing. What a run takes besides tensors, :func:`run_bytes` counts."""

BYTES_PER_THREAD: Final = 63_000
"""Per thread beyond the first of each session that is open: above all the queue of its work. Of 32
trainings by the C++ kit with four threads, in the first evaluation: 59,000 to 79,000."""

BYTES_PER_RUNNING_THREAD: Final = 36_000
"""The same besides once it did work of a run: its stack and heap. Together 92,000 in the median at
the end of these trainings, 64,000 to 112,000."""

_DIVIDED_FLOPS: Final = 2 * 64 * 1024
"""Operations of a product from which on it is divided among threads (MLAS)."""

_DIVIDED_BYTES: Final = 400_000
"""Bytes from which on an elementwise operator is: by ONNX Runtime's costs, 11/64 cycles for a byte
and one for an element, some 36,000 elements of two inputs are worth 100,000 cycles of threads."""

BYTES_PER_SAVED_TENSOR: Final = 600
"""Per tensor of a checkpoint: its tables, while the file is written."""

BYTES_PER_SESSION: Final = 62_700  # Per session

BYTES_PER_NODE: Final = 4_650  # Per node that is executed, those of subgraphs included

BYTES_PER_NATIVE_NODE: Final = 5_000
"""The same besides, of a node that a native kernel runs: step sessions of MobileNetV2 with folded
and with training-mode normalization and of a transformer take 4,500, 4,600 and 13,000 bytes more
than the rest explains for each of their 63, 181 and 45."""

BYTES_PER_REMOVED_NODE: Final = 2_690
"""Per node of the model as stored that optimization removes: it has left its mark on the heap."""

BYTES_PER_INPUT: Final = 3_020  # Per input of the graph. Outputs take next to nothing

BYTES_PER_SUBGRAPH: Final = 8_950  # Per branch or loop body, which has a session state of its own

BYTES_PER_INITIALIZER: Final = 2_000
"""Per initializer of the graph that is executed, besides its elements, and beyond one for every
third node: so many have the networks of the fit at most, and what is counted for a node holds them.
The training model of a 3-D convolution, 343 shifted slices, has 704 for 461 nodes, and takes 1,800
to 2,000 bytes more for each; graphs of four nodes and up to 1,600 of them 1,450 to 1,490."""

BYTES_PER_BODY_OUTPUT: Final = 2_000
"""Per output of such a body. Step models have many: those of an MLP and of MobileNetV2 leave 1,700
and 2,200 bytes for each that nothing else explains."""

BYTES_PER_BINDING: Final = 960
"""Per input and output of every run of a segment in a pass: what Python and ONNX Runtime keep of
its name, type and address. The three constants of segments were fitted to the trainings of 16
decoders of 2, 4, 8 and 20 blocks with LoRA on seven linears of each, float32 and int4, at 128 and
256 tokens: the float32 ones are met within 0.25 MB, the int4 ones take up to 0.4 MB less."""

BYTES_PER_BOUND: Final = 1_130
"""Per input and output of the step or training model and of the evaluation model, where they run
native kernels and are no segments: what names and binds it, and what is known of the tensor behind
it. Trainings of an MLP, a CNN, a transformer and of MobileNetV2 with folded and with training-mode
normalization, of 38, 67, 486, 752 and 1,428 of them, take 0.30 and 0.30 MB less and 0.12, 0.51 and
1.26 MB more than the rest explains before their first run. Sessions of plain nodes take less than
is counted for their nodes, which makes up for it: with this and :func:`run_bytes` the plans of
MobileNetV2 are 2.7 and 2.8 % high, and without them 1.7 % high and 1.1 % low."""

BYTES_OF_SMALL_NETWORK: Final = 360_000
"""What :data:`LOADED_BYTES` holds of these and of :func:`run_bytes`, as the networks of its fit
have some. The same five trainings give it. An app in C++ takes more for a small network than they,
so it is not taken from there."""

_BYTES_PER_VALUE: Final = 24
"""Per value of a graph that runs, in an array (``OrtValue``)."""

_BYTES_PER_TENSOR: Final = 176 + 48
"""Per tensor of a run: what describes it, and what counts who holds it."""

_BYTES_PER_NAME: Final = 120
"""Per input and output that is bound, while a run has copies of their names."""

BYTES_PER_SEGMENTED_PARAMETER: Final = 2_900
"""Per parameter of a package of segments: its objects, and what the manifest says of it."""

BYTES_OF_SEGMENT_RUNS: Final = 250_000
"""Once per process that has run segments: sessions take more in their first run than they took to
be loaded, 0.1 to 0.3 MB in these trainings."""

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


BYTES_PER_KERNEL: Final = (6_400, 8_000, 8_000)
"""For the schema of each operator that is registered, by its kind: what the heap of a session of
one node grew by with 1 to 64 of the first kind, and with 10 and 20 of the second."""

BYTES_OF_LIBRARY: Final = 3_250  # The same without operators

_PRODUCTS: Final = frozenset({"FusedGemm", "FusedMatMul", "Gemm", "MatMul"})
"""Operators that rearrange a matrix, and only a matrix, into panels of :data:`_PANEL` columns."""

_IN_ARENA: Final = frozenset({"ConvTranspose"})
"""Operators that turn the matrix of each group, and take the copy from the arena."""

_PANEL: Final = 16


def scratch_bytes(runs: Iterable[RuntimeGraph], threads: int) -> int:
    """Bytes of the heap that native kernels of some graphs take at most while they run."""
    most = 0
    for run in runs:
        values = {name: value for each in run.graphs() for name, value in each.values.items()}
        for node in (node for each in run.graphs() for node in each.nodes):
            if node.domain == NATIVE_DOMAIN:
                read = [values[name].shape if name in values else None for name in node.inputs]
                most = max(most, native_scratch(node.attributes, read, threads))
    return most


def run_bytes(graph: RuntimeGraph, plan: Allocation) -> int:
    """Bytes of the heap that a run takes at most besides its tensors: for values, and for names."""
    # A tensor that has a buffer of its own is described until that is freed, and one that lies in
    # another's until the run ends; what is bound was described before. In four networks of 318 to
    # 2,960 values a run asked for their array to the byte, and had at most 4 % fewer tensors at its
    # peak.
    last = {buffer.name: buffer.last for buffer in plan.buffers}
    bound = set(graph.outputs) - plan.results
    change = [0] * (len(graph.nodes) + 1)
    for index, node in enumerate(graph.nodes):
        for name in filter(None, node.outputs):
            if name not in bound:
                change[index] += 1
                change[last.get(name, -2) + 1] -= 1
    change[-1] = 0
    ends = len(graph.inputs) + len(bound)
    most = max(itertools.accumulate(change), default=0)
    return len(graph.values) * _BYTES_PER_VALUE + most * _BYTES_PER_TENSOR + ends * _BYTES_PER_NAME


def divides_work(graph: RuntimeGraph) -> bool:
    """Whether a run has a node that is worth more than one thread: only then the others wake."""
    return any(_is_divided(node, each.values) for each in graph.graphs() for node in each.nodes)


def _is_divided(node: Node, values: Mapping[str, Value]) -> bool:
    shaped = [
        [
            Tensor(value.shape, value.itemsize)
            for name in names
            if (value := values.get(name)) is not None and value.shape is not None
        ]
        for names in (node.inputs, node.outputs)
    ]
    work = operator_work(node.op_type, *shaped)
    return (work.flops or 0) >= _DIVIDED_FLOPS or work.moved_bytes >= _DIVIDED_BYTES


def session_bytes(
    model: str | os.PathLike[str], executed: RuntimeGraph, *, is_segment: bool = False
) -> int:
    """Bytes that a session of a model takes, without constants and without :data:`LOADED_BYTES`."""
    # A body also stays as it was stored, its constants included.
    # `is_segment`: Whether it is one of many small ones that are opened one after the other: what a
    # session and its inputs take then fits into what loading those before has left free.
    graph = read_model(Path(model)).graph
    stored, subgraphs = count(graph)
    nodes = sum(len(each.nodes) for each in executed.graphs())
    native = sum(n.domain == NATIVE_DOMAIN for each in executed.graphs() for n in each.nodes)
    initializers = sum(len(each.initializers) for each in executed.graphs())
    _, *bodies = graphs(graph)
    constants: int = sum(each.ByteSize() for body in bodies for each in body.initializer)
    outputs = sum(len(body.output) for body in bodies)
    once = 0 if is_segment else BYTES_PER_SESSION + len(graph.input) * BYTES_PER_INPUT
    return (
        once
        + nodes * BYTES_PER_NODE
        + native * BYTES_PER_NATIVE_NODE
        + max(0, stored - nodes) * BYTES_PER_REMOVED_NODE
        + subgraphs * BYTES_PER_SUBGRAPH
        + outputs * BYTES_PER_BODY_OUTPUT
        + max(0, initializers - nodes // 3) * BYTES_PER_INITIALIZER
        + constants
    )


def count(graph: onnx.GraphProto) -> tuple[int, int]:
    """Number of nodes, those of subgraphs included, and of subgraphs."""
    found = list(graphs(graph))
    return sum(len(each.node) for each in found), len(found) - 1


def constant_bytes(graph: RuntimeGraph, *, arena: bool = False) -> int:
    """Bytes of constants in a loaded session."""
    # A kernel that rearranges a weight keeps its own copy, which it shares with the kernels of the
    # same operator that rearrange it to the same. The original goes when all of its readers have
    # one; only bodies keep what was folded in them.
    # `arena`: Whether the session has an arena, in which arena_copies lie.
    kept = (sum(_constants(each, keeps=each is not graph)) for each in graph.graphs())
    return sum(kept) - arena * sum(arena_copies(graph))


def arena_copies(graph: RuntimeGraph) -> list[int]:
    """Bytes of each rearranged copy that a kernel takes from the session's arena."""
    # `ConvTranspose` asks for its copy as for a buffer; the other kernels reserve theirs.
    copies: list[int] = []
    for each in graph.graphs():
        names = [
            node.inputs[1]
            for node in each.walk()
            if node.op_type in _IN_ARENA
            and node.inputs[1] in each.initializers
            and _is_packed(node, each.values[node.inputs[1]].shape or ())
        ]
        copies += [each.initializers[name] for name in dict.fromkeys(names)]
    return copies


def _constants(graph: RuntimeGraph, *, keeps: bool) -> Iterable[int]:
    """Bytes of each constant with its copies; ``keeps`` says that no original goes."""
    packed: dict[str, dict[tuple[str, bool], int]] = {name: {} for name in graph.initializers}
    read = dict.fromkeys(graph.initializers, 0)
    for node in graph.walk():
        for index, name in enumerate(node.inputs):
            if name not in packed:
                continue
            shape = graph.values[name].shape or ()
            transposed = bool(node.attributes.get("transB", 0))
            if index in _PACKERS.get(node.op_type, ()) and _is_packed(node, shape):
                nbytes = graph.initializers[name]
                if node.op_type in _PRODUCTS:
                    columns = max(1, shape[-2] if transposed else shape[-1])
                    nbytes = nbytes // columns * (-(-columns // _PANEL) * _PANEL)
                packed[name][node.op_type, transposed] = nbytes
            else:
                read[name] += 1
    for name, nbytes in graph.initializers.items():
        copies = sum(packed[name].values())
        yield copies + (nbytes if keeps or read[name] or not copies else 0)


def _is_packed(node: Node, shape: tuple[int, ...]) -> bool:
    if node.op_type in _PRODUCTS:
        return len(shape) == 2
    if node.op_type in _IN_ARENA:  # a row or a column is as it should be
        return shape[0] > int(node.attributes.get("group", 1)) and math.prod(shape[1:]) > 1
    return True


def loading_bytes(graph: RuntimeGraph) -> int:
    """Bytes that constants take at most while a model is loaded, besides :func:`constant_bytes`."""
    # Constants are converted one after the other, so that one of them exists twice.
    reordered = [
        graph.initializers.get(node.inputs[1], 0)
        for node in graph.nodes
        if node.domain == NCHWC_DOMAIN and node.op_type == "Conv"
    ]
    reordering = sum(reordered) + _REORDERING_COPIES * max(reordered, default=0)
    return max(reordering, *graph.initializers.values(), 0)
