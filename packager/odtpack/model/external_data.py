"""Tensors of a model, and those among them whose bytes lie in other files.

What a model file says about other files is not to be trusted: it may point anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import onnx.checker
import onnx.external_data_helper

from odtpack.errors import OdtpackError

if TYPE_CHECKING:
    import onnx_ir as ir


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
    """Find the external data of a model file, which must lie in the file's own folder.

    Args:
        proto: The model; tensors that are not in place are read into it.
        path: Its file.
        is_in_place: Whether an initializer is to be read where it is.
        map_file: Maps a file into memory.

    Yields:
        The initializers that are in place, without their reference to the file, and their
        bytes.

    Raises:
        OdtpackError: Data lie elsewhere, are not there, or are too short.
    """
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
    """The files that hold external data of a model, sorted.

    Args:
        proto: The model.
        path: Its file.

    Raises:
        OdtpackError: Data lie outside the model's folder, are not there, or are too short.
    """
    found = set()
    for tensor in _external(proto):
        _check(tensor, path)
        info = onnx.external_data_helper.ExternalDataInfo(tensor)
        found.add(path.parent / info.location)
    return sorted(found)


def require_none(proto: onnx.ModelProto) -> None:
    """Refuse external data of a model that has no folder.

    Raises:
        OdtpackError: There is some.
    """
    for tensor in _external(proto):
        raise OdtpackError(
            "external-data-without-folder",
            f"tensor {tensor.name!r} of the model in memory keeps its data in a file, and "
            "nothing says in which folder",
        )


def load_into(model: ir.Model) -> ir.Model:
    """Read the external initializers of a model in memory where they are; return the model.

    Raises:
        OdtpackError: External data cannot be read, or lie outside the model's folder.
    """
    import onnx_ir as ir

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
