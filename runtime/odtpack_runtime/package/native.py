"""What nodes of the domain ``odtpack.native`` compute: bodies, read as programs of kernels.

Bodies of ``depthwise`` and ``product`` are not compared with a list of bodies but run, by ONNX
Runtime without the library, on small whole numbers that are drawn anew each time, for two numbers
of samples. A body of a kernel's operators, whose floating-point constants are 0 and 1, computes
sums of products of its inputs, without differences, and on such numbers without rounding: one that
is wrong anywhere is found.

The body of ``depthwise`` is a gradient rule's nodes: slices, products, sums, in one of several
forms. ``product`` is a product with a frozen matrix of few bits: y = x W^T, or its gradient dx = dy
W. The body unpacks W and multiplies; the kernel unpacks a panel of W at a time.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import secrets
import struct
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import onnxruntime

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.package.checks import graphs_of
from odtpack_runtime.session.native import DOMAIN

if TYPE_CHECKING:
    import onnx

    from odtpack_runtime.package.manifest import Manifest

# Whether a body computes what its kernel does: tried on whole numbers

SUMS: Final = {
    "Add", "Concat", "Constant", "Conv", "ConvTranspose", "Gather", "Gemm", "Identity", "MatMul",
    "Mul", "Pad", "ReduceSum", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze",
}  # fmt: skip
"""Operators of sums and products, and of moving elements."""
ONES: Final = (-3, -2, -1, 1, 2, 3)
"""Numbers that inputs are drawn from."""
TRIAL_ELEMENTS: Final = 1 << 26

_MOVES = {"Gather", "Pad", "ReduceSum", "Reshape", "Slice", "Squeeze", "Unsqueeze"}
_BY_PLACE = {"Concat", "Gather", "Pad", "Slice"}
_SAMPLES = (2, 3)
_TRIAL_NODES = 512


Trial = tuple[list[np.ndarray], np.ndarray]
"""Inputs of a kernel, of small whole numbers, without the constants of its body; and its result."""


class RefusedError(Exception):
    """Something that no body of odtpack has."""


def trial_agrees(
    function: onnx.FunctionProto,
    trial: Callable[[int], Trial],
    operators: Set[str],
    constants: Sequence[np.ndarray] = (),
) -> bool:
    """Whether a body of some operators, whose first inputs are a kernel's, computes the same."""
    # `trial`: makes inputs of the kernel for a number of samples.
    # `constants`: values of the function's other inputs.
    import onnx

    try:
        wanted = [trial(samples) for samples in _SAMPLES]
        found = [_run(function, inputs, operators, constants) for inputs, _ in wanted]
        if not all(_alike(node, *found) for node in function.node if node.op_type in _BY_PLACE):
            return False
    except (RefusedError, onnx.shape_inference.InferenceError):
        return False
    except Exception as error:  # ONNX Runtime's exceptions have no common base
        if type(error).__module__.startswith("onnxruntime"):
            return False
        raise
    results = [values[function.output[0]] for values in found]
    return all(np.array_equal(a, b) for a, (_, b) in zip(results, wanted, strict=True))


def unpacked(
    name: str, tensors: Mapping[str, onnx.TensorProto], writers: Mapping[str, onnx.NodeProto]
) -> np.ndarray:
    """The value of a constant, of which nodes may have unpacked it."""
    from onnx import helper, numpy_helper

    if name in tensors:
        return numpy_helper.to_array(tensors[name])
    node = writers.get(name)
    if node is None or node.domain or not node.input:
        raise RefusedError
    first, *others = (unpacked(each, tensors, writers) for each in node.input)
    settings = {each.name: each.i for each in node.attribute}
    if node.op_type == "Cast" and settings.keys() == {"to"}:
        return first.astype(helper.tensor_dtype_to_np_dtype(settings["to"]))
    shapes = [each.shape for each in (first, *others)]
    if node.op_type == "Equal" and math.prod(np.broadcast_shapes(*shapes)) <= TRIAL_ELEMENTS:
        return np.asarray(first == others[0])
    if node.op_type == "Identity":
        return first
    raise RefusedError


