"""A model's source: a file with its external data, or memory. Large tensors are not copied.

What a model file says about other files is not to be trusted: it may point anywhere.

A model of gigabytes is mostly initializers. Whatever looks at its structure (the checker,
shape inference) is given a message in which they are empty; their values are views of the
file, mapped into memory, or of what the caller holds.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google.protobuf.message
import numpy as np
import onnx
import onnx.checker
import onnx.external_data_helper
import onnx.numpy_helper
import onnx_ir as ir

from odtpack.errors import OdtpackError, model_not_readable, not_onnx
from odtpack.model import exporters
from odtpack_runtime.files.protobuf_wire import BYTES, MalformedError, fields, header


def tensors(message: Any) -> Iterator[onnx.TensorProto]:
    """Every tensor in a protobuf message: initializers, attributes, those of subgraphs."""
    if isinstance(message, onnx.TensorProto):
        yield message
        return
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for inner in [value] if hasattr(value, "ListFields") else value:
                yield from tensors(inner)


def load_beside(
    proto: onnx.ModelProto,
    path: Path,
    is_in_place: Callable[[onnx.TensorProto], bool],
    map_file: Callable[[Path], memoryview],
) -> Iterator[tuple[onnx.TensorProto, memoryview]]:
    """Find the external data of a model file, which must lie in the file's own folder."""
    # proto: The model; tensors that are not in place are read into it. is_in_place: Whether an
    # initializer is to be read where it is.
    # Returns the initializers that are in place, without their reference to the file, and their
    # bytes.
    files: dict[Path, memoryview] = {}
    try:
        for tensor in _external(proto):
            _check(tensor, path)
        for tensor in proto.graph.initializer:
            if tensor.data_location != onnx.TensorProto.EXTERNAL or not is_in_place(tensor):
                continue
            info = onnx.external_data_helper.ExternalDataInfo(tensor)
            file = (path.parent / info.location).resolve()
            if file not in files:
                files[file] = map_file(file)
            start = info.offset or 0
            end = len(files[file]) if info.length is None else start + info.length
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
            yield tensor, files[file][start:end]
        onnx.external_data_helper.load_external_data_for_model(proto, str(path.parent))
    except (onnx.checker.ValidationError, OSError, ValueError) as error:
        raise OdtpackError(
            "external-data-unreadable",
            f"external data cannot be read: {str(error).strip().splitlines()[0]}",
            where=str(path),
        ) from None


def files_beside(proto: onnx.ModelProto, path: Path) -> list[Path]:
    """The files that hold external data of a model, sorted."""
    found = set()
    for tensor in _external(proto):
        _check(tensor, path)
        info = onnx.external_data_helper.ExternalDataInfo(tensor)
        found.add(path.parent / info.location)
    return sorted(found)


def require_none(proto: onnx.ModelProto) -> None:
    """Refuse external data of a model that has no folder."""
    for tensor in _external(proto):
        raise OdtpackError(
            "external-data-without-folder",
            f"tensor {tensor.name!r} of the model in memory keeps its data in a file, and "
            "nothing says in which folder",
        )


def load_into(model: ir.Model) -> ir.Model:
    """Read the external initializers of a model in memory where they are; return the model."""
    import onnx_ir as ir  # not needed by `odtpack cache-key`, which runs before each build

    try:
        for graph in model.graphs():
            for value in graph.initializers.values():
                tensor = value.const_value
                if isinstance(tensor, ir.ExternalTensor) and tensor.base_dir:
                    value.const_value = ir.Tensor(
                        tensor.numpy(), dtype=tensor.dtype, name=tensor.name
                    )
    except (OSError, ValueError) as error:
        raise OdtpackError(
            "external-data-unreadable",
            f"external data of the model in memory cannot be read: {error}",
        ) from None
    return model


