"""What the kernels of ONNX Runtime's CPU provider do with memory besides their outputs.

Which outputs share their input's buffer stands in the kernels' registrations;
which kernels allocate working memory, in their code. Both were established by
running each operator alone on ONNX Runtime 1.31.1 with the arena on, whose
profile gives the bytes in use before, during and after a node; the tests repeat
that for the operators that training graphs contain.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from odtpack_runtime.package.native import OPERATORS
from odtpack_runtime.session.native import DOMAIN as NATIVE_DOMAIN

Shape = tuple[int, ...]

NCHWC_DOMAIN: Final = "com.microsoft.nchwc"
"""Domain of the operators in ONNX Runtime's blocked layout for convolutions."""

ALIASES: Final = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators whose first output is their first input's buffer, whatever else reads that."""

IN_PLACE: Final = frozenset(
    {
        *("Cast", "Celu", "Clip", "Elu", "HardSigmoid", "LeakyRelu", "LogSoftmax", "Relu"),
        *("ScatterElements", "Selu", "Shrink", "Sigmoid", "Softmax", "Softplus", "Softsign"),
        *("Tanh", "ThresholdedRelu", "Trilu"),
    }
)
"""Operators whose first output takes their first input's buffer if nothing else reads that.

Sizes must agree. Elementwise operators with two inputs are not among them, and
of those with one only what ONNX Runtime counts as activations.
"""

FROM_HEAP: Final = frozenset({"Dropout", "Expand", "ScatterElements"})
"""Operators that allocate their working memory themselves: no arena gives it, nor keeps it."""

BEFORE_OUTPUT: Final = frozenset({"Where"})
"""Operators that ask for their working memory before they ask for their output."""

_SUM_INPUT: Final = 3
"""The input of a fused convolution that is added to its result, and may become it."""

_NATIVE_IN_PLACE: Final = 8
"""So many outputs of a native kernel may take the input of the same number (``library.cpp``)."""

_CONV_BUFFER_PER_THREAD: Final = 64 * 1024
"""Bytes that a convolution unfolds its input into at a time, per thread (MLAS)."""


def in_place_input(op_type: str, domain: str, output: int = 0) -> int | None:
    """Index of the input whose buffer an output may take; None if there is none."""
    if domain == NATIVE_DOMAIN:
        return output if output < _NATIVE_IN_PLACE else None
    if output:
        return None
    if domain in ("", "ai.onnx") and op_type in IN_PLACE:
        return 0
    fused = (domain, op_type) in {(NCHWC_DOMAIN, "Conv"), ("com.microsoft", "FusedConv")}
    return _SUM_INPUT if fused else None


def workspaces(
    op_type: str,
    attributes: Mapping[str, Any],
    inputs: Sequence[tuple[Shape | None, int]],
    outputs: Sequence[tuple[Shape | None, int]],  # The same of each output
    threads: int,
    *,
    domain: str = "",
) -> tuple[int, ...]:
    """Bytes of each buffer that a kernel holds while it runs, besides inputs and outputs."""
    # `inputs`: Shape (None if unknown) and bytes per element of each input.
    rule = _RULES.get(op_type)
    if rule is None or domain == NCHWC_DOMAIN:
        return ()  # the blocked kernels compute straight from their inputs
    if not outputs or any(shape is None for shape, _ in (*inputs, *outputs)):
        return ()
    read, written = ([(s or (), size) for s, size in tensors] for tensors in (inputs, outputs))
    found = rule(_Kernel(attributes, read, written, threads))
    return found if isinstance(found, tuple) else (found,)


_Tensors = Sequence[tuple[Shape, int]]


class _Kernel(NamedTuple):
    """One run of a kernel."""

    attributes: Mapping[str, Any]
    inputs: _Tensors
    outputs: _Tensors
    threads: int


_Rule = Callable[[_Kernel], int | tuple[int, ...]]  # Bytes of one buffer, or of each of several


