"""Types and shapes of a model's values, by the onnx library.

``onnx_ir``'s own pass does the same by way of a second model, built from the result and then
thrown away; most of a build was spent there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import onnx
import onnx.shape_inference
import onnx_ir as ir

from odtpack import loop_shapes

_LONGEST_VECTOR = 1 << 24
_LARGEST_VALUE = 1000  # bytes of an initializer that may be a shape or another small constant


def infer_shapes(model: ir.Model) -> ir.Model:
    """Infer types and shapes of every value, with data propagation; return the model.

    Values of subgraphs are among them, and what loops carry.

    What is known stays. Where inference fails, nothing is added: a rule that needs what is
    missing says so.

    The onnx library propagates vectors element by element, so data propagation is left
    out where a model declares one so long that it could exhaust the memory.
    """
    return loop_shapes.infer(model, infer_by_standard)


def infer_by_standard(model: ir.Model, *, data_propagation: bool = True) -> ir.Model:
    """The same as far as the onnx library goes, which treats no loop bodies."""
    data_prop = data_propagation and all(map(_vectors_are_short, model.graphs()))
    with _without_large_initializers(model.graph):
        proto = ir.to_proto(model)
    try:
        inferred = onnx.shape_inference.infer_shapes(
            proto, check_type=False, strict_mode=False, data_prop=data_prop
        )
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError):
        return model
    _merge(model.graph, inferred.graph)
    return model


@contextmanager
def _without_large_initializers(graph: ir.Graph) -> Iterator[None]:
    """Make initializers inputs, and leave the values of the large ones out, for a while."""
    initializers = dict(graph.initializers)
    inputs = list(graph.inputs)
    known = set(inputs)
    for name, value in initializers.items():
        tensor = value.const_value
        if tensor is not None:
            if value.shape is None:
                value.shape = ir.Shape(tensor.shape.numpy())
            if value.type is None:
                value.type = ir.TensorType(tensor.dtype)
        if value not in known:
            graph.inputs.append(value)
        if tensor is None or tensor.nbytes > _LARGEST_VALUE:
            del graph.initializers[name]
    try:
        yield
    finally:
        graph.initializers.clear()
        graph.initializers.update(initializers)
        graph.inputs[:] = inputs


def _merge(graph: ir.Graph, proto: onnx.GraphProto) -> None:
    """Take over what inference found out about a graph and its subgraphs."""
    found = {info.name: info.type for info in (*proto.value_info, *proto.output)}
    for node, described in zip(graph, proto.node, strict=True):
        for value in node.outputs:
            inferred = found.get(value.name or "")
            if inferred is not None and not (value.dtype is not None and _is_static(value.shape)):
                _refine(value, inferred)
        for attribute in described.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _merge_body(node.attributes[attribute.name].as_graph(), attribute.g)
            for inner, inner_proto in zip(
                node.attributes[attribute.name].as_graphs() if attribute.graphs else (),
                attribute.graphs,
                strict=True,
            ):
                _merge_body(inner, inner_proto)


def _merge_body(graph: ir.Graph, proto: onnx.GraphProto) -> None:
    for value, info in zip(graph.inputs, proto.input, strict=True):
        _refine(value, info.type)
    _merge(graph, proto)


def _refine(value: ir.Value, inferred: onnx.TypeProto) -> None:
    type_ = ir.serde.deserialize_type_proto_for_type(inferred)
    shape = ir.serde.deserialize_type_proto_for_shape(inferred)
    if type_ is not None and value.type != type_:
        value.type = type_
    if shape is not None and value.shape != shape:
        value.shape = shape


def _is_static(shape: ir.Shape | None) -> bool:
    return shape is not None and all(isinstance(dim, int) for dim in shape)


def _vectors_are_short(graph: ir.Graph) -> bool:
    values = (*graph.inputs, *graph.initializers.values(), *(y for n in graph for y in n.outputs))
    return all(
        value.shape is None
        or value.shape.rank() != 1
        or not isinstance(value.shape[0], int)
        or value.shape[0] <= _LONGEST_VECTOR
        for value in values
    )
