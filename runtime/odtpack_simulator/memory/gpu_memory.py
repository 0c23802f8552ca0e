"""The memory of a training on WebGPU: the buffers that ONNX Runtime's provider holds.

They are planned from the same graphs as the processor's memory. Not part of it are the staging
buffers of copies, with 4 MiB that the driver's library keeps for them,
and the check of a first step.
"""

import bisect
import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeVar

import numpy as np

from odtpack_runtime.package.package import Package
from odtpack_runtime.session.graph_signature import RESET_NAME
from odtpack_runtime.training.optimizer import state_layout
from odtpack_runtime.training.optimizer_contract import matrix
from odtpack_simulator.memory import planning
from odtpack_simulator.memory.allocation import Allocation, allocate
from odtpack_simulator.memory.runtime_graph import Node, RuntimeGraph, Value, load_runtime_graph

# The provider (plug-in 0.4.0, `BufferManager`) rounds a request up to the next of these sizes and
# takes a free buffer of that size, or makes one. Freed ones can be taken at once: it submits what
# uses them first. Of each size it keeps so many; others, and larger ones, go when they are freed.
# fmt: off
_KEPT: Final = {
    64: 250, 128: 200, 256: 200, 512: 200, 2048: 230, 4096: 200,
    **{2**i: 50 for i in range(13, 21)},
    2097152: 30, 4194304: 20, 8388608: 10, 12582912: 10, 16777216: 10, 26214400: 15,
    33554432: 22, 44236800: 2, 58982400: 6, 67108864: 6, 134217728: 6, 167772160: 6,
}
# fmt: on
_SIZES: Final = tuple(_KEPT)
_UNIT: Final = 16  # Bytes to whose multiple larger requests and constants are rounded
_ON_PROCESSOR: Final = 8  # Bytes of an element that the provider leaves to the processor
# Kernels that want the channels last, and those that take them anywhere.
_CHANNELS_LAST: Final = frozenset(
    {
        *("AveragePool", "BatchNormalization", "Conv", "ConvTranspose", "GlobalAveragePool"),
        "MaxPool",
    }
)
_ELEMENTWISE: Final = frozenset(
    {
        *("Add", "Cast", "Clip", "Div", "Equal", "Exp", "HardSigmoid", "Identity", "Max", "Min"),
        *("Mul", "Neg", "Relu", "Sigmoid", "Sub", "Tanh", "Where"),
    }
)
T = TypeVar("T")


def plan_gpu_memory(
    package: Package, shapes: Mapping[str, Sequence[int]], *, step_model: bool = False
) -> int:
    """Bytes of the buffers that a training on WebGPU comes to hold. Nothing is run."""
    # Arguments and errors as of :func:`~odtpack_simulator.memory.memory_plan.plan_memory`. A
    # package of segments does not train on a GPU.
    manifest, buffers = package.manifest, Buffers()
    contract = planning.optimizer_contract(package)
    layout = planning.flat_layout(manifest)
    is_whole = step_model and package.step_model is not None
    sizes = [(p.role, math.prod(p.shape) * np.dtype(p.dtype).itemsize) for p in manifest.parameters]
    trained = [nbytes for role, nbytes in sizes if role == "trainable"]
    state = [nbytes for role, nbytes in sizes if role == "state"]
    accumulated = trained if manifest.accumulation_steps > 1 else []
    moments = [
        slot.nbytes
        for index in range(len(contract.state))
        for slot in state_layout(layout, contract, index).slots
    ]
    gradients = [] if is_whole else trained + accumulated
    for nbytes in (*(each for _, each in sizes), *gradients, *state, *moments):
        buffers.take(nbytes)

    def loaded(path: object, sizes: Mapping[str, Sequence[int]]) -> RuntimeGraph:
        # Further optimizations depend on the provider; these are the same for all.
        return _channels_last(load_runtime_graph(str(path), sizes, level="basic"))

    steps = package.step_model if is_whole else package.training_model
    training, evaluation = loaded(steps, shapes), loaded(package.eval_model, shapes)
    constants = [training, evaluation]
    fed = [each.name for each in manifest.inputs]
    for graph in (training, evaluation):
        fresh = [n for n in graph.outputs if not n.endswith(".out")]  # others lie in place
        plan = allocate(graph, fresh_outputs=fresh, conditions={RESET_NAME: True}, device=True)
        _play(buffers, graph, plan, [name for name in fed if name in graph.inputs])
    if not is_whole:
        names = ("params", "gradients", *(vector.name for vector in contract.state))
        for shape in {slot.shape for slot in layout.slots}:
            vectors: dict[str, Sequence[int]] = dict.fromkeys(names, (math.prod(shape),))
            if contract.by_parameter:
                vectors = dict.fromkeys(names[:2], matrix(shape))
                vectors |= {each.name: each.bound_shape(shape) for each in contract.state}
            graph = loaded(package.optimizer_model, vectors)
            _play(buffers, graph, allocate(graph, device=True), ())
        constants.append(graph)
    return buffers.most + sum(
        _rounded(nbytes) for graph in constants for nbytes in graph.initializers.values()
    )


