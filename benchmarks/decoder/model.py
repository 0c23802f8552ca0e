"""Decoders in float32 with seeded random weights, as files that exporters would write."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a decoder whose last product shares the matrix of its embedding."""

    name: str
    blocks: int
    width: int
    heads: int
    shared: int
    inner: int
    words: int

    @property
    def size(self) -> int:
        """Width of a head."""
        return self.width // self.heads


SHAPES = {"small": Shape("small", 3, 128, 4, 2, 256, 1000)}


def write_model(shape: Any, folder: Path, writer: type[Writer] | None = None) -> Path:
    """Write a model from ``input_ids`` to ``logits``, and its weights, unless they are there."""
    path = folder / "model.onnx"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "model.data").open("wb") as stream:
        model = (writer or Writer)(shape, stream, np.random.default_rng(0)).model()
    partial = folder / "model.onnx.partial"
    partial.write_bytes(model.SerializeToString())
    partial.rename(path)
    return path


class Writer:
    """Writes weights to a stream, and the nodes that read them."""

    def __init__(self, shape: Shape, stream, random: np.random.Generator) -> None:
        self.shape, self.stream, self.random = shape, stream, random
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []

    def model(self) -> onnx.ModelProto:
        s = self.shape
        self._drawn("model.embed_tokens.weight", s.words, s.width)
        x = self("Gather", ["model.embed_tokens.weight", "input_ids"], "/model/embed_tokens/Gather")
        length = self("Gather", [self("Shape", ["input_ids"]), self._constant(np.int64(1))])
        places = self("Range", [self._constant(np.int64(0)), length, self._constant(np.int64(1))])
        rates = 1e6 ** -(np.arange(0, s.size, 2, dtype=np.float32) / s.size)
        column = self("Unsqueeze", [places, self._constant(np.array([1]))])
        angles = self("Mul", [self("Cast", [column], to=TensorProto.FLOAT), self._constant(rates)])
        angles = self("Concat", [angles, angles], axis=1)
        self.cos, self.sin = self("Cos", [angles]), self("Sin", [angles])
        later = self("Less", [column, self("Unsqueeze", [places, self._constant(np.array([0]))])])
        low, zero = np.float32(np.finfo(np.float32).min), np.float32(0)
        self.mask = self("Where", [later, self._constant(low), self._constant(zero)])
        for index in range(s.blocks):
            x = self._block(x, f"model.layers.{index}")
        x = self._norm(x, "model.norm")
        table = self("Transpose", ["model.embed_tokens.weight"], perm=[1, 0])
        self.nodes.append(helper.make_node("MatMul", [x, table], ["logits"], "/lm_head/MatMul"))
        ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "tokens"])
        shape = ["batch", "tokens", s.words]
        logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, shape)
        graph = helper.make_graph(self.nodes, "decoder", [ids], [logits], self.initializers)
        opset = onnx.OperatorSetIdProto(version=21)
        return onnx.ModelProto(ir_version=10, graph=graph, opset_import=[opset])

    def __call__(self, op_type: str, inputs: list[str], name: str = "", **attributes) -> str:
        count = len(self.nodes)
        output = f"{name}_output_0" if name else f"value_{count}"
        node = helper.make_node(op_type, inputs, [output], name or f"node_{count}", **attributes)
        self.nodes.append(node)
        return output

    def _constant(self, array) -> str:
        tensor = numpy_helper.from_array(np.asarray(array), f"constant_{len(self.initializers)}")
        self.initializers.append(tensor)
        return tensor.name

    def _drawn(self, name: str, *dims: int) -> str:
        """A weight, written to the file: matrices are [in, out]."""
        if len(dims) == 1:
            values = 1 + 0.1 * self.random.standard_normal(dims, np.float32)
        else:
            values = self.random.standard_normal(dims, np.float32)
            values *= np.float32(0.5 / dims[0] ** 0.5 if dims[0] != self.shape.words else 0.02)
        return self._stored(name, values)

    def _stored(self, name: str, values: np.ndarray) -> str:
        kind = helper.np_dtype_to_tensor_dtype(values.dtype)
        tensor = TensorProto(name=name, data_type=kind, dims=values.shape)
        tensor.data_location = TensorProto.EXTERNAL
        self.stream.write(bytes(-self.stream.tell() % 4096))
        place = {"location": "model.data", "offset": self.stream.tell(), "length": values.nbytes}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
        self.stream.write(np.ascontiguousarray(values).data)
        self.initializers.append(tensor)
        return name

    def _linear(self, x: str, name: str, inputs: int, outputs: int, bias: bool = False) -> str:
        node = f"/{name.replace('.self', '/self').replace('.mlp', '/mlp')}"
        y = self("MatMul", [x, self._drawn(f"{name}.weight", inputs, outputs)], f"{node}/MatMul")
        return self("Add", [y, self._drawn(f"{name}.bias", outputs)]) if bias else y

    def _norm(self, x: str, name: str) -> str:
        two, least = self._constant(np.float32(2)), self._constant(np.float32(1e-6))
        square = self("ReduceMean", [self("Pow", [x, two]), self._constant(np.array([-1]))])
        root = self("Sqrt", [self("Add", [square, least])])
        weight = self._drawn(f"{name}.weight", self.shape.width)
        return self("Mul", [self("Div", [x, root]), weight])

    def _heads(self, x: str, count: int) -> str:
        split = self._constant(np.array([0, 0, count, self.shape.size]))
        return self("Transpose", [self("Reshape", [x, split])], perm=[0, 2, 1, 3])

    def _turned(self, x: str) -> str:
        half = self.shape.size // 2
        axis, ends = self._constant(np.array([3])), [0, half, 2**62]
        first, second = (
            self("Slice", [x, *(self._constant(np.array([v])) for v in ends[i : i + 2]), axis])
            for i in range(2)
        )
        other = self("Concat", [self("Neg", [second]), first], axis=3)
        return self("Add", [self("Mul", [x, self.cos]), self("Mul", [other, self.sin])])

    def _repeated(self, x: str) -> str:
        """Keys or values of shared heads, once for each head that reads them."""
        s = self.shape
        split = self("Unsqueeze", [x, self._constant(np.array([2]))])
        times = self._constant(np.array([1, 1, s.heads // s.shared, 1, 1]))
        whole = self._constant(np.array([0, s.heads, -1, s.size]))
        return self("Reshape", [self("Expand", [split, times]), whole])

    def _block(self, x: str, name: str) -> str:
        s, attention, mlp = self.shape, f"{name}.self_attn", f"{name}.mlp"
        data = self._norm(x, f"{name}.input_layernorm")

        def projected(key: str, heads: int) -> str:
            linear = (f"{attention}.{key}_proj", s.width, heads * s.size, True)
            return self._heads(self._linear(data, *linear), heads)

        q, k = self._turned(projected("q", s.heads)), self._turned(projected("k", s.shared))
        v = projected("v", s.shared)
        keys = self("Transpose", [self._repeated(k)], perm=[0, 1, 3, 2])
        scale = self._constant(np.float32(s.size**-0.5))
        scores = self("Mul", [self("MatMul", [q, keys]), scale])
        shares = self("Softmax", [self("Add", [scores, self.mask])], axis=-1)
        mixed = self("Transpose", [self("MatMul", [shares, self._repeated(v)])], perm=[0, 2, 1, 3])
        mixed = self("Reshape", [mixed, self._constant(np.array([0, 0, s.width]))])
        x = self("Add", [x, self._linear(mixed, f"{attention}.o_proj", s.width, s.width)])
        data = self._norm(x, f"{name}.post_attention_layernorm")
        gate = self._linear(data, f"{mlp}.gate_proj", s.width, s.inner)
        gate = self("Mul", [gate, self("Sigmoid", [gate])])
        up = self._linear(data, f"{mlp}.up_proj", s.width, s.inner)
        down = self._linear(self("Mul", [gate, up]), f"{mlp}.down_proj", s.inner, s.width)
        return self("Add", [x, down])
