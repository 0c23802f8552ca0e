"""Frozen weights stored in 8 bits or less."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np
import onnx_ir as ir

from odtpack.adapters.layers import Layer, find_layers, home_of
from odtpack.choices import BaseKind
from odtpack.errors import OdtpackError, some
from odtpack.graph import graphs
from odtpack.graph.graphs import LOOK_UP, Ops, mark_constant, redirect, typed
from odtpack.graph.inference import infer_shapes
from odtpack.model.exporters import known_names, matching
from odtpack.model.source import release_pages
from odtpack.passes.finishing import SMALLEST
from odtpack.passes.opsets import BLOCKS, to_blocks

# How numbers become codes of 8 or 4 bits, and how a graph makes numbers of them again.
#
# int8    w = scale[out] code                 one scale for each output, codes from -127 to 127
# int4    w = scale[out, block] code          codes from -8 to 7; the largest number is -8 scales
# nf4     w = scale[out, block] table[code]   16 quantiles of a normal distribution (Dettmers et
#   al.,
#                                             2023, QLoRA, appendix E)
#
# A block is 32 (nf4: 64) weights of one output that follow each other along the inputs, or fewer
# where that does not divide their number. With fewer than 16, scales would take so much that int8
# takes no more: a block of 8 makes it 8 bits for each weight.

NF4 = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip

_BLOCKS = {"int4": 32, "nf4": 64}
_SMALLEST_BLOCK = 16
_STORED = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
_LEAST = np.finfo(np.float32).tiny


@dataclasses.dataclass(frozen=True)
class Codes:
    """A matrix in few bits."""

    kind: BaseKind  # how
    values: np.ndarray  # INT8, INT4 or UINT4, of the matrix's shape
    # FLOAT: for int8 one for each output; else of the matrix's rank, with a number for each block
    # along the inputs.
    scales: np.ndarray
    axis: int  # axis of the inputs
    block: int  # weights that share a scale; 0 for all of an output


def _block(kind: BaseKind, size: int) -> int:
    """How many of the weights of an output share a scale; 0 where all do, as int8."""
    block = math.gcd(size, _BLOCKS.get(kind, 1))
    return block if block >= _SMALLEST_BLOCK else 0


def quantize(matrix: np.ndarray, kind: BaseKind, axis: int) -> Codes:
    """Codes of a matrix, rounding to nearest."""
    # matrix: Finite floating-point numbers, of two axes. kind: What to make of it. Where blocks
    # would have fewer than 16 weights it is int8. axis: Axis of the inputs.
    block = _block(kind, matrix.shape[axis])
    if not block:
        values, scales = to_int8(matrix, (axis,))
        return Codes("int8", values, scales.reshape(-1), axis, 0)
    rows = np.moveaxis(matrix, axis, 1).astype(np.float32)
    blocks = rows.reshape(rows.shape[0], -1, block)
    places = np.abs(blocks).argmax(axis=2, keepdims=True)
    extremes = np.take_along_axis(blocks, places, 2)
    if kind == "int4":
        scales = extremes / np.float32(-8)
        scales = np.where(np.abs(scales) < _LEAST, _LEAST, scales)
        found = np.clip(np.rint(blocks / scales), -8, 7).astype(ml_dtypes.int4)
    else:
        scales = np.maximum(np.abs(extremes), _LEAST)
        bounds = (NF4[1:] + NF4[:-1]) / 2
        found = np.searchsorted(bounds, blocks / scales).astype(ml_dtypes.uint4)
    values = np.ascontiguousarray(np.moveaxis(found.reshape(rows.shape), 1, axis))
    scales = np.ascontiguousarray(np.moveaxis(scales[..., 0], 1, axis))
    return Codes(kind, values, scales, axis, block)


def to_int8(array: np.ndarray, axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Codes from -127 to 127, and scales that all elements along some axes share."""
    largest = np.abs(array).max(axis=axes, keepdims=True).astype(np.float32)
    # What is all zero gets a scale, too; so does what would have a denormal one.
    scales = np.maximum(largest / np.float32(127), _LEAST)
    return np.clip(np.rint(array / scales), -127, 127).astype(np.int8), scales


