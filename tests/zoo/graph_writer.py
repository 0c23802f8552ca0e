"""Writes the graph of a reference model: seeded parameters, named values, a pinned opset."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

MINIMUM_OPSET = 12
MAXIMUM_OPSET = 23

Dimension = int | str
"""A fixed extent, or the name of a free one such as ``"batch"``."""


class GraphWriter:
    """Collects nodes and parameters, then closes them into one model."""

    # Every initializer of the finished model is a parameter or a batch-norm statistic. Whatever
    # does not learn (shapes, axes, bounds) is written as a `Constant` node, as the PyTorch exporter
    # does, so that `[i.name for i in model.graph.initializer]` lists what can be trained.
    # `arguments`: The factory's arguments, all but opset and seed. They are kept as JSON in the
    # `tests.zoo` metadata of the model.

    def __init__(self, name: str, arguments: Mapping[str, Any], *, opset: int, seed: int) -> None:
        if not MINIMUM_OPSET <= opset <= MAXIMUM_OPSET:
            raise ValueError(f"{name} is for opset {MINIMUM_OPSET} to {MAXIMUM_OPSET}, not {opset}")
        self.name = name
        self.opset = opset
        self._metadata = json.dumps({"model": name, **arguments}, sort_keys=True)
        self._random = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._names: set[str] = set()
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def input(self, shape: Sequence[Dimension], dtype: int = TensorProto.FLOAT) -> str:
        """Declares the one graph input, ``input``, and returns its name."""
        self._inputs.append(helper.make_tensor_value_info("input", dtype, shape))
        return "input"

    def uniform(self, name: str, shape: Sequence[int], *, std: float) -> str:
        """Adds a parameter drawn from the uniform distribution with mean 0 and deviation `std`."""
        # `he` and `xavier` give the deviations of the two usual schemes. Both are meant with any
        # symmetric distribution; a uniform one needs no rejection sampling, so its stream is easy
        # to reproduce.
        bound = math.sqrt(3) * std
        return self.parameter(name, self._random.uniform(-bound, bound, shape))

    def fill(self, name: str, shape: Sequence[int], value: float) -> str:
        """Adds a parameter whose elements all hold ``value``."""
        return self.parameter(name, np.full(shape, value))

    def parameter(self, name: str, values: NDArray[Any]) -> str:
        """Adds an initializer of type float32 and returns its name."""
        self._claim(name)
        self._initializers.append(numpy_helper.from_array(values.astype(np.float32), name))
        return name

    def constant(self, values: object, dtype: type[np.generic] = np.float32) -> str:
        """Returns the name of a ``Constant`` with these values, which equal constants share."""
        array = np.asarray(values, dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self.op("Constant", at="", value=numpy_helper.from_array(array))
        return self._constants[key]

    def op(self, op_type: str, *inputs: str, at: str, **attributes: Any) -> str:
        """Adds a node with one output and returns the output's name."""
        # `*inputs`: names of values; `""` leaves an optional input out.
        # `at`: module that the node belongs to, such as `"layers.0.attention"`.
        return self.node(op_type, inputs, ("",), at=at, **attributes)[0]

    def node(self, op_type, inputs, outputs, *, at, **attributes):
        """Adds a node with several outputs; ``""`` asks for a name made from place and operator."""
        base = f"{at}/{op_type}" if at else op_type
        name, count = base, 1
        while name in self._names:
            name, count = f"{base}_{count}", count + 1
        named = [output or name for output in outputs]
        for output in named:
            self._claim(output)
        self._nodes.append(helper.make_node(op_type, inputs, named, name=name, **attributes))
        return named

    def linear(self, x: str, fan_in: int, fan_out: int, *, at: str, std: float) -> str:
        """``Gemm`` of a rank-2 value with ``{at}.weight`` [fan_out, fan_in] and ``{at}.bias``."""
        weight = self.uniform(f"{at}.weight", (fan_out, fan_in), std=std)
        bias = self.fill(f"{at}.bias", (fan_out,), 0.0)
        return self.op("Gemm", x, weight, bias, at=at, transB=1)

    def finish(self, logits: str, shape: Sequence[Dimension]) -> onnx.ModelProto:
        """Names the value ``logits`` (float32) ``output`` and returns the model."""
        self._claim("output")
        for node in self._nodes:
            node.output[:] = ["output" if name == logits else name for name in node.output]
        output = helper.make_tensor_value_info("output", TensorProto.FLOAT, shape)
        graph = helper.make_graph(
            self._nodes, self.name, self._inputs, [output], self._initializers
        )
        model = onnx.ModelProto(
            ir_version=ir_version_for(self.opset), producer_name="tests.zoo", graph=graph,
            opset_import=[onnx.OperatorSetIdProto(domain="", version=self.opset)],
        )  # fmt: skip
        helper.set_model_props(model, {"tests.zoo": self._metadata})
        return model

    def _claim(self, name: str) -> None:
        if name in self._names:
            raise AssertionError(f"the name {name} is taken in {self.name}")
        self._names.add(name)


def he(fan_in: int) -> float:
    """Deviation that keeps the variance through a layer and its ``Relu`` (He et al. 2015)."""
    return math.sqrt(2 / fan_in)


def xavier(fan_in: int, fan_out: int) -> float:
    """Deviation between keeping the variance forward and backward (Glorot and Bengio 2010)."""
    return math.sqrt(2 / (fan_in + fan_out))


def ir_version_for(opset: int) -> int:
    """IR version of a reference model: 8 up to opset 17, which old runtimes load, then 10."""
    return 8 if opset <= 17 else 10


def require_positive(model: str, **extents: int) -> None:
    """Raises ``ValueError`` for the first extent that is below 1."""
    for name, extent in extents.items():
        require(extent >= 1, model, f"{name} must be at least 1, not {extent}")


def require(fine: bool, model: str, sentence: str) -> None:
    """Raises ``ValueError`` with the sentence unless ``fine``."""
    if not fine:
        raise ValueError(f"The {model} model cannot be built: {sentence}.")
