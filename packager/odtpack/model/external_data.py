"""Tensors of a model: those in other files, and large ones taken out before protobuf copies them.

What a model file says about other files is not to be trusted: it may point anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
import onnx.checker
import onnx.external_data_helper

from odtpack.errors import OdtpackError
from odtpack_runtime.files.protobuf_wire import (
    BYTES,
    Field,
    MalformedError,
    fields,
    header,
    tensors,
)

if TYPE_CHECKING:
    import onnx_ir as ir


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
        _check_sum(list(_external(proto)), path)
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


_MOST_COPIES = 2
"""Times that the bytes of a file may be read; more are a small model that fills the memory."""


def _check_sum(copied: Sequence[onnx.TensorProto], path: Path) -> None:
    """Refuse tensors that are together a multiple of the files in which they lie."""
    sizes: dict[Path, int] = {}
    total = 0
    for tensor in copied:
        info = onnx.external_data_helper.ExternalDataInfo(tensor)
        file = (path.parent / info.location).resolve()
        size = sizes.setdefault(file, file.stat().st_size)
        total += info.length or size - (info.offset or 0)  # older onnx reads all for a length of 0
    if total > _MOST_COPIES * sum(sizes.values()):
        raise OdtpackError(
            "external-data-repeated",
            f"{len(copied)} tensors have {total} bytes together, and the files that hold them "
            f"{sum(sizes.values())}",
            where=str(path),
        )


_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9
_EXTERNAL_DATA, _DATA_LOCATION = 13, 14
LEAST = 1024  # bytes below which a tensor stays in the message


def detach(data: memoryview) -> tuple[bytes | memoryview, dict[int, memoryview]]:
    """Leave the large ``raw_data`` of a model's initializers out."""
    # data: Bytes of a serialized ``ModelProto``; they may be anything.
    # Returns the message without them, and what each holds by the initializer's index.
    bodies: dict[int, memoryview] = {}
    chunks: list[bytes | memoryview] = []
    count = 0
    try:
        for found in fields(data):
            if found.number != _GRAPH or found.kind != BYTES:
                chunks.append(data[found.start : found.end])
                continue
            graph, count = _graph(data, found.body, found.end, bodies, count)
            chunks += [header(_GRAPH, sum(map(len, graph))), *graph]
    except MalformedError:
        return data, {}
    return (b"".join(chunks), bodies) if bodies else (data, {})


def _graph(
    data: memoryview, start: int, end: int, bodies: dict[int, memoryview], count: int
) -> tuple[list[bytes | memoryview], int]:
    """The pieces of a graph without its large tensors, and the number of initializers so far."""
    pieces: list[bytes | memoryview] = []
    kept = start  # what lies between two initializers is copied in one piece
    for found in fields(data, start, end):
        if found.number != _INITIALIZER or found.kind != BYTES:
            continue
        raw = _raw_data(data, found.body, found.end)
        if raw is not None:
            rest = [data[found.body : raw.start], data[raw.end : found.end]]
            pieces += [data[kept : found.start], header(_INITIALIZER, sum(map(len, rest))), *rest]
            bodies[count] = data[raw.body : raw.end]
            kept = found.end
        count += 1
    pieces.append(data[kept:end])
    return pieces, count


def _raw_data(data: memoryview, start: int, end: int) -> Field | None:
    """The one large ``raw_data`` field of a tensor."""
    found = None
    for each in fields(data, start, end):
        if each.number in (_EXTERNAL_DATA, _DATA_LOCATION):
            return None
        if each.number == _RAW_DATA:
            if found is not None or each.kind != BYTES:
                return None
            found = each
    return found if found is not None and found.end - found.body >= LEAST else None
