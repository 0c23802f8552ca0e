"""Writes the trained model as ONNX or in ORT format."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import onnxruntime

from odtpack_runtime.apart import worker
from odtpack_runtime.checkpoint.format import DTYPE_CODES, DTYPES
from odtpack_runtime.checkpoint.parameters import Array
from odtpack_runtime.errors import OdtpackError, UnknownNameError, WrongTypeError
from odtpack_runtime.export import onnx_wire as wire
from odtpack_runtime.export.onnx_wire import Node
from odtpack_runtime.files.atomic import atomic_write, refuse_link
from odtpack_runtime.files.protobuf_wire import (
    BYTES,
    VARINT,
    MalformedError,
    Piece,
    bytes_field,
    fields,
    messages,
    name_of,
    number_field,
    size,
)
from odtpack_runtime.session.graph_signature import OWN_TYPE_SUFFIX, UNSCALED_SUFFIX, TensorSpec
from odtpack_runtime.session.model_file import ORT_IDENTIFIER, check_model_file
from odtpack_runtime.session.options import manifest_beside
from odtpack_runtime.session.session import first_line

if TYPE_CHECKING:
    from odtpack_runtime.package.manifest import Manifest, ParameterInfo

# Models in ORT format and back, by ONNX Runtime itself: it writes what it has loaded.
#
# Loading computes constants, and an untrusted model's may never end: commands use another process.


def is_ort_format(data: bytes) -> bool:
    """Whether a file's content is a model in ORT format: a flatbuffer of that identifier."""
    return data[4:8] == ORT_IDENTIFIER


def rewritten(data: bytes, kind: str, where: str, *, apart: bool = False) -> bytes:
    """Return a model in ``ONNX`` format, or in ``ORT`` with fusions that suit every processor."""
    # The nodes are those of the file: what a conversion to ORT format fused stays fused, and names
    # that it dropped are gone.
    # `apart`: whether another process loads it, with limits of time and memory.
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result"
        _ask("rewrite", data, apart=apart, out=str(out), kind=kind, where=where)
        return out.read_bytes()


def output_specs(data: bytes, where: str, *, apart: bool = False) -> list[TensorSpec]:
    """Return type and shape of a model's outputs as ONNX Runtime infers them."""
    # None of a model that it does not load.
    found = _ask("describe", data, apart=apart, where=where)
    return [TensorSpec(name, np.dtype(dtype), tuple(shape)) for name, dtype, shape in found]


def describe(model: str, where: str) -> list[tuple[str, str, list[int | str | None]]]:
    """:func:`output_specs` of a file in this process, as JSON has them."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        specs = [TensorSpec.of_node(node, where) for node in session.get_outputs()]
    except Exception:  # ONNX Runtime's exceptions have no common base
        return []
    return [(spec.name, spec.dtype.str, list(spec.shape)) for spec in specs]


def rewrite(model: str, out: str, kind: str, where: str) -> None:
    """Write a model in ``ONNX`` or ``ORT`` format in this process."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = (
        # No optimization: the model was optimized when it was converted.
        onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        if kind == "ONNX"
        else onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    )
    options.optimized_model_filepath = out
    options.add_session_config_entry("session.save_model_format", kind)
    options.log_severity_level = 3  # that the file suits this machine only is not so here
    try:
        onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's exceptions have no common base
        raise OdtpackError(
            "model-not-loadable" if kind == "ONNX" else "ort-conversion-failed",
            f"ONNX Runtime cannot write {where} in {kind} format: {first_line(error)}",
            where=where,
            hint="work with the .onnx files of the package",
        ) from error