def _nbytes(tensor: tuple[Shape, int]) -> int:
    return math.prod(tensor[0]) * tensor[1]


def _conv(kernel: _Kernel) -> int:
    """MLAS: nothing for 1x1, all columns where filters outnumber pixels, else a piece at a time."""
    attributes, inputs, outputs, threads = kernel
    weight = inputs[1][0]
    pixels = math.prod(outputs[0][0][2:])
    one_by_one = math.prod(weight[2:]) == 1 and not any(attributes.get("pads", ()))
    if one_by_one and all(stride == 1 for stride in attributes.get("strides", ())):
        return 0
    if weight[0] // int(attributes.get("group", 1)) > pixels:
        return pixels * math.prod(weight[1:]) * outputs[0][1]
    return threads * _CONV_BUFFER_PER_THREAD


def _conv_transpose(kernel: _Kernel) -> int:
    """Columns of one image and group: filters x kernel x input pixels."""
    (image, size), (weight, _) = kernel.inputs[:2]
    return math.prod(weight[1:]) * math.prod(image[2:]) * size


def _where(kernel: _Kernel) -> tuple[int, ...]:
    """What the condition selects of each of the two values, merged into the output."""
    condition, *values = kernel.inputs
    shapes = (np.broadcast_shapes(condition[0], shape) for shape, _ in values)
    return tuple(math.prod(shape) * kernel.outputs[0][1] for shape in shapes)


