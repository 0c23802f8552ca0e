"""Decoders in float32 with seeded random weights, as files that exporters would write."""

import dataclasses
import re
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
    # What onnxruntime-genai's builder writes besides.
    positions: int = 0
    head: int = 0  # its size, where it is no share of the width
    bias: bool = False
    # Gemma 3: two more norms a block, norms of queries and keys, windows but in each sixth block.
    gemma: bool = False

    @property
    def size(self) -> int:
        """Width of a head."""
        return self.head or self.width // self.heads


SHAPES = {"small": Shape("small", 3, 128, 4, 2, 256, 1000)}


def write_model(shape: Any, folder: Path, writer: Any = None) -> Path:
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


MICROSOFT, BLOCK = "com.microsoft", 32


_DECODERS = (
    Shape("SmolLM2-135M", 30, 576, 9, 3, 1536, 49_152, 8192),
    Shape("Gemma-3-270M", 18, 640, 4, 1, 2048, 262_144, 32_768, 256, gemma=True),
    Shape("Qwen2.5-0.5B", 24, 896, 14, 2, 4864, 151_936, 32_768, bias=True),
    Shape("Llama-3.2-1B", 16, 2048, 32, 8, 8192, 128_256, 131_072),
    Shape("Qwen2.5-1.5B", 28, 1536, 12, 2, 8960, 151_936, 32_768, bias=True),
    Shape("small", 6, 128, 4, 2, 256, 1000, 512, gemma=True),
)
DECODERS = {each.name: each for each in _DECODERS}


