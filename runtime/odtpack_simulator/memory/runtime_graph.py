"""The graph that a session runs."""

from __future__ import annotations

import itertools
import math
import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import onnx

from odtpack_runtime.apart import worker as apart
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.atomic import file_sha256
from odtpack_runtime.files.scratch import scratch_folder
from odtpack_runtime.package.checks import read_model
from odtpack_runtime.package.records import OptimizationLevel
from odtpack_runtime.session.graph_signature import BUFFER_SUFFIX
from odtpack_runtime.session.native import native_library
from odtpack_runtime.session.options import LEVELS
from odtpack_runtime.session.session import open_session
from odtpack_simulator.memory.execution_order import graphs, rename_casts, sort_saved_model
from odtpack_simulator.memory.kernel_memory import Shape
from odtpack_simulator.memory.missing_shapes import (
    Dims,
    Functions,
    Scope,
    Typed,
    body_inputs,
    fill_in,
    is_fixed,
    tensor_type,
)
from odtpack_simulator.memory.process_memory import memory_options

# What a session of ONNX Runtime makes of a model, as a file.


def save_optimized(
    model: str,
    out: str,
    threads: int,
    level: OptimizationLevel,
    sizes: Mapping[str, int] = {},
    kernels: str | None = None,
) -> None:
    """Write what a session makes of a model; to be called apart, as it computes constants."""
    options = memory_options(threads, kernels)
    options.graph_optimization_level = LEVELS[level]
    options.optimized_model_filepath = out
    for name, size in sizes.items():
        options.add_free_dimension_override_by_name(name, size)
    open_session(model, options)


# What to call the nodes and values of a graph in a report.
#
# The training and the optimizer model of a package have short names without a meaning. What a
# node belongs to is found in the graph: the layer whose parameters it reads, or that of the
# node nearest to it.


class Labels:
    """Names for people: ``features.3.conv/Clip``, ``grad/features.3.conv/Mul``."""

    # `parameters`: Names of those inputs that are parameters.
    # `shown`: What to call a parameter, by name, where it has a better name than its own.
    # `later`: Start of the names of nodes that the first output does not need; in a training graph
    # that is the gradient.
    # `gradient`: Whether it computes gradients alone: all its nodes are such then.

    def __init__(
        self,
        graph: RuntimeGraph,
        parameters: Collection[str] = (),
        *,
        shown: Mapping[str, str] = MappingProxyType({}),
        later: str = "",
        gradient: bool = False,
    ) -> None:
        self._fixed = {*graph.inputs, *graph.outputs}
        producers = {name: i for i, node in enumerate(graph.nodes) for name in node.outputs if name}
        # For each node those that it reads from, then those that read from it.
        before = [[producers[n] for n in node.reads if n in producers] for node in graph.nodes]
        neighbours = [list(sources) for sources in before]
        for index, sources in enumerate(before):
            for source in sources:
                neighbours[source].append(index)
        layers = _layers(graph, {name: shown.get(name, name) for name in parameters}, neighbours)
        self._forward = forward = graph.needed_for(() if gradient else graph.outputs[:1])
        self._nodes: list[str] = []
        self._values: dict[str, str] = {}
        for index, (node, layer) in enumerate(zip(graph.nodes, layers, strict=True)):
            stem = ("" if index in forward else later) + (f"{layer}/" if layer else "")
            self._nodes.append(stem + node.op_type)
            inner = (each for subgraph in node.subgraphs.values() for each in subgraph.walk())
            for each in (*inner, node):
                self._values.update(dict.fromkeys(each.outputs, stem + each.op_type))

    def node(self, index: int) -> str:
        """Name of a node by its place in the graph."""
        return self._nodes[index]

    def is_forward(self, index: int) -> bool:
        """Whether the first output needs a node."""
        return index in self._forward

    def value(self, name: str) -> str:
        """Name of a value: that of its producer, unless it is an input or output."""
        return name if name in self._fixed else self._values.get(name, name)