def _run(
    function: onnx.FunctionProto,
    inputs: Sequence[np.ndarray],
    operators: Set[str],
    constants: Sequence[np.ndarray],
) -> dict[str, Any]:
    """All values of a body for the inputs of a kernel."""
    import onnx
    from onnx import helper, numpy_helper

    feeds = dict(zip(function.input, inputs, strict=False))
    others = function.input[len(feeds) :]
    if len(feeds) < len(inputs) or len(function.node) > _TRIAL_NODES:
        raise RefusedError
    whole = {each.output[0] for each in function.node if each.op_type == "Constant"}
    for each in function.node:
        _check(each, whole, operators)
    # IR 10 has the types of opset 21.
    ir_version = 8 if all(each.version < 21 for each in function.opset_import) else 10
    model = onnx.ModelProto(ir_version=ir_version, opset_import=function.opset_import)
    model.graph.name = "body"
    model.graph.node.extend(function.node)
    for name, array in zip(others, constants, strict=True):
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    for name, array in feeds.items():
        dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
        value = helper.make_tensor_value_info(name, dtype, array.shape)
        model.graph.input.append(value)
    # Sizes first: a body that would fill the memory is not run.
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    shapes = {each.name: each.type.tensor_type.shape.dim for each in inferred.graph.value_info}
    names = [name for each in function.node for name in each.output]
    for name in names:
        dims = [dim.dim_value for dim in shapes.get(name, ()) if dim.HasField("dim_value")]
        if name not in shapes or len(dims) < len(shapes[name]) or math.prod(dims) > TRIAL_ELEMENTS:
            raise RefusedError
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    values = dict(zip(names, session.run(names, feeds), strict=True)) | feeds
    values |= dict(zip(others, constants, strict=True))
    for name in (*others, *whole):
        if values[name].dtype.kind == "f" and not np.isin(values[name], (0, 1)).all():
            raise RefusedError
    return values


def _check(node: onnx.NodeProto, whole: Set[str], operators: Set[str]) -> None:
    """Check one node of a body. ``whole``: Names of what its Constant nodes write."""
    names = {each.name for each in node.attribute}
    if node.domain or node.op_type not in operators or len(names) != len(node.attribute):
        raise RefusedError
    if names & {"mode", "alpha", "beta"} or (node.op_type == "Constant" and names != {"value"}):
        raise RefusedError
    if any(each.ref_attr_name for each in node.attribute):
        raise RefusedError
    if node.op_type in _MOVES:  # where elements move is written in the body
        last = 2 if node.op_type == "Pad" else len(node.input)
        if len(node.input) != last or not {*node.input[1:]} <= whole:
            raise RefusedError


