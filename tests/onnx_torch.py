"""An interpreter of ONNX in PyTorch, in float64: an oracle that shares no code with the product.

``Interpreter(model)`` reads a model as it is, from opset 7 on. Every float is a float64 tensor, so
autograd gives the gradient of any value with respect to any initializer or ``Constant``.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx.inliner
import onnxruntime
import torch
from onnx import numpy_helper
from torch import Tensor
from torch.nn import functional as F

from tests.autodiff.recurrent_oracle import INPUTS, Recurrent

Value = Tensor | None
FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16)


VIEWS = {"Concat", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"}
WEIGHTS = {
    "BatchNormalization": (1, 2), "Conv": (1, 2), "ConvTranspose": (1, 2), "Gather": (0,),
    "Gemm": (0, 1, 2), "GRU": (1, 2, 3), "LSTM": (1, 2, 3), "LayerNormalization": (1, 2),
    "MatMul": (0, 1), "PRelu": (1,),
}  # fmt: skip


def tensor(array: np.ndarray) -> Tensor:
    """The array as a tensor; floats in float64."""
    if array.dtype.kind == "f":
        array = array.astype(np.float64)
    elif array.dtype.name in ("int4", "uint4"):
        array = array.astype(np.int8)
    return torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape).copy())


class Interpreter:
    """A model whose values are computed by PyTorch.

    Attributes:
        constants: Every initializer and every ``Constant`` of the model and of its subgraphs, by
            name; floats require a gradient.
        values: Every value of the last run, by name.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = onnx.inliner.inline_local_functions(model) if model.functions else model
        self.opset = next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
        self.constants: dict[str, Tensor] = {}
        self.values: dict[str, Value] = {}
        for graph in graphs_of(self.model.graph):
            for initializer in graph.initializer:
                self._hold(initializer.name, numpy_helper.to_array(initializer))
            for node in graph.node:
                if node.op_type == "Constant":
                    (given,) = node.attribute
                    array = onnx.helper.get_attribute_value(given)
                    if given.type == onnx.AttributeProto.TENSOR:
                        array = numpy_helper.to_array(array)
                    kind = np.float32 if given.name.startswith("value_float") else np.int64
                    array = np.asarray(array, None if isinstance(array, np.ndarray) else kind)
                    self._hold(node.output[0], array)

    def _hold(self, name: str, array: np.ndarray) -> None:
        if array.dtype.kind not in "OSU":
            held = tensor(array)
            self.constants[name] = held.requires_grad_(held.is_floating_point())

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> dict[str, Value]:
        """Compute every value from the inputs."""
        self.values = {**self.constants, **{name: tensor(a) for name, a in feeds.items()}}
        self._run(self.model.graph)
        return self.values

    def weights(self) -> set[str]:
        """The constants at the place of a layer's weight, buffers by name left out."""
        found = set()
        for graph in graphs_of(self.model.graph):
            behind: dict[str, str] = {}  # what is a view of which constant
            for node in graph.node:
                origins = [behind.get(name, name) for name in node.input]
                if node.op_type in VIEWS and origins[0] in self.constants:
                    behind.update(dict.fromkeys(node.output, origins[0]))
                for index in WEIGHTS.get(node.op_type, ()):
                    if index < len(origins) and origins[index] in self.constants:
                        found.add(origins[index])
        return {name for name in found if "buffer" not in name}

    def _run(self, graph: onnx.GraphProto) -> None:
        for node in graph.node:
            if node.op_type == "Constant":
                continue
            attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            if node.op_type == "If":
                condition = self.values[node.input[0]]
                assert condition is not None
                body = attributes["then_branch" if bool(condition) else "else_branch"]
                self._run(body)
                results: Any = [self.values[output.name] for output in body.output]
            else:
                function = OPERATORS.get(node.op_type)
                if function is None:
                    raise NotImplementedError(f"the oracle has no {node.op_type}")
                given = [self.values[name] if name else None for name in node.input]
                call = Call(attributes, self.opset, len(node.output))
                try:
                    results = function(call, *given)
                except Exception as error:
                    error.add_note(f"in {node.op_type} {node.name!r} -> {list(node.output)}")
                    raise
            if isinstance(results, Tensor):
                results = [results]
            self.values.update(zip(node.output, results, strict=False))


