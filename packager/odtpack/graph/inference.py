"""Types and shapes of a model's values, by the onnx library.

``onnx_ir``'s own pass does the same by way of a second model, built from the result and then
thrown away; most of a build was spent there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import onnx
import onnx.shape_inference
import onnx_ir as ir

from odtpack.graph import loop_shapes
from odtpack.graph.graphs import dims_of, subgraphs
from odtpack.graph.node_inference import Found, NodeInference

_LONGEST_VECTOR = 1 << 24
_LARGEST_VALUE = 1000  # bytes of an initializer that may be a shape or another small constant


def infer_shapes(model: ir.Model, *, new_only: bool = False) -> ir.Model:
    """Infer types and shapes of every value, with data propagation; return the model.

    Values of subgraphs are among them, and what loops carry.

    What is known stays. Where inference fails, nothing is added: a rule that needs what is
    missing says so.

    The onnx library propagates vectors element by element, so data propagation is left
    out where a model declares one so long that it could exhaust the memory.

    Args:
        model: Changed in place.
        new_only: What is known in full was inferred before, and nothing that it depends on
            has changed since.
    """
    if _complete_by_node(model, new_only):
        return model
    return loop_shapes.infer(model, infer_by_standard)


def _complete_by_node(model: ir.Model, new_only: bool) -> bool:
    """Infer node by node, as long as each one's outputs become fully known.

    Most models are known in full already, but for a few new nodes. What is found is what
    inference of the whole model finds: with every size a number or a name, data propagation
    has nothing to add.

    Returns:
        Whether every value is known now. Otherwise the rest is for the whole.
    """
    inference = NodeInference(dict(model.graph.opset_imports))
    _type_initializers(model.graph)
    sizes = frozenset[str]() if new_only else _names_of_sizes(model.graph.inputs)
    complete = True
    for node in model.graph:
        if subgraphs(node):
            complete = False
        if not complete and not sizes:
            return False
        known = _is_known if new_only else _is_static
        settled = all(v.dtype is not None and known(v.shape) for v in node.outputs if v.name)
        if settled and not _loses_size(node, sizes):
            continue
        for value, found in zip(node.outputs, inference.outputs(node), strict=True):
            if found is not None:
                _open_stale_sizes(value, found, sizes)
            if complete and value.name and not _complete(value, found):
                complete = False
    return complete


def _names_of_sizes(values: Iterable[ir.Value]) -> frozenset[str]:
    return frozenset(d for value in values for d in dims_of(value) or () if isinstance(d, str))


def _loses_size(node: ir.Node, sizes: Collection[str]) -> bool:
    """Whether a size of the inputs is in no output: by the operator, or by a stale shape."""
    if not sizes:
        return False
    known = _names_of_sizes(value for value in node.inputs if value is not None)
    return not known.intersection(sizes) <= _names_of_sizes(node.outputs)


def _open_stale_sizes(value: ir.Value, found: Found, sizes: Collection[str]) -> None:
    """Drop a declared number where the node computes as many as an input has, any number.

    So it is where the inputs of an exported model were made dynamic, and the shapes after
    them left as they were. ONNX Runtime only warns of that, but a mean over the axis, or a
    sum back to a broadcast shape, would be differentiated for the wrong number.
    """
    known, dims = dims_of(value), found[1]
    if known is None or dims is None or len(known) != len(dims):
        return
    opened = tuple(
        new if isinstance(old, int) and new in sizes else old
        for old, new in zip(known, dims, strict=True)
    )
    if opened != known:
        value.shape = ir.Shape(opened)


def _complete(value: ir.Value, found: Found | None) -> bool:
    """Take over what was found about a value; whether it is fully known then.

    What is declared stays, but that a number found wins over a name.
    """
    dtype, dims = found or (None, None)
    known = dims_of(value)
    if dims is not None and known is not None:
        if len(known) != len(dims):
            return False
        pairs = zip(known, dims, strict=True)
        dims = tuple(
            old if isinstance(old, int) else new if isinstance(new, int) else old or new
            for old, new in pairs
        )
    dims = dims if dims is not None else known
    if value.dtype is None and dtype is not None:
        value.type = ir.TensorType(dtype)
    if dims is not None and dims != known:
        value.shape = ir.Shape(dims)
    return value.dtype is not None and _is_known(value.shape)


def infer_by_standard(model: ir.Model) -> ir.Model:
    """The same as far as the onnx library goes, which treats no loop bodies."""
    inferred = inferred_proto(model)
    if inferred is not None:
        _merge(model.graph, inferred.graph)
    return model


def inferred_proto(model: ir.Model, *, sizes: bool = True) -> onnx.ModelProto | None:
    """What the onnx library makes of a model, without the values of large initializers.

    Args:
        model: The model.
        sizes: Follow the values of shapes through the graph, which is slow where long vectors
            are joined. Types do not depend on it.

    Returns:
        The model with types and shapes; None if its inference fails. Initializers are inputs.
    """
    data_prop = sizes and all(map(_vectors_are_short, model.graphs()))
    with _without_large_initializers(model.graph):
        proto = ir.to_proto(model)
    try:
        return onnx.shape_inference.infer_shapes(
            proto, check_type=False, strict_mode=False, data_prop=data_prop
        )
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError):
        return None


def _type_initializers(graph: ir.Graph) -> None:
    """Write down types and shapes of initializers, as their values have them."""
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and value.shape is None:
            value.shape = ir.Shape(tensor.shape.numpy())
        if tensor is not None and value.type is None:
            value.type = ir.TensorType(tensor.dtype)


@contextmanager
def _without_large_initializers(graph: ir.Graph) -> Iterator[None]:
    """Make initializers inputs, and leave the values of the large ones out, for a while."""
    _type_initializers(graph)
    initializers = dict(graph.initializers)
    inputs = list(graph.inputs)
    known = set(inputs)
    for name, value in initializers.items():
        tensor = value.const_value
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
    if inferred.HasField("tensor_type"):
        _refine_tensor(value, inferred.tensor_type)
        return
    type_ = ir.serde.deserialize_type_proto_for_type(inferred)
    shape = ir.serde.deserialize_type_proto_for_shape(inferred)
    if type_ is not None and value.type != type_:
        value.type = type_
    if shape is not None and value.shape != shape:
        value.shape = shape


def _refine_tensor(value: ir.Value, inferred: onnx.TypeProto.Tensor) -> None:
    """The same for a tensor, as nearly every value is one: most of a merge is spent here."""
    if inferred.elem_type and (value.dtype is None or int(value.dtype) != inferred.elem_type):
        value.type = ir.TensorType(ir.DataType(inferred.elem_type))
    if inferred.HasField("shape"):
        dims = [
            dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None
            for dim in inferred.shape.dim
        ]
        if value.shape is None or list(dims_of(value) or ()) != dims:
            value.shape = ir.Shape(dims)


def _is_static(shape: ir.Shape | None) -> bool:
    return shape is not None and all(isinstance(dim, int) for dim in shape)


def _is_known(shape: ir.Shape | None) -> bool:
    """Whether every size is a number or has a name, other than what inference makes up."""
    return shape is not None and all(
        isinstance(dim, int) or (dim.value and not dim.value.startswith("unk__")) for dim in shape
    )


def _vectors_are_short(graph: ir.Graph) -> bool:
    values = (*graph.inputs, *graph.initializers.values(), *(y for n in graph for y in n.outputs))
    return all(
        value.shape is None
        or value.shape.rank() != 1
        or not isinstance(value.shape[0], int)
        or value.shape[0] <= _LONGEST_VECTOR
        for value in values
    )
