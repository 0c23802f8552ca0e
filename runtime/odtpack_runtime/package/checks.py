"""The content of a package's files, read without the code that wrote them, and checks of it."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from odtpack_runtime.checkpoint.flatbuffer import Source, Table
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.protobuf_wire import not_text, tensors
from odtpack_runtime.package.manifest import contradiction, same
from odtpack_runtime.package.package import Package
from odtpack_runtime.session import model_file
from odtpack_runtime.session.graph_signature import COTANGENT_SUFFIX, GRADIENT_SUFFIX
from odtpack_runtime.session.segments import segment_name

if TYPE_CHECKING:
    import onnx

    from odtpack_runtime.checkpoint.state import CheckpointState

_LARGEST_SIZE, _MOST_SIZES, _RANK = 4096, 48, 8

Tensor = tuple[str, str, tuple[int | str | None, ...]]
"""Name, element type as numpy has it, and shape."""


_all_text: deque[bytes] = deque(maxlen=16)
"""Digests of the models that were found to be text last: a plan reads each several times, and to
check one takes longer than to read it."""


def read_model(path: Path) -> onnx.ModelProto:
    """Read a model, and nothing that lies in other files; all that should be text is."""
    try:
        import onnx
    except ImportError as error:
        what = "Reading the models of a package needs the package 'onnx', which is not installed."
        raise OdtpackError("onnx-missing", what) from error
    try:
        data = path.read_bytes()
        model = onnx.load_model_from_string(data)
    except Exception as error:  # protobuf's exceptions have no common base with onnx's
        raise OdtpackError(
            "model-not-readable", f"{path.name} is not an ONNX model.", where=str(path)
        ) from error
    digest = hashlib.sha256(data).digest()
    if digest not in _all_text:
        for text in not_text(model):
            raise OdtpackError(
                "model-not-readable",
                f"{path.name} holds a text that is not UTF-8, {text[:60]!r}.",
                where=str(path),
            )
        _all_text.append(digest)
    return model


def load_model(path: Path, beside: Collection[str] = ()) -> onnx.ModelProto:
    """Read a model that holds all that it needs, but for tensors in these files of its folder."""
    if model_file.is_in_ort_format(path):  # what is looked at must be what ONNX Runtime reads
        what = f"{path.name} is not an ONNX model."
        raise OdtpackError("model-not-readable", what, where=str(path))
    model = read_model(path)
    model_file.check_model_file(path, beside)
    for tensor in tensors(model):
        outside = tensor.external_data or tensor.data_location == tensor.EXTERNAL
        places = {each.value for each in tensor.external_data if each.key == "location"}
        if outside and not (places and places.issubset(beside)):
            raise model_file.outside_tensor(path, tensor.name)
    return model


def graphs_of(model: onnx.ModelProto) -> Iterator[tuple[Any, Iterable[onnx.NodeProto]]]:
    """Yield every graph and function body with its nodes."""
    waiting: list[Any] = [model.graph, *model.functions]
    while waiting:
        graph = waiting.pop()
        yield graph, graph.node
        defaults = getattr(graph, "attribute_proto", ())  # of a function's attributes
        for attribute in chain(defaults, *(node.attribute for node in graph.node)):
            waiting += [attribute.g] if attribute.HasField("g") else []
            waiting += attribute.graphs


def likely_sizes(eval_model: Path, state: CheckpointState) -> list[int]:
    """What an open axis may have to be: as long as a constant says, or as a weight is."""
    import onnx

    graph = load_model(eval_model).graph
    tensors = [*graph.initializer, *(a.t for n in graph.node for a in n.attribute)]
    whole = [tensor for tensor in tensors if tensor.data_type == onnx.TensorProto.INT64]
    constants = (onnx.numpy_helper.to_array(tensor) for tensor in whole)
    sizes = {int(size) for array in constants if array.size <= _RANK for size in array.flat}
    sizes |= {size for _, value in state.parameters for size in value.data.shape}
    return sorted(size for size in sizes if 1 <= size <= _LARGEST_SIZE)[:_MOST_SIZES]


def opsets_of(model: onnx.ModelProto, where: Path) -> dict[str, int]:
    """Domains and their versions."""
    found: dict[str, int] = {}
    for entry in model.opset_import:
        if found.setdefault(entry.domain or "ai.onnx", entry.version) != entry.version:
            raise contradiction(where, f"opset of {entry.domain!r}", "two versions", "one")
    return found


def operators_of(model: onnx.ModelProto, opsets: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Operators by domain, each with the opset since which it is what the model's opset has."""
    import onnx.defs

    found: dict[str, dict[str, int]] = {}
    for _, nodes in graphs_of(model):
        for node in nodes:
            domain = "" if node.domain == "ai.onnx" else node.domain
            opset = opsets.get(domain or "ai.onnx", 1)
            since = 1 if domain else opset
            if opset < 2**31 and onnx.defs.has(node.op_type, opset, domain):
                since = onnx.defs.get_schema(node.op_type, opset, domain).since_version
            found.setdefault(domain or "ai.onnx", {})[node.op_type] = since
    return found


