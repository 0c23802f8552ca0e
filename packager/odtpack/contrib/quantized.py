"""Products with weights of few bits, as ONNX Runtime's quantizers, Olive and genai store them.

A matrix [rows, K] is cut along K into blocks of 16, 32, ... codes; a block has a scale and a zero
point, and w = scale (code - zero point). Codes of 4 bits lie two in a byte, the lower column in
its lower half. The columns after K in a last block do not count.

The codes stay codes: for a product a DequantizeLinear reads them, and for a look-up they are
bytes, whose rows are taken apart when they are found.

Products of 8 bits, as ``onnxruntime.quantization.quantize_dynamic`` writes them, round what they
read while they run, and stay in the forward pass. Beside each stands its twin of float32 numbers,
which the gradient passes (see :func:`odtpack.autodiff.stop_gradient.stand_in`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.autodiff.stop_gradient import has_stand_in, stand_in
from odtpack.contrib.table import Outputs, decomposition, known_rank, not_covered
from odtpack.graph.graphs import (
    LOOK_UP,
    Ops,
    constant,
    dims_of,
    maker,
    mark_constant,
    producer,
    replace,
    typed,
)

BLOCKED_OPSET = 21  # opset whose DequantizeLinear takes blocks, and 4 bits
_TYPES = {  # by bits: without and with sign, and what turns the bytes of one into the other's
    4: (ir.DataType.UINT4, ir.DataType.INT4, 0x88),
    8: (ir.DataType.UINT8, ir.DataType.INT8, 0x80),
}


@dataclasses.dataclass(frozen=True)
class _Matrix:
    """What a node stores."""

    name: str  # that of the initializer with the codes
    packed: np.ndarray  # codes without sign, as bytes, row after row
    scales: np.ndarray  # [rows, blocks]
    # Zero points: [rows, blocks] of uint8 or of the type of the scales, or one for all.
    zeros: np.ndarray | int
    bits: int  # 4 or 8
    columns: int  # K
    block: int  # columns of a block


@decomposition("MatMulNBits")
def matmul_nbits(ctx: Context) -> Outputs | None:
    """A W^T + bias: inputs A, codes [N, blocks, bytes], scales, zero points, groups, bias."""
    op, matrix, bias = ctx.op, _read_matrix(ctx.node), ctx.maybe_x(5)
    if op.opset < BLOCKED_OPSET:
        return not_covered(ctx, f"its blocks need opset {BLOCKED_OPSET}: export the model with it")
    if isinstance(matrix, str):
        return not_covered(ctx, matrix)
    product = op.MatMul(ctx.x(), op.transpose(_weight(op, matrix), 1, 0))
    return product if bias is None else op.Add(product, bias)


def _read_matrix(node: ir.Node) -> _Matrix | str:
    """The matrix [N, K] of a MatMulNBits, or why it is not known."""
    usual = {"bits": 4, "block_size": 0, "N": 0, "K": 0, "weight_prepacked": 0}
    bits, block, rows, columns, prepacked = (
        node.attributes.get_int(name, default) for name, default in usual.items()
    )
    inputs = dict(enumerate(node.inputs))
    codes, scales, zeros = (_stored(inputs.get(i)) for i in (1, 2, 3))
    if bits not in _TYPES:
        return f"its codes have {bits} bits; 4 and 8 are read"
    if prepacked or inputs.get(4) is not None:
        return "its weight is packed for a GPU, or has groups (g_idx)"
    if codes is None or scales is None or (zeros is None and inputs.get(3) is not None):
        return "its weight is not stored in the model"
    blocks, width = math.ceil(columns / max(block, 1)), block * bits // 8
    fits = codes.dtype == np.uint8 and codes.size == rows * blocks * width > 0
    if not (fits and scales.size == rows * blocks and _fits(zeros, rows, blocks, bits)):
        return f"its codes are not those of a weight [{rows}, {columns}]"
    codes = codes.reshape(rows, -1)
    if columns * bits % 8 == 0:
        packed = codes[:, : columns * bits // 8]
    else:
        packed = _pack(_unpack(codes, bits)[:, :columns])
    points: np.ndarray | int = 1 << bits - 1
    if zeros is not None and zeros.dtype == np.uint8:
        points = _unpack(zeros.reshape(rows, -1), bits)[:, :blocks]
    elif zeros is not None:
        points = zeros.reshape(rows, blocks)
        if columns % block:
            return "its zero points are not whole numbers, and its last block is not full"
    name = str(node.inputs[1].name) if node.inputs[1] is not None else ""
    return _Matrix(name, packed, scales.reshape(rows, blocks), points, bits, columns, block)


@decomposition("GatherBlockQuantized")
def gather_block_quantized(ctx: Context) -> Outputs | None:
    """Rows of a matrix: inputs codes [rows, columns], numbers of rows, scales, zero points."""
    data, places, block = ctx.x(), known_rank(ctx.x(1)), ctx.int("block_size", 128)
    codes, scales, zeros = (_stored(ctx.maybe_x(i)) for i in (0, 2, 3))
    halves = data.dtype in (ir.DataType.UINT4, ir.DataType.INT4)
    bits = 4 if halves else ctx.int("bits", 4)
    if bits not in _TYPES or not (halves or data.dtype == ir.DataType.UINT8):
        return not_covered(ctx, f"its codes are {data.dtype} of {bits} bits; 4 and 8 bits are read")
    if codes is None or scales is None or (zeros is None and ctx.maybe_x(3) is not None):
        return not_covered(ctx, "its table is not stored in the model")
    if (
        *(ctx.int("gather_axis", 0), ctx.int("quantize_axis", 1) % 2),
        *(codes.ndim, scales.ndim, places is None),
    ) != (0, 1, 2, 2, False):
        return not_covered(ctx, "it does not look up rows that are cut into blocks")
    signed = data.dtype == ir.DataType.INT4
    packed = _pack(codes.astype(np.int8).view(np.uint8) & 15) if halves else codes
    if not len(scales) or packed.size % len(scales):
        return not_covered(ctx, "it has not as many rows of codes as of scales")
    packed = (packed ^ np.uint8(0x88 if signed else 0)).reshape(len(scales), -1)
    columns, blocks = packed.shape[1] * 8 // bits, scales.shape[1]
    block = columns if blocks == 1 else block  # one that is not full
    whole = blocks * block == columns > 0 and packed.size * 8 == len(scales) * columns * bits
    points_fit = zeros is None or zeros.shape == scales.shape or not halves
    if not (whole and points_fit and (halves or _fits(zeros, len(scales), blocks, bits))):
        return not_covered(ctx, f"its rows of {columns} are not whole blocks of {block}")
    points: np.ndarray | int = 0 if data.dtype == ir.DataType.UINT4 else 1 << bits - 1
    if zeros is not None and halves:
        points = (zeros.astype(np.int8).view(np.uint8) & 15) ^ np.uint8(8 if signed else 0)
    elif zeros is not None:
        points = _unpack(zeros.reshape(len(scales), -1), bits)[:, :blocks]
    matrix = _Matrix(str(data.name), packed, scales, points, bits, columns, block)
    return _rows(ctx.op, matrix, ctx.x(1), places or 0)


def _weight(op: Ops, matrix: _Matrix) -> ir.Value:
    """What makes numbers [rows, K] of the codes."""
    name, zeros, bits = matrix.name, matrix.zeros, matrix.bits
    rows, columns = len(matrix.scales), matrix.columns
    plain, signed, flip = _TYPES[bits]
    scales = _constant(op, f"{name}_scale", ir.tensor(matrix.scales))
    blocked = {"axis": 1, "block_size": matrix.block}
    if isinstance(zeros, int):  # in the middle: codes with a sign need none
        flipped = matrix.packed ^ np.uint8(flip)
        codes = _constant(op, f"{name}_quantized", _tensor(flipped, signed, rows, columns))
        return _typed(op.DequantizeLinear(codes, scales, **blocked), scales)
    codes = _constant(op, f"{name}_quantized", _tensor(matrix.packed, plain, rows, columns))
    if zeros.dtype == np.uint8:
        stored = _tensor(zeros if bits == 8 else _pack(zeros), plain, *zeros.shape)
        points = _constant(op, f"{name}_zero_point", stored)
        return _typed(op.DequantizeLinear(codes, scales, points, **blocked), scales)
    numbers = _typed(op.DequantizeLinear(codes, op.constant(np.array(1, zeros.dtype))), scales)
    points = _constant(op, f"{name}_zero_point", ir.tensor(zeros))
    blocks = op.Sub(op.reshape(numbers, rows, -1, matrix.block), op.unsqueeze(points, 2))
    return op.reshape(op.Mul(blocks, op.unsqueeze(scales, 2)), rows, columns)


def _typed(value: ir.Value, like: ir.Value) -> ir.Value:
    value.type = ir.TensorType(like.dtype or ir.DataType.FLOAT)
    return value


def _rows(op: Ops, matrix: _Matrix, numbers: ir.Value, rank: int) -> ir.Value:
    """The rows with some numbers, which have so many axes."""
    name, zeros, kept = matrix.name, matrix.zeros, [0] * rank
    dtype = ir.DataType.from_numpy(matrix.scales.dtype)
    packed = _constant(op, f"{name}_bytes", ir.tensor(matrix.packed))
    found = op.cast(op.Gather(packed, numbers, axis=0), dtype)
    if matrix.bits == 4:
        high = op.Floor(op.Mul(found, 1 / 16))
        halves = op.Sub(found, op.Mul(high, 16.0)), high
        found = op.Concat(*(op.unsqueeze(half, -1) for half in halves), axis=-1)
    found = op.reshape(found, *kept, -1, matrix.block)
    if isinstance(zeros, int):
        found = op.Sub(found, float(zeros)) if zeros else found
    else:
        points = op.Gather(_constant(op, f"{name}_zero_point", ir.tensor(zeros)), numbers, axis=0)
        found = op.Sub(found, op.unsqueeze(op.cast(points, dtype), -1))
    scales = _constant(op, f"{name}_scale", ir.tensor(matrix.scales))
    factors = op.unsqueeze(op.Gather(scales, numbers, axis=0), -1)
    rows = op.reshape(op.Mul(found, factors), *kept, matrix.columns)
    maker(rows).metadata_props[LOOK_UP] = name
    return rows


def _stored(value: ir.Value | None) -> np.ndarray | None:
    """The array of an initializer, as it is or through a Reshape; None for anything else."""
    node = None if value is None else value.producer()
    if value is None or (node is not None and node.op_type != "Reshape"):
        return None
    source = value if node is None else node.inputs[0]
    if source is None or source.const_value is None or source.is_graph_input():
        return None
    array = source.const_value.numpy()
    if node is None:
        return array
    shape = node.inputs[1].const_value if node.inputs[1] is not None else None
    sizes = [] if shape is None else [int(size) for size in shape.numpy().reshape(-1)]
    known = math.prod(size for size in sizes if size > 0)
    if shape is None or min(sizes, default=0) < -1 or 0 in sizes or sizes.count(-1) > 1:
        return None
    if array.size % known or (-1 not in sizes and array.size != known):
        return None
    return array.reshape(sizes)


def _fits(zeros: np.ndarray | None, rows: int, blocks: int, bits: int) -> bool:
    """Whether there are as many zero points as blocks."""
    if zeros is None:
        return True
    whole = zeros.dtype == np.uint8
    return bool(zeros.size == rows * (math.ceil(blocks * bits / 8) if whole else blocks))


def _unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """Codes [rows, columns] of bytes [rows, bytes]."""
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def _pack(codes: np.ndarray) -> np.ndarray:
    """Bytes of codes of 4 bits, row after row."""
    flat = np.pad(codes.reshape(-1), (0, codes.size % 2))
    return np.asarray(flat[::2] | flat[1::2] << 4)


def _tensor(packed: np.ndarray, dtype: ir.DataType, rows: int, columns: int) -> ir.TensorProtocol:
    if dtype.bitwidth == 8:
        return ir.tensor(packed.view(dtype.numpy()))
    return ir.PackedTensor(np.ascontiguousarray(packed).reshape(-1), dtype, shape=[rows, columns])


def _constant(op: Ops, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    """An initializer of that name, which is not trained; one for all that read the same codes."""
    known = op.graph.initializers.get(name)
    if known is not None:
        return known
    tensor.name = name
    value = ir.val(name, const_value=tensor)
    op.graph.register_initializer(value)
    mark_constant(value)
    return value


# Another matrix in the place of that of a MatMulNBits.


def stored_matrix(node: ir.Node) -> np.ndarray | None:
    """What the codes of a MatMulNBits stand for, [N, K] in float64; None if they are not known."""
    matrix = _own_matrix(node)
    if matrix is None:
        return None
    rows, columns, zeros = len(matrix.scales), matrix.columns, matrix.zeros

    def repeated(of_blocks: np.ndarray) -> np.ndarray:
        return np.repeat(of_blocks, matrix.block, axis=1)[:, :columns]

    codes = _unpack(matrix.packed.reshape(1, -1), matrix.bits)[0, : rows * columns]
    points = zeros if isinstance(zeros, int) else repeated(zeros)
    numbers = codes.reshape(rows, columns).astype(np.float64) - points
    return np.asarray(numbers * repeated(matrix.scales))


def store_matrix(node: ir.Node, matrix: np.ndarray) -> None:
    """Round a matrix to the codes of a MatMulNBits, whose matrix is known, by blocks as it was."""
    found = _own_matrix(node)
    assert found is not None  # noqa: S101 - the caller looked
    scales, bits, block = found.scales, found.bits, found.block
    blocks = np.pad(matrix, [(0, 0), (0, scales.shape[1] * block - found.columns)])
    blocks = blocks.reshape(*scales.shape, block)
    low, high, most = blocks.min(axis=2), blocks.max(axis=2), (1 << bits) - 1
    points: np.ndarray | int = found.zeros
    if isinstance(points, int):  # the largest number is the lowest code, one further off
        made = np.where(-low > high, low, high) / -points
    else:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        made = (high - low) / most
        points = np.clip(np.rint(-low / np.where(made == 0, 1, made)), 0, most)[:, :, None]
    made = made.astype(scales.dtype)
    divisor = np.where(made == 0, 1, made).astype(np.float64)[:, :, None]
    codes = np.clip(np.rint(blocks / divisor) + points, 0, most).astype(np.uint8)
    stored = [(1, codes), (2, made)]
    if not isinstance(points, int):
        stored.append((3, points[:, :, 0]))
    for index, array in stored:
        value = node.inputs[index]
        assert value is not None  # noqa: S101 - it was read
        assert value.const_value is not None  # noqa: S101 - it was read
        if index != 2 and bits == 4:
            rows = array.astype(np.uint8).reshape(len(array), -1)
            array = _pack(np.pad(rows, [(0, 0), (0, rows.shape[1] % 2)]))  # noqa: PLW2901
        array = array.astype(value.const_value.dtype.numpy())  # noqa: PLW2901
        shape = value.const_value.shape.numpy()
        value.const_value = ir.tensor(array.reshape(shape), name=value.name)


def _own_matrix(node: ir.Node) -> _Matrix | None:
    """The matrix, if this node alone reads what it is stored as, with whole zero points."""
    parts = [value for value in node.inputs[1:4] if value is not None]
    if any(len(v.uses()) > 1 or v.is_graph_output() or v.producer() for v in parts):
        return None
    found = _read_matrix(node)
    if isinstance(found, str):
        return None
    return found if isinstance(found.zeros, int) or found.zeros.dtype == np.uint8 else None


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


# Codes of 4 bits, two in a byte: no kernel but DequantizeLinear takes them apart.

FOUR_BITS = {ir.DataType.INT4: 8, ir.DataType.UINT4: 0}  # types, and what is added to their numbers


def four_bit_codes(tensor: ir.TensorProtocol) -> np.ndarray:
    """The numbers, from 0 on, as UINT8."""
    return (tensor.numpy().astype(np.int8) + FOUR_BITS[tensor.dtype]).astype(np.uint8)


def packed_four_bits(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """A tensor as a model takes it that unpacks it: of 4 bits as UINT8 [n / 2]."""
    # In the order of MatMulNBits, which reads the same bytes of the file in an inference model.
    if tensor.dtype not in FOUR_BITS:
        return tensor

    def read() -> ir.TensorProtocol:
        return ir.tensor(_pack(four_bit_codes(tensor)), name=tensor.name)

    shape = ir.Shape([-(-math.prod(tensor.shape.numpy()) // 2)])
    return ir.LazyTensor(read, dtype=ir.DataType.UINT8, shape=shape, name=tensor.name)


def unpack_four_bits(op: Ops, value: ir.Value, shift: ir.Value, shape: Sequence[int]) -> ir.Value:
    """Write what makes numbers from 0 on of packed ones; ``shift`` is 4, or 1/16 as FLOAT."""
    if shift.dtype == ir.DataType.FLOAT:  # where there are no kernels for bits
        both = op.cast(value, ir.DataType.FLOAT)
        high = op.Floor(op.Mul(both, shift))
        low = op.Sub(both, op.Mul(high, 16.0))
    else:
        all_bits = op.constant(np.full((), 255, np.uint8))
        low = op.BitwiseAnd(value, op.BitShift(all_bits, shift, direction="RIGHT"))
        high = op.BitShift(value, shift, direction="RIGHT")
    # A Transpose puts them in turn faster than a Concat of columns does.
    rows = op.Concat(op.unsqueeze(low, 0), op.unsqueeze(high, 0), axis=0)
    both = op.reshape(op.transpose(rows, 1, 0), -1)
    if math.prod(shape) % 2:
        both = op.slice(both, [0], [0], [math.prod(shape)])
    found = op.reshape(both, *shape)
    return op.cast(found, ir.DataType.UINT8) if shift.dtype == ir.DataType.FLOAT else found
