"""Inference models that take an adapter as inputs, as ONNX Runtime's own adapters need it.

An app loads the base once, and names an adapter for each run: ``RunOptions.add_active_adapter``
(``OrtRunOptions`` in other languages). The inputs have the values of an adapter that changes
nothing where none is named.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import onnx.checker
import onnx_ir as ir

from odtpack.adapters import low_rank
from odtpack.adapters.layers import find_layers, packed_layers
from odtpack.adapters.low_rank import A, B
from odtpack.adapters.modules import by_layer, modules_of, together
from odtpack.errors import OdtpackError
from odtpack.graph.graphs import Ops, dims_of
from odtpack.model.loading import name_nodes
from odtpack.model.source import ModelLike, open_model
from odtpack.spec import AdapterSpec
from odtpack_runtime import CheckpointState
from odtpack_runtime.files.atomic import open_regular, write_whole
from odtpack_runtime.files.folder_update import replace_together, staged_beside
from odtpack_runtime.package.adapter import PREFIX, adapter_of
from odtpack_runtime.package.checks import read_model
from odtpack_runtime.package.manifest import AdapterInfo
from odtpack_runtime.package.package import Package

CACHE_INPUTS = ("input_ids", "attention_mask", "position_ids")
PAST = "past_key_values."


def with_adapter_inputs(model: Path, defaults: Mapping[str, np.ndarray]) -> None:
    """Let initializers of a model be inputs that may be left out."""
    # model: An ONNX file, which is replaced. defaults: Their values where a run names no adapter.
    proto = onnx.load(model)
    for tensor in proto.graph.initializer:
        if tensor.name not in defaults:
            continue
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        array = np.asarray(defaults[tensor.name], dtype)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
        proto.graph.input.append(value)
    if proto.ByteSize() + _DIGEST_BYTES >= onnx.checker.MAXIMUM_PROTOBUF:
        raise OdtpackError("model-too-large", "the base model would exceed 2 GB", where=str(model))
    content = proto.SerializeToString(deterministic=True)
    del proto
    write_whole(model, content + _digest(hashlib.sha256(content).hexdigest()))


def is_base(path: Path) -> bool:
    """Whether a file is as :func:`with_adapter_inputs` wrote it."""
    digest, end = hashlib.sha256(), b""
    with suppress(OSError), open_regular(path) as stream:
        left = os.fstat(stream.fileno()).st_size - _DIGEST_BYTES
        while left > 0 and (part := stream.read(min(left, 2**20))):
            digest.update(part)
            left -= len(part)
        end = stream.read()
    return end == _digest(digest.hexdigest())


def _digest(text: str) -> bytes:
    """The metadata entry at the end of a base model: a digest of the bytes before it."""
    entry = onnx.StringStringEntryProto(key="odtpack.base", value=text)
    return bytes(onnx.ModelProto(metadata_props=[entry]).SerializeToString())


_DIGEST_BYTES: Final = len(_digest(hashlib.sha256().hexdigest()))


def export_decoder(
    package: Package, state: CheckpointState, out: Path, model: Path | None = None
) -> list[Path]:
    """Write a decoder with the adapter of a state inside; return its files."""
    # It stays a pair of factors: nothing is rounded, and packed weights are as they were.
    # model: what the package was built of, where its decoder is not meant; any model.
    adapter, arrays = adapter_of(package), state.arrays(trainable=True)
    if model is None:
        read_model(package.decoder)  # says what is wrong with it
        decoder = ir.load(package.decoder)
    else:
        if adapter.kind != "lora" or {*arrays} != {*adapter.parameters}:
            raise _unsupported("--model takes LoRA alone, and nothing that is trained beside it")
        decoder = decoder_with_adapter(model, adapter, any_inputs=True)
    for name in adapter.parameters:
        value = decoder.graph.initializers[name]
        value.const_value = ir.tensor(arrays[name], name=name)
        decoder.graph.inputs.remove(value)
    data = f"{out.name}.data"
    with staged_beside(out) as stage:
        ir.save(decoder, stage / out.name, external_data=data)
        return [out, *replace_together(out, stage / out.name, [stage / data])]


# A decoder as it was exported, with its cache and its packed weights, beside which an adapter is
# added to the layers that training adapts.


def decoder_with_adapter(
    model: ModelLike, adapter: AdapterInfo, any_inputs: bool = False
) -> ir.Model:
    """A decoder with a key-value cache whose adapted layers take a LoRA adapter as inputs."""
    # model: The decoder, which is not changed. adapter: Of kind ``lora``. Its parameters become
    # inputs of their names, in float32, that may be left out: they are zero then, which changes
    # nothing. any_inputs: Take a model that is no decoder, too.
    decoder = open_model(model).model()
    graph = decoder.graph
    name_nodes(graph)
    layers = modules_of(graph, (*find_layers(graph), *packed_layers(graph)))
    modules = {module.name: module for module in layers}
    known = {name for name in CACHE_INPUTS if name in {v.name for v in graph.inputs}}
    for value in graph.inputs:
        if not (any_inputs or value.name in known or str(value.name).startswith(PAST)):
            raise _unsupported(f"it has the input {value.name!r}")
    _state_sizes(graph)
    op = Ops(graph, "adapter/")
    spec = AdapterSpec("lora", ("*",), rank=adapter.rank or 1, alpha=adapter.alpha or 1.0)
    left = set(adapter.parameters)
    found = []
    for name in adapter.layers:
        layer = modules.get(name)
        names = {end: f"{PREFIX}{name}.{end}" for end in (A, B)}
        if layer is None or not left.issuperset(names.values()):
            raise _unsupported(f"the layer {name!r} has no linear layer of its own in it")
        left.difference_update(names.values())
        shapes = {A: (spec.rank, layer.inputs), B: (layer.outputs, spec.rank)}
        inputs = {}
        for end, shape in shapes.items():
            zeros = ir.tensor(np.zeros(shape, np.float32), name=names[end])
            inputs[end] = ir.val(names[end], const_value=zeros)
            graph.inputs.append(inputs[end])
            graph.register_initializer(inputs[end])
        found.append((layer, inputs))
    for own, pieces in by_layer(found):
        for use in own.uses:
            with op.after(use.node):
                # Of what a layer is applied to: that of its scales, or of its weight.
                typed = use.node.inputs[2 if use.node.op_type == "MatMulNBits" else 1]
                dtype = (None if typed is None else typed.dtype) or ir.DataType.FLOAT
                values = {
                    end: value if dtype == ir.DataType.FLOAT else op.cast(value, dtype)
                    for end, value in together(op, own, pieces).items()
                }
                low_rank.apply(op, own, use, values, spec)
    if left:
        raise _unsupported(f"{min(left)!r} is beside no linear layer of it")
    return decoder


def _unsupported(problem: str) -> OdtpackError:
    return OdtpackError("decoder-unsupported", problem)


def _state_sizes(graph: ir.Graph) -> None:
    """Write down the size of a head, which genai's builder leaves open in the cache."""
    for node in graph:
        if node.op_type != "GroupQueryAttention":
            continue
        heads, keys = (node.attributes.get_int(k, 0) for k in ("num_heads", "kv_num_heads"))
        packed = node.inputs[1] is None
        width = _width(node.inputs[0] if packed else node.inputs[1])
        size, rest = divmod(width, max(heads + 2 * keys if packed else keys, 1))
        for value in node.inputs[3:5]:
            if value is None or not value.is_graph_input() or rest or not size:
                raise _unsupported(f"the cache of {node.name!r} has no size that is known")
            dims = dims_of(value) or ()
            value.shape = ir.Shape([*dims[:1], keys, *dims[2:3], size])


def _width(value: ir.Value | None) -> int:
    """The last size of what a linear layer gives, whatever is added to it or normalized on it."""
    while value is not None and (node := value.producer()) is not None:
        if node.op_type == "MatMulNBits":
            return node.attributes.get_int("N", 0)
        weight = node.inputs[1].const_value if node.op_type == "MatMul" and node.inputs[1] else None
        if weight is not None:
            return int(weight.shape.numpy()[-1])
        value = node.inputs[0]
    return 0