class Buffers:
    """The buffers of the provider, by size."""

    def __init__(self) -> None:
        self._free: Counter[int] = Counter()
        self._held = 0
        self.most = 0  # Bytes of all at their peak

    def take(self, nbytes: int) -> int:
        """Ask for a buffer; return its size."""
        place = bisect.bisect_left(_SIZES, nbytes)
        size = _SIZES[place] if place < len(_SIZES) else _rounded(nbytes)
        if self._free[size]:
            self._free[size] -= 1
        else:
            self._held += size
            self.most = max(self.most, self._held)
        return size

    def give_back(self, size: int) -> None:
        """Give a buffer back."""
        if self._free[size] < _KEPT.get(size, 0):
            self._free[size] += 1
        else:
            self._held -= size


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _UNIT) * _UNIT


def _play(buffers: Buffers, graph: RuntimeGraph, plan: Allocation, fed: Iterable[str]) -> None:
    """Run a session; `fed` are inputs that it copies to the device."""
    begun: dict[int, list[int]] = defaultdict(list)
    ended: dict[int, list[int]] = defaultdict(list)
    for key, buffer in enumerate(plan.buffers):
        if graph.values[buffer.name].itemsize != _ON_PROCESSOR and buffer.nbytes:
            begun[buffer.first].append(key)
            ended[buffer.last].append(key)
    taken = [buffers.take(n) for n in (_on_device(graph, name) for name in fed) if n]
    sizes: dict[int, int] = {}
    here: set[str] = set()  # values on the processor
    for index, node in enumerate(graph.nodes):
        reads = [name for name in node.inputs if name]
        is_here = node.op_type in ("Shape", "Size") or (
            bool(reads)
            and all(n in here or graph.values[n].itemsize == _ON_PROCESSOR for n in reads)
        )
        copies: list[int] = []
        if is_here:
            here.update(filter(None, node.outputs))
        else:
            for name in here.intersection(reads):
                if nbytes := _on_device(graph, name):
                    taken.append(buffers.take(nbytes))
                    here.discard(name)
            copies.extend(buffers.take(nbytes) for nbytes in _copied(graph, node))
        for key in begun[index]:
            if plan.buffers[key].name not in here:
                sizes[key] = buffers.take(plan.buffers[key].nbytes)
        for size in (*copies, *(sizes.pop(key) for key in ended[index] if key in sizes)):
            buffers.give_back(size)
    for size in taken:
        buffers.give_back(size)


def _copied(graph: RuntimeGraph, node: Node) -> list[int]:
    """Bytes of what a kernel transposes for itself before it starts."""
    copied: Iterable[str] = ()
    if node.op_type.startswith("Conv"):
        copied = node.inputs[1:2]
    elif node.op_type.startswith("Reduce"):
        source = node.inputs[0]
        before, after = (graph.values[name].shape or () for name in (source, node.outputs[0]))
        kept = after
        if len(after) == len(before):
            kept = tuple(n for n, left in zip(before, after, strict=True) if n == left)
        few = math.prod(before) < 32 * math.prod(after) and math.prod(after) > 1024
        copied = () if few or before[: len(kept)] == kept else (source,)
    return [graph.values[name].nbytes or 0 for name in copied]


def _channels_last(graph: RuntimeGraph) -> RuntimeGraph:
    """The graph with channels last where kernels want it so, as ONNX Runtime rewrites it."""
    values, nodes = dict(graph.values), list[Node]()
    last: set[str] = set()  # values with their channels last
    turned: set[str] = set()

    def turn(name: str, to: str, *, back: bool) -> str:
        """Transpose a value, once."""
        if to not in turned:
            old = values[name]
            dims, shape = _turned(old.dims, back=back), _turned(old.shape, back=back)
            values.setdefault(to, Value(to, old.itemsize, dims, shape))
            nodes.append(Node(to, "Transpose", "", (name,), (to,), {}))
            turned.add(to)
        return to

    for node in graph.nodes:
        inputs = list(node.inputs)
        output = next(filter(None, node.outputs), "")
        result = graph.values[output]
        whole = {n for n in inputs if n and graph.values[n].shape == result.shape}
        is_last = node.op_type in _ELEMENTWISE and bool(whole & last)
        if node.op_type in _CHANNELS_LAST:
            is_last, whole = True, {inputs[0]}
        for place, name in enumerate(inputs):
            if is_last and name in whole - last:
                inputs[place] = turn(name, f"{name}/last", back=False)
            elif name in last and not is_last and node.op_type != "Shape":
                inputs[place] = turn(name, f"{name}/first", back=True)
        made = dataclasses.replace(node, inputs=tuple(inputs))
        if is_last:
            dims, shape = _turned(result.dims, back=False), _turned(result.shape, back=False)
            name = f"{output}/last" if output in graph.outputs else output
            values[name] = Value(name, result.itemsize, dims, shape)
            made = dataclasses.replace(made, outputs=(name, *node.outputs[1:]))
            last.add(name)
        nodes.append(made)
        if is_last and output in graph.outputs:
            turn(name, output, back=True)
    return dataclasses.replace(graph, nodes=tuple(nodes), values=values)


def _turned(sizes: tuple[T, ...] | None, *, back: bool) -> tuple[T, ...] | None:
    """Sizes with the channels last, or `back` in the second place."""
    if sizes is None:
        return None
    return (sizes[0], sizes[-1], *sizes[1:-1]) if back else (sizes[0], *sizes[2:], sizes[1])


def _on_device(graph: RuntimeGraph, name: str) -> int:
    value = graph.values[name]
    return 0 if value.itemsize == _ON_PROCESSOR else value.nbytes or 0
