"""Finds nodes whose results are discarded in places, where they may be NaN or infinite.

A model may compute a value, and discard it where it makes no sense:

    p = Where(IsNaN(p0), 0, p0), p0 = Softmax(scores + mask)      a row that is masked as a whole
    y = Where(x > 0, Log(x), 0)                                   an argument without a logarithm

There the cotangent is zero, and its product with a slope that is NaN or infinite would be
NaN. Rules of the nodes found here take such a product as zero (:meth:`Context.discarded`).

The other way round a cotangent may be infinite where the slope is zero:

    y = Sqrt(Relu(x))                                             the slope of Sqrt at 0

Rules that mask a cotangent select there (:meth:`Context.unbounded`). Of a norm, a deviation or a
distance that is 0, both meet, and the slope is taken to be 0 (:meth:`Context.rooted`). So it is of
the root of any Abs, or of a Clip or Max whose bound is 0, as distances are written with those.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from odtpack.graph.graphs import constant, producer, reads, scalar

_FLOATS = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE}

# Functions that are infinite or NaN somewhere, or whose slope is.
_SINGULAR = {
    "Acos", "Acosh", "Asin", "Atanh", "Cosh", "Div", "Exp", "Log", "Pow", "Reciprocal", "Sinh",
    "Sqrt", "Tan",
}  # fmt: skip
# Rules of these multiply the cotangent by a slope, element by element.
SCALING = _SINGULAR | {
    "Abs", "Asinh", "Atan", "Celu", "Cos", "Elu", "Erf", "Gelu", "Mul", "Sigmoid", "Sin",
    "Softplus", "Softsign", "Swish", "Tanh",
}  # fmt: skip
_ROWS = {"Softmax", "LogSoftmax"}
# Of a sound model their results are finite, or lost for good.
_MIXING = {
    "BatchNormalization", "Conv", "ConvTranspose", "DeformConv", "Einsum", "GRU", "Gemm",
    "GroupNormalization", "If", "InstanceNormalization", "LSTM", "LayerNormalization", "Loop",
    "MatMul", "RMSNormalization", "RNN", "Scan",
}  # fmt: skip
_LARGEST_MASK = 1 << 24  # elements; a larger constant is a weight
_MOVING = {
    "Add", "Cast", "CastLike", "Concat", "Dropout", "Expand", "Flatten", "Gather", "Identity",
    "Neg", "Reshape", "Slice", "Split", "Squeeze", "Sub", "Sum", "Transpose", "Unsqueeze",
}  # fmt: skip
_PASSING = SCALING | _ROWS | _MOVING


def find(
    graph: ir.Graph, sources: set[ir.Value], needed: set[ir.Value], rooted: set[ir.Node]
) -> set[ir.Node]:
    """Nodes whose rules must not multiply a zero cotangent by what may not be finite."""
    # graph: In topological order. sources: Values that are differentiated, which are taken to be
    # finite. needed: Values that depend on them. rooted: What :func:`roots` finds.
    candidates = _discarded(graph, needed)
    if not candidates:
        return set()
    unsafe = _may_be_infinite(graph, candidates, sources, rooted)
    return {
        node
        for node in candidates
        if node.op_type in SCALING | _ROWS and any(y in unsafe for y in node.outputs)
    }


def _discarded(graph: ir.Graph, needed: set[ir.Value]) -> set[ir.Node]:
    """Nodes of which a Where picks elements, with only element-wise ones and views between."""
    values: set[ir.Value | None] = set()
    nodes = set[ir.Node]()
    for node in reversed(graph):
        if node.domain:
            continue
        if node.op_type == "Where":
            values.update(node.inputs[1:])
        elif node.op_type in ("Clip", "Max"):
            # A bound discards what is below it: the 0 of a root, or the -infinity of a logarithm.
            low, _ = _range(node, needed)
            kinds = () if low == -math.inf else ("Log", "Pow", "Sqrt") if low > 0 else ("Log",)
            nodes.update(n for v in node.inputs if (n := producer(v, *kinds)) is not None)
        elif node.op_type in _PASSING and any(y in values for y in node.outputs):
            nodes.add(node)
            values.update(node.inputs)
    return nodes


def _may_be_infinite(
    graph: ir.Graph, candidates: set[ir.Node], sources: set[ir.Value], rooted: set[ir.Node]
) -> set[ir.Value]:
    """Values that may hold NaN or infinities though the model is sound."""
    # Only what ``candidates`` are computed from is looked at: weights are large.
    relevant, stack = set(candidates), list(candidates)
    while stack:
        producers = (value.producer() for value in reads(stack.pop()))
        new = {n for n in producers if n is not None and n.op_type not in _MIXING} - relevant
        relevant |= new
        stack.extend(new)
    fixed: set[ir.Value] = set()  # computed from constants and shapes only
    found: set[ir.Value] = set()

    def look_at(value: ir.Value) -> None:
        if value.producer() is not None or value in sources or value in fixed:
            return
        if value.const_value is None:
            if value.dtype in _FLOATS:
                found.add(value)
            return
        fixed.add(value)
        if _holds_infinite(value.const_value):
            found.add(value)

    for node in graph:
        if node not in relevant:
            continue
        inputs = list(reads(node))
        for value in inputs:
            look_at(value)
        if node.op_type in ("Shape", "Size", "Constant") or all(v in fixed for v in inputs):
            fixed.update(node.outputs)
        makes = node not in rooted and _makes_infinite(node, fixed)
        if makes or _passes_infinite(node, found, fixed):
            found.update(node.outputs)
    return found


def _makes_infinite(node: ir.Node, fixed: set[ir.Value]) -> bool:
    """Whether a node computes, or holds, infinities of its own."""
    if node.op_type == "Constant":
        return _holds_infinite(ir.convenience.get_const_tensor(node.outputs[0]))
    if node.op_type == "ConstantOfShape":
        return _holds_infinite(node.attributes.get_tensor("value", None))
    if node.op_type not in _SINGULAR or _is_tame(node, fixed):
        return False
    return node.op_type == "Log" or not all(value in fixed for value in reads(node))


def _passes_infinite(node: ir.Node, found: set[ir.Value], fixed: set[ir.Value]) -> bool:
    """Whether infinities of what a node reads are in what it computes."""
    if node.op_type == "Where":  # what it discards is the matter here
        return any(v in found and v in fixed for v in node.inputs[1:] if v is not None)
    return node.op_type not in _MIXING and any(value in found for value in reads(node))


def _holds_infinite(tensor: ir.TensorProtocol | None) -> bool:
    if tensor is None or tensor.dtype not in _FLOATS or tensor.size > _LARGEST_MASK:
        return False
    return not bool(np.isfinite(tensor.numpy()).all())


def _is_tame(node: ir.Node, fixed: set[ir.Value]) -> bool:
    """Whether a function that is singular somewhere is so nowhere, for the operand that it has."""
    # A known divisor is not zero in a sound model; a whole exponent of one or more has a slope
    # everywhere.
    if node.op_type == "Div":
        return node.inputs[1] in fixed
    power = node.inputs[1] if node.op_type == "Pow" else None
    exponent = None if power is None else ir.convenience.get_const_tensor(power)
    if exponent is None:
        return False
    numbers = np.asarray(exponent.numpy(), np.float64)
    return bool((numbers >= 1).all() and (numbers == np.round(numbers)).all())


# Where the slope of a function is infinite.
_POLES = {
    "Acos": (-1, 1), "Acosh": (1,), "Asin": (-1, 1), "Atanh": (-1, 1), "Log": (0,),
    "Reciprocal": (0,), "Sqrt": (0,),
}  # fmt: skip
_MASKING = {"Clip", "Max", "Min", "Relu", "ThresholdedRelu"}
# Each result is an element of the input, or lies between some.
_BETWEEN = (_MOVING - {"Add", "Neg", "Sub", "Sum"}) | {
    "AveragePool", "GlobalAveragePool", "MaxPool", "Pad", "ReduceMax", "ReduceMean", "ReduceMin",
    "Where",
}  # fmt: skip
_SQUARES = {"Abs", "ReduceL2", "ReduceSumSquare"}
_POSITIVE = {"Cosh", "Exp", "Sigmoid", "Softplus"}
# In place of the number at which a pole is.
_ANY, _NEGATIVE = math.nan, -math.inf


def before_poles(graph: ir.Graph, needed: set[ir.Value], rooted: set[ir.Node]) -> set[ir.Node]:
    """Nodes with a mask whose cotangent may be infinite."""
    # Poles are followed back to what their arguments are computed from. Where that cannot be the
    # number that it would have to be, as no sum of squares is the negative of an epsilon, no
    # cotangent is infinite.
    poles: defaultdict[ir.Value, set[float]] = defaultdict(set)
    found = set()
    for node in reversed(graph):
        if node.domain:
            continue
        at = {pole for value in node.outputs for pole in poles.get(value, ())}
        if node.op_type in _MASKING and at:
            low, high = _range(node, needed)
            at = {p for p in at if (low < 0 if p == _NEGATIVE else not (p < low or p > high))}
            if at:
                found.add(node)
        for index, value in enumerate(node.inputs):
            new = {p for pole in at if (p := _argument(node, index, pole)) is not None}
            own = () if node in rooted else _own_poles(node, index)
            if value is not None and (new := new.union(own)):
                poles[value] |= new
    return found


def _own_poles(node: ir.Node, index: int) -> Iterable[float]:
    if node.op_type == "Pow" and index == 0:
        exponent = scalar(node.inputs[1])
        return () if exponent is not None and (exponent >= 1 or exponent == 0) else (0,)
    if node.op_type == "Div":
        return (0,) if index == 1 else ()
    return _POLES.get(node.op_type, ())


def _range(node: ir.Node, needed: set[ir.Value]) -> tuple[float, float]:
    """Between which numbers the results of a node with a mask are, as far as that is known."""
    # A bound that is trained is not known.
    low, high = -math.inf, math.inf
    if node.op_type in ("Relu", "ThresholdedRelu"):
        return min(0.0, node.attributes.get_float("alpha", 0.0)), high
    for index, value in enumerate(node.inputs):
        bound = None if value in needed else constant(value, _LARGEST_MASK)
        if bound is None or not bound.size or (node.op_type == "Clip" and index == 0):
            continue
        if node.op_type == "Max" or (node.op_type == "Clip" and index == 1):
            low = max(low, float(bound.min()))
        else:
            high = min(high, float(bound.max()))
    return low, high


def _argument(node: ir.Node, index: int, pole: float) -> float | None:
    """What an input must be for an output to be at a pole; None if it cannot be, or is mixed."""
    kind, inputs = node.op_type, node.inputs
    if kind in _BETWEEN or kind in _MASKING:
        return pole
    number = scalar(inputs[1 - index]) if kind in ("Add", "Div", "Mul", "Sub") else None
    if kind in ("Add", "Sub") and number is not None and math.isfinite(pole):
        if kind == "Add":
            return pole - number
        return pole + number if index == 0 else number - pole
    if kind == "Mul" and number and math.isfinite(pole):
        return pole / number
    if kind == "Div" and index == 0 and number and math.isfinite(pole):
        return pole * number
    if kind in ("Add", "ReduceSum", "Sum"):
        return _NEGATIVE if pole < 0 else 0.0 if pole == 0 and kind == "ReduceSum" else _ANY
    square = kind in _SQUARES or (kind == "Mul" and inputs[0] is inputs[1])
    if kind == "Pow":
        exponent = scalar(inputs[1])
        square = exponent is not None and exponent > 0 and exponent % 2 == 0
    if pole < 0 and (square or kind == "Sqrt" or kind in _POSITIVE):
        return None
    if pole == 0 and kind in _POSITIVE:
        return None
    if kind == "Sqrt":
        return pole * pole if math.isfinite(pole) else _ANY
    if square or kind in SCALING or kind in ("Neg", "Sub"):
        keeps = square or kind in ("Mul", "Neg") or (kind == "Div" and index == 0)
        return 0.0 if keeps and pole == 0 else _ANY
    return None


# Of what is 0 only where everything in it is, so are the results.
_KEEPING_ZERO = {
    "Cast", "Expand", "Flatten", "Gather", "Identity", "ReduceMean", "ReduceSum", "Reshape",
    "Slice", "Sqrt", "Squeeze", "Transpose", "Unsqueeze",
}  # fmt: skip


def roots(graph: ir.Graph, needed: set[ir.Value]) -> set[ir.Node]:
    """Nodes that take a root of a sum of squares or absolute values, as norms and deviations do."""
    # At 0 the slope of the root is infinite, and that of the sum is zero. PyTorch's derivatives of
    # norm, std and cdist mask it (norm_backward, std_backward, _euclidean_dist_backward).
    sums, found, sizes = set[ir.Value | None](), set[ir.Node](), set[ir.Value | None]()

    def is_positive(value: ir.Value | None) -> bool:
        if value in needed:
            return False
        array = constant(value, _LARGEST_MASK)
        return value in sizes or (array is not None and bool((array >= 0).all()))

    def keeps(factor: ir.Value | None) -> bool:
        # A sum times a number below 0, as of a Minkowski norm, may be 0 or less where no part is 0.
        return factor in sums or is_positive(factor)

    for node in graph:
        if node.domain or not node.inputs:
            continue
        kind, inputs = node.op_type, node.inputs
        first, second = (*inputs, None)[:2]
        others = {
            v for v in inputs
            if v is not None and v.const_value is None and producer(v, "Constant") is None
        }  # fmt: skip
        if (
            kind in ("Shape", "Size")
            or (others and others <= sizes)
            or (kind == "Cast" and is_positive(first))  # sizes that are known
        ):
            sizes.update(node.outputs)
        exponent = scalar(second) if kind == "Pow" and second not in needed else None
        summed = [value in sums for value in inputs]
        if summed[0] and (kind == "Sqrt" or (exponent is not None and 0 < exponent < 1)):
            found.add(node)
        if (
            kind in _SQUARES
            or kind == "ReduceL1"
            or (kind in _KEEPING_ZERO and summed[0])
            or (kind in ("Add", "Sum") and all(summed))
            or (kind == "Mul" and first is second)
            or (kind == "Mul" and any(summed) and all(map(keeps, inputs)))
            or (kind == "Div" and summed[0] and second not in needed and keeps(second))
            or (exponent is not None and exponent > 0 and (summed[0] or exponent % 2 == 0))
            # The square of a distance by way of a product of matrices, which rounding makes less.
            or (kind in ("Clip", "Max") and _range(node, needed)[0] == 0)
        ):
            sums.update(node.outputs)
    return found
