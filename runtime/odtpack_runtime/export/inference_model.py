"""Write a plain inference model that carries the current parameters."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from odtpack_runtime.checkpoint.layout import Array
from odtpack_runtime.errors import OdtpackError, UnknownNameError, WrongTypeError, onnx_missing
from odtpack_runtime.export.ort_conversion import is_ort_format, to_onnx, to_ort
from odtpack_runtime.files.atomic import atomic_write
from odtpack_runtime.session.graph_signature import OWN_TYPE_SUFFIX, UNSCALED_SUFFIX

if TYPE_CHECKING:
    import onnx

MAX_MODEL_SIZE = 2**31 - 2**20
"""Bytes: the 2 GiB of one protobuf message, less room for names and sizes."""

_Message = TypeVar("_Message", bound=Any)  # of protobuf

_FIRST_IR_WITH_FREE_INITIALIZERS = 4  # before, every initializer had to be an input too


def export_inference_model(
    eval_model: Path,
    parameters: Mapping[str, Array],
    destination: str | os.PathLike[str],
    output_names: Sequence[str],
) -> None:
    """Cut the part of an evaluation model that computes some values, and embed its parameters.

    Args:
        eval_model: The evaluation model, ``.onnx`` or ``.ort``. Of the latter only those
            values can be outputs that the conversion to ORT format left in it.
        parameters: Values of the inputs that become initializers, in the type that the
            model computes in.
        destination: Where the model goes, whole or not at all; in ORT format if its name
            ends in ``.ort``.
        output_names: Values that the evaluation model computes, in the order of
            the new model's outputs.

    Raises:
        OdtpackError: ``onnx-missing``; ``model-not-loadable`` if ``eval_model`` is no
            model; ``no-outputs``; ``model-too-large``; ``value-out-of-range`` for a parameter
            that the model's own type cannot hold; ``ort-conversion-failed``;
            ``file-not-written``.
        UnknownNameError: The model computes no value of that name.
    """
    if isinstance(output_names, str) or not all(isinstance(name, str) for name in output_names):
        raise WrongTypeError("no-outputs", "The names of the outputs must be a list of names.")
    if not output_names or len(set(output_names)) != len(output_names):
        raise OdtpackError(
            "no-outputs",
            "An exported model needs at least one output, and each only once.",
            hint='module.export_model_for_inferencing("inference.onnx", ["output"])',
        )
    model = _load(eval_model)
    _keep_only(model, output_names, str(eval_model))
    parameters = _in_own_type(model, parameters)
    used = [parameters[value.name] for value in model.graph.input if value.name in parameters]
    size = model.ByteSize() + sum(array.nbytes for array in used)
    if size > MAX_MODEL_SIZE:
        raise OdtpackError(
            "model-too-large",
            f"The model with its parameters has {size} bytes, and one ONNX file holds "
            f"{MAX_MODEL_SIZE}.",
        )
    _embed(model, parameters)
    data = model.SerializeToString(deterministic=True)
    if Path(destination).suffix == ".ort":
        data = to_ort(data, str(destination))
    with atomic_write(destination) as stream:
        stream.write(data)


def _load(path: Path) -> onnx.ModelProto:
    try:
        import onnx
    except ImportError as error:
        raise onnx_missing("Exporting a model") from error
    try:
        data = path.read_bytes()
        if is_ort_format(data):
            model = onnx.load_model_from_string(to_onnx(data, str(path)))
            _tidy(model)
        else:
            model = onnx.load_model(str(path))
    except OdtpackError:
        raise
    except Exception as error:  # protobuf's exceptions have no common base with onnx's
        raise OdtpackError(
            "model-not-loadable",
            f"{path} is not a readable ONNX model: {error}",
            where=str(path),
            hint="export needs the eval_model.onnx or eval_model.ort of the package",
        ) from error
    if not model.HasField("graph"):
        raise OdtpackError(
            "model-not-loadable",
            f"{path} is not a readable ONNX model: it has no graph.",
            where=str(path),
            hint="export needs the eval_model.onnx or eval_model.ort of the package",
        )
    return model


def _tidy(model: onnx.ModelProto) -> None:
    """ONNX Runtime imports every domain that it knows, and leaves the graph without a name."""
    used = {node.domain for node in model.graph.node} | {""}
    imports = [_copy(entry) for entry in model.opset_import if entry.domain in used]
    del model.opset_import[:]
    model.opset_import.extend(imports)
    model.ClearField("model_version")
    model.graph.name = "inference"


def _keep_only(model: onnx.ModelProto, output_names: Sequence[str], where: str) -> None:
    """Leave in a model only what the named values need, and make them its outputs."""
    graph = model.graph
    producers = {
        name: index for index, node in enumerate(graph.node) for name in node.output if name
    }
    for name in output_names:
        if name not in producers:
            raise UnknownNameError(
                "unknown-output",
                f"The evaluation model computes no value '{name}'.",
                where=where,
                hint=f"its outputs are {', '.join(output.name for output in graph.output)}",
            )
    needed: set[str] = set()
    kept: set[int] = set()
    wanted = list(output_names)
    while wanted:
        name = wanted.pop()
        if name in needed:
            continue
        needed.add(name)
        index = producers.get(name)
        if index is not None and index not in kept:
            kept.add(index)
            wanted += _names_read(graph.node[index])
    outputs = _describe(model, output_names)
    for field, values in (
        (graph.node, [graph.node[index] for index in sorted(kept)]),
        (graph.input, [value for value in graph.input if value.name in needed]),
        (graph.initializer, [tensor for tensor in graph.initializer if tensor.name in needed]),
        (
            graph.sparse_initializer,
            [tensor for tensor in graph.sparse_initializer if tensor.values.name in needed],
        ),
        (
            graph.value_info,
            [
                value
                for value in graph.value_info
                if value.name in needed - set(output_names) and value.HasField("type")
            ],
        ),
        (graph.output, outputs),
    ):
        copies = [_copy(value) for value in values]
        del field[:]
        field.extend(copies)


def _names_read(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names a node reads; of its subgraphs all names, be they their own or captured."""
    yield from node.input
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            yield from (output.name for output in graph.output)
            for inner in graph.node:
                yield from _names_read(inner)


