"""Where a model comes from: a file, or memory; and checks of it. Its large tensors are not copied.

A model of gigabytes is mostly initializers. Whatever looks at its structure (the checker,
shape inference) is given a message in which they are empty; their values are views of the
file, mapped into memory, or of what the caller holds.
"""

from __future__ import annotations

import dataclasses
import graphlib
import math
import mmap
from pathlib import Path
from typing import Any, Final

import google.protobuf.message
import numpy as np
import onnx
import onnx.numpy_helper
import onnx_ir as ir

from odtpack import targets
from odtpack.errors import OdtpackError, model_not_readable, not_onnx
from odtpack.model import exporters, external_data
from odtpack.passes import opsets
from odtpack_runtime.files.protobuf_wire import not_text, tensors
from odtpack_runtime.package.records import MAX_ELEMENTS

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

    def check(self) -> None:
        """Check everything about the model that needs no shapes, before anything reads it.

        Raises:
            OdtpackError: It is damaged, or too large where functions are inlined.
        """
        proto, where = self.proto, self.where
        check_functions(proto, where)
        opset = next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), None)
        if opset is None:
            raise OdtpackError("no-opset", "the model imports no standard operators", where=where)
        targets.lowest_target(targets.MIN_OPSET if opset in opsets.CONVERTED else opset)
        check_texts(proto, where)
        try:
            if proto.ByteSize() < onnx.checker.MAXIMUM_PROTOBUF:
                onnx.checker.check_model(proto)
        except (onnx.checker.ValidationError, ValueError) as error:
            # The second: it cannot be parsed.
            first = str(error).strip().splitlines()[0]
            raise OdtpackError(
                "invalid-model",
                f"the ONNX checker refuses the model: {first}",
                where=where,
                hint="python -m onnx.checker, or onnx.checker.check_model(), says more",
            ) from None
        if not proto.graph.output:
            raise OdtpackError("no-output", "the model's graph has no output", where=where)
        for info in (*proto.graph.input, *proto.graph.output):
            dims = info.type.tensor_type.shape.dim
            if math.prod(max(1, dim.dim_value) for dim in dims) > MAX_ELEMENTS:
                shape = ", ".join(dim.dim_param or str(dim.dim_value or "?") for dim in dims)
                raise OdtpackError(
                    "invalid-model",
                    f"{info.name!r} has the shape [{shape}], and at most 2^40 elements are allowed",
                    where=where,
                    hint="export the model with a smaller axis, or one whose size is open",
                )
        for sparse in proto.graph.sparse_initializer:
            raise OdtpackError(
                "sparse-initializer",
                f"initializer {sparse.values.name!r} is sparse, which odtpack does not read",
                where=where,
            )
        for tensor in tensors(proto):
            check_bytes(tensor, where)

    def model(self) -> ir.Model:
        """The model with the values of its large initializers.

        Raises:
            OdtpackError: It is damaged (``invalid-model``).
        """
        try:
            model = ir.from_proto(self.proto)
        except ir.serde.SerdeError as error:
            raise OdtpackError(
                "invalid-model",
                f"the model is damaged: {str(error).splitlines()[0]}",
                where=self.where,
            ) from error
        for name, array in self.arrays.items():
            value = model.graph.initializers[name]
            value.const_value = ir.Tensor(array, name=name)
            value.shape = ir.Shape(array.shape)
        return model


def open_model(model: ModelLike) -> Source:
    """Open a model; what it is has not been checked, but that its tensors are complete."""
    if isinstance(model, ir.Model):
        return _from_ir(model)
    if isinstance(model, onnx.ModelProto):
        external_data.require_none(model)
        try:
            proto, arrays = _parse(memoryview(model.SerializeToString()), _IN_MEMORY)
        except (ValueError, google.protobuf.message.EncodeError):  # more than 2 GB
            proto, arrays = onnx.ModelProto(), {}
            proto.CopyFrom(model)
        return Source(proto, _IN_MEMORY, arrays)
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
    for tensor, array in external_data.load_beside(proto, path, _is_in_place, map_file):
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
    light, bodies = external_data.detach(content)
    proto = onnx.ModelProto()
    proto.ParseFromString(light)
    arrays: dict[str, np.ndarray] = {}
    for index, body in bodies.items():
        tensor = proto.graph.initializer[index]
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


