"""Models of opsets 7 to 11 become models of a newer one, by the onnx library's converter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import onnx.shape_inference
import onnx.version_converter

from odtpack.errors import OdtpackError
from odtpack.targets import MIN_OPSET

CONVERTED = range(7, MIN_OPSET)
"""Opsets that are converted."""
NEWEST = 17
"""What such a model becomes: ONNX Runtime loads it since release 1.12."""
_COORDINATES_SINCE = 11  # Resize says how it computes positions; the default is another one


def convert(proto: onnx.ModelProto, arrays: Mapping[str, np.ndarray], where: str) -> int | None:
    """Convert a model in place, if it needs it; names stay."""
    # proto: The model, checked, with detached initializers of shape [0]. arrays: Their values.
    # Returns the opset that it had; None if it stays as it is.
    opset = next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), None)
    if opset is None or opset not in CONVERTED:
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
    training = _cut_training(light.graph)
    try:
        light = onnx.version_converter.convert_version(light, NEWEST)
    except (
        RuntimeError,  # what has no Python class of its own
        ValueError,
        onnx.version_converter.ConvertError,
        onnx.shape_inference.InferenceError,
    ) as error:
        said = str(error).partition("\n")[0].rpartition("failed: ")[2]
        raise _fails(opset, said, where) from None
    for node in (node for graph in _graphs(light.graph) for node in graph.node):
        if node.output[:1] in training:
            node.attribute.append(onnx.helper.make_attribute("training_mode", 1))
            node.output.extend(f"{node.output[0]}/{part}" for part in ("mean", "var"))
    _name_upsampled(proto.graph, light.graph)
    if opset < _COORDINATES_SINCE:
        _keep_positions(proto.graph, light.graph, arrays, opset, where)
    for graph in _graphs(light.graph):
        _flatten_hardmax(graph)
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
    return int(opset)


def _fails(opset: int, said: str, where: str) -> OdtpackError:
    return OdtpackError(
        "opset-too-old",
        f"the model uses opset {opset}, and converting it to {NEWEST} fails: {said}",
        where=where,
        hint=f"export it again with opset {MIN_OPSET} or newer",
    )


def _cut_training(graph: onnx.GraphProto) -> list[list[str]]:
    """Leave each BatchNormalization in training mode its result alone; return these."""
    # Until opset 13 further outputs, which nothing reads, say the mode; the converter refuses them.
    nodes = [node for inner in _graphs(graph) for node in inner.node]
    read = {name for node in nodes for name in node.input} | {v.name for v in graph.output}
    found = []
    for node in nodes:
        if node.op_type == "BatchNormalization" and read.isdisjoint(node.output[1:]):
            if len(node.output) > 1:
                found.append([node.output[0]])
            del node.output[1:]
    return found


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


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph, and those inside its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else ())):
                yield from _graphs(inner)


def _keep_positions(
    old: onnx.GraphProto,
    new: onnx.GraphProto,
    arrays: Mapping[str, np.ndarray],
    opset: int,
    where: str,
) -> None:
    """Say of each Resize where it read: the converter leaves it to the default, another one."""
    nodes = [node for graph in _graphs(old) for node in graph.node]
    grown = {node.output[0] for node in nodes if node.op_type == "Upsample"}
    known = dict(arrays)
    for graph in _graphs(new):
        stored = {tensor.name: tensor for tensor in graph.initializer if tensor.name not in known}
        for node in graph.node:
            if node.op_type == "Constant" and node.attribute[0].name == "value":
                stored[node.output[0]] = node.attribute[0].t
        known |= {name: onnx.numpy_helper.to_array(tensor) for name, tensor in stored.items()}
    for node in (node for graph in _graphs(new) for node in graph.node):
        if node.op_type != "Resize":
            continue
        said = {"coordinate_transformation_mode": "asymmetric"}
        mode = next((a.s for a in node.attribute if a.name == "mode"), b"nearest")
        if mode == b"nearest":
            scales = known.get(node.input[2])
            shrinks = scales is not None and bool((scales < 1).any())
            if scales is None and node.output[0] not in grown:
                what = "has scales that are known only when the model runs"
            elif scales is not None and shrinks and (scales > 1).any():
                what = "shrinks one axis and enlarges another"
            else:
                what = ""
            if what:
                raise _fails(opset, f"the Resize that makes {node.output[0]!r} {what}", where)
            said["nearest_mode"] = "ceil" if shrinks else "floor"  # as ONNX Runtime reads there
        node.attribute.extend(onnx.helper.make_attribute(*each) for each in said.items())


def _flatten_hardmax(graph: onnx.GraphProto) -> None:
    """Hardmax worked on rows of all axes from its own on: the converter keeps only the axis."""
    nodes = []
    for node in graph.node:
        if node.op_type != "Hardmax" or node.domain:
            nodes.append(node)
            continue
        axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
        (x,), (y,) = node.input, node.output
        shape, rows, found = (f"{y}/hardmax_{part}" for part in ("shape", "rows", "found"))
        nodes += [
            onnx.helper.make_node("Shape", [x], [shape]),
            onnx.helper.make_node("Flatten", [x], [rows], axis=axis),
            onnx.helper.make_node("Hardmax", [rows], [found], node.name, axis=-1),
            onnx.helper.make_node("Reshape", [found, shape], [y]),
        ]
    if len(nodes) > len(graph.node):
        nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(nodes)