def _expand(kernel: _Kernel) -> int:
    """Where each piece begins that is copied as a whole, as int64."""
    shape, result = kernel.inputs[0][0], kernel.outputs[0][0]
    pairs = zip(reversed(shape), reversed(result), strict=False)
    same = [size for size, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return 0 if shape == result else math.prod(shape[: len(shape) - len(same)]) * 8


def _softmax(kernel: _Kernel) -> tuple[int, ...]:
    """Along another axis than the last: the transposed input and the transposed result."""
    rank = len(kernel.inputs[0][0])
    axis = int(kernel.attributes.get("axis", -1))
    return () if rank < 2 or axis in (-1, rank - 1) else (_nbytes(kernel.outputs[0]),) * 2


def _variadic(kernel: _Kernel) -> int:
    """From three inputs on, one partial result."""
    return _nbytes(kernel.outputs[0]) if len(kernel.inputs) > 2 else 0


def _local_response(kernel: _Kernel) -> tuple[int, ...]:
    """Squares of one image, padded by the window, and the scale of the whole output."""
    image, size = kernel.inputs[0]
    padded = image[1] + int(kernel.attributes.get("size", 1)) - 1
    return padded * math.prod(image[2:]) * size, _nbytes(kernel.outputs[0])


def _recurrent(gates: int) -> _Rule:
    """The buffers of each direction in the kernels' order, above all the gates of all steps."""
    # GRU and LSTM keep both directions at once; RNN computes one direction after the other.

    def rule(kernel: _Kernel) -> tuple[int, ...]:
        attributes = kernel.attributes
        (sequence, size), (weight, _) = kernel.inputs[:2]
        steps, batch = sequence[0], sequence[1]
        if int(attributes.get("layout", 0)):
            steps, batch = batch, steps
        hidden = weight[1] // gates
        each = steps * batch * size
        if gates == 1:
            return (each * hidden,)
        # What goes backwards keeps its inputs and its results in reverse: of two the second.
        backwards = attributes.get("direction", b"forward") not in (b"forward", "forward")
        reverse = (each * sequence[2], each * hidden) if backwards else ()
        directions = [()] * (weight[0] - 1) + [reverse]
        has_bias = any(len(shape) == 2 for shape, _ in kernel.inputs[3:])
        state, lengths = batch * hidden * size, batch * 4
        found = [weight[0] * state] * (gates - 1 - len(kernel.outputs))  # last states
        if gates == 4:
            row = hidden * size
            for own in directions:
                found += (row, row, state, state, state, each * 4 * hidden)
                found += (*(row,) * (4 * has_bias), *own)
            return (*found, *(lengths,) * weight[0])
        resets = int(attributes.get("linear_before_reset", 0))
        for own in directions:
            found += (state,) * (2 + (3 + resets) * has_bias + resets)
            found += (each * 3 * hidden, *own, lengths)
        return tuple(found)

    return rule


def _attention(kernel: _Kernel) -> int:
    """Scores: batch x heads x queries x keys, where heads have an axis of their own."""
    (query, size), (key, _) = kernel.inputs[:2]
    if len(query) != 4:
        return sum(map(_nbytes, kernel.inputs[:3]))
    return math.prod(query[:3]) * key[2] * size


_RULES: Final[dict[str, _Rule]] = {
    "Attention": _attention,
    "BiasGelu": lambda kernel: _nbytes(kernel.outputs[0]),
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    # The mask, where it is no output.
    "Dropout": lambda kernel: math.prod(kernel.inputs[0][0]) if len(kernel.outputs) == 1 else 0,
    # Permuted copies of the operands and the product before its last permutation.
    "Einsum": lambda kernel: (*map(_nbytes, kernel.inputs), _nbytes(kernel.outputs[0])),
    "Expand": _expand,
    "FusedConv": _conv,
    "GRU": _recurrent(3),
    "LRN": _local_response,
    "LSTM": _recurrent(4),
    "LogSoftmax": _softmax,
    "Max": _variadic,
    "Mean": _variadic,
    "Min": _variadic,
    "MultiHeadAttention": _attention,
    "RNN": _recurrent(1),
    # The indices once more, as int64.
    "ScatterElements": lambda kernel: math.prod(kernel.inputs[1][0]) * 8,
    "Softmax": _softmax,
    "Sum": _variadic,
    "Where": _where,
}


# What native kernels allocate while they run, and the allocator keeps for the next of them: as
# runtime/native/src does it.

_DEEP, _HIGH, _STRIP, _PACKED = 192, 156, 1_024, 24_576
_TILE: Final = (12, 32)
_MOST: Final = {b"product": 14_336, b"transposed": _DEEP * _HIGH + _PACKED}
"""What products pack at a time in each thread (``product.cpp``): of aᵀb rows, columns of a, columns
of b in a task, and numbers of these, where tiles are of AVX-512, the largest; and numbers at most,
of the other products for a panel of the unpacked matrix."""

_BLOCK, _PAD, _TASK, _COLUMN_TASKS, _WIDEST = 512, 80, 1 << 15, 16, 1 << 14
"""Numbers of a register and of the gap behind it, elements of a task, the tasks that add columns,
and the longest rows that are kept whole without need (``elementwise.cpp``)."""

_ROW_SUM, _COLUMN_SUM = OPERATORS.index("RowSum"), OPERATORS.index("ColumnSum")


def native_scratch(
    attributes: Mapping[str, Any], inputs: Sequence[Shape | None], threads: int
) -> int:
    """Bytes of the heap that a node of the domain ``odtpack.native`` takes while it runs."""
    # `inputs`: Shape of each; None if unknown.
    kernel, shapes = attributes.get("kernel", b""), [x for x in inputs if x is not None]
    if len(shapes) == len(inputs) and kernel in _NATIVE_RULES:
        return 4 * _NATIVE_RULES[kernel](attributes["program"], shapes, threads)
    return 4 * threads * _MOST.get(kernel, 0)


def _packed(_: Sequence[int], shapes: Sequence[Shape], threads: int) -> int:
    """Numbers of both factors of aᵀb."""
    deep, rows, columns = min(_DEEP, shapes[0][0]), shapes[0][1], shapes[1][1]
    down, across = -(-rows // _HIGH), -(-columns // _STRIP)
    if not deep * down * across:
        return 0
    high = -(-rows // (down * _TILE[0])) * _TILE[0]
    wide = min(-(-columns // (across * _TILE[1])) * _TILE[1], _PACKED // deep)
    return min(threads, down * across) * deep * (high + wide)


def _registers(program: Sequence[int], shapes: Sequence[Shape], threads: int) -> int:
    """Numbers of all registers of a program, and of the sums that each of its tasks has."""
    reads, results = program[0], program[2 : 2 + program[1]]
    code = [program[index : index + 4] for index in range(2 + len(results), len(program), 4)]
    whole: Shape = np.broadcast_shapes(*shapes)
    if not math.prod(whole):
        return 0
    width, a_row = (whole or (1,))[-1], (*whole[:-1], 1)
    reduces = any(operator >= _ROW_SUM for operator, *_ in code)
    rowed = [
        math.prod(each) > 1 and each == a_row != whole and (reduces or width <= _WIDEST)
        for each in shapes
    ]
    by_rows = any(rowed) or any(_ROW_SUM <= operator < _COLUMN_SUM for operator, *_ in code)
    block = width * max(1, _BLOCK // width) if by_rows else _BLOCK
    last = {value: len(code) for value in results}
    for index, (operator, *read) in reversed(list(enumerate(code))):
        for value in read[:1] if operator >= _ROW_SUM else read:
            last.setdefault(value, index)
    live = (
        sum(last.get(reads + made, made) >= index for made in range(index + 1))
        for index in range(len(code))
    )
    repeated = sum(each != whole and not row for each, row in zip(shapes, rowed, strict=True))
    blocks = -(-math.prod(whole) // block)
    columns = sum(code[value - reads][0] == _COLUMN_SUM for value in results)
    share = max(1, _TASK // block, -(-blocks // _COLUMN_TASKS) if columns else 1)
    tasks = -(-blocks // share)
    own = max(live) + repeated + 3 * by_rows
    return min(threads, tasks) * own * (block + _PAD) + tasks * columns * width


def _frames(program: Sequence[int], shapes: Sequence[Shape], threads: int) -> int:
    """Numbers of a plane with zeros around it, and of results that lie as it does."""
    kind, channels, axes = program[0], program[4], (program[5:11], program[11:17])
    of_input, of_weight = kind == 1, kind == 2
    frame, steps, pixels, taps, plane = 1, 1, 1, 1, 1
    for size, kernel, step, apart, before, out in axes:
        windows = max((size - 1 + before) // step + 1, out) if of_input else out
        frame *= (kernel - 1) * apart // step + windows
        steps *= 1 if of_input else step
        pixels, taps = pixels * out, taps * kernel
        plane *= out if of_input else size
    planes = math.prod(shapes[0 if of_weight else 1]) // plane
    if of_weight:
        each = max(1, 2 * _TASK // ((pixels + 64) * max(1, planes // channels)))
        return min(threads, -(-channels // each)) * (frame * (steps + 1) + 16 * taps)
    each = max(1, 2 * _TASK // (pixels + 64))
    return min(threads, -(-planes // each)) * frame * (steps + 2)


def _short_planes(program: Sequence[int], shapes: Sequence[Shape], threads: int) -> int:
    """Three numbers for each element of a sample's channels, where planes are short."""
    x = shapes[0]
    samples, channels, *rest = (1, *x) if program[1] == 0 else x
    plane = math.prod(rest)
    if not 0 < plane < 64:
        return 0
    each = min(channels, max(1, min((1 << 13) // plane, (1 << 16) // max(1, samples * plane))))
    return min(threads, -(-channels // each)) * 3 * each * plane


_NATIVE_RULES: Final[dict[bytes, Callable[[Sequence[int], Sequence[Shape], int], int]]] = {
    b"depthwise": _frames,
    b"elementwise": _registers,
    b"normalization": _short_planes,
    b"transposed": _packed,
}