def write(op: Ops, codes: Codes, values: ir.Value, scales: ir.Value) -> ir.Value:
    """Write what makes float32 numbers of stored codes and scales."""
    if codes.kind == "int8":
        return op.DequantizeLinear(values, scales, axis=1 - codes.axis)
    if codes.kind == "int4":
        return op.DequantizeLinear(values, scales, axis=codes.axis, block_size=codes.block)
    # Numbers of the codes first: there is no look-up by 4 bits. ONNX Runtime computes constants
    # before it runs, but for DequantizeLinear.
    numbers = op.DequantizeLinear(values, op.constant(np.float32(1)))
    numbers.type = scales.type
    table = op.constant(NF4)
    mark_constant(table)
    looked_up = op.Gather(table, op.Cast(numbers, to=int(ir.DataType.INT32)), axis=0)
    looked_up.type = scales.type
    split = [*codes.values.shape]
    split[codes.axis : codes.axis + 1] = [-1, codes.block]
    blocks = op.reshape(looked_up, *split)
    return op.reshape(op.Mul(blocks, op.unsqueeze(scales, codes.axis + 1)), *codes.values.shape)


# Stores the weights of frozen linear layers and look-up tables of a model in few bits.


class _Matrix(NamedTuple):
    """A frozen matrix: a layer's, a table's, or of both."""

    name: str
    source: ir.Value
    layer: Layer | None
    lookups: list[ir.Node]
    axis: int  # of its inputs
    kind: BaseKind  # how it is stored


def quantize_base(
    model: ir.Model,
    kind: BaseKind,
    trained: Sequence[str] = (),
    newest_opset: int = 21,
    remark: Callable[[str], None] = lambda _: None,
) -> ir.Model:
    """Store the matrices of linear layers, and look-up tables, as codes with scales."""
    # The codes are constants of the model, and no parameters. Everything that reads a weight reads
    # what its codes stand for, be it the layer, its gradient or DoRA's norms. A table that Gather
    # reads, tied to a layer or not, is stored as int8, since its rows are looked up before they are
    # unpacked.
    # model: As :func:`odtpack.model.loading.load_model` returns it; changed in place. kind:
    # ``int8``, ``int4`` or ``nf4``. trained: Patterns of parameters that stay as they are, for
    # training. newest_opset: The newest opset that the loading runtime knows. remark: Takes a
    # sentence about what is stored in more bits than that.
    # Returns the model, with shapes inferred.
    graph = model.graph
    matrices = list(_matrices(graph, kind, trained))
    narrow = [m.layer.name for m in matrices if m.layer and not m.lookups and m.kind != kind]
    few = any(each.kind != "int8" for each in matrices)
    if not matrices:
        raise OdtpackError(
            "base-not-used",
            f"the model has no frozen matrix to store as {kind}",
            hint=f"it needs one of {SMALLEST} elements or more that is not trained; leave --base "
            "out otherwise",
        )
    if narrow and not few:
        raise OdtpackError(
            "base-not-used",
            f"no matrix can be stored as {kind}, as none has a multiple of {_SMALLEST_BLOCK} "
            f"inputs: {some(narrow)}",
            hint="use --base int8",
        )
    opset = graph.opset_imports[""]
    if few and opset < BLOCKS and (newest_opset < BLOCKS or not to_blocks(graph)):
        what = f"weights of 4 bits need opset {BLOCKS}, and the model has {opset}"
        hint = "export the model with opset 21, choose a newer --onnxruntime, or --base int8"
        raise OdtpackError("base-needs-opset", what, hint=hint)
    if narrow:
        remark(
            f"{len(narrow)} {'matrices are' if narrow[1:] else 'matrix is'} stored as int8, as the "
            f"number of inputs is not a multiple of {_SMALLEST_BLOCK}: {some(narrow)}"
        )
    op, stored = Ops(graph, "base/"), Counter[str]()
    for each in matrices:
        tensor = each.source.const_value
        assert tensor is not None  # noqa: S101 - of each that was found
        array = tensor.numpy()
        if not np.isfinite(array).all():
            what = f"{each.name!r} holds infinity or NaN, which {kind} cannot store"
            hint = "leave --base out, or train it (--train)"
            raise OdtpackError("value-out-of-range", what, hint=hint)
        codes = quantize(array.astype(np.float32, copy=False), each.kind, each.axis)
        called = home_of(each.source, each.lookups[0], 0) if each.lookups else ""
        called = called or (each.layer.name if each.layer else each.name.removesuffix(".weight"))
        _replace(op, each.source, codes, each.lookups, called)
        release_pages(array)
        stored[each.kind] += array.size
    parts = (f"{count:,} weights as {how}" for how, count in stored.items())
    remark(f"stored inside the models: {' and '.join(parts)}")
    return infer_shapes(model)