def _from_ir(model: ir.Model) -> Source:
    light = external_data.load_into(model.clone())
    arrays: dict[str, np.ndarray] = {}
    for name, value in light.graph.initializers.items():
        tensor = value.const_value
        if (
            tensor is not None
            and tensor.dtype in _IN_PLACE
            and tensor.nbytes >= external_data.LEAST
        ):
            arrays[name] = tensor.numpy()
            value.const_value = ir.tensor(np.empty(0, tensor.dtype.numpy()), name=name)
    proto = ir.to_proto(light)
    external_data.require_none(proto)
    return Source(proto, _IN_MEMORY, arrays)


def check_texts(proto: onnx.ModelProto, where: str) -> None:
    """Check that every name in a model is text, and each such attribute of standard operators."""
    for text in not_text(proto):
        raise OdtpackError(
            "invalid-model",
            f"the model is damaged: it holds text that is not UTF-8, {text[:60]!r}",
            where=where,
        )


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


# What inlining a model's functions will produce: counted before it is done.
#
# A function that calls another twice doubles it, level by level: forty levels in four kilobytes
# make 10^12 nodes.

_ALWAYS_ALLOWED: Final = 10_000
_TIMES_STORED: Final = 100
"""How many times the nodes of a file inlining may produce. A layer that is stored once and called
for each layer of a deep network makes 100 of one."""

_Name = tuple[str, str, str]


def check_functions(proto: onnx.ModelProto, where: str) -> None:
    """Check that inlining makes no more nodes than a file of this size can mean."""
    if not proto.functions:
        return
    bodies = {(_domain(f.domain), f.name, getattr(f, "overload", "")): f for f in proto.functions}
    calls: dict[_Name, list[_Name]] = {}
    sizes: dict[_Name, int] = {}
    for name, function in bodies.items():
        sizes[name], calls[name] = _count(function.node, bodies)
    stored, called = _count(proto.graph.node, bodies)
    allowed = max(_ALWAYS_ALLOWED, _TIMES_STORED * (stored + sum(sizes.values())))
    total: dict[_Name, int] = {}
    try:
        for name in graphlib.TopologicalSorter(calls).static_order():  # callees first
            total[name] = sizes[name] + sum(total[each] for each in calls[name])
    except graphlib.CycleError as error:
        raise OdtpackError(
            "bad-function", f"function {error.args[1][0][1]!r} of the model calls itself",
            where=where,
        ) from None  # fmt: skip
    made = stored + sum(total[each] for each in called)
    if made > allowed:
        shown = f"{made:,}" if made < 10**12 else f"2^{made.bit_length() - 1}"
        raise OdtpackError(
            "functions-too-large",
            f"the functions of the model call each other so often that the graph would have "
            f"{shown} nodes, and {allowed:,} are allowed for a file of its size",
            where=where,
        )


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _count(nodes: object, bodies: dict[_Name, onnx.FunctionProto]) -> tuple[int, list[_Name]]:
    """The number of nodes, those of subgraphs included, and the functions that they call."""
    count, called, waiting = 0, list[_Name](), [nodes]
    while waiting:
        for node in waiting.pop():  # type: ignore[attr-defined]
            count += 1
            name = _domain(node.domain), node.op_type, getattr(node, "overload", "")
            if name in bodies:
                called.append(name)
            for attribute in node.attribute:
                waiting += [graph.node for graph in (attribute.g, *attribute.graphs) if graph.node]
    return count, called
