"""Write a trained model from a package's inference template, as the kits in all languages do.

Protobuf merges messages that stand one after the other: the template's bytes, followed by a
fragment for each parameter that holds nothing but its tensor, are one ONNX model.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from odtpack_runtime.checkpoint.parameters import Array
from odtpack_runtime.errors import OdtpackError, UnknownNameError
from odtpack_runtime.export import onnx_wire as wire
from odtpack_runtime.export.inference_model import cast_parameter, check_size
from odtpack_runtime.files.atomic import atomic_write
from odtpack_runtime.files.protobuf_wire import BYTES, MalformedError, Piece, bytes_field, fields
from odtpack_runtime.package.manifest import ParameterInfo
from odtpack_runtime.package.package import Package


def write_inference_model(
    package: Package,
    parameters: Mapping[str, Array],
    destination: str | os.PathLike[str],
    output_names: Sequence[str] | None = None,
) -> None:
    """Write the forward model of a package with these parameters inside."""
    # `output_names`: which of the forward model's outputs it has, in the template's order; all of
    # them if None.
    file, info = package.manifest.files.inference_template, package.manifest.inference
    wanted = [] if info is None else list(info.outputs if output_names is None else output_names)
    if file is None or info is None or not wanted or len(set(wanted)) != len(wanted):
        raise OdtpackError(
            "no-outputs",
            "The package has no inference template: its model has no output but its loss."
            if info is None
            else "An exported model needs at least one output, and each only once.",
            where=str(package.path),
        )
    for name in wanted:
        if name not in info.outputs:
            raise UnknownNameError(
                "unknown-output",
                f"The inference template computes no value '{name}'.",
                where=file.path,
                hint=f"its outputs are {', '.join(info.outputs)}",
            )
    path = package.path / file.path
    pieces: list[Piece] = [path.read_bytes()]
    if set(wanted) != set(info.outputs):
        try:
            pieces = with_outputs(memoryview(pieces[0]), wanted)
        except MalformedError as error:  # its hash was right: it was not written by odtpack
            raise OdtpackError(
                "model-not-loadable",
                f"{path} is not a readable ONNX model: {error}.",
                where=str(path),
                hint="build the package again",
            ) from error
    known = {item.name: item for item in package.manifest.parameters}
    for name in info.parameters:
        pieces += fragment(name, _in_model_type(known[name], known, parameters))
    check_size(pieces)
    with atomic_write(destination) as stream:
        stream.writelines(pieces)


def fragment(name: str, array: Array) -> list[Piece]:
    """Return a ``ModelProto`` whose graph holds one initializer and nothing else."""
    tensor = bytes_field(wire.INITIALIZERS, wire.tensor_proto(name, array))
    return bytes_field(wire.MODEL_GRAPH, tensor)


def with_outputs(model: memoryview, names: Collection[str]) -> list[Piece]:
    """Return the pieces of a model without the outputs of its graph that are not named."""
    pieces: list[Piece] = []
    for found in fields(model):
        if found.number != wire.MODEL_GRAPH or found.kind != BYTES:
            pieces.append(model[found.start : found.end])
            continue
        graph = model[found.body : found.end]
        kept: list[Piece] = [
            graph[part.start : part.end]
            for part in fields(graph)
            if part.number != wire.OUTPUTS or wire.value_name(graph[part.body : part.end]) in names
        ]
        pieces += bytes_field(wire.MODEL_GRAPH, kept)
    return pieces


def _in_model_type(
    item: ParameterInfo, known: Mapping[str, ParameterInfo], parameters: Mapping[str, Array]
) -> Array:
    array = _checked(item, parameters)
    if item.scale is not None:
        return array.astype(np.float32) * _checked(known[item.scale], parameters)
    if item.model_dtype is not None:
        return cast_parameter(item.name, array, np.dtype(item.model_dtype))
    return array


def _checked(item: ParameterInfo, parameters: Mapping[str, Array]) -> Array:
    array = parameters.get(item.name)
    if array is None or (array.dtype.name, array.shape) != (item.dtype, item.shape):
        raise OdtpackError(
            "model-mismatch",
            f"The package has a parameter '{item.name}' that is {item.dtype}{list(item.shape)}, "
            + ("and there is none." if array is None else f"not {array.dtype}{list(array.shape)}."),
            hint="pass the parameters of a checkpoint that was trained from this package",
        )
    return array