def _layers(
    graph: RuntimeGraph, parameters: Mapping[str, str], neighbours: list[list[int]]
) -> list[str]:
    """The layer of each node; empty where no parameter can be reached."""
    layers = [""] * len(graph.nodes)
    queue: deque[int] = deque()
    for index, node in enumerate(graph.nodes):
        for name in node.reads:
            parameter = name.removesuffix(BUFFER_SUFFIX)
            if parameter in parameters and not layers[index]:
                shown = parameters[parameter]
                layers[index] = shown.rpartition(".")[0] or shown
                queue.append(index)
    while queue:
        index = queue.popleft()
        for other in neighbours[index]:
            if not layers[other]:
                layers[other] = layers[index]
                queue.append(other)
    return layers


# A model as ONNX Runtime will execute it: its optimized nodes in execution order, with sizes.
#
# Two sessions are made, in a process of their own (:mod:`odtpack_runtime.apart`),
# and none is run. The first saves the graph that ONNX Runtime's optimizers leave
# (``SessionOptions.optimized_model_filepath``), on
# which it plans its buffers with the sizes it knows: symbolic where the model
# leaves them open. The second loads that graph with the sizes of a real batch,
# optimizations off, and lets ONNX Runtime infer every shape.
#
# The order of the nodes, the shapes and the bytes in use at every node are held
# against profiles of real runs by the tests.


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the graph."""

    name: str  # Its name
    # Bytes per element, 0.5 for 4 bits; 0 for text and for what is not a tensor
    itemsize: float
    # Shape as ONNX Runtime knows it when it plans: sizes, names of sizes, None for an unknown size;
    # None as a whole if not even the rank is known.
    dims: Dims | None
    shape: Shape | None  # Shape with the sizes of a real batch; None where it depends on data

    @property
    def nbytes(self) -> int | None:
        """Bytes of the elements; None where the shape depends on data."""
        return None if self.shape is None else math.ceil(math.prod(self.shape) * self.itemsize)


@dataclass(frozen=True, slots=True)
class Node:
    """One operator; ``inputs`` and ``outputs`` hold ``""`` for what is left out."""

    # `implicit` names the outer values that its subgraphs read.
    name: str
    op_type: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    subgraphs: Mapping[str, RuntimeGraph] = field(default_factory=dict)
    implicit: tuple[str, ...] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of what it reads, its subgraphs included."""
        return (*filter(None, self.inputs), *self.implicit)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of what it reads, and of what it writes."""
        return (*self.reads, *filter(None, self.outputs))


@dataclass(frozen=True, slots=True)
class RuntimeGraph:
    """A graph in the order of execution."""

    # `values` covers this graph only; a subgraph's nodes may name values of the graphs around it.
    # `initializers` maps names to bytes.
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    values: Mapping[str, Value]
    initializers: Mapping[str, int]

    def graphs(self) -> Iterator[RuntimeGraph]:
        """It, and all that are inside it."""
        yield self
        for node in self.nodes:
            for subgraph in node.subgraphs.values():
                yield from subgraph.graphs()

    def walk(self) -> Iterator[Node]:
        """Every node, those of subgraphs included."""
        for node in self.nodes:
            yield node
            for subgraph in node.subgraphs.values():
                yield from subgraph.walk()

    def needed_for(self, names: Iterable[str]) -> frozenset[int]:
        """Places of the nodes that it takes to compute some values."""
        producers = {name: i for i, node in enumerate(self.nodes) for name in node.outputs if name}
        found: set[int] = set()
        stack = [producers[name] for name in names if name in producers]
        while stack:
            index = stack.pop()
            if index not in found:
                found.add(index)
                stack += [producers[name] for name in self.nodes[index].reads if name in producers]
        return frozenset(found)


_SAVE: Final = "odtpack_simulator.memory.runtime_graph:save_optimized"
_RECENT: Final = 8
_recent: dict[object, RuntimeGraph] = {}
"""The last few graphs that were read, the latest at the end, by all that decides them.

