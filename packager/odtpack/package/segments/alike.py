"""Tells which pieces of a graph are alike: they have the same operators, on other weights."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from odtpack.autodiff.unpack_late import SMALLEST
from odtpack.graph.graphs import dims_of, subgraphs
from odtpack.package.segments.cut import Piece
from odtpack.package.segments.packed import can_be_lifted

_LARGEST_COMPARED = 1 << 16
"""Bytes up to which constants are compared; what is larger is a weight."""
_WEIGHTS = {
    *(ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE),
    *(ir.DataType.INT4, ir.DataType.UINT4),
}


@dataclasses.dataclass(frozen=True)
class Outline:
    """The shape of a piece.

    Attributes:
        key: Equal for pieces that are alike.
        inputs: Names of its inputs, in the order in which they are met from its outputs.
        weights: Its initializers that may hold other numbers in a piece that is alike, in order.
        values: What it gives, and the gradients that go with it, in order.
    """

    key: str
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    outputs: tuple[str, ...]


def outline(graph: ir.Graph, piece: Piece, trained: Sequence[str]) -> Outline:
    """Return the shape of a piece.

    Args:
        graph: The piece alone, its inputs and outputs named as in the whole.
        piece: Where it was cut.
        trained: Names of parameters to train.
    """
    digest = hashlib.sha256()
    numbers: dict[ir.Value, int] = {}
    sizes: dict[str, int] = {}
    inputs: list[str] = []
    weights: list[str] = []
    seen: set[ir.Node] = set()

    def note(*parts: object) -> None:
        digest.update(repr(parts).encode())

    def meet(value: ir.Value) -> None:
        """Number an input or an initializer."""
        numbers[value] = len(numbers)
        tensor, name = value.const_value, str(value.name)
        if not value.is_graph_input() and tensor is not None:
            note("constant", tensor.dtype.name, tuple(tensor.shape.numpy()))
            if is_weight(tensor) and can_be_lifted(value):
                weights.append(name)
            else:
                note(tensor.tobytes())
            return
        inputs.append(name)
        dims = [
            sizes.setdefault(dim, len(sizes)) + 0.5 if isinstance(dim, str) else dim
            for dim in dims_of(value) or ()
        ]
        start = piece.start is not None and name == piece.start.name
        note("input", value.dtype, dims, name in trained, start)

    for output in graph.outputs:
        stack: list[tuple[ir.Node | None, bool]] = [(output.producer(), False)]
        while stack:
            node, ready = stack.pop()
            if node is None or (node in seen and not ready):
                continue
            if not ready:
                seen.add(node)
                stack.append((node, True))
                given = [v for v in reversed(node.inputs) if v is not None]
                stack.extend((v.producer(), False) for v in given if v not in numbers)
                continue
            for value in node.inputs:
                if value is not None and value not in numbers:
                    meet(value)
            if subgraphs(node):
                note("own", str(node.outputs[0].name))
            else:
                note(*sorted(_attribute(each) for each in node.attributes.values()))
            note(
                node.domain, node.op_type, [None if v is None else numbers[v] for v in node.inputs]
            )
            for value in node.outputs:
                numbers[value] = len(numbers)
        if output not in numbers:
            meet(output)
        note("output", numbers[output])
    # Inputs that only subgraphs read; a piece with subgraphs is like no other.
    inputs += [str(value.name) for value in graph.inputs if value not in numbers]
    outputs = tuple(str(value.name) for value in graph.outputs)
    return Outline(digest.hexdigest(), tuple(inputs), tuple(weights), outputs)


def is_weight(tensor: ir.TensorProtocol) -> bool:
    """Whether a constant may hold other numbers in a piece that is alike."""
    return tensor.dtype in _WEIGHTS or tensor.size >= SMALLEST


def differing(
    outlines: Sequence[Outline], tensors: Mapping[str, ir.TensorProtocol]
) -> tuple[bool, ...]:
    """Which weights of pieces that are alike are stored outside of their model.

    Those are the ones that differ, and the large ones; what is small and the same is a constant.
    """
    found = []
    for names in zip(*(each.weights for each in outlines), strict=True):
        each = [tensors[name] for name in names]
        large = each[0].nbytes > _LARGEST_COMPARED or each[0].size >= SMALLEST
        found.append(large or len({tensor.tobytes() for tensor in each}) > 1)
    return tuple(found)


def _attribute(attribute: ir.Attr) -> str:
    proto = ir.serde.serialize_attribute(attribute)
    return hashlib.sha256(proto.SerializeToString(deterministic=True)).hexdigest()
