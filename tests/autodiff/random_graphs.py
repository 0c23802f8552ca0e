"""Random differentiable graphs, away from kinks by construction.

Values have the batch as first axis, which may be a symbol. What needs positive numbers, or numbers
away from a kink, is fed from 2 + tanh with constant signs or offsets: no tolerance excuses a kink.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from hypothesis import strategies as st

from odtpack import targets
from odtpack.graph.graphs import Ops
from odtpack.graph.inference import infer_shapes
from tests.autodiff.oracle import Array

BATCH = 2
_LARGEST = 64  # elements of a sample
_AXES_INPUT_SINCE = 18  # of the reductions but ReduceSum


@dataclasses.dataclass
class RandomGraph:
    """A forward model with the values of its inputs and parameters, all in float64."""

    model: ir.Model
    feeds: dict[str, Array]
    single: bool
    steps: list[str]


class Builder:
    """Draws one step after the other; ``pool`` holds what the next may read."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self.draw = draw
        self.single = draw(st.booleans())
        self.opset = draw(st.sampled_from([13, 17, 18, 23]))
        self.symbolic = draw(st.booleans())
        self.random = np.random.default_rng(draw(st.integers(0, 2**16)))
        self.graph = ir.Graph([], [], nodes=[], opset_imports={"": self.opset}, name="random")
        self.op = Ops(self.graph, "f_")
        self.dtype = ir.DataType.DOUBLE
        self.feeds: dict[str, Array] = {}
        self.shapes: dict[ir.Value, tuple[int, ...]] = {}  # with the batch as a number
        self.pool: list[ir.Value] = []
        self.parameters: list[ir.Value] = []

    # Values

    def new_input(self, *shape: int, batched: bool) -> ir.Value:
        name = f"{'x' if batched else 'w'}{len(self.feeds)}"
        declared = ["batch", *shape[1:]] if batched and self.symbolic else list(shape)
        value = ir.val(name, self.dtype, declared)
        self.graph.inputs.append(value)
        self.feeds[name] = self.random.uniform(-1, 1, shape)
        self.shapes[value] = shape
        return value

    def parameter(self, *shape: int) -> ir.Value:
        """A parameter of that shape: one that there is, or a new one."""
        known = [p for p in self.parameters if self.shapes[p] == shape]
        if known and (len(self.parameters) > 3 or self.draw(st.booleans())):
            return self.draw(st.sampled_from(known))
        self.parameters.append(self.new_input(*shape, batched=False))
        return self.parameters[-1]

    def constant(self, array: Array) -> ir.Value:
        return self.op.constant(np.asarray(array, np.float64))

    def pick(self, *ranks: int) -> ir.Value:
        """A value of one of the ranks; the newest ones are likelier."""
        fitting = [v for v in self.pool if not ranks or len(self.shapes[v]) in ranks]
        if not fitting:
            fitting = [self.flat(self.pool[-1])] if ranks[0] == 2 else [self.cube(self.pool[-1])]
        return fitting[-1 - self.draw(st.integers(0, min(3, len(fitting) - 1)))]

    def push(self, value: ir.Value, shape: tuple[int, ...]) -> ir.Value:
        self.shapes[value] = shape
        if int(np.prod(shape[1:])) <= _LARGEST and 0 not in shape:
            self.pool.append(value)
        return value

    def axis(self, value: ir.Value) -> int:
        """An axis other than the batch."""
        return self.draw(st.integers(1, len(self.shapes[value]) - 1))

    def flat(self, value: ir.Value) -> ir.Value:
        shape = self.shapes[value]
        return self.push(self.op.reshape(value, 0, -1), (BATCH, int(np.prod(shape[1:]))))

    def cube(self, value: ir.Value) -> ir.Value:
        """The value as [batch, channels, length]."""
        count = int(np.prod(self.shapes[value][1:]))
        channels = 2 if count % 2 == 0 else 1
        cube = self.op.reshape(value, 0, channels, count // channels)
        return self.push(cube, (BATCH, channels, count // channels))

    def bounded(self, value: ir.Value) -> ir.Value:
        """Between 1 and 3."""
        return self.op.Add(self.op.Tanh(value), 2.0)

    def signs(self, value: ir.Value) -> ir.Value:
        return self.constant(self.random.choice([-1.0, 1.0], self.shapes[value][1:]))

    def ramp(self, value: ir.Value) -> ir.Value:
        """Values between whose elements lies at least 1, whatever they are."""
        shape = self.shapes[value][1:]
        steps = 3.0 * self.random.permutation(int(np.prod(shape))).reshape(shape)
        return self.op.Add(self.op.Tanh(value), self.constant(steps / 3 * 3))

    # Steps

    def unary(self) -> None:
        x, op = self.pick(), self.op
        kind = self.draw(st.sampled_from(
            ["Tanh", "Sin", "Cos", "Sigmoid", "Neg", "Exp", "Log", "Sqrt", "Reciprocal", "Pow"]
        ))  # fmt: skip
        if kind == "Exp":
            y = op.Exp(op.Tanh(x))
        elif kind in ("Log", "Sqrt", "Reciprocal"):
            y = op.emit(kind, [self.bounded(x)])[0]
        elif kind == "Pow":
            y = op.Pow(self.bounded(x), self.draw(st.sampled_from([2.0, 3.0, 0.5, -1.0])))
        else:
            y = op.emit(kind, [x])[0]
        self.push(y, self.shapes[x])

    def kinked(self) -> None:
        x, op = self.pick(), self.op
        away = op.Mul(self.bounded(x), self.signs(x))
        kinds = ["Relu", "Abs", "Clip"] + ["LeakyRelu", "Elu", "Selu"] * self.single
        kind = self.draw(st.sampled_from(kinds))
        y = op.Clip(away, 0.0, None) if kind == "Clip" else op.emit(kind, [away])[0]
        self.push(y, self.shapes[x])

    def binary(self) -> None:
        x, op = self.pick(), self.op
        shape = self.shapes[x]
        same = [v for v in self.pool if self.shapes[v] == shape]
        kept = tuple(n if self.draw(st.booleans()) else 1 for n in shape[1:])
        use_parameter = self.draw(st.booleans())
        other = self.parameter(*kept) if use_parameter else self.draw(st.sampled_from(same))
        kind = self.draw(st.sampled_from(["Add", "Sub", "Mul", "Div", "Max", "Min", "Where"]))
        if kind == "Div":
            y = op.Div(x, self.bounded(other))
        elif kind in ("Max", "Min"):
            y = op.emit(
                kind, [op.Mul(self.bounded(x), self.signs(x)), op.Mul(op.Tanh(other), 0.9)]
            )[0]
        elif kind == "Where":
            mask = op.constant(self.random.integers(0, 2, shape[1:]).astype(bool))
            y = op.Where(mask, x, other)
        else:
            y = op.emit(kind, [x, other] if self.draw(st.booleans()) else [other, x])[0]
        self.push(y, shape)

    def product(self) -> None:
        x, op = self.pick(), self.op
        shape = self.shapes[x]
        if len(shape) > 2 and self.draw(st.booleans()):
            order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
            pair = op.MatMul(x, op.transpose(op.Tanh(x), *order))
            self.push(op.Mul(pair, 1 / shape[-1]), (*shape[:-1], shape[-2]))
            return
        columns = self.draw(st.integers(1, 4))
        weight = self.parameter(shape[-1], columns)
        self.push(op.Mul(op.MatMul(x, weight), 1 / shape[-1]), (*shape[:-1], columns))

    def reduced(self) -> None:
        x, op = self.pick(), self.op
        axis, keep = self.axis(x), self.draw(st.integers(0, 1))
        kind = self.draw(st.sampled_from(
            ["ReduceSum", "ReduceMean", "ReduceL2", "ReduceLogSumExp", "ReduceSumSquare",
             "ReduceMax", "ReduceMin", "ReduceLogSum"]
        ))  # fmt: skip
        if kind in ("ReduceMax", "ReduceMin"):
            x, shape = self.ramp(x), self.shapes[x]
        else:
            positive = kind in ("ReduceL2", "ReduceLogSum")
            x, shape = (self.bounded(x) if positive else op.Tanh(x)), self.shapes[x]
        if len(shape) == 2:
            keep = 1
        if self.opset >= (13 if kind == "ReduceSum" else _AXES_INPUT_SINCE):
            y = op.emit(kind, [x, op.ints(axis)], keepdims=keep)[0]
        else:
            y = op.emit(kind, [x], axes=[axis], keepdims=keep)[0]
        self.push(y, (*shape[:axis], *[1] * keep, *shape[axis + 1 :]))

    def centered(self) -> None:
        """Less the mean over the batch, as a normalization over it has it."""
        x = self.pick()
        self.push(self.op.Sub(x, self.op.reduce_mean(x, [0])), self.shapes[x])

    def normalized(self) -> None:
        x, op = self.pick(), self.op
        kind = self.draw(st.sampled_from(["Softmax", "LogSoftmax", "LpNormalization"]))
        operand = self.bounded(x) if kind == "LpNormalization" else x
        self.push(op.emit(kind, [operand], axis=self.axis(x))[0], self.shapes[x])

    def moved(self) -> None:
        x, op = self.pick(), self.op
        shape, axis = self.shapes[x], self.axis(x)
        size = shape[axis]
        kind = self.draw(st.sampled_from(
            ["Transpose", "Slice", "Gather", "Split", "Pad", "Tile", "Unsqueeze", "CumSum", "Flat"]
        ))  # fmt: skip

        def sized(length: int) -> tuple[int, ...]:
            return (*shape[:axis], length, *shape[axis + 1 :])

        if kind == "Transpose":
            order = [0, *self.draw(st.permutations(range(1, len(shape))))]
            self.push(op.transpose(x, *order), tuple(shape[i] for i in order))
        elif kind == "Slice":
            start = self.draw(st.integers(0, size - 1))
            step = self.draw(st.sampled_from([1, 2]))
            count = len(range(start, size, step))
            self.push(op.slice(x, [axis], [start], [size], [step]), sized(count))
        elif kind == "Gather":
            picked = self.draw(st.lists(st.integers(-size, size - 1), min_size=1, max_size=4))
            self.push(op.Gather(x, op.ints(*picked), axis=axis), sized(len(picked)))
        elif kind == "Split" and size > 1:
            first = self.draw(st.integers(1, size - 1))
            for part, length in zip(
                op.split(x, axis, [first, size - first]), (first, size - first), strict=True
            ):
                self.push(part, sized(length))
        elif kind == "Pad":
            mode = self.draw(st.sampled_from(["constant", "edge"]))
            pads = [int(i in (axis, len(shape) + axis)) for i in range(2 * len(shape))]
            self.push(op.Pad(x, op.ints(*pads), mode=mode), sized(size + 2))
        elif kind == "Tile":
            repeats = [2 if i == axis else 1 for i in range(len(shape))]
            self.push(op.Tile(x, op.ints(*repeats)), sized(2 * size))
        elif kind == "Unsqueeze" and len(shape) < 4:
            self.push(op.unsqueeze(x, axis), (*shape[:axis], 1, *shape[axis:]))
        elif kind == "CumSum":
            self.push(op.CumSum(op.Tanh(x), op.constant(np.array(axis))), shape)
        else:
            self.flat(x)

    def joined(self) -> None:
        x, op = self.pick(), self.op
        shape, axis = self.shapes[x], self.axis(x)
        same = [v for v in self.pool if self.shapes[v] == shape]
        others = self.draw(st.lists(st.sampled_from(same), min_size=1, max_size=2))
        size = shape[axis] * (1 + len(others))
        y = op.Concat(x, *others, axis=axis)
        self.push(y, (*shape[:axis], size, *shape[axis + 1 :]))

    def windowed(self) -> None:
        """A small convolution or pooling along one axis."""
        x, op = self.pick(3), self.op
        _, channels, length = self.shapes[x]
        kind = self.draw(st.sampled_from(["Conv", "AveragePool", "MaxPool"]))
        size, stride = min(2, length), self.draw(st.integers(1, 2))
        count = (length - size) // stride + 1
        if kind == "Conv":
            features = self.draw(st.integers(1, 3))
            weight = self.parameter(features, channels, size)
            y = op.Conv(op.Tanh(x), weight, strides=[stride], kernel_shape=[size])
            self.push(y, (BATCH, features, count))
            return
        operand = self.ramp(x) if kind == "MaxPool" else x
        y = op.emit(kind, [operand], kernel_shape=[size], strides=[stride])[0]
        self.push(op.Mul(y, 0.1), (BATCH, channels, count))

    def steps(self) -> list[Callable[[], None]]:
        usual = [self.unary, self.kinked, self.binary, self.product, self.reduced, self.centered,
                 self.normalized, self.moved, self.moved, self.joined]  # fmt: skip
        return [*usual, self.windowed] if self.single else usual


@st.composite
def random_graphs(draw: Callable[[Any], Any]) -> RandomGraph:
    """One to three inputs, four to twelve steps, one or two outputs."""
    builder = Builder(draw)
    shapes = [(BATCH, 3), (BATCH, 2, 3), (BATCH, 2, 2, 2), (BATCH, 2, 5)]
    for shape in draw(st.lists(st.sampled_from(shapes), min_size=1, max_size=3)):
        builder.push(builder.new_input(*shape, batched=True), shape)
    names = []
    for step in draw(st.lists(st.sampled_from(builder.steps()), min_size=4, max_size=12)):
        step()
        names.append(step.__name__)
    outputs = {builder.pool[-1], builder.pick()}
    for index, value in enumerate(sorted(outputs, key=builder.pool.index)):
        y = builder.op.Tanh(value)
        y.name = f"y{index}"
        shape = builder.shapes[value]
        y.shape = ir.Shape(["batch" if builder.symbolic else BATCH, *shape[1:]])
        builder.graph.outputs.append(y)
    model = ir.Model(builder.graph, ir_version=8)
    targets.stamp(model)
    return RandomGraph(infer_shapes(model), builder.feeds, builder.single, names)
