"""What the standard finds out about one node's outputs from its inputs alone.

Training graphs repeat themselves: the same operator with the same attributes meets inputs
of the same types and shapes in every layer. So each such node is inferred once, and the
whole takes a fraction of what inference of the model takes.
"""

from __future__ import annotations

from typing import Final

import onnx
import onnx.checker
import onnx.defs
import onnx.shape_inference
import onnx_ir as ir

from odtpack.graph.graphs import Dims, dims_of, subgraphs

_LARGEST_VALUE: Final = (
    1000  # bytes of an initializer that may be a shape or another small constant
)
_PLAIN: Final = {
    ir.AttributeType.FLOAT,
    ir.AttributeType.FLOATS,
    ir.AttributeType.INT,
    ir.AttributeType.INTS,
    ir.AttributeType.STRING,
    ir.AttributeType.STRINGS,
}

Found = tuple[ir.DataType, Dims | None]
"""Element type and dimensions; None for an unknown rank, and for each unknown dimension."""

_Input = tuple[ir.DataType | None, Dims | None, bytes | None]
"""Type, dimensions and, of a small initializer, the bytes of its elements."""
_Key = tuple[
    tuple[tuple[str, int], ...], str, str, tuple[object, ...], tuple[_Input | None, ...], int
]

_KNOWN: Final[dict[_Key, list[Found | None]]] = {}
"""What was found before. A training model repeats most of its forward model."""

_MOST_KNOWN: Final = 10_000


class NodeInference:
    """Infers nodes of one model in topological order, without data propagation between them.

    Where a value has no type or shape, what was found of it before takes its place.

    Args:
        opsets: Versions of the operator sets by domain.
    """

    def __init__(self, opsets: dict[str, int]) -> None:
        self._opsets = opsets
        self._imports = [onnx.helper.make_opsetid(*each) for each in opsets.items()]
        self._of_opsets = tuple(sorted(opsets.items()))
        self._found: dict[ir.Value, Found] = {}
        self._descriptions: dict[ir.Value, _Input] = {}  # most values are read several times

    def outputs(self, node: ir.Node) -> list[Found | None]:
        """Type and shape of each output, as far as they follow from the inputs'.

        None for an output of which nothing is found out, and for every output of a node
        with subgraphs, whose types come from inside.
        """
        if subgraphs(node):
            return [None] * len(node.outputs)
        inputs = tuple([self._described(value) for value in node.inputs])
        attributes = node.attributes.data.values()  # see odtpack.graph.graphs.subgraphs
        if any(attribute.type not in _PLAIN for attribute in attributes):
            found = self._infer(node, inputs)
        else:
            plain = tuple([(a.name, a.type, _hashable(a.value)) for a in attributes])
            key = (self._of_opsets, node.op_type, node.domain, plain, inputs, len(node.outputs))
            known = _KNOWN.get(key)  # once: another thread may clear it
            if known is None:
                if len(_KNOWN) >= _MOST_KNOWN:
                    _KNOWN.clear()
                known = _KNOWN[key] = self._infer(node, inputs)
            found = known
        for value, each in zip(node.outputs, found, strict=True):
            if each is not None:
                self._found[value] = each
                self._descriptions.pop(value, None)
        return found

    def _described(self, value: ir.Value | None) -> _Input | None:
        if value is None:
            return None
        known = self._descriptions.get(value)
        if known is None:
            known = self._descriptions[value] = self._describe(value)
        return known

    def _describe(self, value: ir.Value) -> _Input:
        tensor = value.const_value if value.is_initializer() else None
        if tensor is not None:
            small = tensor.nbytes <= _LARGEST_VALUE and tensor.dtype != ir.DataType.STRING
            return tensor.dtype, tuple(tensor.shape.numpy()), tensor.tobytes() if small else None
        dtype, dims = self._found.get(value, (None, None))
        return value.dtype or dtype, dims if value.shape is None else dims_of(value), None

    def _infer(self, node: ir.Node, inputs: tuple[_Input | None, ...]) -> list[Found | None]:
        nothing: list[Found | None] = [None] * len(node.outputs)
        version = self._opsets.get(node.domain, 1)
        if not onnx.defs.has(node.op_type, version, node.domain):
            return nothing
        proto = onnx.NodeProto(op_type=node.op_type, domain=node.domain)
        types, data = {}, {}
        for index, given in enumerate(inputs):
            name = "" if given is None else f"input{index}"
            proto.input.append(name)
            if given is None:
                continue
            dtype, dims, value = given
            if dtype is None:
                return nothing
            types[name] = onnx.helper.make_tensor_type_proto(int(dtype), dims)
            if value is not None:
                sizes = [dim for dim in dims or () if isinstance(dim, int)]
                data[name] = onnx.TensorProto(data_type=int(dtype), dims=sizes, raw_data=value)
        proto.output.extend(f"output{index}" for index in range(len(node.outputs)))
        for attribute in node.attributes.values():
            proto.attribute.append(ir.serde.serialize_attribute(attribute))
        try:
            found = onnx.shape_inference.infer_node_outputs(
                onnx.defs.get_schema(node.op_type, version, node.domain),
                proto,
                types,
                data,
                opset_imports=self._imports,
            )
        except (
            onnx.shape_inference.InferenceError,
            onnx.checker.ValidationError,
            RuntimeError,
            ValueError,
        ):
            return nothing
        return [_read(found.get(name)) for name in proto.output]


def _hashable(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _read(proto: onnx.TypeProto | None) -> Found | None:
    if proto is None or not proto.HasField("tensor_type") or not proto.tensor_type.elem_type:
        return None
    tensor = proto.tensor_type
    dims: Dims | None = None
    if tensor.HasField("shape"):
        dims = tuple(
            dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None
            for dim in tensor.shape.dim
        )
    return ir.DataType(tensor.elem_type), dims
