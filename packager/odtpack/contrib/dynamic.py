"""Products with weights of 8 bits, as ``onnxruntime.quantization.quantize_dynamic`` writes them.

They round what they read while they run, and stay in the forward pass. Beside each stands its twin
of float32 numbers, which the gradient passes (see :func:`odtpack.autodiff.backward.stand_in`).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.backward import has_stand_in, stand_in
from odtpack.autodiff.context import Context
from odtpack.contrib.table import Outputs, decomposition, known_rank, not_covered
from odtpack.graph.graphs import constant, dims_of, maker, mark_constant, producer, replace, typed
from odtpack.graph.ops import Ops

PRODUCTS = frozenset({"ConvInteger", "MatMulInteger"})
_AXIS_OPSET = 13  # of DequantizeLinear with a scale for each of several slices


@decomposition("DynamicQuantizeLSTM")
def dynamic_quantize_lstm(ctx: Context) -> Outputs | None:
    """Itself beside an LSTM: W and R are [directions, in, 4 hidden], a scale for each of either."""
    op, node = ctx.op, ctx.node
    given = [ctx.maybe_x(i) for i in range(12)]
    x, codes, (scales, zeros) = ctx.x(), given[1:3], (given[8::2], given[9::2])
    if has_stand_in(node):
        return None
    if any(_unknown(value) for value in (*codes, *scales, *zeros)):
        return not_covered(ctx, "its weights are not stored in the model")
    if known_rank(x) is None:
        return None  # until what is before it is known
    if [known_rank(value) for value in (x, *codes)] != [3, 3, 3]:
        return not_covered(ctx, "its input and weights do not have three axes")
    weights = [_numbers(op, *each, 0) for each in zip(codes, scales, zeros, strict=True)]
    operands = [x, *(op.transpose(w, 0, 2, 1) for w in weights), *given[3:8]]
    while operands[-1] is None:
        operands.pop()
    settings = {key: each.value for key, each in node.attributes.items()}
    actual = op.again(node, node.inputs)
    maker(actual[0]).name = node.name
    exact = op.emit("LSTM", operands, outputs=len(node.outputs), **settings)
    steps, batch, *_ = dims_of(x) or ()
    directions, hidden = (dims_of(ctx.x(2)) or ())[:2]
    state = (directions, batch, hidden)
    for place, value in enumerate(node.outputs):
        value.type = ir.TensorType(ir.DataType.FLOAT)
        value.shape = ir.Shape(state if place else (steps, directions, batch, hidden))
    return [stand_in(op, *pair) for pair in zip(actual, exact, strict=True)]


@decomposition("DynamicQuantizeMatMul")
def dynamic_quantize_matmul(ctx: Context) -> Outputs | None:
    """A B + bias, with inputs A, B, B's scale, B's zero point and bias."""
    op, zero, bias = ctx.op, ctx.maybe_x(3), ctx.maybe_x(4)
    codes, scale, point = op.emit("DynamicQuantizeLinear", [ctx.x()], outputs=3)
    codes.type = point.type = ir.TensorType(ir.DataType.UINT8)
    product = op.MatMulInteger(codes, ctx.x(1), point, *([] if zero is None else [zero]))
    product.type = ir.TensorType(ir.DataType.INT32)
    result = op.Mul(op.cast(product, ir.DataType.FLOAT), op.Mul(scale, ctx.x(2)))
    return result if bias is None else op.Add(result, bias)


def pass_straight_through(op: Ops, products: Iterable[ir.Node]) -> bool:
    """Put a twin beside each product of integers that is cast and scaled."""
    return bool(sum(_product(op, node) for node in products if not node.domain))


def _product(op: Ops, node: ir.Node) -> bool:
    """Mul(Cast(MatMulInteger(q, W, z, zero)), Mul(s, scale)) with DynamicQuantizeLinear(x)."""
    codes, weight, point, zero = [*node.inputs, None, None][:4]
    source = producer(codes, "DynamicQuantizeLinear")
    cast = _only_reader(node.outputs[0], "Cast")
    scaled = None if cast is None else _only_reader(cast.outputs[0], "Mul")
    if source is None or cast is None or scaled is None or point is not source.outputs[2]:
        return False
    factors = next((v for v in scaled.inputs if v is not cast.outputs[0]), None)
    scales = producer(factors, "Mul")
    if scales is None or source.outputs[1] not in scales.inputs:
        return False
    scale = next((v for v in scales.inputs if v is not source.outputs[1]), None)
    unknown = (zero is not None and _unknown(zero)) or _unknown(scale) or _unknown(weight)
    if unknown or weight is None or scale is None:
        return False
    conv, sizes = node.op_type == "ConvInteger", dims_of(scale)
    if conv and sizes not in ((), (1,)):
        return False
    with op.after(scaled):
        numbers = _numbers(op, weight, scale, zero, 0 if conv else (known_rank(weight) or 0) - 1)
        settings = {key: each.value for key, each in node.attributes.items()}
        kind = node.op_type.removesuffix("Integer")
        (exact,) = op.emit(kind, [source.inputs[0], numbers], **settings)
        old = scaled.outputs[0]
        new = stand_in(op, typed(exact, old), exact)
    replace(old, new, [])
    old.name = op.fresh_name(f"{new.name}.rounded")
    maker(new).replace_input_with(0, old)
    return True


def _only_reader(value: ir.Value, op_type: str) -> ir.Node | None:
    readers = [*value.consumers()]
    alone = len(readers) == 1 and readers[0].op_type == op_type and not value.is_graph_output()
    return readers[0] if alone else None


def _unknown(value: ir.Value | None) -> bool:
    return constant(value) is None


def _numbers(
    op: Ops, codes: ir.Value | None, scale: ir.Value | None, zero: ir.Value | None, axis: int
) -> ir.Value:
    """What codes stand for; scales and zero points have the axes of the codes from one on."""
    assert codes is not None and scale is not None  # noqa: S101, PT018 - the callers have looked
    rank, sizes = known_rank(codes) or 0, dims_of(scale) or ()
    for value in (scale, zero):
        if value is not None:
            mark_constant(value, setting=True)

    def spread(value: ir.Value) -> ir.Value:
        dims = dims_of(value) or ()
        if not dims or rank == axis + 1:
            return value
        gaps = rank - axis - len(dims)
        return op.reshape(value, dims[0], *[1] * gaps, *dims[1:])  # type: ignore[arg-type]

    same = zero is None or dims_of(zero) == sizes
    if same and (sizes in ((), (1,)) or (len(sizes) == 1 and op.opset >= _AXIS_OPSET)):
        along = {} if sizes in ((), (1,)) else {"axis": axis}
        points = [] if zero is None else [zero]
        numbers = op.DequantizeLinear(codes, scale, *points, **along)
    else:
        numbers = op.DequantizeLinear(codes, op.constant(np.float32(1)))
        numbers.type = ir.TensorType(ir.DataType.FLOAT)
        if zero is not None:
            numbers = op.Sub(numbers, op.cast(spread(zero), ir.DataType.FLOAT))
        numbers = op.Mul(numbers, spread(scale))
    numbers.type, numbers.shape = ir.TensorType(ir.DataType.FLOAT), codes.shape
    return numbers