def graphs_of(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and those inside of its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
                yield from graphs_of(inner)


class Call:
    """The attributes of one node."""

    def __init__(self, attributes: Mapping[str, Any], opset: int, outputs: int) -> None:
        self.attributes, self.opset, self.outputs = attributes, opset, outputs

    def get(self, name: str, default: Any = None) -> Any:
        value = self.attributes.get(name, default)
        return value.decode() if isinstance(value, bytes) else value

    def list(self, name: str, given: Value = None) -> list[int] | None:
        """A list that is an input in newer opsets and an attribute in older ones."""
        if given is not None:
            return [int(v) for v in given.reshape(-1).tolist()]
        return None if name not in self.attributes else [int(v) for v in self.attributes[name]]


OPERATORS: dict[str, Callable[..., Any]] = {}


def operator(function: Callable[..., Any]) -> Callable[..., Any]:
    OPERATORS[function.__name__.strip("_")] = function
    return function


def _simple(**functions: Callable[..., Any]) -> None:
    for name, function in functions.items():
        OPERATORS[name] = lambda call, *given, function=function: function(*given)


def _divide(x: Tensor, y: Tensor) -> Tensor:
    return x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


_simple(
    Abs=torch.abs, Add=torch.add, And=torch.logical_and, Cos=torch.cos, Div=_divide, Equal=torch.eq,
    Erf=torch.erf, Exp=torch.exp, Floor=torch.floor, Greater=torch.gt, GreaterOrEqual=torch.ge,
    Identity=lambda x: x, IsNaN=torch.isnan, Less=torch.lt, LessOrEqual=torch.le, Log=torch.log,
    MatMul=torch.matmul, Mul=torch.mul, Neg=torch.neg, Not=torch.logical_not, Or=torch.logical_or,
    Pow=lambda x, y: torch.pow(x, y).to(x.dtype), Reciprocal=torch.reciprocal, Relu=torch.relu,
    Sigmoid=torch.sigmoid, Sin=torch.sin,
    Size=lambda x: torch.tensor(x.numel()), Softplus=F.softplus, Sqrt=torch.sqrt, Sub=torch.sub,
    Tanh=torch.tanh, Where=torch.where,
    Range=lambda a, b, s: torch.arange(a.item(), b.item(), s.item(), dtype=a.dtype),
    GlobalAveragePool=lambda x: x.mean(tuple(range(2, x.ndim)), keepdim=True),
    GlobalMaxPool=lambda x: x.amax(tuple(range(2, x.ndim)), keepdim=True),
    PRelu=lambda x, slope: torch.where(x >= 0, x, slope * x),
)  # fmt: skip


@operator
def MaxUnpool(call: Call, x: Tensor, index: Tensor, shape: Tensor) -> Tensor:
    flat = x.new_zeros(int(shape.prod()))
    return flat.index_add(0, index.flatten(), x.flatten()).reshape(shape.tolist())


@operator
def ConstantOfShape(call: Call, shape: Tensor) -> Tensor:
    value = call.get("value")
    fill = tensor(numpy_helper.to_array(value)) if value is not None else torch.zeros(1).double()
    return fill.reshape(()).expand(shape.tolist())


@operator
def Clip(call: Call, x: Tensor, low: Value = None, high: Value = None) -> Tensor:
    if call.opset < 11:
        return x.clamp(call.get("min"), call.get("max"))
    x = x if low is None else torch.where(x < low, low, x)
    return x if high is None else torch.where(x > high, high, x)


@operator
def Softmax(call: Call, x: Tensor, function: Callable[..., Tensor] = torch.softmax) -> Tensor:
    if call.opset >= 13:
        return function(x, call.get("axis", -1))
    axis = call.get("axis", 1)
    return function(x.reshape(math.prod(x.shape[:axis]), -1), 1).reshape(x.shape)


# Shapes and indices.


@operator
def Flatten(call: Call, x: Tensor) -> Tensor:
    axis = call.get("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), -1)


@operator
def Gather(call: Call, x: Tensor, indices: Tensor) -> Tensor:
    axis = call.get("axis", 0) % x.ndim
    flat = x.index_select(axis, indices.reshape(-1).to(torch.int64) % x.shape[axis])
    return flat.reshape(x.shape[:axis] + indices.shape + x.shape[axis + 1 :])


@operator
def Pad(
    call: Call, x: Tensor, pads: Value = None, fill: Value = None, axes: Value = None
) -> Tensor:
    flat = call.list("pads", pads)
    chosen = call.list("axes", axes) or list(range(x.ndim))
    mode, half = call.get("mode", "constant"), len(flat) // 2
    value = 0.0 if fill is None else fill.item()
    for each, before, after in zip(chosen, flat[:half], flat[half:], strict=True):
        axis, size = each % x.ndim, x.shape[each]
        if mode == "constant":
            x = x.narrow(axis, max(-before, 0), size - max(-before, 0) - max(-after, 0))
            widths = [0, 0] * (x.ndim - axis - 1) + [max(before, 0), max(after, 0)]
            x = F.pad(x, widths, value=value)
            continue
        at = torch.arange(-before, size + after)
        if mode == "reflect":
            at = at.abs() if size > 1 else 0 * at
            at = torch.where(at >= size, 2 * (size - 1) - at, at)
        x = x.index_select(axis, at % size if mode == "wrap" else at.clamp(0, size - 1))
    return x


@operator
def Reshape(call: Call, x: Tensor, shape: Tensor) -> Tensor:
    zero = not call.get("allowzero", 0)
    return x.reshape([x.shape[i] if d == 0 and zero else d for i, d in enumerate(shape.tolist())])


@operator
def Slice(
    call: Call, x: Tensor, starts: Value = None, ends: Value = None, axes: Value = None,
    steps: Value = None,
) -> Tensor:  # fmt: skip
    first, last = call.list("starts", starts), call.list("ends", ends)
    assert first is not None
    assert last is not None
    along = call.list("axes", axes) or range(len(first))
    by = call.list("steps", steps) or [1] * len(first)
    for axis, start, end, step in zip(along, first, last, by, strict=True):
        at = range(x.shape[axis])[slice(start, None if step < 0 and end < -(2**31) else end, step)]
        x = x.index_select(axis, torch.tensor(list(at), dtype=torch.int64))
    return x


@operator
def Split(call: Call, x: Tensor, split: Value = None) -> list[Tensor]:
    axis, sizes = call.get("axis", 0), call.list("split", split)
    if sizes is None:
        each = -(-x.shape[axis] // call.outputs)
        sizes = [each] * (call.outputs - 1) + [x.shape[axis] - each * (call.outputs - 1)]
    return list(x.split(sizes, axis))


@operator
def Squeeze(call: Call, x: Tensor, axes: Value = None) -> Tensor:
    chosen = call.list("axes", axes)
    if chosen is None:
        return x.squeeze()
    assert all(x.shape[axis] == 1 for axis in chosen)
    return x.squeeze(tuple(chosen))


@operator
def Unsqueeze(call: Call, x: Tensor, axes: Value = None) -> Tensor:
    chosen = call.list("axes", axes) or []
    for axis in sorted(axis % (x.ndim + len(chosen)) for axis in chosen):
        x = x.unsqueeze(axis)
    return x


def _reduction(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def reduce(call: Call, x: Tensor, axes: Value = None) -> Tensor:
        chosen = call.list("axes", axes)
        if not chosen:
            if call.get("noop_with_empty_axes", 0):
                return x
            chosen = list(range(x.ndim))
        return function(x, tuple(chosen), bool(call.get("keepdims", 1)))

    return reduce


_TYPES = {
    getattr(onnx.TensorProto, name.upper()): getattr(torch, name)
    for name in ("int64", "int32", "int8", "uint8", "bool")
} | dict.fromkeys(FLOATS, torch.float64)


def _indexed(call: Call, x: Tensor, indices: Tensor) -> Tensor:
    assert not call.get("batch_dims", 0)
    return x[tuple(indices.unbind(-1))]


# Operators of one line.
OPERATORS |= {
    "Cast": lambda call, x: x.to(_TYPES[call.get("to")]),
    "Concat": lambda call, *given: torch.cat(given, call.get("axis")),
    "DynamicQuantizeLinear": lambda _, x: quantized(x),
    "Expand": lambda _, x, shape: x.expand(torch.broadcast_shapes(x.shape, tuple(shape.tolist()))),
    "GRU": lambda call, *given: recurrent("GRU", call, *given),
    "GatherElements": lambda call, x, index: x.gather(call.get("axis", 0), index),
    "GatherND": _indexed,
    "HardSigmoid": lambda call, x: (call.get("alpha", 0.2) * x + call.get("beta", 0.5)).clamp(0, 1),
    "LSTM": lambda call, *given: recurrent("LSTM", call, *given),
    "LeakyRelu": lambda call, x: F.leaky_relu(x, call.get("alpha", 0.01)),
    "LogSoftmax": lambda call, x: Softmax(call, x, torch.log_softmax),
    "Max": lambda _, *given: functools.reduce(torch.maximum, given),
    "Min": lambda _, *given: functools.reduce(torch.minimum, given),
    "NonZero": lambda _, x: x.nonzero().T,
    "ReduceL2": _reduction(lambda x, axes, keep: x.square().sum(axes, keep).sqrt()),
    "ReduceMax": _reduction(torch.amax),
    "ReduceMean": _reduction(torch.mean),
    "ReduceMin": _reduction(torch.amin),
    "ReduceProd": _reduction(lambda x, axes, keep: x.flatten().prod().reshape((1,) * keep)),
    "ReduceSum": _reduction(torch.sum),
    "ScatterElements": lambda call, x, index, new: x.scatter(call.get("axis", 0), index, new),
    "Shape": lambda call, x: torch.tensor(x.shape[call.get("start", 0) : call.get("end")]).long(),
    "Transpose": lambda call, x: x.permute(call.get("perm", [*reversed(range(x.ndim))])),
}


# Products.


@operator
def Gemm(call: Call, a: Tensor, b: Tensor, c: Value = None) -> Tensor:
    a, b = (a.T if call.get("transA", 0) else a), (b.T if call.get("transB", 0) else b)
    product = call.get("alpha", 1.0) * (a @ b)
    return product if c is None else product + call.get("beta", 1.0) * c


def _window(call: Call, x: Tensor, kernel: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Strides, dilations and pads (begin and end of each axis) of a window."""
    rank = len(kernel)
    strides, dilations = call.get("strides", [1] * rank), call.get("dilations", [1] * rank)
    pads, auto = list(call.get("pads", [0] * 2 * rank)), call.get("auto_pad", "NOTSET")
    pads = list(itertools.chain(*zip(pads[:rank], pads[rank:], strict=True)))
    if auto.startswith("SAME"):
        for axis, size in enumerate(x.shape[2:]):
            span = dilations[axis] * (kernel[axis] - 1) + 1
            total = max((-(-size // strides[axis]) - 1) * strides[axis] + span - size, 0)
            less, more = total // 2, total - total // 2
            pads[2 * axis : 2 * axis + 2] = [less, more] if auto == "SAME_UPPER" else [more, less]
    return list(strides), list(dilations), pads


def _padded(x: Tensor, pads: list[int], value: float = 0.0) -> Tensor:
    pairs = [pads[i : i + 2] for i in range(0, len(pads), 2)]
    return F.pad(x, [width for pair in reversed(pairs) for width in pair], value=value)


@operator
def Conv(call: Call, x: Tensor, w: Tensor, b: Value = None) -> Tensor:
    strides, dilations, pads = _window(call, x, list(w.shape[2:]))
    convolve = [F.conv1d, F.conv2d, F.conv3d][x.ndim - 3]
    return convolve(_padded(x, pads), w, b, strides, 0, dilations, call.get("group", 1))


@operator
def ConvTranspose(call: Call, x: Tensor, w: Tensor, b: Value = None) -> Tensor:
    assert call.get("auto_pad", "NOTSET") == "NOTSET"
    assert "output_shape" not in call.attributes
    strides, dilations, pads = _window(call, x, list(w.shape[2:]))
    convolve = [F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d][x.ndim - 3]
    more = call.get("output_padding", [0] * len(strides))
    y = convolve(x, w, b, strides, 0, more, call.get("group", 1), dilations)
    return _padded(y, [-pad for pad in pads])


def _pool(call: Call, x: Tensor, value: float) -> tuple[Tensor, list[int], list[int], list[int]]:
    kernel = call.get("kernel_shape")
    strides, dilations, pads = _window(call, x, kernel)
    if call.get("ceil_mode", 0):
        for axis, size in enumerate(x.shape[2:]):
            span = dilations[axis] * (kernel[axis] - 1) + 1
            rest = (size + sum(pads[2 * axis : 2 * axis + 2]) - span) % strides[axis]
            pads[2 * axis + 1] += (strides[axis] - rest) % strides[axis]
    return _padded(x, pads, value), kernel, strides, dilations


@operator
def MaxPool(call: Call, x: Tensor) -> Tensor:
    padded, kernel, strides, dilations = _pool(call, x, -math.inf)
    pool: Any = [F.max_pool1d, F.max_pool2d, F.max_pool3d][x.ndim - 3]
    result: Tensor = pool(padded, kernel, strides, 0, dilations)
    return result


@operator
def AveragePool(call: Call, x: Tensor) -> Tensor:
    pool: Any = [F.avg_pool1d, F.avg_pool2d, F.avg_pool3d][x.ndim - 3]
    padded, kernel, strides, _ = _pool(call, x, 0.0)
    total = pool(padded, kernel, strides) * math.prod(kernel)
    counted = torch.ones_like(x)
    if call.get("count_include_pad", 0):
        assert not call.get("ceil_mode", 0)
        return total / math.prod(kernel)
    count = pool(_pool(call, counted, 0.0)[0], kernel, strides) * math.prod(kernel)
    return total / count


@operator
def BatchNormalization(
    call: Call, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor
) -> Tensor:
    assert not call.get("training_mode", 0)
    shape = [-1] + [1] * (x.ndim - 2)
    factor = scale / (variance.detach() + call.get("epsilon", 1e-5)).sqrt()  # statistics are fixed
    return (x - mean.detach().reshape(shape)) * factor.reshape(shape) + bias.reshape(shape)


@operator
def LayerNormalization(
    call: Call, x: Tensor, scale: Tensor, bias: Value = None
) -> tuple[Tensor, ...]:
    axes, epsilon = tuple(range(call.get("axis", -1) % x.ndim, x.ndim)), call.get("epsilon", 1e-5)
    y = F.layer_norm(x, x.shape[axes[0] :], None, None, epsilon) * scale
    deviation = (x.var(axes, correction=0, keepdim=True) + epsilon).sqrt()
    return y if bias is None else y + bias, x.mean(axes, keepdim=True), 1 / deviation


@operator
def Resize(
    call: Call, x: Tensor, roi: Value = None, scales: Value = None, sizes: Value = None
) -> Tensor:
    if call.opset < 11:
        scales = roi
    given = [] if scales is None else [float(s) for s in scales.reshape(-1).tolist()]
    ends = call.list("sizes", sizes) or [int(n * s) for n, s in zip(x.shape, given, strict=True)]
    mode, nearest = call.get("mode", "nearest"), call.get("nearest_mode", "round_prefer_floor")
    where = call.get("coordinate_transformation_mode", "half_pixel")
    if call.opset < 11:
        where, nearest = "asymmetric", "floor"
    for axis, (size, end) in enumerate(zip(x.shape, ends, strict=True)):
        if size == end:
            continue
        scale = given[axis] if given and sizes is None else end / size
        at = torch.arange(end, dtype=torch.float64)
        if where == "align_corners":
            at = at * (size - 1) / (end - 1) if end > 1 else 0 * at
        elif where == "asymmetric":
            at = at / scale
        else:
            assert where in ("half_pixel", "pytorch_half_pixel")
            at = 0 * at if end == 1 and where[0] == "p" else (at + 0.5) / scale - 0.5
        if mode == "nearest":
            rounded = {
                "floor": at.floor(), "ceil": at.ceil(), "round_prefer_floor": (at - 0.5).ceil(),
                "round_prefer_ceil": (at + 0.5).floor(),
            }[nearest]  # fmt: skip
            x = x.index_select(axis, rounded.clamp(0, size - 1).to(torch.int64))
            continue
        assert mode == "linear"
        at = at.clamp(0, size - 1)
        low = at.floor().to(torch.int64)
        high = (low + 1).clamp(max=size - 1)
        part = (at - low).reshape([-1 if i == axis else 1 for i in range(x.ndim)])
        x = x.index_select(axis, low) * (1 - part) + x.index_select(axis, high) * part
    return x


# Recurrent layers, by the formulas of the standard.


def recurrent(op: str, call: Call, *given: Value, actual: Value = None) -> list[Tensor]:
    assert not call.get("layout", 0)
    attributes = dict(call.attributes)
    if "activations" in attributes:
        attributes["activations"] = [name.decode() for name in attributes["activations"]]
    if "direction" in attributes:
        attributes["direction"] = attributes["direction"].decode()
    there = {name: v for name, v in zip(INPUTS, given, strict=False) if v is not None}
    outputs = 2 if op == "GRU" else 3
    return Recurrent(op, attributes, list(there), range(outputs), actual)(*there.values())


# Quantized layers: a gradient passes rounding as if it were not there.


@operator
def DequantizeLinear(call: Call, x: Tensor, scale: Tensor, zero: Value = None) -> Tensor:
    shape, block = [1] * x.ndim, call.get("block_size", 0)
    if block:
        axis, shape = call.get("axis", 1), list(x.shape)
        scale = scale.repeat_interleave(block, axis)
        zero = None if zero is None else zero.repeat_interleave(block, axis)
    elif scale.numel() > 1:
        shape[call.get("axis", 1)] = -1
    centred = x.double() if zero is None else x.double() - zero.double().reshape(shape)
    return centred * scale.reshape(shape)


def quantized(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Levels, scale and zero point of DynamicQuantizeLinear, computed in float32."""
    narrow = x.detach().float()
    low, high = narrow.min().clamp(max=0), narrow.max().clamp(min=0)
    scale = (high - low) / 255
    zero = (-low / scale).round().clamp(0, 255)
    levels = ((narrow / scale).round() + zero).clamp(0, 255).double()
    smooth = x / scale.double()
    return levels + smooth - smooth.detach(), scale.double(), zero.double()


@operator
def MatMulInteger(call: Call, a: Tensor, b: Tensor, az: Value = None, bz: Value = None) -> Tensor:
    a = a.double() if az is None else a.double() - az.double()
    b = b.double() if bz is None else b.double() - bz.double()
    return a @ b


@operator
def DynamicQuantizeLSTM(
    call: Call, x: Tensor, w: Tensor, r: Tensor, b: Value, lengths: Value, h0: Value, c0: Value,
    p: Value, w_scale: Tensor, w_zero: Tensor, r_scale: Tensor, r_zero: Tensor,
) -> list[Tensor]:  # fmt: skip
    """ONNX Runtime's values, and there the gradient of the LSTM with the weights as stored."""
    given = [x, w, r, b, lengths, h0, c0, p, w_scale, w_zero, r_scale, r_zero]
    arrays = [None if v is None else v.detach().numpy() for v in given]
    arrays = [v if v is None or v.dtype != np.float64 else v.astype(np.float32) for v in arrays]
    names = ["" if v is None else f"i{i}" for i, v in enumerate(arrays)]
    feeds = {name: v for name, v in zip(names, arrays, strict=True) if v is not None}
    typed = {n: onnx.helper.np_dtype_to_tensor_dtype(v.dtype) for n, v in feeds.items()}
    infos = [onnx.helper.make_tensor_value_info(n, typed[n], v.shape) for n, v in feeds.items()]
    outputs = [onnx.helper.make_tensor_value_info(f"o{i}", 1, None) for i in range(3)]
    node = onnx.helper.make_node("DynamicQuantizeLSTM", names, ["o0", "o1", "o2"],
                                 domain="com.microsoft", **call.attributes)  # fmt: skip
    imports = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
    graph = onnx.helper.make_graph([node], "lstm", infos, outputs)
    model = onnx.ModelProto(ir_version=8, graph=graph, opset_import=imports)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # each thread quantizes its part of the batch by itself
    values = onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, feeds)

    def plain(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        scale, zero = (v.double().reshape(codes.shape[0], 1, -1) for v in (scale, zero))
        return ((codes.double() - zero) * scale).transpose(1, 2)

    weights = plain(w, w_scale, w_zero), plain(r, r_scale, r_zero)
    exact = recurrent("LSTM", call, x, *weights, b, lengths, h0, c0, actual=tensor(values[0]))
    return [y + (tensor(v) - y).detach() for y, v in zip(exact, values, strict=True)]
