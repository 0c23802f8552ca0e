"""Puts a classification head on an encoder that has none: pooling and a linear layer.

pooled = mean over tokens, first token, or the output itself    [batch, width];
         of a feature map the mean of each channel, or all of its numbers
logits = pooled head.weight^T + head.bias                       [batch, classes]
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from typing import Final

import google.protobuf.message
import numpy as np
import onnx
import onnx.checker
import onnx.shape_inference
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from odtpack.choices import Pool
from odtpack.errors import OdtpackError
from odtpack.graph.graphs import TRAINABLE_TYPES, Ops, dims_of, used_names
from odtpack.model.external_data import load_into
from odtpack.model.loading import load_model, name_standard_domain
from odtpack.model.source import ModelLike

LOGITS: Final = "logits"
WEIGHT: Final = "head.weight"
BIAS: Final = "head.bias"

_MASK: Final = "*attention_mask*"
_INTEGERS: Final = (ir.DataType.INT64, ir.DataType.INT32)
_LAYOUTS: Final = {  # ranks, and how the axes are called
    "none": (range(2, 3), "[batch, width]"),
    "mean": (range(3, 4), "[batch, sequence, width]"),
    "cls": (range(3, 4), "[batch, sequence, width]"),
    "global": (range(3, 6), "[batch, channels, height, width]"),
    "flatten": (range(2, 6), "[batch, channels, height, width]"),
}


def add_head(
    model: ModelLike, pool: Pool, classes: int, *, seed: int = 0, name: str | None = None
) -> bytes:
    """Return the serialized model of an encoder with a head, whose only output is ``logits``."""
    # ``head.weight`` [classes, width] is drawn uniformly from (-1/sqrt(width), 1/sqrt(width)), as
    # ``torch.nn.Linear`` does; ``head.bias`` [classes] is zero. Both have the dtype of the
    # encoder's output. Nodes that only other outputs needed are dropped.
    # pool: ``"mean"`` over the tokens, those that an integer input named like ``*attention_mask*``
    # [batch, sequence] marks if there is one; ``"cls"``, the first token; ``"none"`` for an output
    # [batch, width]; ``"global"`` and ``"flatten"`` for a feature map. classes: Number of logits,
    # at least 1. name: Output of the encoder to read; by default the first float one of the fitting
    # rank.
    if classes < 1:
        raise OdtpackError("bad-argument", f"classes is {classes}; it must be at least 1")
    checked, where = load_model(model), None
    # Built on the file as it is stored: what the exporter noted stays true of it.
    if isinstance(model, ir.Model):
        model = load_into(model.clone())
    elif isinstance(model, onnx.ModelProto):
        model = ir.from_proto(model)
    else:
        where = str(model)
        model = ir.from_proto(onnx.load(model))
    index, width, dtype = _features(checked.graph.outputs, pool, name, where)
    graph = model.graph
    taken = [v for v in sorted(used_names(graph)) if v == LOGITS or v.startswith("head.")]
    if taken:
        raise OdtpackError(
            "head-name-taken",
            f"the model has a value {taken[0]!r}, a name that the head needs",
            where=where,
            hint="it may have a head already; otherwise rename the value before exporting",
        )
    features = graph.outputs[index]
    if classes * width * dtype.itemsize > onnx.checker.MAXIMUM_PROTOBUF:
        raise _too_large(where)
    name_standard_domain(graph.opset_imports)
    op, pooled = Ops(graph, "head."), features
    if pool == "cls":
        pooled = op.Gather(features, op.constant(np.int64(0)), axis=1)
    elif pool == "mean":
        pooled = _mean(op, features, dtype, _mask(graph))
    elif pool == "global":
        axes = range(2, len(dims_of(checked.graph.outputs[index]) or ()))
        pooled = op.reduce_mean(features, axes, keepdims=False)
    elif pool == "flatten":
        pooled = op.Flatten(features, axis=1)
    bound = 1 / math.sqrt(width)
    values = np.random.default_rng(seed).uniform(-bound, bound, (classes, width))
    weight = _parameter(graph, WEIGHT, values.astype(dtype.numpy()))
    bias = _parameter(graph, BIAS, np.zeros(classes, dtype.numpy()))
    logits = op.Gemm(pooled, weight, bias, transB=1)
    logits.name, logits.type = LOGITS, ir.TensorType(dtype)
    batch = features.shape[0] if features.shape is not None else None
    logits.shape = ir.Shape([batch, classes])
    graph.outputs[:] = [logits]
    common_passes.RemoveUnusedNodesPass()(model)
    return _serialized(model, where)


def _features(
    outputs: Sequence[ir.Value], pool: Pool, name: str | None, where: str | None
) -> tuple[int, int, ir.DataType]:
    """Index, width and dtype of the output that the head reads."""
    if name is not None and name not in [value.name for value in outputs]:
        raise OdtpackError(
            "unknown-output",
            f"the head reads {name!r}, which is not an output of the model",
            where=where,
            hint=f"its outputs are {', '.join(str(value.name) for value in outputs)}",
        )
    ranks, layout = _LAYOUTS[pool]
    for index, value in enumerate(outputs):
        dims, dtype = dims_of(value), value.dtype
        if dims is None or len(dims) not in ranks or name not in (None, value.name):
            continue
        if dtype is None or dtype not in TRAINABLE_TYPES:
            continue
        read = {"global": dims[1:2], "flatten": dims[1:]}.get(pool, dims[-1:])
        width = math.prod(dim if isinstance(dim, int) else 0 for dim in read)
        if width < 1:
            which = {"global": "channels, its axis 1,", "flatten": "axes but the first"}.get(pool)
            raise OdtpackError(
                "unknown-shape",
                f"the {which or 'width'} of {value.name!r}{'' if which else ', its last axis,'} "
                f"{'are' if which else 'is'} not fixed",
                where=where,
                hint="export the model with a fixed width",
            )
        return index, width, dtype
    subject = "the model has no float output" if name is None else f"{name!r} is not a float output"
    found = ", ".join(f"{value.name} {_shown(value)}" for value in outputs)
    raise OdtpackError(
        "head-without-input",
        f"{subject} of the shape {layout}: the outputs are {found}",
        where=where,
        hint="pool none takes [batch, width], mean and cls take [batch, sequence, width], global "
        "and flatten take a feature map",
    )


def _shown(value: ir.Value) -> str:
    dims = dims_of(value)
    shape = "of unknown rank" if dims is None else f"[{', '.join(str(d or '?') for d in dims)}]"
    return f"{value.dtype.name if value.dtype is not None else 'unknown'} {shape}"


def _mask(graph: ir.Graph) -> ir.Value | None:
    """The input that marks the tokens that count."""
    named = (v for v in graph.inputs if fnmatch.fnmatchcase(str(v.name), _MASK))
    fitting = (v for v in named if v.dtype in _INTEGERS and len(dims_of(v) or ()) == 2)
    return next(fitting, None)


def _parameter(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    value = ir.val(name, const_value=ir.tensor(array, name=name))
    graph.register_initializer(value)
    return value


def _mean(op: Ops, features: ir.Value, dtype: ir.DataType, mask: ir.Value | None) -> ir.Value:
    """Mean over the tokens that the mask marks; zero where it marks none."""
    if mask is None:
        return op.reduce_mean(features, [1], keepdims=False)
    marked = op.Mul(features, op.unsqueeze(op.cast(mask, dtype), 2))
    total = op.reduce_sum(marked, [1], keepdims=False)
    # Counted in integers: a float constant would be a parameter that 'head.*' trains.
    count = op.Max(op.reduce_sum(mask, [1]), 1)
    return op.Div(total, op.cast(count, dtype))


def _serialized(model: ir.Model, where: str | None) -> bytes:
    try:
        content: bytes | None = ir.to_proto(model).SerializeToString()
    except (ValueError, google.protobuf.message.EncodeError):
        content = None
    if content is None or len(content) > onnx.checker.MAXIMUM_PROTOBUF:
        raise _too_large(where)
    try:
        onnx.checker.check_model(content, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise OdtpackError(
            "invalid-model",
            f"the ONNX checker refuses the model with its head: {str(error).splitlines()[0]}",
            where=where,
            hint="onnx.checker.check_model(path, full_check=True) says more of the encoder",
        ) from None
    return content


def _too_large(where: str | None) -> OdtpackError:
    return OdtpackError(
        "model-too-large",
        "the model with its head would exceed 2 GB, the limit of an ONNX file",
        where=where,
        hint="export the encoder in float16, or ask for fewer classes",
    )
