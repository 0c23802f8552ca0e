"""Checks of a package's files against its manifest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from odtpack_runtime.checkpoint.flatbuffer import Source, Table
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.package.manifest import contradiction, same
from odtpack_runtime.package.onnx_files import Tensor, load_model, operators_of, values_of
from odtpack_runtime.package.package import Package
from odtpack_runtime.session.graph_signature import COTANGENT_SUFFIX, GRADIENT_SUFFIX
from odtpack_runtime.session.model_file import outside_tensor
from odtpack_runtime.session.segments import segment_name

# Which operators a model in ORT format has, read without ONNX Runtime.
#
# The format is ``onnxruntime/core/flatbuffers/schema/ort.fbs``; the numbers below are those of its
# fields. A model optimized at run time also names operators that may take the place of others.

_IDENTIFIER = b"ORTM"
_SESSION_MODEL, _MODEL_GRAPH = 1, 7
_INITIALIZERS, _NODES, _OPTIMIZATIONS = 0, 2, 8
_DOMAIN, _OPERATOR, _ATTRIBUTES = 2, 5, 10
_TENSOR, _GRAPH, _TENSORS, _GRAPHS = 6, 7, 11, 12
_RECORDS, _OF_OPTIMIZER, _PRODUCED = 0, 1, 3
_TENSOR_NAME, _EXTERNAL = 0, 6


class _Model(Source):
    """A model in ORT format, whose errors are those of a model."""

    def fail(self, reason: str) -> NoReturn:
        raise OdtpackError(
            "model-not-readable",
            f"{Path(self.where).name} is not a model in ORT format: {reason}.",
            where=self.where,
        )


def ort_operators(path: Path) -> set[tuple[str, str]]:
    """Return domain and type of every operator, ``ai.onnx`` for ONNX's own."""
    found: set[tuple[str, str]] = set()
    with path.open("rb") as stream:
        source = _Model(stream, "model", str(path))
        model = source.root(_IDENTIFIER).table(_SESSION_MODEL)
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
        raise outside_tensor(path, tensor.string(_TENSOR_NAME))


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
        self,
        inputs: list[Tensor],
        names: Mapping[str, str],
        where: Path,
        taken: dict[str, Tensor],
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
