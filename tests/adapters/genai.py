"""A small decoder as onnxruntime-genai's builder writes one, with the weights of a PyTorch model.

The nodes, names and shapes are those for CPUs; ONNX Runtime's own tool quantizes the products.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from torch import Tensor, nn

from tests.adapters.llama import LENGTH, VOCABULARY, Llama, Shape, llama

SHAPE = Shape(width=64, inner=80, heads=4, shared=2, tied=False)
BLOCK = 32
BATCH, SEQUENCE = "batch_size", "sequence_length"


class Causal(nn.Module):
    """The model under the names that Hugging Face's causal models have."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids)


class Writer:
    """Collects nodes and initializers, as the builder names them."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.stored: dict[str, np.ndarray] = {}

    def store(self, name: str, values: Any) -> str:
        array = values.detach().numpy() if isinstance(values, Tensor) else np.asarray(values)
        self.stored[name] = np.ascontiguousarray(array)
        return name

    def node(self, op_type, name, inputs, outputs=1, **more):
        found = [f"{name}/output_{i}" for i in range(outputs)]
        found = more.pop("names", found)
        self.nodes.append(helper.make_node(op_type, inputs, found, name=name, **more))
        return found[0]

    def linear(self, name: str, x: str, layers: list[nn.Linear]) -> str:
        """A product, and the sum with a bias; several layers packed into one."""
        weight = torch.cat([layer.weight for layer in layers]).T
        flat = name.removeprefix("/").replace("/", ".")
        y = self.node("MatMul", f"{name}/MatMul", [x, self.store(f"{flat}.MatMul.weight", weight)])
        if layers[0].bias is None:
            return y
        bias = self.store(f"{flat}.Add.bias", torch.cat([layer.bias for layer in layers]))
        return self.node("Add", f"{name}/Add", [y, bias])


def write(model: Llama, shape: Shape, *, packed: bool) -> onnx.ModelProto:
    """The forward model in float32, with its cache."""
    to, one = Writer(), "/model/constants/INT64/1"
    to.store(f"{one}d", np.array([1]))
    to.store(one, np.array(1))
    mask = "/model/attn_mask_reformat/attn_mask_subgraph"
    total = to.node("ReduceSum", f"{mask}/ReduceSum", ["attention_mask", f"{one}d"], keepdims=1)
    lengths = to.node("Sub", f"{mask}/Sub", [total, f"{one}d"])
    lengths = to.node("Cast", f"{mask}/Sub/Cast", [lengths], to=TensorProto.INT32)
    longest = to.node(
        "Gather", f"{mask}/Gather", [to.node("Shape", f"{mask}/Shape", ["attention_mask"]), one],
        axis=0,
    )  # fmt: skip
    longest = to.node("Cast", f"{mask}/Gather/Cast", [longest], to=TensorProto.INT32)
    angles = shape.angles()
    caches = [to.store("cos_cache", angles.cos()), to.store("sin_cache", angles.sin())]
    table = to.store("model.embed_tokens.weight", model.embed_tokens.weight)
    x = to.node("Gather", "/model/embed_tokens/Gather", [table, "input_ids"])
    norm = to.store("model.layers.0.input_layernorm.weight", model.layers[0].input_layernorm.weight)
    name = "/model/layers.0/input_layernorm/LayerNorm"
    y = to.node(
        "SimplifiedLayerNormalization", name, [x, norm], axis=-1, epsilon=1e-5, stash_type=1
    )
    pasts = []
    for i, block in enumerate(model.layers):
        head, attn = f"/model/layers.{i}", block.self_attn
        if packed:
            qkv = to.linear(f"{head}/attn/qkv_proj", y, [attn.q_proj, attn.k_proj, attn.v_proj])
            qkv = [qkv, "", ""]
        else:
            qkv = [
                to.linear(f"{head}/attn/{n}_proj", y, [getattr(attn, f"{n}_proj")]) for n in "qkv"
            ]
        past = [f"past_key_values.{i}.{n}" for n in ("key", "value")]
        present = [f"present.{i}.{n}" for n in ("key", "value")]
        pasts += past
        name = f"{head}/attn/GroupQueryAttention"
        y = to.node(
            "GroupQueryAttention", name, [*qkv, *past, lengths, longest, *caches],
            names=[f"{name}/output_0", *present], domain="com.microsoft", num_heads=shape.heads,
            kv_num_heads=shape.shared, scale=shape.size**-0.5, do_rotary=1, rotary_interleaved=0,
        )  # fmt: skip
        y = to.linear(f"{head}/attn/o_proj", y, [attn.o_proj])
        x, y = skip(to, f"{head}/post_attention_layernorm", x, y, block.post_attention_layernorm)
        gate = to.linear(f"{head}/mlp/gate_proj", y, [block.mlp.gate_proj])
        up = to.linear(f"{head}/mlp/up_proj", y, [block.mlp.up_proj])
        act = to.node("Sigmoid", f"{head}/mlp/act_fn/Sigmoid", [gate])
        act = to.node("Mul", f"{head}/mlp/act_fn/Mul", [gate, act])
        y = to.node("Mul", f"{head}/mlp/Mul", [act, up])
        y = to.linear(f"{head}/mlp/down_proj", y, [block.mlp.down_proj])
        last = i + 1 == len(model.layers)
        name = f"/model/layers.{i + 1}/{'final_norm_layernorm' if last else 'input_layernorm'}"
        x, y = skip(to, name, x, y, model.norm if last else model.layers[i + 1].input_layernorm)
    logits = to.linear("/lm_head", y, [model.lm_head])
    to.node("Identity", "/lm_head/Identity", [logits], names=["logits"])
    long = [BATCH, "total_sequence_length"]
    cache = [BATCH, shape.shared, "past_sequence_length", shape.size]
    inputs = [
        helper.make_tensor_value_info("input_ids", TensorProto.INT64, [BATCH, SEQUENCE]),
        helper.make_tensor_value_info("attention_mask", TensorProto.INT64, long),
        *(helper.make_tensor_value_info(name, TensorProto.FLOAT, cache) for name in pasts),
    ]
    cache[2] = "total_sequence_length"
    names = [name.replace("past_key_values", "present") for name in pasts]
    outputs = [
        helper.make_tensor_value_info("logits", TensorProto.FLOAT, [BATCH, SEQUENCE, VOCABULARY]),
        *(helper.make_tensor_value_info(name, TensorProto.FLOAT, cache) for name in names),
    ]
    stored = [numpy_helper.from_array(array, name) for name, array in to.stored.items()]
    graph = helper.make_graph(to.nodes, "main_graph", inputs, outputs, stored)
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return onnx.ModelProto(
        ir_version=10, graph=graph, opset_import=domains, producer_name="onnxruntime-genai"
    )


def skip(to: Writer, name: str, x: str, y: str, norm: nn.Module) -> tuple[str, str]:
    """The sum of two branches, and its normalization."""
    weight = to.store(f"{name.removeprefix('/').replace('/', '.')}.weight", norm.weight)
    label = f"{name}/SkipLayerNorm"
    names = [f"{label}/output_0", "", "", f"{label}/output_3"]
    y = to.node(
        "SkipSimplifiedLayerNormalization", label, [x, y, weight], names=names,
        domain="com.microsoft", epsilon=1e-5,
    )  # fmt: skip
    return names[3], y


def quantized(proto, bits, *, symmetric, tables):
    """The model with its products, and look-ups, in few bits."""
    kinds = ("MatMul", "Gather") if tables else ("MatMul",)
    tool = MatMulNBitsQuantizer(
        proto, bits=bits, block_size=BLOCK, is_symmetric=symmetric, op_types_to_quantize=kinds
    )
    tool.process()
    model: onnx.ModelProto = tool.model.model
    return model


def numbers(proto: onnx.ModelProto, node: onnx.NodeProto) -> Tensor:
    """The weight [N, K] of a MatMulNBits, by the formula of its documentation."""
    stored = {each.name: numpy_helper.to_array(each) for each in proto.graph.initializer}
    attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    rows, columns, bits = (attributes[name] for name in ("N", "K", "bits"))
    blocks = -(-columns // attributes["block_size"])

    def codes(name: str) -> np.ndarray:
        packed = stored[name].reshape(rows, -1)
        if bits == 8:
            return packed.astype(np.float64)
        return np.stack([packed & 15, packed >> 4], -1).reshape(rows, -1).astype(np.float64)

    zeros = np.full((rows, blocks), 1 << bits - 1)
    if len(node.input) > 3 and node.input[3]:
        zeros = codes(node.input[3])[:, :blocks]
    scales = stored[node.input[2]].reshape(rows, blocks)
    wide = (each.repeat(attributes["block_size"], 1) for each in (zeros, scales))
    zero, scale = wide
    return torch.tensor(((codes(node.input[1]) - zero) * scale)[:, :columns], dtype=torch.float32)


def twin(proto: onnx.ModelProto, model: Llama) -> Causal:
    """The PyTorch model with what the codes stand for."""
    for node in proto.graph.node:
        if node.op_type != "MatMulNBits":
            continue
        path = node.input[1].split(".MatMul.")[0].removeprefix("model.")
        path = path.replace(".attn.", ".self_attn.")
        names = [path.replace("qkv", n) for n in "qkv"] if "qkv_proj" in path else [path]
        parts = [model.get_submodule(name).weight for name in names]
        rows = numbers(proto, node).split([len(part) for part in parts])
        with torch.no_grad():
            for part, values in zip(parts, rows, strict=True):
                assert 0 < (part - values).abs().max() < 0.2 * part.abs().max()
                part.copy_(values)
    return Causal(model)


def decoder(path, bits=4, *, symmetric=True, packed=False, tables=False):
    """Write the quantized model; return the PyTorch model with the same weights."""
    model = llama(shape=SHAPE)
    proto = quantized(write(model, SHAPE, packed=packed), bits, symmetric=symmetric, tables=tables)
    onnx.save(proto, path)
    found = twin(proto, model)
    look_up = [node for node in proto.graph.node if node.op_type == "GatherBlockQuantized"]
    assert len(look_up) == int(tables)
    if tables:  # its rows, by its kernel
        ids = np.arange(VOCABULARY)
        del proto.graph.output[:], proto.graph.input[:]
        proto.graph.input.append(helper.make_tensor_value_info(look_up[0].input[1], 7, ["n"]))
        proto.graph.output.append(
            helper.make_tensor_value_info(look_up[0].output[0], 1, ["n", SHAPE.width])
        )
        del proto.graph.node[:]
        proto.graph.node.extend(look_up)
        session = onnxruntime.InferenceSession(proto.SerializeToString())
        with torch.no_grad():
            (rows,) = session.run(None, {"input_ids": ids})
            model.embed_tokens.weight.copy_(torch.from_numpy(rows))
    return found


def to_float16(path: Path) -> None:
    """Store and compute in float16, as the builder writes models for GPUs."""
    proto = onnx.load(path)
    for each in proto.graph.initializer:
        if each.data_type == TensorProto.FLOAT:
            array = numpy_helper.to_array(each).astype(np.float16)
            each.CopyFrom(numpy_helper.from_array(array, each.name))
    for info in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        if info.type.tensor_type.elem_type == TensorProto.FLOAT:
            info.type.tensor_type.elem_type = TensorProto.FLOAT16
    onnx.save(proto, path)


def feeds(ids: np.ndarray) -> dict[str, np.ndarray]:
    """Inputs for ONNX Runtime, with an empty cache."""
    empty = np.zeros((len(ids), SHAPE.shared, 0, SHAPE.size), np.float32)
    pasts = {f"past_key_values.{i}.{n}": empty for i in range(2) for n in ("key", "value")}
    return {"input_ids": ids, "attention_mask": np.ones((len(ids), LENGTH), np.int64)} | pasts
