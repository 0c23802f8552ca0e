"""Makes a finished model small: what a runtime can find out itself is not written down.

- Generated names become short: most bytes of a training graph are names, and each is written
  once where a value is made and again wherever it is read. Names of inputs and outputs stay,
  and so do all names of values of the evaluation model, which a user may export by.
- Types and shapes of values go where shape inference finds the same.
- Attributes go that have their default value; doc strings and exporters' notes go.
- Equal constants are stored once. Large ones of small whole numbers are stored in bytes, and
  expanded by nodes that ONNX Runtime executes once, when it loads the model.

None of it changes what a runtime executes.
"""

from __future__ import annotations

import functools
import itertools
import string
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import onnx.defs
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from odtpack.graph.graphs import Ops, defined, subgraphs
from odtpack.graph.inference import NodeInference

# Bytes from which on a constant is worth the nodes that expand it.
_LARGE_CONSTANT = 512
# Bytes up to which equal constants are looked for; beyond, they are weights.
_LARGEST_COMPARED = 1 << 20

_NOWHERE = 255  # the row of a column without a one
_FLOATS = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE}
_LETTERS = string.ascii_letters
_CHARACTERS = string.ascii_letters + string.digits


def compact(model: ir.Model, *, keep_names: bool) -> ir.Model:
    """Make a finished model small."""
    # model: In topological order; changed in place, and returned. keep_names: Keep the names of
    # nodes and values, and constants as they are.
    common_passes.ClearMetadataAndDocStringPass()(model)
    common_passes.DeduplicateInitializersPass(size_limit=_LARGEST_COMPARED)(model)
    graphs = list(all_graphs(model.graph))
    # What exporters noted of values onnx-ir's pass leaves. It would be written as a description
    # without a type, which the ONNX checker refuses.
    for graph in graphs:
        for value in defined(graph):
            value.metadata_props.clear()
    _drop_defaults(model.graph, graphs)
    if not keep_names:
        _narrow_constants(model.graph)
        _shorten_names(model.graph, graphs)
    drop_types(model.graph)
    return model


def _drop_defaults(graph: ir.Graph, graphs: Sequence[ir.Graph]) -> None:
    """Drop attributes that say what the operator's specification says without them."""
    version = graph.opset_imports[""]
    for inner in graphs:
        for node in inner:
            if node.domain or not node.attributes:
                continue
            defaults = _defaults(node.op_type, version)
            for name, attribute in list(node.attributes.items()):
                if name in defaults and defaults[name] == (attribute.type, attribute.value):
                    del node.attributes[name]


def all_graphs(graph: ir.Graph) -> Iterator[ir.Graph]:
    """A graph and the graphs inside it, outermost first."""
    yield graph
    for node in graph:
        for inner in subgraphs(node):
            yield from all_graphs(inner)


@functools.cache
def _defaults(op_type: str, version: int) -> dict[str, tuple[ir.AttributeType, Any]]:
    """Type and default value of the attributes of an ai.onnx operator that have one."""
    if not onnx.defs.has(op_type, version, ""):
        return {}
    schema = onnx.defs.get_schema(op_type, version, "")
    found = {}
    for name, attribute in schema.attributes.items():
        if attribute.default_value.type:  # else there is none
            default = ir.serde.deserialize_attribute(attribute.default_value)
            if isinstance(default, ir.Attr):
                found[name] = (default.type, default.value)
    return found


def _narrow_constants(graph: ir.Graph) -> None:
    """Store large constants of small whole numbers in bytes."""
    outputs, found = set(graph.outputs), {}
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is None or tensor.dtype not in _FLOATS or tensor.nbytes < _LARGE_CONSTANT:
            continue
        if value in outputs or any(node.graph is not graph for node in value.consumers()):
            continue
        array = tensor.numpy()
        with np.errstate(invalid="ignore"):
            narrow = array.astype(np.uint8)
        # Bytes are compared: of a negative zero the sign would be lost.
        if narrow.astype(array.dtype).tobytes() == array.tobytes():
            found[value] = narrow, tensor.dtype
    if not found:
        return
    op = Ops(graph)
    for value, (narrow, dtype) in found.items():
        with op.before(graph[0]):
            value.replace_all_uses_with(_expanded(op, narrow, dtype))
        graph.initializers.pop(str(value.name))