def _alike(node: onnx.NodeProto, first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether a node cuts, joins or pads only axes whose length samples have no part in."""
    rank = first[node.input[0]].ndim
    attributes = {each.name: each.i for each in node.attribute}
    if node.op_type == "Slice":
        axes = first[node.input[3]].tolist() if len(node.input) > 3 else range(rank)
    elif node.op_type == "Pad":
        pads = first[node.input[1]].tolist()
        axes = [a for a in range(rank) if pads[a] or pads[a + rank]]
    else:
        axes = [attributes.get("axis", 0)]
    return all(
        first[name].shape[axis] == second[name].shape[axis]
        for name in (node.input[0], *(node.input if node.op_type == "Concat" else ()))
        for axis in axes
    )


# The kernel ``depthwise``

DEPTHWISE: Final = "depthwise"
FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = range(3)
DEPTHWISE_LENGTH: Final = 18
"""Numbers of a program: what is computed; whether the input's planes and the output's lie
[C, N, P] or [N, C, H, W]; how the weight lies, see :func:`weight_dims`; C; for both axes size,
kernel, step of windows, distance of taps, zeros before, windows; and whether there is a bias."""

_LONGEST = 64
"""Taps of an axis, and steps between windows and taps, that the library has a kernel for."""


def depthwise_computes(
    function: onnx.FunctionProto, program: Sequence[int], constants: Sequence[np.ndarray]
) -> bool:
    """Whether a body computes what a program of the kernel says."""
    # `constants`: values of the function's inputs after the kernel's.
    trial = functools.partial(_depthwise, program)
    return trial_agrees(function, trial, SUMS, constants)


def weight_dims(channels: int, kernel: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The shapes that a weight may have."""
    height, width = kernel
    return (channels, 1, height, width), (channels, height * width), (channels * height, width)


def inputs_of(program: Sequence[int]) -> int:
    """Number of tensors that the kernel reads; what its body reads besides is constant."""
    return 3 if len(program) == DEPTHWISE_LENGTH and program[0] == FORWARD and program[-1] else 2


def _depthwise(program: Sequence[int], samples: int) -> Trial:
    if len(program) != DEPTHWISE_LENGTH or min(program) < 0 or max(program) > 1 << 16:
        raise RefusedError
    kind, x_first, y_first, lies, channels, *axes, bias = program
    sizes, kernel, steps, apart, before, out = zip(axes[:6], axes[6:], strict=True)
    planes = samples * channels * (math.prod(sizes) + math.prod(out))
    if kind > WEIGHT_GRADIENT or 0 in (channels, *sizes, *kernel, *steps, *out) or lies > 2:
        raise RefusedError
    if max(*kernel, *steps, *apart) > _LONGEST:
        raise RefusedError
    padded = [
        max((o - 1) * step + (k - 1) * d + 1, zeros + size)
        for size, k, step, d, zeros, o in (axes[:6], axes[6:])
    ]
    if max(planes, samples * channels * math.prod(padded)) > TRIAL_ELEMENTS:
        raise RefusedError
    random = np.random.default_rng(secrets.randbits(64))

    def draw(*shape: int) -> np.ndarray:
        return random.choice(ONES, shape).astype(np.float32)

    x, y = draw(samples, channels, *sizes), draw(samples, channels, *out)
    w, b = draw(channels, 1, *kernel), draw(channels)
    plane = np.zeros((samples, channels, *padded), np.float32)
    inner = plane[:, :, before[0] : before[0] + sizes[0], before[1] : before[1] + sizes[1]]
    if kind != INPUT_GRADIENT:
        inner[...] = x
    total, dw = np.zeros_like(y), np.zeros_like(w)
    for i, j in itertools.product(*map(range, kernel)):
        starts = i * apart[0], j * apart[1]
        rows, columns = (
            slice(start, start + (o - 1) * step + 1, step)
            for start, o, step in zip(starts, out, steps, strict=True)
        )
        read, weight = plane[:, :, rows, columns], w[:, :, i, j, None]
        if kind == FORWARD:
            total += weight * read
        elif kind == INPUT_GRADIENT:
            read += weight * y
        else:
            dw[:, 0, i, j] = (read * y).sum((0, 2, 3))
    total += b.reshape(-1, 1, 1) if bias else 0
    x, y, inner, total = (
        each.swapaxes(0, 1).reshape(channels, samples, -1) if first else each
        for each, first in ((x, x_first), (y, y_first), (inner, x_first), (total, y_first))
    )
    w = w.reshape(weight_dims(channels, kernel)[lies])
    inputs = ([w, x, b] if bias else [w, x], [w, y], [x, y])[kind]
    return inputs, (total, inner, dw)[kind]


# The kernel ``product``

PRODUCT: Final = "product"
PRODUCT_LENGTH: Final = 8
"""Numbers of a program: whether x meets the transpose of W [N, K]; N; K; the rows and the columns
that share a scale, one of them 1; bits of a code; whether codes have a sign; the code of 0, counted
from the lowest."""
PRODUCT_NODES: Final = {"Gemm", "MatMul"}
"""Operators that multiply: a body ends with one."""
UNPACKING: Final = {
    "BitShift", "BitwiseAnd", "Cast", "Concat", "DequantizeLinear", "Expand", "Min", "Mul",
    "Reshape", "Shape", "Size", "Transpose", "Unsqueeze",
}  # fmt: skip
"""Operators that unpack W."""
_PRODUCT_ELEMENTS = 1 << 24
"""Of a W whose body is run: as many as 8,192 columns of 2,048 rows have."""


def product_computes(function: onnx.FunctionProto, program: Sequence[int]) -> bool:
    """Whether a body computes what a program of the kernel says; its inputs are the kernel's."""
    nodes = function.node
    if not nodes or nodes[-1].op_type not in PRODUCT_NODES or len(function.input) not in (3, 4):
        return False
    *before, end = nodes
    x, sized = function.input[2], {*function.input[2:]}
    constants = {each.output[0]: each for each in before if each.op_type == "Constant"}
    sizes, ones = set[str](), set[str]()  # and what follows from 1 and constants
    for node in before:
        kind, read = node.op_type, [*node.input]
        used = {*read}
        if (
            kind in PRODUCT_NODES
            or (sized & used and kind != "Size")
            or (sizes & used and kind != "Min")
        ):
            return False
        if kind == "Size":
            sizes.update(node.output)
        elif kind == "Min":  # of a size no more is read than that it is not 0
            if len(read) != 2 or read[0] not in sizes or not _is_one(constants.get(read[1])):
                return False
            ones.update(node.output)
        elif kind == "Cast" and not used <= ones:  # which would round
            return False
        elif kind in ("Cast", "Mul") and used <= ones | constants.keys():
            ones.update(node.output)
    if len(end.input) != 2 or end.input[0] != x:
        return False
    operators = UNPACKING | PRODUCT_NODES | {"Constant"}
    matrix = functools.partial(_product, program, inputs=len(function.input))
    vector = functools.partial(matrix, vector=True)
    return any(trial_agrees(function, each, operators) for each in (matrix, vector))


def _is_one(node: onnx.NodeProto | None) -> bool:
    from onnx import numpy_helper

    if node is None or len(node.attribute) != 1 or not node.attribute[0].HasField("t"):
        return False
    value = numpy_helper.to_array(node.attribute[0].t)
    return value.size == 1 and bool((value == 1).all())


def _product(
    program: Sequence[int], samples: int, inputs: int = 3, *, vector: bool = False
) -> Trial:
    """Inputs of the kernel, and its result [samples, N], or [samples, K]."""
    # Codes, [N K / 2] as uint8 or [N, K], scales by rows and columns of blocks or as a vector, x
    # [samples, K], or [samples, N]; what the body reads the size of, if it does.
    if len(program) != PRODUCT_LENGTH or min(program) < 0 or max(program) > 1 << 24:
        raise RefusedError
    transposed, rows, columns, high, wide, bits, signed, zero = program
    if transposed > 1 or 0 in (rows, columns, high, wide) or 1 not in (high, wide):
        raise RefusedError
    if bits not in (4, 8) or signed > (bits == 8) or zero >= 1 << bits:
        raise RefusedError
    if rows * columns > _PRODUCT_ELEMENTS or columns * bits % 8:
        raise RefusedError
    random = np.random.default_rng(secrets.randbits(64))
    codes = random.integers(0, 1 << bits, (rows, columns), np.uint8)
    blocks = math.ceil(rows / high), math.ceil(columns / wide)
    scales = random.choice((0.5, 1, 2), blocks).astype(np.float32)
    x = random.choice(ONES, (samples, columns if transposed else rows)).astype(np.float32)
    wider = scales.repeat(high, 0)[:rows].repeat(wide, 1)[:, :columns]
    w = (codes.astype(np.float32) - zero) * wider
    packed = codes.reshape(-1)
    if bits == 4:
        packed = packed[::2] | packed[1::2] << 4
    elif signed:
        packed = (codes ^ 0x80).view(np.int8)
    else:
        packed = codes
    if vector:
        scales = scales.reshape(-1)
    return [packed, scales, x, x][:inputs], x @ (w.T if transposed else w)


# The kernel ``transposed``

TRANSPOSED: Final = "transposed"
"""A product a^T b, whose body is one ``Gemm``. Its program is a 0."""


def is_transposed_product(node: onnx.NodeProto) -> bool:
    """Whether a node computes a^T b, and nothing else, of its inputs."""
    settings = {
        each.name: each.f if each.name in ("alpha", "beta") else each.i
        for each in node.attribute
        if not each.ref_attr_name
    }
    usual = {"alpha": 1.0, "beta": 1.0, "transB": 0}
    return (
        node.op_type == "Gemm" and not node.domain and len(node.input) == 2
        and len(settings) == len(node.attribute)
        and usual | settings == {**usual, "transA": 1}
    )  # fmt: skip


# The kernel ``normalization``

NORMALIZATION: Final = "normalization"
FORWARD_NORMALIZATION, ACTIVATED, NORMALIZATION_GRADIENT = range(3)
NO_ACTIVATION, CLIP, RELU = range(3)
_MOST_AXES = 8


def normalization_body(program: Sequence[int]) -> onnx.FunctionProto:
    """The body of a program of the kernel, without a name: there is no other.

    Args:
        program: What is computed, batch normalization in training mode, its scaled and activated
            result once more, or its gradient; the number of axes, or 0 for [C, N, P]; the
            activation; the bits of epsilon.
    """
    if len(program) != 4 or min(program) < 0 or program[0] > NORMALIZATION_GRADIENT:
        raise RefusedError
    kind, rank, activation, bits = program
    if (rank and not 3 <= rank <= _MOST_AXES) or activation > RELU or bits >= 1 << 32:
        raise RefusedError
    body = _Normalization(rank, activation, struct.unpack("<f", struct.pack("<I", bits))[0])
    if kind != ACTIVATED or rank == 0:
        body.numbers("samples", 0)
    if kind != ACTIVATED:
        body.numbers("space", *(range(2, rank) if rank else (1, 2)))
        body.numbers("each", -1, *[1] * (rank - 2 if rank else 2))
    return body.gradient() if kind == NORMALIZATION_GRADIENT else body.forward(kind)


class _Normalization:
    """Writes a body of the kernel."""

    def __init__(self, rank: int, activation: int, epsilon: float) -> None:
        self._rank, self._activation, self._epsilon = rank, activation, epsilon
        self._nodes: list[onnx.NodeProto] = []
        self._bounds = ("low", "high") if activation == CLIP else ()

    def _write(self, operator: str, result: str, *read: str, **attributes: Any) -> str:
        from onnx import helper

        self._nodes.append(helper.make_node(operator, read, [result], **attributes))
        return result

    def numbers(self, result: str, *values: int) -> None:
        """A constant that says axes or sizes."""
        from onnx import helper

        self._write("Constant", result, value=helper.make_tensor("", 7, [len(values)], values))

    def _sum(self, result: str, value: str) -> str:
        if self._rank:
            value = self._write("ReduceSum", f"{result}.space", value, "space", keepdims=0)
        axes = "samples" if self._rank else "space"
        return self._write("ReduceSum", result, value, axes, keepdims=0)

    def _normalize(self, result: str, *read: str) -> str:
        operator, epsilon = "BatchNormalization", self._epsilon
        if self._rank:
            return self._write(operator, result, "centered", *read, epsilon=epsilon)
        wide = self._write("Unsqueeze", "wide", "centered", "samples")
        wide = self._write(operator, f"{result}.wide", wide, *read, epsilon=epsilon)
        return self._write("Squeeze", result, wide, "samples")

    def _function(self, read: Sequence[str], made: Sequence[str]) -> onnx.FunctionProto:
        from onnx import helper

        return helper.make_function(DOMAIN, "", read, made, self._nodes, [])

    def forward(self, kind: int) -> onnx.FunctionProto:
        """Of a forward pass, or of what it ends with alone."""
        made, read = ["y"], ["centered", "scale", "bias", "zeros", "variance", *self._bounds]
        if kind == FORWARD_NORMALIZATION:
            made = ["centered", "y", "mean", "variance"]
            read = ["x", "scale", "bias", "zeros", "count", *self._bounds]
            self._write("Div", "mean", self._sum("sum", "x"), "count")
            self._write("Sub", "centered", "x", self._write("Reshape", "means", "mean", "each"))
            squares = self._sum("squares", self._write("Mul", "square", "centered", "centered"))
            self._write("Div", "variance", squares, "count")
        if self._activation == NO_ACTIVATION:
            self._normalize("y", "scale", "bias", "zeros", "variance")
        else:
            normal = self._normalize("normal", "scale", "bias", "zeros", "variance")
            self._write("Clip" if self._bounds else "Relu", "y", normal, *self._bounds)
        return self._function(read, made)

    def gradient(self) -> onnx.FunctionProto:
        """Of the gradient; that of an activation is a mask."""
        write = self._write
        read = ["dy", "centered", "scale", "variance", "count", "epsilon", "zeros", "ones"]
        g = "dy"
        if self._activation == CLIP:
            write("Cast", "above", "y", to=9)
            write("Less", "below", "y", "high")
            write("And", "within", "above", "below")
            write("Cast", "mask", "within", to=1)
        elif self._activation == RELU:
            write("HardSigmoid", "mask", "y", alpha=2.0**126, beta=0.0)
        if self._activation != NO_ACTIVATION:
            read += ["y", *self._bounds[1:]]
            g = write("Mul", "g", "mask", "dy")
        self._sum("dbias", g)
        product = self._sum("product", write("Mul", "along", g, "centered"))
        total = write("Add", "widened", "variance", "epsilon")
        inverse = write("Reciprocal", "inverse", write("Sqrt", "deviation", total))
        write("Mul", "dscale", product, inverse)
        share = write("Div", "share", write("Mul", "gain", "scale", inverse), "count")
        slope = write("Mul", "slope", write("Mul", "steep", share, inverse), "dscale")
        shift = write("Mul", "shift", share, "dbias")
        line = self._normalize("line", slope, shift, "zeros", "ones")
        straight = write("Mul", "straight", g, write("Reshape", "gains", "gain", "each"))
        write("Sub", "dx", straight, line)
        return self._function(read, ["dx", "dscale", "dbias"])


# The kernel ``elementwise``, and the reading of programs from bodies

SLOTS: Final = {"Kernel": 64, "Codes": 20, "SignedCodes": 4}
"""Operators ``Kernel0``, ``Kernel1``, ... of the library; a model has one for each body. The first
input of the others is uint8 and int8."""
ELEMENTWISE: Final = "elementwise"

MOST_INPUTS: Final = 32
MOST_NODES: Final = 64

OPERATORS: Final = (
    "Add", "Sub", "Mul", "Div", "Sqrt", "Neg", "Abs", "Min", "Max", "Relu", "Less", "LessOrEqual",
    "Greater", "GreaterOrEqual", "Equal", "Not", "And", "Or", "Where", "Cast", "Clip", "Reciprocal",
    "Gemm", "HardSigmoid", "Identity", "Sign", "Exp", "Erf", "Tanh", "Sigmoid", "Log", "RowSum",
    "RowMean", "RowMax", "ColumnSum",
)  # fmt: skip
"""Operators of programs by their number; ``Op`` in ``runtime/native``."""
ELEMENTWISE_OPERATORS: Final = OPERATORS[: OPERATORS.index("RowSum")]
REDUCTIONS: Final = {"ReduceSum": "RowSum", "ReduceMean": "RowMean", "ReduceMax": "RowMax"}
"""Of the last axis, which is kept; a ``ReduceSum`` over all other axes is a ``ColumnSum``."""

_UNARY = {
    "Sqrt", "Neg", "Abs", "Relu", "Not", "Cast", "Reciprocal", "HardSigmoid", "Identity", "Sign",
    "Exp", "Erf", "Tanh", "Sigmoid", "Log",
}  # fmt: skip
_TERNARY = {"Where", "Clip", "Gemm"}
_TRUTH = {"Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "Not", "And", "Or"}
_OF_TRUTH = {"Not", "And", "Or"}


def has_native_nodes(manifest: Manifest) -> bool:
    """Whether a package has nodes that native kernels can run."""
    return any(DOMAIN in domains for domains in manifest.operators.by_model().values())


class NotAProgramError(ValueError):
    """A body has something that no kernel computes."""


def program_of(
    nodes: Sequence[onnx.NodeProto], inputs: Sequence[str], outputs: Sequence[str]
) -> list[int]:
    """The program of the kernel ``elementwise`` for the nodes of a body, in their order.

    Numbers of inputs and outputs, what each output is, then four numbers for each node: its
    operator and what it reads. Values are numbered: the inputs, then what each node computes.
    Constants are axes; they are no values.

    Raises:
        NotAProgramError: The body has something else than such nodes.
    """
    numbers = {name: index for index, name in enumerate(inputs)}
    truth = [False] * len(inputs)
    constants: dict[str, list[int]] = {}
    code: list[int] = []
    if not (0 < len(inputs) <= MOST_INPUTS and len(outputs) > 0 and len(nodes) <= MOST_NODES):
        raise NotAProgramError("too many or too few values")
    if len(numbers) != len(inputs):
        raise NotAProgramError("an input twice")
    for node in nodes:
        kind = node.op_type
        if len(node.output) != 1 or node.output[0] in {"", *numbers, *constants}:
            raise NotAProgramError(f"the result of {kind}")
        if kind == "Constant":
            constants[node.output[0]] = _axes(node)
            continue
        read = [numbers.get(name, -1) for name in node.input if name not in constants]
        operands = 1 if kind in _UNARY or kind in REDUCTIONS else 3 if kind in _TERNARY else 2
        known = kind in ELEMENTWISE_OPERATORS or kind in REDUCTIONS
        if node.domain or not known or len(read) != operands or -1 in read:
            raise NotAProgramError(f"{kind} of {len(read)}")
        wanted = [kind in _OF_TRUTH or (kind == "Where" and i == 0) for i in range(operands)]
        found = [truth[each] for each in read]
        if found != wanted and kind not in ("Cast", "Identity"):
            raise NotAProgramError(f"what {kind} reads")
        if kind in REDUCTIONS:
            fields = _reduction(node, [constants[n] for n in node.input if n in constants])
            code += [fields[0], *read, *fields[1:]]
        elif len(node.input) > operands:
            raise NotAProgramError(f"{kind} of axes")
        else:
            code += [OPERATORS.index(kind), *read, *_settings(node)]
        code += [0] * (-len(code) % 4)
        numbers[node.output[0]] = len(truth)
        truth.append(kind in _TRUTH or (kind == "Identity" and found[0]))
    results = [numbers.get(name, -1) for name in outputs]
    if min(results) < len(inputs) or len({*results}) < len(results):
        raise NotAProgramError("an output that is not computed, or twice")
    if any(truth[each] for each in results):
        raise NotAProgramError("an output that is not a number")
    return [len(inputs), len(outputs), *results, *code]


def _attributes(node: onnx.NodeProto) -> dict[str, onnx.AttributeProto]:
    """The attributes of a node by name, each once and with a value of its own."""
    found = {each.name: each for each in node.attribute}
    if any(each.ref_attr_name for each in found.values()) or len(found) != len(node.attribute):
        raise NotAProgramError(f"the attributes of {node.op_type}")
    return found


def _reduction(node: onnx.NodeProto, given: list[list[int]]) -> tuple[int, int]:
    """The operator of a reduction, and its axis from 1 on, 0 for the last, or how many it sums."""
    found = _attributes(node)
    if "axes" in found:
        given = [*given, list(found["axes"].ints)]
    keeps = "keepdims" not in found or found["keepdims"].i == 1
    if (
        len(given) != 1
        or not found.keys() <= {"axes", "keepdims"}
        or (node.input[0] == "" or len(node.input) != 2 - ("axes" in found))
    ):
        raise NotAProgramError(f"the attributes of {node.op_type}")
    (axes,) = given
    if node.op_type == "ReduceSum" and not keeps and axes and axes == [*range(len(axes))]:
        return OPERATORS.index("ColumnSum"), len(axes)
    if not keeps or len(axes) != 1 or axes[0] < -1:
        raise NotAProgramError(f"the axes of {node.op_type}")
    return OPERATORS.index(REDUCTIONS[node.op_type]), axes[0] + 1


def _axes(node: onnx.NodeProto) -> list[int]:
    """What a node of axes has."""
    import onnx.numpy_helper

    found = _attributes(node)
    tensor = found["value"].t if found.keys() == {"value"} else None
    if tensor is None or node.domain or node.input:
        raise NotAProgramError("a constant")
    if tensor.data_type != 7 or len(tensor.dims) != 1 or not 0 < tensor.dims[0] <= 8:
        raise NotAProgramError("a constant")
    return [int(each) for each in onnx.numpy_helper.to_array(tensor)]


def _settings(node: onnx.NodeProto) -> list[int]:
    """What a node's attributes add to its program: two numbers as bits, or nothing."""
    found = _attributes(node)
    if node.op_type == "HardSigmoid" and found.keys() <= {"alpha", "beta"}:
        numbers = [
            found[name].f if name in found else usual
            for name, usual in (("alpha", 0.2), ("beta", 0.5))
        ]
        return [struct.unpack("<I", struct.pack("<f", number))[0] for number in numbers]
    if node.op_type == "Cast" and found.keys() == {"to"} and found["to"].i == 1:
        return []
    if found:
        raise NotAProgramError(f"the attributes of {node.op_type}")
    return []


def check_functions(model: onnx.ModelProto, where: str) -> None:
    """Check that each native node says of itself what its body computes.

    With the library a session runs the node's kernel, without it the body: a package whose two
    differ would compute one thing here and another there.

    Raises:
        OdtpackError: ``package-limits``, where they do, or where a body is not one of odtpack's.
    """
    bodies: dict[str, onnx.FunctionProto] = {}
    for function in model.functions:
        if function.domain == DOMAIN:
            if function.name in bodies or function.overload:
                raise _strange(function.name, where)
            bodies[function.name] = function
    calls = [n for _, nodes in graphs_of(model) for n in nodes if n.domain == DOMAIN]
    values = _Constants(model) if calls else None
    for node in calls:
        body = bodies.get(node.op_type)
        if body is None or values is None or not _says(node, body, values):
            raise _strange(node.op_type, where)


class _Constants:
    """Values of a model's constants, by name; what is named twice is not one."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.tensors: dict[str, onnx.TensorProto] = {}
        self.writers: dict[str, onnx.NodeProto] = {}
        self.known: set[tuple[object, ...]] = set()
        written = collections.Counter[str]()
        for graph, nodes in graphs_of(model):
            if graph in model.functions:
                continue
            written.update(each.name for each in graph.input)
            for tensor in graph.initializer:
                self.tensors[tensor.name] = tensor
                written[tensor.name] += 1
            for node in nodes:
                for name in filter(None, node.output):
                    self.writers[name] = node
                    written[name] += 1
        for name, times in written.items():
            if times > 1:
                self.tensors.pop(name, None)
                self.writers.pop(name, None)


def _says(node: onnx.NodeProto, body: onnx.FunctionProto, values: _Constants) -> bool:
    """Whether the attributes of a call are what its body computes."""
    found = {each.name: each for each in node.attribute}
    if len(found) != len(node.attribute) or found.keys() != {"kernel", "program"}:
        return False
    if (len(node.input), len(node.output)) != (len(body.input), len(body.output)):
        return False
    if "" in (*node.input, *node.output):  # a kernel takes and gives all of them
        return False
    kernel, program = found["kernel"].s.decode("utf-8", "replace"), list(found["program"].ints)
    try:
        if kernel == ELEMENTWISE:
            return program == program_of(body.node, body.input, body.output)
        if kernel == TRANSPOSED:
            return program == [0] and any(
                is_transposed_product(each) and len(body.node) == 1
                and (each.input, each.output) == (body.input, body.output)
                for each in body.node
            )  # fmt: skip
        if kernel == NORMALIZATION:
            own = normalization_body(program)
            return all(
                [*getattr(own, each)] == [*getattr(body, each)]
                for each in ("node", "input", "output")
            )
        if len(body.output) != 1 or kernel not in (DEPTHWISE, PRODUCT):
            return False
        others = node.input[inputs_of(program) :] if kernel == DEPTHWISE else []
        key = (kernel, node.op_type, *program, *others)
        if key in values.known:
            return True
        if kernel == PRODUCT:
            computes = product_computes(body, program)
        else:
            tensors = [unpacked(each, values.tensors, values.writers) for each in others]
            computes = depthwise_computes(body, program, tensors)
        if computes:
            values.known.add(key)
        return computes
    except (NotAProgramError, RefusedError):
        return False


def _strange(name: str, where: str) -> OdtpackError:
    return OdtpackError(
        "package-limits",
        f"The operator {name!r} of the domain {DOMAIN!r} has no body, or a body that "
        "differs from its kernel.",
        where=where,
    )