A build within a budget and a search plan the same models again and again, and each takes two
sessions of ONNX Runtime.
"""


def load_runtime_graph(
    model: str | os.PathLike[str],
    shapes: Mapping[str, Sequence[int]],
    *,
    threads: int = 1,
    level: OptimizationLevel = "all",
    native: bool = False,
) -> RuntimeGraph:
    """Read a model as ONNX Runtime executes it."""
    # The result is shared with other callers, who do not change it.
    # `native`: Whether it has the native kernels of the library that the environment names.
    sizes = tuple(sorted((name, tuple(shape)) for name, shape in shapes.items()))
    library = native_library() if native else None
    kernels = None if library is None else str(library.resolve())
    key = file_sha256(Path(model)), sizes, threads, level, kernels
    graph = _recent.pop(key, None) or _read(Path(model), shapes, threads, level, kernels)
    _recent[key] = graph
    if len(_recent) > _RECENT:
        _recent.pop(next(iter(_recent)), None)
    return graph


def _read(
    model: Path,
    shapes: Mapping[str, Sequence[int]],
    threads: int,
    level: OptimizationLevel,
    kernels: str | None,
) -> RuntimeGraph:
    limits = apart.Limits.of([model])
    with apart.worker(), scratch_folder("plan") as folder:
        optimized_path = Path(folder) / "optimized.onnx"
        original = read_model(model)
        typed_path = Path(folder) / "typed.onnx"
        onnx.save(_typed(original), str(typed_path))
        apart.call(
            _SAVE, limits, model=str(typed_path), out=str(optimized_path), threads=threads,
            level=level, kernels=kernels,
        )  # fmt: skip
        optimized = onnx.load(str(optimized_path))
        sort_saved_model(optimized.graph, original.graph)
        if kernels is not None:  # shapes are those of the bodies
            optimized.functions.extend(original.functions)
        del original
        rename_casts(optimized.graph)
        sizes = _name_sizes(optimized.graph, shapes, str(model))
        named_path = Path(folder) / "named.onnx"
        onnx.save(optimized, str(named_path))
        inferred_path = Path(folder) / "inferred.onnx"
        apart.call(
            _SAVE, limits, model=str(named_path), out=str(inferred_path), threads=threads,
            level="disabled", sizes=sizes,
        )  # fmt: skip
        inferred = onnx.load(str(inferred_path))
    for graph in graphs(inferred.graph):  # in subgraphs ONNX Runtime leaves the names
        for value in (*graph.input, *graph.value_info, *graph.output):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param in sizes:
                    dim.dim_value = sizes[dim.dim_param]
    opset = next((o.version for o in optimized.opset_import if o.domain in ("", "ai.onnx")), 1)
    functions = {(each.domain, each.name): each for each in optimized.functions}
    return _convert(optimized.graph, inferred.graph, opset, _Scope({}, {}, {}, functions=functions))


def _typed(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the type of every value: ONNX Runtime saves shapes only of such values."""
    # The shapes are left to ONNX Runtime, which plans with those that it finds itself.
    known = {value.name for graph in graphs(model.graph) for value in graph.value_info}
    inferred = onnx.shape_inference.infer_shapes(model)
    for graph in graphs(inferred.graph):
        for value in graph.value_info:
            if value.name not in known:
                value.type.tensor_type.ClearField("shape")
    return inferred


def _name_sizes(
    graph: onnx.GraphProto, shapes: Mapping[str, Sequence[int]], where: str
) -> dict[str, int]:
    """Return the size of every named dimension; open dimensions without a name get one."""
    sizes: dict[str, int] = {}
    for value in graph.input:
        shape = shapes.get(value.name)
        if shape is None:
            continue
        tensor = value.type.tensor_type
        if not tensor.HasField("shape"):
            tensor.shape.dim.extend(onnx.TensorShapeProto.Dimension() for _ in shape)
        for axis, (dim, size) in enumerate(zip(tensor.shape.dim, shape, strict=False)):
            if not dim.HasField("dim_value"):
                dim.dim_param = dim.dim_param or f"{value.name}.{axis}"
                sizes.setdefault(dim.dim_param, size)
        fixed = [
            dim.dim_value
            if dim.HasField("dim_value")
            else sizes.get(dim.dim_param, dim.dim_param or "?")
            for dim in tensor.shape.dim
        ]
        if fixed != list(shape):
            raise OdtpackError(
                "input-shape",
                f"Input '{value.name}' is {fixed} and cannot have the shape {list(shape)}.",
                where=where,
            )
    return sizes


def item_size(elem_type: int) -> float:
    """Bytes per element of an ONNX element type; 0 where elements have no fixed size."""
    if elem_type in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING):
        return 0
    if elem_type in (onnx.TensorProto.INT4, onnx.TensorProto.UINT4):
        return 0.5  # two lie in a byte
    return int(onnx.helper.tensor_dtype_to_np_dtype(elem_type).itemsize)