def _ask(function: str, data: bytes, *, apart: bool, **arguments: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / f"model.{'ort' if is_ort_format(data) else 'onnx'}"
        model.write_bytes(data)
        if not apart:
            return globals()[function](str(model), **arguments)
        limits = worker.Limits.of([model])
        return worker.call(f"{__name__}:{function}", limits, model=str(model), **arguments)


# Write a plain inference model that carries the current parameters.

MAX_MODEL_SIZE = 2**31 - 2**20
"""Bytes: the 2 GiB of one protobuf message, less room for names and sizes."""

_FIRST_IR_WITH_FREE_INITIALIZERS = 4  # before, every initializer had to be an input too


def export_inference_model(
    eval_model: Path,
    parameters: Mapping[str, Array],
    destination: str | os.PathLike[str],
    output_names: Sequence[str],
    template: Callable[[], Template | None] = lambda: None,
    *,
    apart: bool = False,
) -> list[str]:
    """Cut the part of an evaluation model that computes some values, and embed its parameters.

    Returns the names of its inputs.
    """
    # `eval_model`: The evaluation model, `.onnx` or `.ort`. Of the latter only those values can be
    # outputs that the conversion to ORT format left in it.
    # `parameters`: values of the inputs that become initializers, in the type that the model
    # computes in.
    # `destination`: where the model goes, whole or not at all; in ORT format if its name ends in
    # `.ort`.
    # `output_names`: values that the evaluation model computes, in the order of the new model's
    # outputs.
    # `template`: finds the forward model, whose outputs the evaluation model need not compute.
    # `apart`: whether ONNX Runtime loads models in a process of its own, with limits of time and
    # memory.
    if isinstance(output_names, str) or not all(isinstance(name, str) for name in output_names):
        raise WrongTypeError("no-outputs", "The names of the outputs must be a list of names.")
    if not output_names or len(set(output_names)) != len(output_names):
        what = "An exported model needs at least one output, and each only once."
        hint = 'module.export_model_for_inferencing("inference.onnx", ["output"])'
        raise OdtpackError("no-outputs", what, hint=hint)
    try:
        model = _load(eval_model, apart=apart)
        if not model.computes(output_names) and (found := template()) is not None:
            whole = _load(found.path, found.fragments(parameters), apart=apart)
            if whole.computes(output_names):
                whole.keep_only(output_names, str(found.path))
                # Settings of inputs change the evaluation model's.
                if whole.data().items() <= model.data(parameters).items():
                    model, parameters = whole, {}
        model.keep_only(output_names, str(eval_model))
        values = _in_own_type(model, parameters)
        pieces = model.pieces(values)
        if not all(model.outputs.values()):
            # Type and shape of outputs about which the model says nothing; a bare name will do.
            for spec in output_specs(b"".join(pieces), str(eval_model), apart=apart):
                if not model.outputs[spec.name] and spec.dtype in DTYPE_CODES:
                    described = wire.value_info(spec.name, spec.dtype, spec.shape)
                    model.outputs[spec.name] = described
            pieces = model.pieces(values)
    except (MalformedError, RecursionError) as error:
        reason = str(error) if isinstance(error, MalformedError) else "it nests too deeply"
        _not_loadable(eval_model, reason, error)
    check_size(pieces)
    if Path(destination).suffix == ".ort":
        pieces = [rewritten(b"".join(pieces), "ORT", str(destination), apart=apart)]
    refuse_link(Path(destination))
    with atomic_write(destination) as stream:
        stream.writelines(pieces)
    return [name for name in model.inputs if name not in values]


@dataclass(frozen=True)
class Template:
    """The forward model of a package, which lacks its parameters, with the manifest."""

    path: Path
    manifest: Manifest

    @classmethod
    def beside(cls, model: Path) -> Template | None:
        """Return the template in the folder of a training model, if there is one."""
        from odtpack_runtime.package.manifest import Manifest

        content = manifest_beside(model)
        if content is None:
            return None
        manifest = Manifest.from_json(json.dumps(content).encode(), str(model.parent))
        file = manifest.files.inference_template
        return None if file is None else cls(model.with_name(Path(file.path).name), manifest)

    def fragments(self, parameters: Mapping[str, Array]) -> Iterator[Piece]:
        """Yield what completes the template where it is appended."""
        known = {item.name: item for item in self.manifest.parameters}
        for name in () if self.manifest.inference is None else self.manifest.inference.parameters:
            yield from fragment(name, _in_model_type(known[name], known, parameters))


def fragment(name: str, array: Array) -> list[Piece]:
    """Return a ``ModelProto`` whose graph holds one initializer and nothing else."""
    tensor = bytes_field(wire.INITIALIZERS, wire.tensor_proto(name, array))
    return bytes_field(wire.MODEL_GRAPH, tensor)


def _in_model_type(
    item: ParameterInfo, known: Mapping[str, ParameterInfo], parameters: Mapping[str, Array]
) -> Array:
    array = _checked_template(item, parameters)
    if item.scale is not None:
        return array.astype(np.float32) * _checked_template(known[item.scale], parameters)
    if item.model_dtype is not None:
        return cast_parameter(item.name, array, np.dtype(item.model_dtype))
    return array


def _checked_template(item: ParameterInfo, parameters: Mapping[str, Array]) -> Array:
    array = parameters.get(item.name)
    if array is None or (array.dtype.name, array.shape) != (item.dtype, item.shape):
        raise OdtpackError(
            "model-mismatch",
            f"The package has a parameter '{item.name}' that is {item.dtype}{list(item.shape)}, "
            + ("and there is none." if array is None else f"not {array.dtype}{list(array.shape)}."),
            hint="pass the parameters of a checkpoint that was trained from this package",
        )
    return array


def check_size(pieces: Sequence[Piece]) -> None:
    """Refuse a model that one ONNX file does not hold."""
    if size(pieces) > MAX_MODEL_SIZE:
        raise OdtpackError(
            "model-too-large",
            f"The model with its parameters has {size(pieces)} bytes, and one ONNX file holds "
            f"{MAX_MODEL_SIZE}.",
        )


@dataclass
class _Model:
    before: list[Piece] = field(default_factory=list)  # fields before the graph
    after: list[Piece] = field(default_factory=list)  # fields after it, without training metadata
    # other fields of the graph, by number
    graph: dict[int, list[Piece]] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    # the inputs by name; so are outputs, of which those without a type are empty
    inputs: dict[str, Piece] = field(default_factory=dict)
    outputs: dict[str, Piece] = field(default_factory=dict)
    values: dict[str, Piece] = field(default_factory=dict)  # what is known of other values
    # constants, by number of their field and name
    initializers: dict[tuple[int, str], Piece] = field(default_factory=dict)

    def read_graph(self, graph: memoryview) -> None:
        for found in fields(graph):
            body = graph[found.body : found.end]
            match found.number:
                case wire.NODES:
                    self.nodes.append(Node.read(body))
                case wire.INPUTS:
                    self.inputs[wire.value_name(body)] = body
                case wire.OUTPUTS:
                    self.outputs[wire.value_name(body)] = body
                case wire.VALUE_INFO:
                    self.values[wire.value_name(body)] = body
                case wire.INITIALIZERS:
                    self.initializers[found.number, wire.tensor_name(body)] = body
                case wire.SPARSE:
                    self.initializers[found.number, wire.sparse_name(body)] = body
                case _:
                    piece = graph[found.start : found.end]
                    self.graph.setdefault(found.number, []).append(piece)

    def computes(self, names: Iterable[str]) -> bool:
        """Whether nodes compute all of some values."""
        return set(names) <= {name for node in self.nodes for name in node.outputs}

    def data(self, parameters: Collection[str] = ()) -> dict[str, list[memoryview]]:
        """Type and shape of every input that is no parameter."""
        return {
            name: messages(memoryview(value), wire.VALUE_TYPE)
            for name, value in self.inputs.items()
            if name not in parameters
        }

    def keep_only(self, output_names: Sequence[str], where: str) -> None:
        """Leave only what the named values need, and make them the outputs."""
        producers = {
            name: index for index, node in enumerate(self.nodes) for name in node.outputs if name
        }
        for name in output_names:
            if name not in producers:
                what = f"The evaluation model computes no value '{name}'."
                hint = f"its outputs are {', '.join(self.outputs)}"
                raise UnknownNameError("unknown-output", what, where=where, hint=hint)
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
                wanted += self.nodes[index].names_read()
        known = self.values | self.outputs
        self.nodes = [self.nodes[index] for index in sorted(kept)]
        self.inputs = {name: value for name, value in self.inputs.items() if name in needed}
        self.initializers = {
            key: tensor for key, tensor in self.initializers.items() if key[1] in needed
        }
        self.values = {
            name: value
            for name, value in self.values.items()
            if name in needed and name not in output_names
        }
        self.outputs = {name: known.get(name, b"") for name in output_names}

    def pieces(self, parameters: Mapping[str, Array]) -> list[Piece]:
        """Return the model's bytes: inputs that are parameters have become initializers."""
        tensors = [
            bytes_field(wire.INITIALIZERS, wire.tensor_proto(name, parameters[name]))
            for name in self.inputs
            if name in parameters
        ]
        own: dict[int, list[Piece]] = {number: list(found) for number, found in self.graph.items()}
        for (number, _), tensor in self.initializers.items():
            own.setdefault(number, []).extend(bytes_field(number, [tensor]))
        own.setdefault(wire.INITIALIZERS, []).extend(piece for each in tensors for piece in each)
        bare = {
            name: value or b"".join(bytes_field(1, [name.encode()]))
            for name, value in self.outputs.items()
        }
        free = {name: value for name, value in self.inputs.items() if name not in parameters}
        for number, values in (
            (wire.NODES, [node.data for node in self.nodes]),
            (wire.INPUTS, free.values()),
            (wire.OUTPUTS, bare.values()),
            (wire.VALUE_INFO, self.values.values()),
        ):
            own[number] = [piece for value in values for piece in bytes_field(number, [value])]
        graph = [piece for number in sorted(own) for piece in own[number]]
        return [*self.before, *bytes_field(wire.MODEL_GRAPH, graph), *self.after]


def _load(path: Path, more: Iterable[Piece] = (), *, apart: bool) -> _Model:
    """Read a model, to whose bytes more are appended."""
    try:
        data = path.read_bytes()
    except OSError as error:
        _not_loadable(path, error.strerror or str(error), error)
    check_model_file(path)
    converted = is_ort_format(data)
    if converted:
        data = rewritten(data, "ONNX", str(path), apart=apart)
    view = memoryview(b"".join([data, *more]))
    model = _Model()
    graphs: list[memoryview] = []
    version = 0
    for found in fields(view):
        body = view[found.body : found.end]
        match found.number:
            case wire.MODEL_GRAPH if found.kind == BYTES:
                graphs.append(body)
            case wire.MODEL_IR_VERSION if found.kind == VARINT:
                version = found.value
            case wire.MODEL_METADATA if name_of(body, 1).startswith("odtpack."):
                pass
            case wire.MODEL_VERSION if converted:
                pass
            case _:
                (model.after if graphs else model.before).append(view[found.start : found.end])
    if not graphs:
        _not_loadable(path, "it has no graph")
    for graph in graphs:  # several are merged, as protobuf does
        model.read_graph(graph)
    version = max(version, _FIRST_IR_WITH_FREE_INITIALIZERS)
    model.before.insert(0, number_field(wire.MODEL_IR_VERSION, version))
    if converted:
        _tidy(model)
    return model


def _tidy(model: _Model) -> None:
    """ONNX Runtime imports every domain that it knows, and leaves the graph without a name."""
    used = {name_of(node.data, wire.NODE_DOMAIN) for node in model.nodes} | {""}
    for pieces in (model.before, model.after):
        pieces[:] = [piece for piece in pieces if _is_used(memoryview(piece), used)]
    model.graph[wire.GRAPH_NAME] = bytes_field(wire.GRAPH_NAME, [b"inference"])


def _is_used(piece: memoryview, domains: Iterable[str]) -> bool:
    """Whether a field of a model is anything but the opset of a domain that no node is of."""
    (entry,) = fields(piece)
    return entry.number != wire.MODEL_OPSETS or (
        name_of(piece[entry.body : entry.end], 1) in domains
    )


def _in_own_type(model: _Model, parameters: Mapping[str, Array]) -> dict[str, Array]:
    """Drop what brings parameters from their storage to the model's type; return the results."""
    renamed: dict[str, str] = {}
    unscaled: dict[str, tuple[str, Array]] = {}
    scales: set[str] = set()
    values = dict(parameters)
    kept: list[Node] = []
    for node in model.nodes:
        name = node.inputs[0] if node.inputs else ""
        made = node.outputs
        if node.op_type == "Cast" and name in parameters and made == [f"{name}{OWN_TYPE_SUFFIX}"]:
            values[name] = _cast(node, name, parameters[name])
            renamed[made[0]] = name
        elif node.op_type == "Cast" and name in parameters and made == [f"{name}{UNSCALED_SUFFIX}"]:
            unscaled[made[0]] = name, _cast(node, name, parameters[name])
        elif node.op_type == "Mul" and name in unscaled and node.inputs[1] in parameters:
            name, array = unscaled.pop(name)
            values[name] = array * parameters[node.inputs[1]]
            renamed[made[0]] = name
            scales.add(node.inputs[1])
        else:
            kept.append(node)
    if unscaled or any(name in renamed for name in model.outputs):
        return dict(parameters)
    if renamed:
        model.nodes = [
            Node.read(memoryview(b"".join(wire.renamed(node.data, renamed)))) for node in kept
        ]
    model.inputs = {name: value for name, value in model.inputs.items() if name not in scales}
    return values


def _cast(node: Node, name: str, array: Array) -> Array:
    dtype = DTYPES.get(node.integer("to") or 0)
    if dtype is None:
        raise MalformedError(f"'{name}' is cast to no type that numpy has")
    return cast_parameter(name, array, dtype)


def cast_parameter(name: str, array: Array, dtype: np.dtype[np.generic]) -> Array:
    """Convert a parameter, rounding to nearest, ties to even."""
    with np.errstate(over="ignore"):
        result = array.astype(dtype)
    if not np.array_equal(np.isfinite(result), np.isfinite(array)):
        raise OdtpackError("value-out-of-range", f"Parameter '{name}' exceeds what {dtype} holds.")
    return result


def _not_loadable(path: Path, reason: str, cause: BaseException | None = None) -> NoReturn:
    what = f"{path} is not a readable ONNX model: {reason}."
    hint = "export needs the eval_model.onnx or eval_model.ort of the package"
    raise OdtpackError("model-not-loadable", what, where=str(path), hint=hint) from cause
