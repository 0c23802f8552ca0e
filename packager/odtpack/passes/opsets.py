"""Models of older opsets become models of newer ones.

Those of opsets 7 to 11 are converted by the onnx library. A graph of opset 13 or newer is read as
one of a newer opset where its meaning stays: from 13 to 17 the standard grew types, attributes with
the old meaning as default, and new operators; what an existing model means did not change, but for
two operators. In return gradients may use LayerNormalization and scatters that add.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import onnx.shape_inference
import onnx.version_converter
import onnx_ir as ir

from odtpack.errors import OdtpackError
from odtpack.graph.graphs import Ops, nodes_of
from odtpack.targets import MIN_OPSET

CONVERTED = range(7, MIN_OPSET)  # opsets that are converted
TO = 17  # what older models become: ONNX Runtime loads it since release 1.12 (2022)
_FROM = 13  # the first opset that is read as that one
BLOCKS = 21  # the opset whose DequantizeLinear takes 4 bits and blocks
_COORDINATES_SINCE = 11  # Resize says how it computes positions; the default is another one

_REDUCTIONS = {  # whose axes became an input in 18
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean",
    "ReduceMin", "ReduceProd", "ReduceSumSquare",
}  # fmt: skip
_CHANGED = {"DFT", "GridSample", "GroupNormalization", "Resize", "Scatter", "Upsample"}


def upgrade(graph: ir.Graph) -> None:
    """Stamp opset 17 on a graph of opset 13 to 16 if its meaning stays."""
    opset = graph.opset_imports[""]
    # RoiAlign's default coordinates moved by half a pixel (16); the training mode of
    # BatchNormalization turned from a count of outputs into an attribute (14).
    if _FROM <= opset < TO and not any(
        node.op_type == "RoiAlign"
        or (node.op_type == "BatchNormalization" and opset < 14 and len(node.outputs) > 1)
        for node in nodes_of(graph)
        if not node.domain
    ):
        graph.opset_imports[""] = TO


def to_blocks(graph: ir.Graph) -> bool:
    """Write a graph of opset 17 to 20 as one of opset 21 if its meaning stays; return whether."""
    upgrade(graph)
    if not TO <= graph.opset_imports[""] < BLOCKS or _changes_before_21(graph):
        return False
    if graph.opset_imports[""] < 18:
        op = Ops(graph, "axes/")
        for node in graph:
            if node.op_type in _REDUCTIONS and "axes" in node.attributes:
                axes = node.attributes.pop("axes").as_ints()
                node.resize_inputs(2)
                node.replace_input_with(1, op.ints(*axes))
    graph.opset_imports[""] = BLOCKS
    return True


def _changes_before_21(graph: ir.Graph) -> bool:
    before_18 = graph.opset_imports[""] < 18
    for node in nodes_of(graph):
        if node.domain:
            continue
        if node.op_type in _CHANGED:
            return True
        if before_18 and node.op_type == "Split" and len(node.inputs) < 2:
            return True
        if before_18 and node.op_type in _REDUCTIONS and node.graph is not graph:
            return True  # where axes would have to be written too
    return False


# Opsets 7 to 11, by the converter, which loses some things on the way.


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
    _set(light.graph.initializer, (t for t in light.graph.initializer if t.name not in detached))
    inputs = {value.name for value in light.graph.input}
    for name, tensor in detached.items():
        if name not in inputs:
            shape = arrays[name].shape
            info = onnx.helper.make_tensor_value_info(name, tensor.data_type, shape)
            light.graph.input.append(info)
    training = _cut_training(light.graph)
    try:
        light = onnx.version_converter.convert_version(light, TO)
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
    _set(light.graph.input, (value for value in light.graph.input if value.name in inputs))
    order = [tensor.name for tensor in proto.graph.initializer]
    found = {tensor.name: tensor for tensor in light.graph.initializer} | detached
    tensors = [found.pop(name) for name in order if name in found] + list(found.values())
    _set(light.graph.initializer, tensors)
    proto.CopyFrom(light)
    return int(opset)


def _set(field: Any, messages: Iterable[Any]) -> None:
    """Let a repeated field hold some messages, which may be its own."""
    copies = [copy.deepcopy(each) for each in messages]
    del field[:]
    field.extend(copies)


def _fails(opset: int, said: str, where: str) -> OdtpackError:
    return OdtpackError(
        "opset-too-old",
        f"the model uses opset {opset}, and converting it to {TO} fails: {said}",
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
        _set(graph.node, nodes)