def _external(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    for tensor in tensors(proto):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            yield tensor


def _check(tensor: onnx.TensorProto, path: Path) -> None:
    """Refuse external data that does not lie in the model's own folder."""
    folder = path.parent.resolve()
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    try:
        file = (folder / location).resolve()
    except ValueError:  # a null character
        location, file = "", folder
    if not location or Path(location).is_absolute() or not file.is_relative_to(folder):
        raise OdtpackError(
            "external-data-escapes",
            f"initializer {tensor.name!r} keeps its data in {location!r}, "
            "outside the model's folder",
            where=str(path),
        )
    if not file.is_file():
        raise OdtpackError(
            "external-data-missing",
            f"initializer {tensor.name!r} keeps its data in {location!r}, which is not there",
            where=str(path),
        )
    try:
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", 0))
    except ValueError:
        offset, length = -1, 0
    if offset < 0 or length < 0 or offset + length > file.stat().st_size:
        raise OdtpackError(
            "external-data-short",
            f"initializer {tensor.name!r} reaches past the end of {location!r}",
            where=str(path),
        )


_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9
_EXTERNAL_DATA, _DATA_LOCATION = 13, 14
LEAST = 1024
"""Bytes below which a tensor stays in the message."""


@dataclasses.dataclass(frozen=True)
class Span:
    """Where the bytes of a tensor stand in a file."""

    offset: int
    length: int


def detach(data: memoryview) -> tuple[bytes | memoryview, dict[int, Span]]:
    """Leave the large ``raw_data`` of a model's initializers out."""
    # data: Bytes of a serialized ``ModelProto``; they may be anything.
    # Returns the message without them, and the place of each by the initializer's index.
    spans: dict[int, Span] = {}
    chunks: list[bytes | memoryview] = []
    count = 0
    try:
        for found in fields(data):
            if found.number != _GRAPH or found.kind != BYTES:
                chunks.append(data[found.start : found.end])
                continue
            graph, count = _graph(data, found.body, found.end, spans, count)
            chunks += [header(_GRAPH, sum(map(len, graph))), *graph]
    except MalformedError:
        return data, {}
    return (b"".join(chunks), spans) if spans else (data, {})


def _graph(
    data: memoryview, start: int, end: int, spans: dict[int, Span], count: int
) -> tuple[list[bytes | memoryview], int]:
    """The pieces of a graph without its large tensors, and the number of initializers so far."""
    pieces: list[bytes | memoryview] = []
    kept = start  # what lies between two initializers is copied in one piece
    for found in fields(data, start, end):
        if found.number != _INITIALIZER or found.kind != BYTES:
            continue
        raw = _raw_data(data, found.body, found.end)
        if raw is not None:
            tag, raw_end, span = raw
            rest = [data[found.body : tag], data[raw_end : found.end]]
            pieces += [data[kept : found.start], header(_INITIALIZER, sum(map(len, rest))), *rest]
            spans[count] = span
            kept = found.end
        count += 1
    pieces.append(data[kept:end])
    return pieces, count


def _raw_data(data: memoryview, start: int, end: int) -> tuple[int, int, Span] | None:
    """Start and end of the one large ``raw_data`` field of a tensor, and its bytes."""
    found = None
    for each in fields(data, start, end):
        if each.number in (_EXTERNAL_DATA, _DATA_LOCATION):
            return None
        if each.number == _RAW_DATA:
            if found is not None or each.kind != BYTES:
                return None
            found = each.start, each.end, Span(each.body, each.end - each.body)
    return found if found is not None and found[2].length >= LEAST else None


ModelLike = str | Path | onnx.ModelProto | ir.Model

# Types whose elements numpy reads in place. The others are rare, and small.
_IN_PLACE = {
    ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BOOL,
    ir.DataType.INT8, ir.DataType.INT16, ir.DataType.INT32, ir.DataType.INT64,
    ir.DataType.UINT8, ir.DataType.UINT16, ir.DataType.UINT32, ir.DataType.UINT64,
}  # fmt: skip
_IN_MEMORY = "the model in memory"


@dataclasses.dataclass(frozen=True)
class Source:
    """A model without the values of its large initializers, and those values."""

    # The model. A detached initializer has its name and type, and shape [0].
    proto: onnx.ModelProto
    where: str  # what to call the model in messages
    # Values of the detached initializers, by name; not to be written to.
    arrays: dict[str, np.ndarray]

    def restore(self, graph: ir.Graph) -> None:
        """Give the initializers of the graph, read from :attr:`proto`, their values."""
        for name, array in self.arrays.items():
            value = graph.initializers[name]
            value.const_value = ir.Tensor(array, name=name)
            value.shape = ir.Shape(array.shape)


def open_model(model: ModelLike) -> Source:
    """Open a model; what it is has not been checked, but that its tensors are complete."""
    if isinstance(model, ir.Model):
        return _from_ir(model)
    if isinstance(model, onnx.ModelProto):
        require_none(model)
        return _from_proto(model)
    if not isinstance(model, str | Path):
        raise OdtpackError(
            "bad-model-type",
            f"model is a {type(model).__name__}; it must be a path, an onnx.ModelProto or an "
            "onnx_ir.Model",
        )
    path = Path(model)
    if not path.is_file():
        raise OdtpackError(
            "model-not-found",
            f"there is no file {str(path)!r}",
            hint="pass the path of a forward model, for example model.onnx",
        )
    try:
        content = map_file(path)
    except OSError as error:
        raise model_not_readable(path, error) from error
    try:
        proto, arrays = _parse(content, str(path))
    except (google.protobuf.message.DecodeError, MemoryError):
        raise not_onnx(path) from None
    if not proto.HasField("graph") or not proto.opset_import:
        raise not_onnx(path)
    for key, value in exporters.noted_architecture(path).items():
        proto.graph.metadata_props.add(key=key, value=value)
    for tensor, array in load_beside(proto, path, _is_in_place, map_file):
        _keep(tensor, array, str(path), arrays)
    return Source(proto, str(path), arrays)


def map_file(path: Path) -> memoryview:
    """The bytes of a file, mapped into memory: read when they are used, and never copied."""
    with path.open("rb") as stream:
        if path.stat().st_size == 0:  # which cannot be mapped
            return memoryview(b"")
        return memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))


