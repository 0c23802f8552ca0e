"""The content of an ONNX file, read without the code that wrote the manifest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from odtpack_runtime.errors import OdtpackError, onnx_missing
from odtpack_runtime.package.manifest import contradiction
from odtpack_runtime.session.model_file import check_model_file, outside_tensor

if TYPE_CHECKING:
    import onnx

    from odtpack_runtime.checkpoint.state import CheckpointState

_LARGEST_SIZE, _MOST_SIZES, _RANK = 4096, 48, 8

Tensor = tuple[str, str, tuple[int | str | None, ...]]
"""Name, element type as numpy has it, and shape."""


def load_model(path: Path, beside: Collection[str] = ()) -> onnx.ModelProto:
    """Read a model that holds all that it needs, but for tensors in these files of its folder."""
    try:
        import onnx
    except ImportError as error:
        raise onnx_missing("Verifying a package") from error
    try:
        model = onnx.load_model_from_string(path.read_bytes())
    except Exception as error:  # protobuf's exceptions have no common base with onnx's
        raise OdtpackError(
            "model-not-readable", f"{path.name} is not an ONNX model.", where=str(path)
        ) from error
    check_model_file(path, beside)
    if any(not isinstance(text, str) for text in _texts(model)):  # bytes: not UTF-8
        raise OdtpackError(
            "model-not-readable", f"{path.name} holds a name that is not text.", where=str(path)
        )
    for tensor in _tensors(model):
        outside = tensor.external_data or tensor.data_location == onnx.TensorProto.EXTERNAL
        places = {each.value for each in tensor.external_data if each.key == "location"}
        if outside and not (places and places.issubset(beside)):
            raise outside_tensor(path, tensor.name)
    return model


def graphs_of(model: onnx.ModelProto) -> Iterator[tuple[Any, Iterable[onnx.NodeProto]]]:
    """Yield every graph and function body with its nodes."""
    waiting: list[Any] = [model.graph, *model.functions]
    while waiting:
        graph = waiting.pop()
        yield graph, graph.node
        for node in graph.node:
            for attribute in node.attribute:
                waiting += [attribute.g] if attribute.HasField("g") else []
                waiting += attribute.graphs


def _texts(model: onnx.ModelProto) -> Iterator[object]:
    """The texts that are compared with those of a manifest."""
    for _, nodes in graphs_of(model):
        for node in nodes:
            yield from (node.op_type, node.domain)
    for value in (*model.graph.input, *model.graph.output):
        yield value.name
        yield from (dim.dim_param for dim in value.type.tensor_type.shape.dim)
    yield from (entry.domain for entry in model.opset_import)
    yield from (text for entry in model.metadata_props for text in (entry.key, entry.value))


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    for graph, nodes in graphs_of(model):
        yield from getattr(graph, "initializer", ())
        for sparse in getattr(graph, "sparse_initializer", ()):
            yield from (sparse.values, sparse.indices)
        for node in nodes:
            for attribute in node.attribute:
                yield from (attribute.t, *attribute.tensors)
                for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                    yield from (sparse.values, sparse.indices)


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
