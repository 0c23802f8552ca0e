"""What the kernel ``depthwise`` computes, and whether a body computes the same.

A body is a gradient rule's nodes: slices, products, sums, in one of several forms. They are not
compared with a list of bodies but run, by ONNX Runtime without the library, on small whole numbers
that are drawn anew each time, for two numbers of samples. A body of the operators below, whose
constants are 0 and 1, computes sums of products of its inputs, without differences, and on such
numbers without rounding: one that is wrong anywhere is found.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import onnxruntime

if TYPE_CHECKING:
    import onnx

DEPTHWISE: Final = "depthwise"
FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = range(3)
LENGTH: Final = 18
"""Numbers of a program: what is computed; whether the input's planes and the output's lie
[C, N, P] or [N, C, H, W]; how the weight lies, see :func:`weight_dims`; C; for both axes size,
kernel, step of windows, distance of taps, zeros before, windows; and whether there is a bias."""

_SUMS = {
    "Add", "Concat", "Constant", "Conv", "ConvTranspose", "Gather", "Gemm", "Identity", "MatMul",
    "Mul", "Pad", "ReduceSum", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze",
}  # fmt: skip
"""Operators of bodies: of sums and products, and of moving elements."""
_MOVES = {"Gather", "Pad", "ReduceSum", "Reshape", "Slice", "Squeeze", "Unsqueeze"}
_BY_PLACE = {"Concat", "Gather", "Pad", "Slice"}
_SAMPLES = (2, 3)
_MOST_ELEMENTS, _MOST_NODES = 1 << 26, 512
_LONGEST = 64
"""Taps of an axis, and steps between windows and taps, that the library has a kernel for."""
_ONES = (-3, -2, -1, 1, 2, 3)


def computes(
    function: onnx.FunctionProto, program: Sequence[int], constants: Sequence[np.ndarray]
) -> bool:
    """Whether a body computes what a program of the kernel says.

    Args:
        function: Function whose first inputs are the kernel's.
        program: Attribute of its call.
        constants: Values of its other inputs.
    """
    import onnx

    try:
        wanted = [Depthwise(program, samples) for samples in _SAMPLES]
        found = [_run(function, each, constants) for each in wanted]
        if not all(_alike(node, *found) for node in function.node if node.op_type in _BY_PLACE):
            return False
    except (RefusedError, onnx.shape_inference.InferenceError):
        return False
    except Exception as error:  # ONNX Runtime's exceptions have no common base
        if type(error).__module__.startswith("onnxruntime"):
            return False
        raise
    results = [values[function.output[0]] for values in found]
    return all(np.array_equal(a, b.result) for a, b in zip(results, wanted, strict=True))


def unpacked(
    name: str, tensors: Mapping[str, onnx.TensorProto], writers: Mapping[str, onnx.NodeProto]
) -> np.ndarray:
    """The value of a constant, of which nodes may have unpacked it.

    Raises:
        RefusedError: It is not one.
    """
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
    if node.op_type == "Equal" and math.prod(np.broadcast_shapes(*shapes)) <= _MOST_ELEMENTS:
        return np.asarray(first == others[0])
    if node.op_type == "Identity":
        return first
    raise RefusedError


def weight_dims(channels: int, kernel: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The shapes that a weight may have."""
    height, width = kernel
    return (channels, 1, height, width), (channels, height * width), (channels * height, width)


def inputs_of(program: Sequence[int]) -> int:
    """Number of tensors that the kernel reads; what its body reads besides is constant."""
    return 3 if len(program) == LENGTH and program[0] == FORWARD and program[-1] else 2


class RefusedError(Exception):
    """Something that no body of odtpack has."""


class Depthwise:
    """Inputs of the kernel, of small whole numbers, and its result.

    Attributes:
        inputs: Tensors of the kernel, without the constants of its body.
        result: What it computes of them.
    """

    def __init__(self, program: Sequence[int], samples: int) -> None:
        if len(program) != LENGTH or min(program) < 0 or max(program) > 1 << 16:
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
        if max(planes, samples * channels * math.prod(padded)) > _MOST_ELEMENTS:
            raise RefusedError
        random = np.random.default_rng(secrets.randbits(64))

        def draw(*shape: int) -> np.ndarray:
            return random.choice(_ONES, shape).astype(np.float32)

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
        self.inputs: list[np.ndarray] = [
            [w, x, b] if bias else [w, x], [w, y], [x, y],
        ][kind]  # fmt: skip
        self.result: np.ndarray = (total, inner, dw)[kind]


def _run(
    function: onnx.FunctionProto, wanted: Depthwise, constants: Sequence[np.ndarray]
) -> dict[str, Any]:
    """All values of a body for the inputs of a kernel."""
    import onnx
    from onnx import helper, numpy_helper

    feeds = dict(zip(function.input, wanted.inputs, strict=False))
    others = function.input[len(feeds) :]
    if len(feeds) < len(wanted.inputs) or len(function.node) > _MOST_NODES:
        raise RefusedError
    whole = {each.output[0] for each in function.node if each.op_type == "Constant"}
    for each in function.node:
        _check(each, whole)
    model = onnx.ModelProto(ir_version=8, opset_import=function.opset_import)
    model.graph.name = "body"
    model.graph.node.extend(function.node)
    for name, array in zip(others, constants, strict=True):
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    for name, array in feeds.items():
        value = helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, array.shape)
        model.graph.input.append(value)
    # Sizes first: a body that would fill the memory is not run.
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    shapes = {each.name: each.type.tensor_type.shape.dim for each in inferred.graph.value_info}
    names = [name for each in function.node for name in each.output]
    for name in names:
        dims = [dim.dim_value for dim in shapes.get(name, ()) if dim.HasField("dim_value")]
        if name not in shapes or len(dims) < len(shapes[name]) or math.prod(dims) > _MOST_ELEMENTS:
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


def _check(node: onnx.NodeProto, whole: Set[str]) -> None:
    """Check one node of a body. ``whole``: Names of what its Constant nodes write."""
    names = {each.name for each in node.attribute}
    if node.domain or node.op_type not in _SUMS or len(names) != len(node.attribute):
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