def release_pages(array: np.ndarray) -> None:
    """Let the system drop the pages of an array that lies in a mapped file, if it does."""
    # The next look at them reads them from the file again.
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    owner = getattr(owner, "obj", owner)
    advice = getattr(mmap, "MADV_DONTNEED", None)
    if isinstance(owner, mmap.mmap) and advice is not None and array.size:
        start = array.ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        owner.madvise(advice, first, start + array.nbytes - first)


def _parse(content: memoryview, where: str) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Parse a serialized model and detach its large tensors, which become views of it."""
    light, spans = detach(content)
    proto = onnx.ModelProto()
    proto.ParseFromString(light)
    arrays: dict[str, np.ndarray] = {}
    for index, span in spans.items():
        tensor = proto.graph.initializer[index]
        body = content[span.offset : span.offset + span.length]
        if _is_in_place(tensor):
            _keep(tensor, body, where, arrays)
        else:
            tensor.raw_data = bytes(body)
    return proto, arrays


def _keep(
    tensor: onnx.TensorProto, body: memoryview, where: str, arrays: dict[str, np.ndarray]
) -> None:
    """Detach a tensor: its values are these bytes."""
    wanted = _wanted_bytes(tensor)
    if len(body) != wanted:
        raise _wrong_size(tensor, f"{len(body)} bytes, and not {wanted}", where)
    dtype = ir.DataType(tensor.data_type).numpy()
    if tensor.name in arrays:  # the checker says so of small ones
        raise OdtpackError(
            "invalid-model",
            f"the model has two initializers {tensor.name!r}",
            where=where,
            hint="export it again",
        )
    arrays[tensor.name] = np.frombuffer(body, dtype.newbyteorder("<")).reshape(tuple(tensor.dims))
    tensor.dims[:] = [0]


def _from_proto(model: onnx.ModelProto) -> Source:
    try:
        proto, arrays = _parse(memoryview(model.SerializeToString()), _IN_MEMORY)
    except (ValueError, google.protobuf.message.EncodeError):  # more than 2 GB
        proto, arrays = onnx.ModelProto(), {}
        proto.CopyFrom(model)
    return Source(proto, _IN_MEMORY, arrays)


def _from_ir(model: ir.Model) -> Source:
    light = load_into(model.clone())
    arrays: dict[str, np.ndarray] = {}
    for name, value in light.graph.initializers.items():
        tensor = value.const_value
        if tensor is not None and tensor.dtype in _IN_PLACE and tensor.nbytes >= LEAST:
            arrays[name] = tensor.numpy()
            value.const_value = ir.tensor(np.empty(0, tensor.dtype.numpy()), name=name)
    proto = ir.to_proto(light)
    require_none(proto)
    return Source(proto, _IN_MEMORY, arrays)


def check_bytes(tensor: onnx.TensorProto, where: str) -> None:
    """Check that a tensor holds exactly as many values as its shape and type say."""
    try:
        ir.DataType(tensor.data_type)
    except ValueError:
        raise OdtpackError(
            "unknown-element-type",
            f"tensor {tensor.name!r} has elements of the unknown type {tensor.data_type}",
            where=where,
        ) from None
    if tensor.HasField("raw_data"):
        wanted = _wanted_bytes(tensor)
        fits = len(tensor.raw_data) == wanted
        held = f"{len(tensor.raw_data)} bytes, and not {wanted}"
    else:
        held = "another number of values"
        try:
            fits = onnx.numpy_helper.to_array(tensor).shape == tuple(tensor.dims)
        except (ValueError, TypeError, KeyError):
            fits = False
    if not fits:
        raise _wrong_size(tensor, held, where)


def _is_in_place(tensor: Any) -> bool:
    """Whether numpy can read a tensor's elements where they are."""
    return tensor.data_type in _IN_PLACE and min(tensor.dims, default=0) >= 0


def _wanted_bytes(tensor: onnx.TensorProto) -> int:
    bits: int = math.prod(tensor.dims) * ir.DataType(tensor.data_type).bitwidth
    return -(-bits // 8)


def _wrong_size(tensor: onnx.TensorProto, held: str, where: str) -> OdtpackError:
    dtype = ir.DataType(tensor.data_type).name
    return OdtpackError(
        "initializer-size",
        f"tensor {tensor.name!r} of type {dtype} and shape {list(tensor.dims)} holds {held}",
        where=where,
    )