def values_of(values: Iterable[onnx.ValueInfoProto]) -> list[Tensor]:
    """Inputs or outputs of a graph."""
    import onnx

    found: list[Tensor] = []
    for value in values:
        kind = value.type.tensor_type
        try:
            name = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)).name
            name = "string" if kind.elem_type == onnx.TensorProto.STRING else name
        except (KeyError, TypeError, ValueError):
            name = "no tensor"
        dims = tuple(
            dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None
            for dim in kind.shape.dim
        )
        found.append((value.name, name, dims))
    return found


def said(items: Iterable[Any]) -> list[Tensor]:
    """The same from a manifest."""
    return [(item.name, item.dtype, tuple(item.shape)) for item in items]


# Which operators a model in ORT format has, read without ONNX Runtime.
#
# The format is ``onnxruntime/core/flatbuffers/schema/ort.fbs``; the numbers below are those of its
# fields. A model optimized at run time also names operators that may take the place of others.

_SESSION_MODEL, _MODEL_GRAPH = 1, 7
_INITIALIZERS, _NODES, _OPTIMIZATIONS = 0, 2, 8
_DOMAIN, _OPERATOR, _ATTRIBUTES = 2, 5, 10
_TENSOR, _GRAPH, _TENSORS, _GRAPHS = 6, 7, 11, 12
_RECORDS, _OF_OPTIMIZER, _PRODUCED = 0, 1, 3
_TENSOR_NAME, _EXTERNAL = 0, 6


class _Model(Source):
    """A model in ORT format, whose errors are those of a model."""

    def fail(self, reason: str) -> NoReturn:
        what = f"{Path(self.where).name} is not a model in ORT format: {reason}."
        raise OdtpackError("model-not-readable", what, where=self.where)


def ort_operators(path: Path) -> set[tuple[str, str]]:
    """Return domain and type of every operator, ``ai.onnx`` for ONNX's own."""
    found: set[tuple[str, str]] = set()
    with path.open("rb") as stream:
        source = _Model(stream, "model", str(path))
        model = source.root(model_file.ORT_IDENTIFIER).table(_SESSION_MODEL)
        graph = None if model is None else model.table(_MODEL_GRAPH)
        if graph is None:
            source.fail("it has no graph")
        waiting = [graph]
        while waiting:
            graph = waiting.pop()
            for tensor in graph.tables(_INITIALIZERS):
                _check_inside(tensor, path)
            for node in graph.tables(_NODES):
                found.add((node.string(_DOMAIN) or "ai.onnx", node.string(_OPERATOR)))
                for attribute in node.tables(_ATTRIBUTES):
                    graphs = (attribute.table(_GRAPH), *attribute.tables(_GRAPHS))
                    waiting += filter(None, graphs)
                    tensors = (attribute.table(_TENSOR), *attribute.tables(_TENSORS))
                    for tensor in filter(None, tensors):
                        _check_inside(tensor, path)
            found |= set(_produced(graph.table(_OPTIMIZATIONS)))
    return found