def _matrices(graph: ir.Graph, kind: BaseKind, trained: Sequence[str]) -> Iterator[_Matrix]:
    """What can be stored as codes, in the order of the file."""
    known = known_names(graph)
    layers = {layer.source: layer for layer in find_layers(graph) if len(layer.shape) == 2}
    for name, source in graph.initializers.items():
        tensor, layer = source.const_value, layers.get(source)
        lookups = [node for node, i in source.uses() if node.op_type == "Gather" and i == 0]
        if tensor is None or tensor.dtype not in _STORED or tensor.size < SMALLEST:
            continue
        if len(tensor.shape) != 2 or not (layer or lookups):
            continue
        if any(matching(pattern, [name], known) for pattern in trained):
            continue
        if _is_all(source, layer, lookups):
            outputs_first = layer is None or layer.uses[0].outputs_first != layer.uses[0].swapped
            axis = int(outputs_first)
            bits8 = bool(lookups) or not _block(kind, tensor.shape.numpy()[axis])
            yield _Matrix(name, source, layer, lookups, axis, "int8" if bits8 else kind)


def _is_all(source: ir.Value, layer: Layer | None, lookups: Sequence[ir.Node]) -> bool:
    """Whether nothing else reads a weight."""
    known = {id(node) for node in lookups}
    for use in layer.uses if layer is not None else ():
        known |= {id(use.node), id(use.weight.producer())}
    direct = all(id(node) in known for node, _ in source.uses())
    return direct and not source.is_graph_output()


def _replace(
    op: Ops, source: ir.Value, codes: Codes, lookups: Sequence[ir.Node], layer: str
) -> None:
    """Put codes in the place of an initializer."""
    graph = op.graph
    values = _constant(graph, f"{layer}.weight_quantized", ir.tensor(codes.values))
    scales = _constant(graph, f"{layer}.weight_scale", ir.tensor(codes.scales))
    for node in lookups:
        with op.before(node):
            axis, ids = node.attributes.get_int("axis", 0), node.inputs[1]
            rows = op.cast(op.emit("Gather", [values, ids], axis=axis)[0], op.FLOAT)
            rows.type = ir.TensorType(op.FLOAT)
            factors = op.emit("Gather", [scales, ids], axis=0)[0]
            unpacked = _cast(op, op.Mul(rows, op.unsqueeze(factors, -1)), source)
        end = unpacked.producer()
        assert end is not None  # noqa: S101 - a Mul or a Cast
        end.metadata_props[LOOK_UP] = layer
        node.outputs[0].type = source.type or ir.TensorType(op.FLOAT)
        graphs.replace(node.outputs[0], unpacked, [node])
    readers = [*source.uses()]
    if readers:
        order = {id(node): place for place, node in enumerate(graph)}
        with op.before(min((node for node, _ in readers), key=lambda node: order[id(node)])):
            unpacked = _cast(op, write(op, codes, values, scales), source)
        redirect(readers, typed(unpacked, source))
    graph.initializers.pop(str(source.name))


def _cast(op: Ops, value: ir.Value, source: ir.Value) -> ir.Value:
    """Numbers in the type of what they replace."""
    value.type = ir.TensorType(ir.DataType.FLOAT)
    return op.cast(value, ir.DataType.FLOAT16) if source.dtype == ir.DataType.FLOAT16 else value


def _constant(graph: ir.Graph, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    value = ir.val(name, const_value=tensor)
    while value.name in graph.initializers:
        value.name = f"{value.name}_"
    tensor.name = value.name
    graph.register_initializer(value)
    mark_constant(value)
    return value
