"""Cuts a network into segments: where, which are equal, in which rows, how weights are packed."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.backward import FLOATS, dependents, influences
from odtpack.contrib.quantized import FOUR_BITS, four_bit_codes, packed_four_bits, unpack_four_bits
from odtpack.errors import OdtpackError
from odtpack.graph.graphs import (
    Ops,
    ancestors,
    dims_of,
    mark_constant,
    reads,
    static_dims,
    subgraphs,
    typed,
)
from odtpack.passes.finishing import SMALLEST


def can_be_lifted(value: ir.Value) -> bool:
    """Whether an initializer can be an input: of 4 bits those that are unpacked alone can."""
    readers = (node.op_type == "DequantizeLinear" for node, _ in value.uses())
    return value.dtype not in FOUR_BITS or all(readers)


def unpack(graph: ir.Graph, values: Sequence[ir.Value], *, bits: bool = True) -> None:
    """Let a graph take initializers of 4 bits apart, which become packed bytes."""
    # `bits`: whether there are kernels that shift them.
    op = Ops(graph, "packed/")
    stored = {value: tensor_of(value) for value in values if value.dtype in FOUR_BITS}
    for value, tensor in stored.items():
        stored_as = packed_four_bits(tensor)
        value.const_value, value.type = stored_as, ir.TensorType(ir.DataType.UINT8)
        value.shape = ir.Shape(stored_as.shape.numpy())
    for node in dict.fromkeys(node for value in stored for node, _ in value.uses()):
        assert node.graph is not None  # noqa: S101 - it reads what a graph has
        inner = op if node.graph is graph else op.inside(node.graph)
        codes, scale, *rest = [value for value in node.inputs if value is not None]
        offset = FOUR_BITS[(stored.get(codes) or tensor_of(codes)).dtype]
        with inner.before(node):
            shift = _shift(inner, scale, bits)
            found = [_unpacked(inner, value, shift, stored) for value in (codes, *rest)]
            if not rest and offset:
                zero = inner.constant(np.full((), offset, np.uint8 if bits else np.float32))
                zeros = inner.Expand(zero, inner.Shape(scale))
                found.append(zeros if bits else inner.cast(zeros, ir.DataType.UINT8))
            (result,) = inner.again(node, [found[0], scale, *found[1:]])
        old = node.outputs[0]
        old.replace_all_uses_with(typed(result, old), replace_graph_outputs=True)
        node.graph.remove(node, safe=True)


def tensor_of(value: ir.Value) -> ir.TensorProtocol:
    """What an initializer holds."""
    assert value.const_value is not None  # noqa: S101 - of an initializer
    return value.const_value


def _shift(op: Ops, scale: ir.Value, bits: bool) -> ir.Value:
    """4, or 1/16 without shifts, which is there when the scales are."""
    if scale.producer() is None:
        return op.constant(np.full((), 4, np.uint8) if bits else np.full((), 1 / 16, np.float32))
    one = op.Min(op.Size(scale), 1)
    if bits:
        return op.cast(op.Mul(one, 4), ir.DataType.UINT8)
    shift: ir.Value = op.Mul(op.cast(one, ir.DataType.FLOAT), 1 / 16)
    return shift


def _unpacked(
    op: Ops, value: ir.Value, shift: ir.Value, stored: Mapping[ir.Value, ir.TensorProtocol]
) -> ir.Value:
    """Codes of 4 bits as UINT8, from 0 on."""
    if value not in stored:
        return op.constant(four_bit_codes(tensor_of(value)))
    return unpack_four_bits(op, value, shift, stored[value].shape.numpy())


_ROWS = ".rows_"


def part_of(name: str) -> str:
    """The name of the initializer that one of these names has rows of; itself without any."""
    return name.partition(_ROWS)[0]


LARGEST_PART = 1 << 20
"""Elements of a matrix that are unpacked at a time: 4 MiB in float32."""


def split_rows(graph: ir.Graph) -> None:
    """Take the products of a graph apart whose matrices have more elements than that."""
    # A matrix that is read by anything else, as DoRA's norms read it, stays whole.
    op = Ops(graph, "rows/")
    for node in [*graph]:
        if node.op_type == "DequantizeLinear" and node.domain == "":
            _split(op, node)


def _split(op: Ops, unpack: ir.Node) -> None:
    weight = unpack.outputs[0]
    shape = static_dims(weight)
    if shape is None or len(shape) != 2 or math.prod(shape) <= LARGEST_PART:
        return
    stored = [value for value in unpack.inputs if value is not None]
    if any(value.const_value is None for value in stored) or len(stored[0].uses()) > 1:
        return
    found = _product(weight)
    if found is None:
        return
    product, between = found
    source, old = product.inputs[0], product.outputs[0]
    assert source is not None  # noqa: S101 - a product has two
    sizes = _sizes(unpack, *shape)
    if len(sizes) == 1:
        return
    with op.before(product):
        parts, start = [], 0
        for size in sizes:
            parts.append(_rows(op, unpack, start, size))
            start += size
        if between is not None:
            turned = [op.Transpose(part, perm=[1, 0]) for part in parts]
            result = op.Concat(*(op.MatMul(source, part) for part in turned), axis=-1)
        else:
            cuts = op.split(source, -1, sizes)
            products = [op.MatMul(x, part) for x, part in zip(cuts, parts, strict=True)]
            result = functools.reduce(op.Add, products)
    old.replace_all_uses_with(typed(result, old))
    for node in (product, between, unpack):
        if node is not None:
            op.graph.remove(node, safe=True)
    result.name = old.name


def frozen_products(graph: ir.Graph) -> frozenset[str]:
    """Names of the results of products with large frozen matrices."""
    fixed = (v for v in graph.initializers.values() if not v.is_graph_input())
    constant = {v for node in _spread(graph, fixed, all) for v in node.outputs}
    return frozenset(
        str(node.outputs[0].name)
        for node in graph
        if node.op_type in ("Conv", "Gemm", "MatMul")
        and (weight := node.inputs[1]) is not None
        and (weight in constant or weight.is_initializer())
        and math.prod(static_dims(weight) or (0,)) >= SMALLEST
        and node.outputs[0] not in constant
    )


def _product(weight: ir.Value) -> tuple[ir.Node, ir.Node | None] | None:
    """The one product that reads a matrix, and the Transpose between them, if there is one."""
    between = None
    while len(weight.uses()) == 1 and not weight.is_graph_output():
        (reader, index), *_ = weight.uses()
        if reader.op_type == "MatMul":
            is_last = index == 1 and not reader.outputs[0].is_graph_output()
            return (reader, between) if is_last else None
        if reader.op_type != "Transpose" or between is not None:
            return None
        between, weight = reader, reader.outputs[0]
    return None


def _sizes(unpack: ir.Node, rows: int, columns: int) -> list[int]:
    """Rows of each part: whole blocks, and whole bytes of codes."""
    # Of 32 rows codes and scales have multiples of 64 bytes: parts follow each other without gaps.
    unit = math.lcm(_rows_of_scale(unpack), 32 if 32 * columns <= LARGEST_PART else 2)
    most = max(LARGEST_PART // columns // unit, 1) * unit
    count = math.ceil(rows / most)
    size = math.ceil(rows / count / unit) * unit
    return [min(size, rows - start) for start in range(0, rows, size)]


def _rows_of_scale(unpack: ir.Node) -> int:
    """Rows that share a row of scales."""
    blocked = unpack.attributes.get_int("axis", 1) == 0
    return max(unpack.attributes.get_int("block_size", 0), 1) if blocked else 1


def _rows(op: Ops, unpack: ir.Node, start: int, size: int) -> ir.Value:
    """What unpacks some rows of a matrix."""
    stored = [value for value in unpack.inputs if value is not None]
    by_column = unpack.attributes.get_int("axis", 1) == 1
    step = _rows_of_scale(unpack)
    inputs = [_part(op, stored[0], start, size)]
    for value in stored[1:]:  # scales and zero points: of rows of blocks, of rows, or of columns
        rank = len(dims_of(value) or ())
        shared = rank == 0 or (rank == 1 and by_column)
        inputs.append(value if shared else _part(op, value, start // step, -(-size // step)))
    (result,) = op.again(unpack, inputs)
    columns = (static_dims(unpack.outputs[0]) or ())[1:]
    result.type, result.shape = unpack.outputs[0].type, ir.Shape([size, *columns])
    return result


def _part(op: Ops, value: ir.Value, start: int, size: int) -> ir.Value:
    """An initializer with some rows of another one."""
    tensor = tensor_of(value)
    name = op.fresh_name(f"{value.name}{_ROWS}{start}")
    shape = ir.Shape([size, *tensor.shape.numpy()[1:]])

    def read() -> ir.TensorProtocol:
        rows = np.ascontiguousarray(tensor.numpy()[start : start + size])
        return ir.Tensor(rows, dtype=tensor.dtype, name=name)

    lazy = ir.LazyTensor(read, dtype=tensor.dtype, shape=shape, name=name)
    part = ir.val(name, const_value=lazy, type=ir.TensorType(tensor.dtype), shape=shape)
    op.graph.register_initializer(part)
    mark_constant(part)
    return part


_LARGEST_COMPARED = 1 << 16
"""Bytes up to which constants are compared; what is larger is a weight."""
_WEIGHTS = {
    *(ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE),
    *(ir.DataType.INT4, ir.DataType.UINT4),
}


@dataclasses.dataclass(frozen=True)
class Outline:
    """The shape of a piece."""

    # `values`: what it gives, and the gradients that go with it, in order.

    key: str  # the same for equal pieces
    # names of its inputs, in the order in which they are met from its outputs
    inputs: tuple[str, ...]
    # its initializers that may hold other numbers in an equal piece, in order
    weights: tuple[str, ...]
    outputs: tuple[str, ...]


def outline(graph: ir.Graph, piece: Piece, trained: Sequence[str]) -> Outline:
    """Return the shape of a piece."""
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
    """Whether a constant may hold other numbers in an equal piece."""
    return tensor.dtype in _WEIGHTS or tensor.size >= SMALLEST


def differing(
    outlines: Sequence[Outline], tensors: Mapping[str, ir.TensorProtocol]
) -> tuple[bool, ...]:
    """Which weights of equal pieces are stored outside their model."""
    found = []
    for names in zip(*(each.weights for each in outlines), strict=True):
        each = [tensors[name] for name in names]
        large = each[0].nbytes > _LARGEST_COMPARED or each[0].size >= SMALLEST
        found.append(large or len({tensor.tobytes() for tensor in each}) > 1)
    return tuple(found)


def _attribute(attribute: ir.Attr) -> str:
    proto = ir.serde.serialize_attribute(attribute)
    return hashlib.sha256(proto.SerializeToString(deterministic=True)).hexdigest()


_MANY: Final = 16
"""Pieces from which on two of them, such as attention and feed-forward, are one: as in T. Chen and
others, arXiv 1604.06174, least is kept where pieces are as many as the values inside of one."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """A stretch of a graph."""

    # the value that the piece before gives it, whose gradient it gives back; of the prelude, and
    # where the first block cannot be told from it, None
    start: ir.Value | None
    end: ir.Value | None  # its result, whose gradient it takes; None of the prelude
    # what it reads: graph inputs and values of other pieces, `start` among them
    inputs: tuple[ir.Value, ...]
    outputs: tuple[ir.Value, ...]  # what others read of it, `end` among them


def cut(graph: ir.Graph, trained: Sequence[ir.Value]) -> list[Piece]:
    """Cut a graph into pieces, in the order in which they are computed."""
    loss = graph.outputs[0]
    flow = dependents(graph, trained) & influences(graph, [loss])
    readers = _readers(graph)
    fixed = (v for v in graph.initializers.values() if not v.is_graph_input())
    constant = _spread(graph, fixed, all)  # nodes that depend on no input
    stream = _stream(graph, trained, readers, constant)
    before = [value for value in stream if value not in flow]
    start = before[-1] if before else None
    cuts = [value for value in stream if value in flow]
    cuts = _without_leaks(cuts, _owners(graph, [*cuts, loss]), flow, readers)
    cuts = _worthwhile(cuts, _owners(graph, [*cuts, loss]), trained)
    if len(cuts) >= _MANY:
        # What lies between pieces is kept for a whole step, what is inside of one while it runs.
        cuts = cuts[len(cuts) % 2 == 0 :: 2]
    if not cuts:
        raise OdtpackError(
            "segments-not-found",
            "the model cannot be cut into segments: no value lies on every path from the input to "
            "the loss, with trained parameters before it and a matrix on both sides",
            hint="leave --segments out",
        )
    owner = _owners(graph, [*cuts, loss])
    shared = _shared(graph, owner, flow, readers, constant)
    for node in ancestors([*shared, *(() if start is None else (start,))], graph):
        owner[node] = -1
    _check_shared(trained, owner, readers)
    ends: dict[int, ir.Value] = {**dict(enumerate(cuts)), len(cuts): loss}
    starts: dict[int, ir.Value | None] = {0: start, **{i + 1: v for i, v in enumerate(cuts)}}
    return [
        piece
        for index in sorted({-1, *ends})
        if (piece := _piece(graph, index, owner, constant, starts, ends)) is not None
    ]


def _readers(graph: ir.Graph) -> dict[ir.Value, list[ir.Node]]:
    found: dict[ir.Value, list[ir.Node]] = {}
    for node in graph:
        for value in dict.fromkeys(reads(node)):
            found.setdefault(value, []).append(node)
    return found


def _spread(
    graph: ir.Graph, known: Iterable[ir.Value], enough: Callable[[Iterable[bool]], bool]
) -> set[ir.Node]:
    """Nodes that read known values, all or any of them, or what such nodes give."""
    reached, found = set(known), set()
    for node in graph:
        if enough(value in reached for value in reads(node)):
            reached.update(node.outputs)
            found.add(node)
    return found


def _post_dominators(
    nodes: Sequence[ir.Node],
    successors: Mapping[ir.Node, Collection[ir.Node]],
    position: Mapping[ir.Node, int],
) -> dict[ir.Node, ir.Node | None]:
    """The next node that all paths from a node take; None where there is none."""
    found: dict[ir.Node, ir.Node | None] = {}

    def meet(a: ir.Node | None, b: ir.Node | None) -> ir.Node | None:
        while a is not b:
            if a is None or b is None:
                return None
            if position[a] < position[b]:
                a = found.get(a)
            else:
                b = found.get(b)
        return a

    for node in reversed(nodes):
        following: list[ir.Node | None] = [each for each in successors[node] if each in found]
        found[node] = functools.reduce(meet, following) if following else None
    return found


def _stream(
    graph: ir.Graph,
    trained: Collection[ir.Value],
    readers: Mapping[ir.Value, Sequence[ir.Node]],
    constant: Collection[ir.Node],
) -> list[ir.Value]:
    """Values that all data of an input pass through, for the input that has most of them."""
    # Others, such as positions and masks, have few: each block reads what is made of them.
    position = {node: place for place, node in enumerate(graph)}
    given = {value for value in graph.inputs if value not in trained}
    ends = influences(graph, graph.outputs[:1])
    longest: list[ir.Value] = []
    for source in graph:
        if source in constant or given.isdisjoint(reads(source)):
            continue
        reached = dependents(graph, source.outputs) & (ends | {*source.outputs})
        nodes = [node for node in graph if any(y in reached for y in node.outputs)]
        inside = set(nodes)
        successors = {
            node: [
                r for y in node.outputs if y in reached for r in readers.get(y, ()) if r in inside
            ]
            for node in nodes
        }
        following = _post_dominators(nodes, successors, position)
        node: ir.Node | None = source
        found = []
        while node is not None:
            made = [y for y in node.outputs if y in reached]
            if len(made) == 1 and made[0].dtype in FLOATS and made[0] not in graph.outputs:
                found.append(made[0])
            node = following.get(node)
        longest = max(longest, found, key=len)
    return longest


def _owners(graph: ir.Graph, ends: Sequence[ir.Value]) -> dict[ir.Node, int]:
    """The first of some ends that needs a node, for each node that one needs."""
    owner: dict[ir.Node, int] = {}
    for index, end in enumerate(ends):
        stack = [end.producer()]
        while stack:
            node = stack.pop()
            if node is None or node in owner or node.graph is not graph:
                continue
            owner[node] = index
            stack.extend(value.producer() for value in reads(node))
    return owner


def _without_leaks(
    cuts: Sequence[ir.Value],
    owner: Mapping[ir.Node, int],
    flow: Collection[ir.Value],
    readers: Mapping[ir.Value, Sequence[ir.Node]],
) -> list[ir.Value]:
    """Cuts that no other value with a gradient crosses."""
    bad: set[int] = set()
    for node, index in owner.items():
        for value in node.outputs:
            if value not in flow:
                continue
            last = max((owner.get(reader, index) for reader in readers.get(value, ())), default=0)
            own = index < len(cuts) and cuts[index] is value
            bad.update(range(index + own, last))
    return [value for index, value in enumerate(cuts) if index not in bad]


def _worthwhile(
    cuts: Sequence[ir.Value], owner: Mapping[ir.Node, int], trained: Collection[ir.Value]
) -> list[ir.Value]:
    """Cuts with a matrix between each and the one before, and after the last."""
    heavy = {
        index
        for node, index in owner.items()
        if any(value in trained or _is_matrix(value) for value in reads(node))
    }
    found: list[ir.Value] = []
    last = max(heavy, default=0)
    pending = False
    for index, value in enumerate(cuts[:last]):
        pending |= index in heavy
        if pending:
            found.append(value)
            pending = False
    return found


def _is_matrix(value: ir.Value) -> bool:
    tensor = value.const_value
    return (
        value.is_initializer()
        and tensor is not None
        and len(tensor.shape) >= 2
        and math.prod(tensor.shape.numpy()) >= SMALLEST
    )


def _shared(
    graph: ir.Graph,
    owner: Mapping[ir.Node, int],
    flow: Collection[ir.Value],
    readers: Mapping[ir.Value, Sequence[ir.Node]],
    constant: Collection[ir.Node],
) -> list[ir.Value]:
    """Values of the first piece that the data decide alone, and that others read too."""
    # What depends on a trained parameter, whatever is made of it.
    depends = _spread(graph, flow, any)
    return [
        value
        for node, index in owner.items()
        if index == 0 and node not in constant and node not in depends
        for value in node.outputs
        if any(owner.get(reader, 0) > 0 for reader in readers.get(value, ()))
    ]


def _check_shared(
    trained: Iterable[ir.Value],
    owner: Mapping[ir.Node, int],
    readers: Mapping[ir.Value, Sequence[ir.Node]],
) -> None:
    for value in trained:
        if len({owner[reader] for reader in readers.get(value, ()) if reader in owner}) > 1:
            raise OdtpackError(
                "segments-unsupported",
                f"{value.name!r} is read by several segments, and each would give a gradient of "
                "its own",
                hint="leave --segments out, or --untie it",
            )


def _piece(
    graph: ir.Graph,
    index: int,
    owner: Mapping[ir.Node, int],
    constant: Collection[ir.Node],
    starts: Mapping[int, ir.Value | None],
    ends: Mapping[int, ir.Value],
) -> Piece | None:
    nodes = [node for node in graph if owner.get(node) == index and node not in constant]
    if not nodes:
        return None
    inputs: dict[ir.Value, None] = {}
    for node in nodes:
        for value in reads(node):
            maker = value.producer()
            outside = value.is_graph_input() if maker is None else owner.get(maker) != index
            if outside and maker not in constant:
                inputs[value] = None
    own = {value for node in nodes for value in node.outputs}
    others = (n for n in graph if owner.get(n, index) != index and n not in constant)
    read = {value for node in others for value in reads(node)}
    outputs = dict.fromkeys([ends[index]] if index in ends else [])
    outputs.update(dict.fromkeys(v for n in nodes for v in n.outputs if v in read and v in own))
    start = starts.get(index)
    return Piece(start if start in inputs else None, ends.get(index), (*inputs,), (*outputs,))