def _expanded(op: Ops, narrow: np.ndarray, dtype: ir.DataType) -> ir.Value:
    """Nodes that expand an array of bytes."""
    # A matrix of zeros and ones with at most one of them in each column, as gradients of
    # convolutions and pools have it, is known by the row of each column's one.
    for axis in (0, 1):
        length = narrow.shape[axis] if narrow.ndim == 2 else _NOWHERE
        if length < _NOWHERE and narrow.max() == 1 and narrow.sum(axis, np.int64).max() <= 1:
            place = np.where(narrow.any(axis), narrow.argmax(axis), _NOWHERE).astype(np.uint8)
            index = op.Cast(op.constant(np.expand_dims(place, axis)), to=ir.DataType.INT32)
            rows = op.constant(np.expand_dims(np.arange(length, dtype=np.int32), 1 - axis))
            return op.cast(op.Equal(index, rows), dtype)
    return op.cast(op.constant(narrow), dtype)


def _shorten_names(graph: ir.Graph, graphs: Sequence[ir.Graph]) -> None:
    """Name values a, b, c in the order of the file, and nodes after their first output."""
    kept = {value.name for value in (*graph.inputs, *graph.outputs)}
    # a, b, ..., Z, aa, ab, ..., a0, ...: a letter, then letters and digits.
    every = (
        first + "".join(rest)
        for length in itertools.count()
        for first in _LETTERS
        for rest in itertools.product(_CHARACTERS, repeat=length)
    )
    names = (name for name in every if name not in kept)
    outputs = set(graph.outputs)
    for inner in graphs:
        # Initializers first: they are read most, and the first names are the shortest.
        initializers = [v for v in inner.initializers.values() if v not in outputs]
        inner.initializers.clear()
        for value in initializers:
            value.name = next(names)
            if value.const_value is not None:
                value.const_value.name = value.name
            inner.initializers.add(value)
        for value in inner.inputs if inner is not graph else ():
            value.name = next(names)
        for node in inner:
            for value in node.outputs:
                if value.name and value not in outputs:
                    value.name = next(names)
            node.name = next((value.name for value in node.outputs if value.name), None)


def drop_types(graph: ir.Graph) -> None:
    """Drop types and shapes of values that inference without data propagation finds."""
    for value in _inferred(graph):
        value.type = value.shape = None


@contextmanager
def inferred_left_out(graph: ir.Graph) -> Iterator[None]:
    """Leave out for a while what :func:`compact` drops of types and shapes."""
    known = [(value, value.type, value.shape) for value in _inferred(graph)]
    try:
        for value, _, _ in known:
            value.type = value.shape = None
        yield
    finally:
        for value, dtype, shape in known:
            value.type, value.shape = dtype, shape


def _inferred(main: ir.Graph) -> list[ir.Value]:
    """Values whose types and shapes a runtime finds out itself."""
    # ONNX Runtime infers at least as much; what only the packager knows stays. A value's type may
    # go if it follows from those of its node's inputs: each of these is in the file, or follows in
    # the same way.
    outputs, graphs = set(main.outputs), list(all_graphs(main))
    inference = NodeInference(dict(main.opset_imports))
    values = [value for graph in graphs for value in graph.initializers.values()]
    for graph in graphs:
        for node in graph:
            for value, found in zip(node.outputs, inference.outputs(node), strict=True):
                if value in outputs or found is None:
                    continue
                dtype, dims = found
                shape = value.shape
                covered = shape is None or (
                    dims is not None
                    and len(dims) == shape.rank()
                    and all(a is None or a == b for a, b in zip(_dims(shape), dims, strict=True))
                )
                if value.type == ir.TensorType(dtype) and covered:
                    values.append(value)
    return values


def _dims(shape: ir.Shape) -> Iterator[int | str | None]:
    for dim in shape:
        name = dim if isinstance(dim, int) else dim.value
        # Inference makes such names up for sizes that it does not know.
        yield None if isinstance(name, str) and name.startswith("unk__") else name
