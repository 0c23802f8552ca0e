"""The parts of an ONNX model that an export needs, on the wire.

Field numbers are those of onnx.proto.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from odtpack_runtime.checkpoint.format import DTYPE_CODES
from odtpack_runtime.checkpoint.parameters import Array
from odtpack_runtime.files.protobuf_wire import (
    BYTES,
    VARINT,
    Piece,
    bytes_field,
    fields,
    messages,
    name_of,
    number_field,
    replaced,
    text,
)

MODEL_IR_VERSION, MODEL_VERSION, MODEL_GRAPH, MODEL_OPSETS, MODEL_METADATA = 1, 5, 7, 8, 14
NODES, GRAPH_NAME, INITIALIZERS, INPUTS, OUTPUTS, VALUE_INFO, SPARSE = 1, 2, 5, 11, 12, 13, 15
NODE_INPUT, NODE_OUTPUT, NODE_TYPE, NODE_ATTRIBUTE, NODE_DOMAIN = 1, 2, 4, 5, 7
ATTRIBUTE_NAME, ATTRIBUTE_INT, ATTRIBUTE_GRAPH, ATTRIBUTE_GRAPHS = 1, 3, 6, 11
_TENSOR_DIMS, TENSOR_TYPE, TENSOR_NAME, _TENSOR_RAW = 1, 2, 8, 9
TENSOR_EXTERNAL, TENSOR_LOCATION = 13, 14
_VALUE_NAME, VALUE_TYPE, _SPARSE_VALUES = 1, 2, 1


def value_name(data: memoryview) -> str:
    """Return the name of a ``ValueInfoProto``."""
    return name_of(data, _VALUE_NAME)


def tensor_name(data: memoryview) -> str:
    """Return the name of a ``TensorProto``."""
    return name_of(data, TENSOR_NAME)


def sparse_name(data: memoryview) -> str:
    """Return the name of a ``SparseTensorProto``: that of its values."""
    return "".join(tensor_name(values) for values in messages(data, _SPARSE_VALUES)[-1:])


@dataclass
class Node:
    """A node, and its bytes as they stand in the file."""

    data: memoryview
    op_type: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    attributes: list[memoryview] = field(default_factory=list)

    @classmethod
    def read(cls, data: memoryview) -> Node:
        """Read a ``NodeProto``."""
        node = cls(data)
        for found in fields(data):
            if found.number == NODE_INPUT:
                node.inputs.append(text(data, found))
            elif found.number == NODE_OUTPUT:
                node.outputs.append(text(data, found))
            elif found.number == NODE_TYPE:
                node.op_type = text(data, found)
            elif found.number == NODE_ATTRIBUTE and found.kind == BYTES:
                node.attributes.append(data[found.body : found.end])
        return node

    def graphs(self) -> Iterator[memoryview]:
        """Yield the node's subgraphs."""
        for attribute in self.attributes:
            for number in (ATTRIBUTE_GRAPH, ATTRIBUTE_GRAPHS):
                yield from messages(attribute, number)

    def integer(self, name: str) -> int | None:
        """Return an attribute that is a whole number."""
        for attribute in self.attributes:
            if name_of(attribute, ATTRIBUTE_NAME) == name:
                values = [
                    found.value
                    for found in fields(attribute)
                    if found.number == ATTRIBUTE_INT and found.kind == VARINT
                ]
                return values[-1] if values else None
        return None

    def names_read(self) -> Iterator[str]:
        """Yield the names it reads; of its subgraphs all, be they their own or captured."""
        yield from self.inputs
        for graph in self.graphs():
            for output in messages(graph, OUTPUTS):
                yield value_name(output)
            for inner in messages(graph, NODES):
                yield from Node.read(inner).names_read()


def renamed(node: memoryview, names: Mapping[str, str]) -> list[Piece]:
    """Return the pieces of a node in which values have other names."""

    def name(data: memoryview) -> list[Piece]:
        own = bytes(data).decode()
        return [names.get(own, own).encode()]

    def output(value: memoryview) -> list[Piece]:
        return replaced(value, {_VALUE_NAME: name})

    def graph(data: memoryview) -> list[Piece]:
        return replaced(data, {NODES: lambda inner: renamed(inner, names), OUTPUTS: output})

    def attribute(data: memoryview) -> list[Piece]:
        return replaced(data, {ATTRIBUTE_GRAPH: graph, ATTRIBUTE_GRAPHS: graph})

    return replaced(node, {NODE_INPUT: name, NODE_ATTRIBUTE: attribute})


def tensor_proto(name: str, array: Array) -> list[Piece]:
    """Return the pieces of a ``TensorProto`` with raw data; the last one views the array."""
    head = b"".join(number_field(_TENSOR_DIMS, dim) for dim in array.shape)
    head += number_field(TENSOR_TYPE, DTYPE_CODES[array.dtype])
    flat = np.ascontiguousarray(array).reshape(-1)
    raw = flat.view(np.uint8).data if flat.size else b""
    label = bytes_field(TENSOR_NAME, [name.encode()])
    return [head, *label, *bytes_field(_TENSOR_RAW, [raw])]


def value_info(
    name: str, dtype: np.dtype[np.generic], shape: tuple[int | str | None, ...]
) -> bytes:
    """Return a ``ValueInfoProto``; an empty shape is left out, for it may be unknown."""
    dims: list[Piece] = []
    for dim in shape:
        content: list[Piece] = []
        if isinstance(dim, int):
            content = [number_field(1, dim)]
        elif dim:
            content = bytes_field(2, [dim.encode()])
        dims += bytes_field(1, content)
    tensor: list[Piece] = [number_field(1, DTYPE_CODES[dtype])]
    if shape:
        tensor += bytes_field(2, dims)
    kind = bytes_field(2, bytes_field(1, tensor))
    return b"".join([*bytes_field(_VALUE_NAME, [name.encode()]), *kind])
