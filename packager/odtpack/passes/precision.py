"""Types of a graph: what has no float16 kernel runs in float32, and mixed precision.

In mixed precision activations and gradients are float16 and parameters float32. Casts are written
into the forward graph before it is differentiated: the gradient of a Cast brings float32 gradients
to the parameters. What is computed in which type follows PyTorch's autocast
(https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference): products in float16; what
takes the type of its inputs in float16 where all of them are; all else, as losses, softmax, norms,
sums, powers and exponentials, in float32. A float16 model keeps its types.

The loss is differentiated with a scale as its gradient, as float16 has no numbers below 6e-8, and
gradients of parameters are divided by it in float32. The scale and the number of good steps are
states of the training model, as running statistics are. If a gradient is not finite, and the loss
is, the scale is halved; after :data:`GROWS_AFTER` good steps it is doubled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
import onnx_ir as ir

from odtpack.graph import graphs
from odtpack.graph.graphs import Ops, static_dims
from odtpack.passes.batch_norm import RunningStatistic
from odtpack_runtime.session.graph_signature import LOSS_SCALE_NAMES, UPDATE_SUFFIX

# Runs in float32 what ONNX Runtime, or its gradient, has no float16 kernel for.
#
# - Recurrent layers. The layer's parameters remain float16 in the model.
# - Scatters that add, multiply or take extrema.
# - What reads planes at positions: ONNX Runtime computes those in float32, and so must their
#   gradients, as float16 does not distinguish neighbouring elements beyond 2048.
# - AffineGrid, whose function body ONNX Runtime fails to run in float16.

_WIDENED = {
    "AffineGrid", "DeformConv", "GRU", "GridSample", "LSTM", "MaxRoiPool", "RNN", "RoiAlign",
}  # fmt: skip


def widen(graph: ir.Graph) -> None:
    """Put casts around every such node that reads float16; types must be known."""
    op = Ops(graph, "half/")
    for node in list(graph):
        half = [v is not None and v.dtype == ir.DataType.FLOAT16 for v in node.inputs]
        widened = node.op_type in _WIDENED
        if node.op_type in ("ScatterElements", "ScatterND"):
            widened = node.attributes.get_string("reduction", "none") != "none"
        if node.domain or not any(half) or not widened:
            continue
        with op.before(node):
            operands = [
                op.cast(value, ir.DataType.FLOAT) if narrow and value is not None else value
                for value, narrow in zip(node.inputs, half, strict=True)
            ]
            for value, wide in zip(node.inputs, operands, strict=True):
                if value is not None and wide is not None:
                    wide.shape = value.shape
            for old, new in zip(node.outputs, op.again(node, operands), strict=True):
                if not old.name:
                    new.name = old.name
                    continue
                new.shape = old.shape
                graphs.replace(old, op.cast(new, ir.DataType.FLOAT16), [])
        graph.remove(node, safe=True)


STATES: Final = dict(zip(LOSS_SCALE_NAMES, (2.0**12, 0.0), strict=True))
"""What a training begins with. It is less than that of ``torch.amp.GradScaler``: a GPU that
overflows in the first steps would differ from the processor, with which it is compared."""

GROWS_AFTER: Final = 2000
_LEAST, _MOST = 2.0**-14, 2.0**24
_LARGEST = 65504

_NARROW = {"Conv", "ConvTranspose", "Einsum", "Gemm", "MatMul", "PRelu"}
_AS_INPUTS = {
    *("Abs", "Add", "AveragePool", "Clip", "Concat", "Dropout", "Elu", "Expand", "Flatten"),
    *("Gather", "Gelu", "GlobalAveragePool", "GlobalMaxPool", "HardSigmoid", "HardSwish"),
    *("Identity", "LeakyRelu", "Max", "MaxPool", "Min", "Mul", "Neg", "Pad", "Relu", "Reshape"),
    *("Sigmoid", "Slice", "Split", "Squeeze", "Sub", "Tanh", "Transpose", "Unsqueeze", "Where"),
}


def narrow(graph: ir.Graph) -> None:
    """Compute in float16 what may be; types must be known, parameters be inputs."""
    op = Ops(graph, "half/")
    halves: dict[ir.Value, ir.Value] = {}
    given = {*graph.inputs, *graph.initializers.values()}

    def made_from(value: ir.Value) -> ir.Value | None:
        """The float16 value that a float32 value is a cast of."""
        cast = graphs.producer(value, "Cast")
        source = None if cast is None else cast.inputs[0]
        return source if source is not None and source.dtype == ir.DataType.FLOAT16 else None

    def half(value: ir.Value) -> ir.Value:
        if value not in halves:
            halves[value] = made_from(value) or op.cast(value, ir.DataType.FLOAT16)
            halves[value].shape = value.shape
        return halves[value]

    def is_wide(value: ir.Value) -> bool:
        if value.const_value is not None:  # as what a mask adds
            return bool(np.abs(value.const_value.numpy()).max(initial=0) > _LARGEST)
        return value not in given and made_from(value) is None

    for node in list(graph):
        floats = [v for v in node.inputs if v is not None and v.dtype == ir.DataType.FLOAT]
        follows = any(map(made_from, floats)) and not any(map(is_wide, floats))
        if not floats or not (node.op_type in _NARROW or (node.op_type in _AS_INPUTS and follows)):
            continue
        with op.before(node):
            operands = [half(value) if value in floats else value for value in node.inputs]
            for old, new in zip(node.outputs, op.again(node, operands), strict=True):
                narrowed = old.dtype == ir.DataType.FLOAT
                if narrowed:
                    new.type, new.shape = ir.TensorType(ir.DataType.FLOAT16), old.shape
                graphs.replace(old, op.cast(new, op.FLOAT) if narrowed else new, [])
        graph.remove(node, safe=True)


class LossScale:
    """Writes a loss scale into a training graph, which has the states as inputs."""

    def __init__(self, op: Ops, graph: ir.Graph) -> None:
        inputs = {str(value.name): value for value in graph.inputs}
        self._op, self._loss = op, graph.outputs[0]
        self._scale, self._good = (inputs[name] for name in STATES)

    def seed(self, plain: ir.Value) -> ir.Value:
        """The gradient of the loss, scaled."""
        op = self._op
        scale = op.cast(self._scale, op.type_of(plain))
        return op.Mul(plain, op.reshape(scale, *static_dims(plain) or ()))

    def unscale(self, gradients: Mapping[ir.Value, ir.Value]) -> dict[ir.Value, ir.Value]:
        """Gradients of parameters as they are without a scale."""
        op, factor = self._op, self._op.reshape(self._op.Div(1.0, self._scale))
        return {parameter: op.Mul(value, factor) for parameter, value in gradients.items()}

    def updates(self, gradients: Iterable[ir.Value]) -> list[RunningStatistic]:
        """What the states become; where the loss is not finite they stay."""
        op = self._op
        sums = [op.reshape(op.ReduceL1(value, keepdims=0), 1) for value in dict.fromkeys(gradients)]
        finite = op.Less(op.ReduceSum(op.join(sums, 0), op.ints(0)), np.inf)
        counts = op.Less(op.reshape(op.Abs(op.cast(self._loss, op.FLOAT)), 1), np.inf)
        # From 1 to the last and on with 1, so that 0 says that a gradient was not finite.
        starts = op.GreaterOrEqual(self._good, float(GROWS_AFTER))
        good = op.Where(finite, op.Add(op.Where(starts, 0.0, self._good), 1.0), 0.0)
        grows = op.GreaterOrEqual(good, float(GROWS_AFTER))
        factor = op.Where(finite, op.Where(grows, 2.0, 1.0), 0.5)
        scale = op.Min(op.Max(op.Mul(self._scale, factor), _LEAST), _MOST)
        news = (op.Where(counts, scale, self._scale), op.Where(counts, good, self._good))
        return [RunningStatistic(name, new) for name, new in zip(STATES, news, strict=True)]


def all_finite(op: Ops, graph: ir.Graph) -> ir.Value | None:
    """Whether all gradients of a training graph are finite, BOOL[1]; None without a loss scale."""
    name = LOSS_SCALE_NAMES[1] + UPDATE_SUFFIX
    good = next((value for value in graph.outputs if value.name == name), None)
    return None if good is None else op.Greater(good, 0.0)
