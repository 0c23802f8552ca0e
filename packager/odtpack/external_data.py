"""Tensors of a model, and those among them whose bytes lie in other files.

What a model file says about other files is not to be trusted: it may point anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import onnx.checker
import onnx.external_data_helper
import onnx_ir as ir

from odtpack.errors import OdtpackError


def tensors(message: Any) -> Iterator[onnx.TensorProto]:
    """Every tensor in a protobuf message: initializers, attributes, those of subgraphs."""
    if isinstance(message, onnx.TensorProto):
        yield message
        return
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for inner in [value] if hasattr(value, "ListFields") else value:
                yield from tensors(inner)


def load_beside(proto: onnx.ModelProto, path: Path) -> None:
    """Read the external data of a model file, which must lie in the file's own folder.

    Raises:
        OdtpackError: It lies elsewhere, is not there, or is too short.
    """
    for tensor in _external(proto):
        _check(tensor, path)
    try:
        onnx.external_data_helper.load_external_data_for_model(proto, str(path.parent))
    except (onnx.checker.ValidationError, OSError, ValueError) as error:
        raise OdtpackError(
            "external-data-unreadable",
            f"external data cannot be read: {str(error).strip().splitlines()[0]}",
            where=str(path),
            hint="save the model with its data beside it",
        ) from None


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
            hint="pass the model's path, or load it with its data: onnx.load(path)",
        )


def load_into(model: ir.Model) -> ir.Model:
    """Return a model whose initializers are all in memory; the given one is not changed.

    Raises:
        OdtpackError: External data cannot be read, or lie outside the model's folder.
    """
    external = [
        value.const_value
        for graph in model.graphs()
        for value in graph.initializers.values()
        if isinstance(value.const_value, ir.ExternalTensor) and value.const_value.base_dir
    ]
    if not external:
        return model
    try:
        return ir.external_data.load_to_model(model.clone())
    except (OSError, ValueError) as error:
        raise OdtpackError(
            "external-data-unreadable",
            f"external data of the model in memory cannot be read: {error}",
            hint="save the model with its data beside it",
        ) from None


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
            hint="save the model with its data beside it",
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