def _produced(optimizations: Table | None) -> Iterator[tuple[str, str]]:
    """Operators that optimizations at run time may put in, each ``domain:type:version``."""
    for entry in () if optimizations is None else optimizations.tables(_RECORDS):
        for record in entry.tables(_OF_OPTIMIZER):
            for text in record.strings(_PRODUCED):
                domain, _, rest = text.partition(":")
                yield domain or "ai.onnx", rest.partition(":")[0]


def _check_inside(tensor: Table, path: Path) -> None:
    if tensor.integer(_EXTERNAL, "q", default=-1) != -1:
        raise model_file.outside_tensor(path, tensor.string(_TENSOR_NAME))


# The models of a package's segments, read as the one model that they make up.

Operators = dict[str, dict[str, int]]


class SegmentModels:
    """The models of segments; none of them in a package with one model."""

    def __init__(self, package: Package) -> None:
        self._manifest = package.manifest
        info = self._manifest.segments
        self.models: dict[Path, Any] = {}
        self._parts: list[tuple[Path, Mapping[str, str], bool]] = []
        if info is None:
            return
        self._weights = {each.name: each for each in info.tensors}
        for name in info.files():
            path = package.path / name
            if name != info.weights:
                self.models[path] = load_model(path)
            elif info.tensors:
                end = info.tensors[-1].offset + info.tensors[-1].nbytes
                same(path, "its length", path.stat().st_size, end)
        for each in info.segments:
            self._parts.append((package.path / each.forward, each.names, False))
            if each.backward is not None:
                self._parts.append((package.path / each.backward, each.names, True))

    def operators(self, own: Operators, *, training: bool) -> Operators:
        """Operators of the whole that ends with a model that has ``own``."""
        found = {domain: dict(versions) for domain, versions in own.items()}
        for path in dict.fromkeys(path for path, _, _ in self._used(training)):
            model = self.models[path]
            opsets = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
            for domain, versions in operators_of(model, opsets).items():
                found.setdefault(domain, {}).update(versions)
        return found

    def whole(
        self, model: Any, where: Path, *, training: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs and outputs of the whole that ends with a model."""
        # Without segments those of the model. Else the inputs that no segment makes and no
        # file holds, the manifest's inputs and parameters first and in its order; the model's
        # outputs, and the gradients of all.
        ends = values_of(model.graph.input), values_of(model.graph.output)
        if not self._parts:
            return ends
        taken: dict[str, Tensor] = {}
        made: set[str] = set()
        gradients: list[Tensor] = []
        for path, names, backward in self._used(training):
            graph = self.models[path].graph
            self._take(values_of(graph.input), names, path, taken)
            outputs = _renamed(values_of(graph.output), names)
            made.update(name for name, _, _ in outputs if not backward)
            gradients += [each for each in outputs if each[0].endswith(GRADIENT_SUFFIX)]
        self._take(ends[0], {}, where, taken)
        first = [item.name for item in self._manifest.inputs]
        first += [item.name for item in self._manifest.parameters]
        order = [*(name for name in first if name in taken), *sorted(taken.keys() - set(first))]
        inputs = [
            taken[name]
            for name in order
            if name not in made and not name.endswith(COTANGENT_SUFFIX)
        ]
        outputs = [each for each in ends[1] if not each[0].endswith(COTANGENT_SUFFIX)]
        return inputs, [*outputs, *gradients]

    def _used(self, training: bool) -> Iterator[tuple[Path, Mapping[str, str], bool]]:
        return (part for part in self._parts if training or not part[2])

    def _take(
        self, inputs: list[Tensor], names: Mapping[str, str], where: Path, taken: dict[str, Tensor]
    ) -> None:
        """Note what a model reads besides weights, which are checked."""
        for name, dtype, dims in _renamed(inputs, names):
            weight = self._weights.get(name)
            if weight is None:
                taken.setdefault(name, (name, dtype, dims))
            elif (dtype, dims) != (weight.dtype, weight.shape):
                raise contradiction(
                    where, f"the weight {name!r}", (dtype, dims), (weight.dtype, weight.shape)
                )


def _renamed(values: list[Tensor], names: Mapping[str, str]) -> list[Tensor]:
    return [(segment_name(names, name), dtype, dims) for name, dtype, dims in values]
