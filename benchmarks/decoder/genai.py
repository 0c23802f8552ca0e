"""Decoders of published shapes as onnxruntime-genai's builder writes them in int4 for a processor.

Codes and scales are seeded random numbers: memory and time do not depend on their values.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from benchmarks.decoder.model import Shape, Writer

MICROSOFT, BLOCK = "com.microsoft", 32


@dataclasses.dataclass(frozen=True)
class Decoder(Shape):
    """A decoder as the builder writes it."""

    positions: int = 0
    head: int = 0  # its size, where it is no share of the width
    bias: bool = False
    # Gemma 3: two more norms a block, norms of queries and keys, windows but in each sixth block.
    gemma: bool = False

    @property
    def size(self) -> int:
        """Width of a head."""
        return self.head or super().size


_DECODERS = (
    Decoder("SmolLM2-135M", 30, 576, 9, 3, 1536, 49_152, 8192),
    Decoder("Gemma-3-270M", 18, 640, 4, 1, 2048, 262_144, 32_768, 256, gemma=True),
    Decoder("Qwen2.5-0.5B", 24, 896, 14, 2, 4864, 151_936, 32_768, bias=True),
    Decoder("Llama-3.2-1B", 16, 2048, 32, 8, 8192, 128_256, 131_072),
    Decoder("Qwen2.5-1.5B", 28, 1536, 12, 2, 8960, 151_936, 32_768, bias=True),
    Decoder("small", 6, 128, 4, 2, 256, 1000, 512, gemma=True),
)
DECODERS = {each.name: each for each in _DECODERS}


class GenaiWriter(Writer):
    """The nodes, names and shapes of the builder, 0.18."""

    shape: Decoder

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