class GenaiWriter(Writer):
    """The nodes, names and shapes of the builder, 0.18."""

    def model(self) -> onnx.ModelProto:
        self.described: list[onnx.ValueInfoProto] = []
        s, one = self.shape, self._constant(np.array([1]))
        total = self("ReduceSum", ["attention_mask", one], keepdims=0)
        self.lengths = self("Cast", [self("Sub", [total, one])], to=TensorProto.INT32)
        longest = self("Gather", [self("Shape", ["attention_mask"]), self._constant(np.int64(1))])
        self.longest = self("Cast", [longest], to=TensorProto.INT32)
        self.caches = [self._cache("", 1e6)]
        if s.gemma:
            self.caches.append(self._cache("_local", 1e4))
        codes, scales = self._matrix("lm_head", s.width, s.words)
        rows = self("Reshape", [codes, self._constant(np.array([s.words, s.width // 2]))])
        x = self._own(
            "GatherBlockQuantized", [rows, "input_ids", scales], s.width, bits=4, block_size=BLOCK,
            gather_axis=0, quantize_axis=1,
        )  # fmt: skip
        if s.gemma:
            x = self("Mul", [x, self._constant(np.float32(s.width**0.5))])
        data = self._norm(x, "model.layers.0.input_layernorm")
        for index in range(s.blocks):
            x, data = self._block(x, data, index)
        logits = self._product(data, "lm_head", codes, scales, s.width, s.words)
        self.nodes.append(helper.make_node("Identity", [logits], ["logits"]))
        batch = ["batch_size", "sequence_length"]
        long = ["batch_size", "total_sequence_length"]
        past = [f"{i}.{key}" for i in range(s.blocks) for key in ("key", "value")]
        describe, real = helper.make_tensor_value_info, TensorProto.FLOAT
        inputs = [
            describe("input_ids", TensorProto.INT64, batch),
            describe("attention_mask", TensorProto.INT64, long),
        ]
        outputs = [describe("logits", real, [*batch, s.words])]
        for each in past:
            before, after = ([batch[0], s.shared, length, s.size]
                             for length in ("past_sequence_length", long[1]))  # fmt: skip
            inputs.append(describe(f"past_key_values.{each}", real, before))
            outputs.append(describe(f"present.{each}", real, after))
        graph = helper.make_graph(
            self.nodes, "main_graph", inputs, outputs, self.initializers, value_info=self.described
        )
        domains = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
        return onnx.ModelProto(ir_version=10, graph=graph, opset_import=domains)

    def _cache(self, suffix: str, base: float) -> list[str]:
        s = self.shape
        angles = np.outer(np.arange(s.positions), base ** -(np.arange(0, s.size, 2) / s.size))
        return [
            self._stored(f"{name}_cache{suffix}", function(angles).astype(np.float32))
            for name, function in (("cos", np.cos), ("sin", np.sin))
        ]

    def _matrix(self, name: str, inputs: int, outputs: int) -> tuple[str, str]:
        blocks = inputs // BLOCK
        codes = self.random.integers(0, 256, (outputs, blocks, BLOCK // 2), np.uint8)
        scales = self.random.random((outputs, blocks), np.float32)
        scales *= np.float32(0.2 / inputs**0.5)
        named = {"Q4": codes, "scales": scales}
        both = [self._stored(f"{name}.MatMul.weight_{key}", each) for key, each in named.items()]
        return both[0], both[1]

    def _own(
        self, op_type: str, inputs: list[str], width: int, name: str = "", **attributes: Any
    ) -> str:
        """A node of ONNX Runtime's own, whose result ONNX cannot describe."""
        y = self(op_type, inputs, name, domain=MICROSOFT, **attributes)
        self._describe(y, width)
        return y

    def _describe(self, value: str, width: int, rows: str | None = "sequence_length") -> None:
        shape = ["batch_size", rows, width]
        self.described.append(helper.make_tensor_value_info(value, TensorProto.FLOAT, shape))

    def _product(
        self, x: str, name: str, codes: str, scales: str, inputs: int, outputs: int
    ) -> str:
        label = "/" + re.sub(r"\.(?!\d)", "/", name)
        return self._own(
            "MatMulNBits", [x, codes, scales], outputs, f"{label}/MatMul_Q4", K=inputs, N=outputs,
            bits=4, block_size=BLOCK, accuracy_level=4,
        )  # fmt: skip

    def _linear(self, x: str, name: str, inputs: int, outputs: int, bias: bool = False) -> str:
        y = self._product(x, name, *self._matrix(name, inputs, outputs), inputs, outputs)
        return self("Add", [y, self._drawn(f"{name}.Add.bias", outputs)]) if bias else y

    def _norm(self, x: str, name: str, width: int = 0) -> str:
        rows = None if width else "sequence_length"  # those of a width are heads
        width = width or self.shape.width
        given = [x, self._drawn(f"{name}.weight", width)]
        y = self("SimplifiedLayerNormalization", given, epsilon=1e-6, axis=-1, stash_type=1)
        self._describe(y, width, rows)
        return y

    def _skip(self, x: str, y: str, name: str) -> tuple[str, str]:
        """The sum of two branches, and its normalization."""
        width = self.shape.width
        given = [x, y, self._drawn(f"{name}.weight", width)]
        data = self._own("SkipSimplifiedLayerNormalization", given, width, epsilon=1e-6)
        self.nodes[-1].output.extend(["", "", f"{data}_sum"])
        self._describe(f"{data}_sum", width)
        return f"{data}_sum", data

    def _headwise(self, x: str, name: str, count: int) -> str:
        """Each head normalized."""
        size = self.shape.size
        split = self("Reshape", [x, self._constant(np.array([0, -1, size]))])
        whole = self._constant(np.array([0, -1, count * size]))
        return self("Reshape", [self._norm(split, name, size), whole])

    def _block(self, x: str, data: str, index: int) -> tuple[str, str]:
        s, name = self.shape, f"model.layers.{index}"
        wide, narrow = s.heads * s.size, s.shared * s.size
        q, k, v = (
            self._linear(data, f"{name}.attn.{key}_proj", s.width, size, s.bias)
            for key, size in (("q", wide), ("k", narrow), ("v", narrow))
        )
        if s.gemma:
            q = self._headwise(q, f"{name}.attn.q_norm.layernorm", s.heads)
            k = self._headwise(k, f"{name}.attn.k_norm.layernorm", s.shared)
        local = s.gemma and index % 6 != 5
        past = [f"past_key_values.{index}.{key}" for key in ("key", "value")]
        y = self._own(
            "GroupQueryAttention",
            [q, k, v, *past, self.lengths, self.longest, *self.caches[local]], wide,
            f"/model/layers.{index}/attn/GroupQueryAttention", num_heads=s.heads,
            kv_num_heads=s.shared, scale=s.size**-0.5, do_rotary=1,
            local_window_size=512 if local else -1, softcap=0.0, rotary_interleaved=0,
        )  # fmt: skip
        self.nodes[-1].output.extend(f"present.{index}.{key}" for key in ("key", "value"))
        y = self._linear(y, f"{name}.attn.o_proj", wide, s.width)
        before = f"{name}.post_attention_layernorm"
        if s.gemma:
            y, before = self._norm(y, before), f"{name}.pre_feedforward_layernorm"
        x, data = self._skip(x, y, before)
        gate = self._linear(data, f"{name}.mlp.gate_proj", s.width, s.inner)
        if s.gemma:
            gate = self._own("FastGelu", [gate], s.inner)
        else:
            gate = self("Mul", [gate, self("Sigmoid", [gate])])
        up = self._linear(data, f"{name}.mlp.up_proj", s.width, s.inner)
        y = self._linear(self("Mul", [gate, up]), f"{name}.mlp.down_proj", s.inner, s.width)
        if s.gemma:
            y = self._norm(y, f"{name}.post_feedforward_layernorm")
        kind = "final_norm" if index + 1 == s.blocks else "input"
        return self._skip(x, y, f"model.layers.{index + 1}.{kind}_layernorm")