@dataclass(frozen=True, slots=True)
class _Scope:
    """What a subgraph sees of the graphs around it: types as planned and as found, constants."""

    planned: Mapping[str, Typed]
    found: Mapping[str, Typed]
    constants: Mapping[str, onnx.TensorProto]
    # Names of those whose shape is not ONNX Runtime's, of either
    added: tuple[Collection[str], Collection[str]] = ((), ())
    functions: Functions = field(default_factory=dict)
    # Besides the constants, values that shapes give: ONNX Runtime does not plan with these.
    known: Mapping[str, onnx.TensorProto] = field(default_factory=dict)


def _convert(
    graph: onnx.GraphProto,
    inferred: onnx.GraphProto,
    opset: int,
    outer: _Scope,
    given: Mapping[str, Typed] = MappingProxyType({}),
) -> RuntimeGraph:
    """Convert a graph, with dimensions from it and shapes from its inferred twin."""
    constants = {**outer.constants, **{tensor.name: tensor for tensor in graph.initializer}}
    stored = {t.name: (t.data_type, tuple(t.dims)) for t in graph.initializer}
    planned, found = (
        earlier
        | {v.name: tensor_type(v.type) for v in (*of.input, *of.value_info, *of.output)}
        | stored
        for earlier, of in ((dict(outer.planned), graph), (dict(outer.found), inferred))
    )
    found |= given  # inputs whose shapes the graph around it gives
    added = set(outer.added[0]), {*outer.added[1], *given}
    fill_in(graph.node, opset, constants, planned, added[0], as_planned=True)
    known = {**outer.known, **constants}
    fill_in(graph.node, opset, known, found, added[1], functions=outer.functions)
    scope = _Scope(planned, found, constants, added, outer.functions, known)
    twins = {name: node for node in inferred.node for name in node.output if name}
    nodes = [_node(node, twins, opset, scope) for node in graph.node]
    names = [value.name for value in graph.input] + [tensor.name for tensor in graph.initializer]
    names += [name for node in nodes for name in node.outputs if name]
    values = {}
    for name in names:
        kind, dims = planned.get(name, (0, None))
        kind_inferred, shape = found.get(name, (0, None))
        size = item_size(kind or kind_inferred)
        values[name] = Value(name, size, dims, shape if is_fixed(shape) else None)
    initializers = {tensor.name: values[tensor.name].nbytes or 0 for tensor in graph.initializer}
    return RuntimeGraph(
        tuple(value.name for value in graph.input if value.name not in initializers),
        tuple(value.name for value in graph.output),
        tuple(nodes),
        values,
        initializers,
    )


def _node(
    node: onnx.NodeProto,
    twins: Mapping[str, onnx.NodeProto],
    opset: int,
    scope: _Scope,
) -> Node:
    graphs = {a.name: a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH}
    subgraphs = {}
    if graphs:
        twin = next((twins[name] for name in node.output if name in twins), node)
        inferred = {a.name: a.g for a in twin.attribute if a.type == onnx.AttributeProto.GRAPH}
        given = body_inputs(node, Scope(opset, scope.known, scope.found))
        subgraphs = {
            name: _convert(graph, inferred.get(name, graph), opset, scope, given)
            for name, graph in graphs.items()
        }
    attributes = {
        attribute.name: onnx.helper.get_attribute_value(attribute)
        for attribute in node.attribute
        if attribute.name not in graphs
    }
    if opset < 13 and node.op_type in ("LogSoftmax", "Softmax"):
        attributes["axis"] = -1  # these normalize rows of a matrix, whatever axis that begins at
    outer: dict[str, None] = {}  # What subgraphs read from the graphs around them
    for each in subgraphs.values():
        read = itertools.chain(*(inner.reads for inner in each.nodes), each.outputs)
        outer |= dict.fromkeys(name for name in read if name not in each.values)
    return Node(
        node.name or node.op_type,
        node.op_type,
        node.domain,
        tuple(node.input),
        tuple(node.output),
        attributes,
        subgraphs,
        tuple(outer),
    )
