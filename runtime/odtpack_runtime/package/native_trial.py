"""Whether the body of a native node computes what its kernel does.

Bodies are not compared with a list of bodies but run, by ONNX Runtime without the library, on small
whole numbers that are drawn anew each time, for two numbers of samples. A body of a kernel's
operators, whose floating-point constants are 0 and 1, computes sums of products of its inputs,
without differences, and on such numbers without rounding: one that is wrong anywhere is found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import onnxruntime

if TYPE_CHECKING:
    import onnx

SUMS: Final = {
    "Add", "Concat", "Constant", "Conv", "ConvTranspose", "Gather", "Gemm", "Identity", "MatMul",
    "Mul", "Pad", "ReduceSum", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze",
}  # fmt: skip
"""Operators of sums and products, and of moving elements."""
ONES: Final = (-3, -2, -1, 1, 2, 3)
"""Numbers that inputs are drawn from."""
MOST_ELEMENTS: Final = 1 << 26

_MOVES = {"Gather", "Pad", "ReduceSum", "Reshape", "Slice", "Squeeze", "Unsqueeze"}
_BY_PLACE = {"Concat", "Gather", "Pad", "Slice"}
_SAMPLES = (2, 3)
_MOST_NODES = 512


class Trial(Protocol):
    """Inputs of a kernel, of small whole numbers, and its result."""

    inputs: list[np.ndarray]  # tensors of the kernel, without the constants of its body
    result: np.ndarray  # what it computes of them


class RefusedError(Exception):
    """Something that no body of odtpack has."""


def computes(
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
        found = [_run(function, each, operators, constants) for each in wanted]
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
    if node.op_type == "Equal" and math.prod(np.broadcast_shapes(*shapes)) <= MOST_ELEMENTS:
        return np.asarray(first == others[0])
    if node.op_type == "Identity":
        return first
    raise RefusedError


def _run(
    function: onnx.FunctionProto,
    wanted: Trial,
    operators: Set[str],
    constants: Sequence[np.ndarray],
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
        if name not in shapes or len(dims) < len(shapes[name]) or math.prod(dims) > MOST_ELEMENTS:
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