def _describe(model: onnx.ModelProto, names: Sequence[str]) -> list[onnx.ValueInfoProto]:
    """Return type and shape of values, as the model states them or as inference finds out."""
    import onnx

    described = (*model.graph.value_info, *model.graph.output)
    known = {value.name: value for value in described if value.HasField("type")}
    if not all(name in known for name in names):
        inferred = onnx.shape_inference.infer_shapes(model).graph
        found = {value.name: value for value in inferred.value_info if value.HasField("type")}
        known = found | known
    missing = [name for name in names if name not in known]
    if missing:
        known |= _described_by_runtime(model, missing)
    return [known.get(name, onnx.ValueInfoProto(name=name)) for name in names]


def _described_by_runtime(
    model: onnx.ModelProto, names: Sequence[str]
) -> dict[str, onnx.ValueInfoProto]:
    """Types of values behind operators that the ONNX library does not know."""
    import onnx
    import onnxruntime

    probe = _copy(model)
    del probe.graph.output[:]
    probe.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = onnxruntime.InferenceSession(
            probe.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except Exception:  # ONNX Runtime's exceptions have no common base
        return {}  # custom operators: the application's runtime has them
    found = {}
    for value in session.get_outputs():
        kind = value.type.removeprefix("tensor(").removesuffix(")")
        element = {"float": "FLOAT", "double": "DOUBLE"}.get(kind, kind.upper())
        if element in dict(onnx.TensorProto.DataType.items()):
            found[value.name] = onnx.helper.make_tensor_value_info(
                value.name, onnx.TensorProto.DataType.Value(element), value.shape
            )
    return found


def _in_own_type(model: onnx.ModelProto, parameters: Mapping[str, Array]) -> dict[str, Array]:
    """Drop what brings parameters from their storage to the model's type; return the results."""
    graph = model.graph
    renamed: dict[str, str] = {}
    unscaled: dict[str, tuple[str, Array]] = {}
    scales: set[str] = set()
    values = dict(parameters)
    kept = []
    for node in graph.node:
        name = node.input[0] if node.input else ""
        made = list(node.output)
        if node.op_type == "Cast" and name in parameters and made == [f"{name}{OWN_TYPE_SUFFIX}"]:
            values[name] = _cast(node, name, parameters[name])
            renamed[made[0]] = name
        elif node.op_type == "Cast" and name in parameters and made == [f"{name}{UNSCALED_SUFFIX}"]:
            unscaled[made[0]] = name, _cast(node, name, parameters[name])
        elif node.op_type == "Mul" and name in unscaled and node.input[1] in parameters:
            name, array = unscaled.pop(name)
            values[name] = array * parameters[node.input[1]]
            renamed[made[0]] = name
            scales.add(node.input[1])
        else:
            kept.append(_copy(node))
    if unscaled or any(output.name in renamed for output in graph.output):
        return dict(parameters)
    inputs = [_copy(value) for value in graph.input if value.name not in scales]
    for field, left in ((graph.node, kept), (graph.input, inputs)):
        del field[:]
        field.extend(left)
    for node in graph.node:
        _rename(node, renamed)
    return values


def _cast(node: onnx.NodeProto, name: str, array: Array) -> Array:
    """What a Cast makes of a parameter.

    Raises:
        OdtpackError: ``value-out-of-range``.
    """
    from onnx import helper

    dtype = helper.tensor_dtype_to_np_dtype(node.attribute[0].i)
    with np.errstate(over="ignore"):
        result = array.astype(dtype)
    if not np.array_equal(np.isfinite(result), np.isfinite(array)):
        raise OdtpackError(
            "value-out-of-range",
            f"Parameter '{name}' has grown beyond what {dtype} holds.",
            hint="train with a lower learning rate, or from a float32 model",
        )
    return result


def _rename(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    node.input[:] = [names.get(name, name) for name in node.input]
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for output in graph.output:
                output.name = names.get(output.name, output.name)
            for inner in graph.node:
                _rename(inner, names)


def _embed(model: onnx.ModelProto, parameters: Mapping[str, Array]) -> None:
    """Turn the inputs that are parameters into initializers, and drop training metadata."""
    from onnx import numpy_helper

    graph = model.graph
    inputs = [_copy(value) for value in graph.input if value.name not in parameters]
    graph.initializer.extend(
        numpy_helper.from_array(parameters[value.name], value.name)
        for value in graph.input
        if value.name in parameters
    )
    del graph.input[:]
    graph.input.extend(inputs)
    model.ir_version = max(model.ir_version, _FIRST_IR_WITH_FREE_INITIALIZERS)
    entries = [_copy(e) for e in model.metadata_props if not e.key.startswith("odtpack.")]
    del model.metadata_props[:]
    model.metadata_props.extend(entries)


def _copy(message: _Message) -> _Message:
    # Emptying a repeated field invalidates what is taken from it.
    copied: _Message = type(message)()
    copied.CopyFrom(message)
    return copied
