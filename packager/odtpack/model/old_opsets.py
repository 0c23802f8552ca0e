"""Models of opsets 7 to 11 become models of a newer one, by the onnx library's converter."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnx.helper
import onnx.shape_inference
import onnx.version_converter

from odtpack.errors import OdtpackError
from odtpack.targets import MIN_OPSET

CONVERTED = range(7, MIN_OPSET)
"""Opsets that are converted."""
NEWEST = 17
"""What such a model becomes: ONNX Runtime loads it since release 1.12."""


def convert(proto: onnx.ModelProto, arrays: Mapping[str, np.ndarray], where: str) -> int | None:
    """Convert a model in place, if it needs it; names stay."""
    # proto: The model, checked, with detached initializers of shape [0]. arrays: Their values.
    # Returns the opset that it had; None if it stays as it is.
    opset = next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), None)
    if opset not in CONVERTED:
        return None
    light = onnx.ModelProto()
    light.CopyFrom(proto)
    light.ir_version = max(light.ir_version, 8)  # initializers need not be inputs
    # Their sizes are needed, and their values are not: they are inputs for a while.
    detached = {t.name: t for t in proto.graph.initializer if t.name in arrays}
    kept = [tensor for tensor in light.graph.initializer if tensor.name not in detached]
    del light.graph.initializer[:]
    light.graph.initializer.extend(kept)
    inputs = {value.name for value in light.graph.input}
    for name, tensor in detached.items():
        if name not in inputs:
            shape = arrays[name].shape
            info = onnx.helper.make_tensor_value_info(name, tensor.data_type, shape)
            light.graph.input.append(info)
    try:
        light = onnx.version_converter.convert_version(light, NEWEST)
    except (
        RuntimeError,  # what has no Python class of its own
        ValueError,
        onnx.version_converter.ConvertError,
        onnx.shape_inference.InferenceError,
    ) as error:
        said = str(error).partition("\n")[0].rpartition("failed: ")[2]
        raise OdtpackError(
            "opset-too-old",
            f"the model uses opset {opset}, and converting it to {NEWEST} fails: {said}",
            where=where,
            hint=f"export it again with opset {MIN_OPSET} or newer",
        ) from None
    _name_upsampled(proto.graph, light.graph)
    given = [value for value in light.graph.input if value.name in inputs]
    del light.graph.input[:]
    light.graph.input.extend(given)
    order = [tensor.name for tensor in proto.graph.initializer]
    found = {tensor.name: tensor for tensor in light.graph.initializer} | detached
    tensors = [found.pop(name) for name in order if name in found] + list(found.values())
    stored = [onnx.TensorProto.FromString(tensor.SerializeToString()) for tensor in tensors]
    del light.graph.initializer[:]
    light.graph.initializer.extend(stored)
    proto.CopyFrom(light)
    return opset


def _name_upsampled(old: onnx.GraphProto, new: onnx.GraphProto) -> None:
    """Give what Upsample computed its name again: the converter loses it, and only that."""
    kept = {name for node in new.node for name in node.output}
    lost = [n.output[0] for n in old.node if n.op_type == "Upsample" and n.output[0] not in kept]
    known = {name for node in old.node for name in node.output}
    made = [n.output[0] for n in new.node if n.op_type == "Resize" and n.output[0] not in known]
    if len(lost) != len(made):
        return
    names = dict(zip(made, lost, strict=True))
    for node in new.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    for value in (*new.output, *new.value_info):
        value.name = names.get(value.name, value.name)
