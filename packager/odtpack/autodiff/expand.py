"""Replaces operators that have no gradient rule by their definition."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from odtpack.autodiff.backward import ancestors, dependents, opset_of
from odtpack.autodiff.context import REGISTRY, Registry
from odtpack.errors import OdtpackError
from odtpack.graph.fold import fold, share_constants
from odtpack.graph.graphs import InlinePass, captures, dims_of, nodes_of, reads, subgraphs
from odtpack.graph.inference import infer_shapes
from odtpack.graph.ops import Ops

# Replaces operators that have no gradient rule by what they are defined as.
#
# The ONNX specification defines many operators as functions of others (Celu, Mish,
# GroupNormalization, Attention, ...), and a model may bring functions of its own. A body in
# place of its call is differentiated like any other part of the graph, so that such an
# operator needs a rule only where that is quicker or more stable than its body.

_DOMAIN = "odtpack.body"  # of the functions that exist for the length of one expansion

# Operators that the same attributes mean something else for from this opset on. All other
# changes between opsets add to an operator, or take an attribute away, which is found out.
CHANGED_MEANING = {
    "Softmax": 13,
    "LogSoftmax": 13,
    "Hardmax": 13,
    "BatchNormalization": 14,
    "RoiAlign": 16,
    "Split": 18,
    "Resize": 18,
    "DFT": 20,
    "GridSample": 20,
    "GroupNormalization": 21,
}


def expand(model: ir.Model, sources: Collection[str], registry: Registry = REGISTRY) -> ir.Model:
    """Expand every node without a rule between ``sources`` and the outputs that has a body."""
    # Nodes inside the bodies of control flow are expanded there.
    # Functions of the model itself are all inlined, and integer arithmetic on known shapes, which
    # bodies are full of, is folded; sequences of known tensors are replaced by the tensors. Names
    # of inputs, outputs and initializers stay; the values of a body are named after its node.
    # model: Types and shapes inferred; changed in place. sources: Names of the inputs and
    # initializers whose gradients are wanted. registry: Rules that make an expansion unnecessary.
    # Returns an equivalent model. Types and shapes of its new values are inferred.
    sources = frozenset(sources)
    if model.functions:
        for function in model.functions.values():
            _read_under(function, model)
        _inline(model)
        model = infer_shapes(model)
    if share_constants(model.graph, keep=sources):
        model = infer_shapes(model)
    while True:
        while fold(model.graph, keep=sources) or resolve(model.graph):
            model = infer_shapes(model)
        if not _call_bodies(model, sources, registry):
            return model
        _inline(model)
        model = infer_shapes(model)


def _call_bodies(model: ir.Model, sources: Collection[str], registry: Registry) -> bool:
    """Turn nodes into calls of functions with their bodies; return whether there were any."""
    graph = model.graph
    values = [*graph.inputs, *graph.initializers.values()]
    wanted = [value for value in values if value.name in sources]
    for node in list(_without_rule(graph, wanted, registry)):
        body = _body(node, graph)
        if body is None:
            continue
        _name_after(node, body)
        body.domain, body.name = _DOMAIN, f"{node.op_type}_{len(model.functions)}"
        node.domain, node.op_type = body.domain, body.name
        model.functions[body.identifier()] = body
    return bool(model.functions)


def _without_rule(
    graph: ir.Graph, sources: Iterable[ir.Value], registry: Registry
) -> Iterator[ir.Node]:
    """Nodes without a rule between ``sources`` and the outputs, those in subgraphs included."""
    reached = dependents(graph, sources, registry)
    upstream = ancestors(graph.outputs, graph)
    for node in graph:
        if node not in upstream or not any(value in reached for value in reads(node)):
            continue
        if registry.lookup(node.domain, node.op_type, opset_of(node, graph)) is None:
            yield node
        for body in subgraphs(node):
            body.opset_imports.update(graph.opset_imports)
            taken = (value for value in captures(body) if value in reached)
            yield from _without_rule(body, [*taken, *body.inputs], registry)


def _body(node: ir.Node, graph: ir.Graph) -> ir.Function | None:
    """The function that the specification defines a node as, written in the graph's opset."""
    opset = opset_of(node, graph)
    if node.domain not in ("", "ai.onnx") or not onnx.defs.has(node.op_type, opset, ""):
        return None
    schema: Any = onnx.defs.get_schema(node.op_type, opset, "")  # its stubs lack functions
    proto = onnx.FunctionProto()
    try:
        if schema.has_function:
            version = _newest(schema.function_opset_versions, opset)
            proto.ParseFromString(schema.get_function_with_opset_version(version))
        elif schema.has_context_dependent_function:
            version = _newest(schema.context_dependent_function_opset_versions, opset)
            types = [_type(value).SerializeToString() for value in node.inputs]
            call = ir.serde.serialize_node(node).SerializeToString()
            built = schema.get_context_dependent_function_with_opset_version(version, call, types)
            proto.ParseFromString(built)
        else:
            return None
    except (ValueError, RuntimeError, onnx.defs.SchemaError):  # not for these types or inputs
        return None
    _define_all_outputs(proto)
    function = ir.serde.deserialize_function(proto)
    if not _same_meaning(function, function.opset_imports.get("", opset), opset):
        return None
    function.opset_imports.clear()
    function.opset_imports[""] = opset
    _add_defaults(node, schema)
    return function


def _define_all_outputs(proto: onnx.FunctionProto) -> None:
    """Give outputs that a body leaves undefined, as its call does not ask for them, any value."""
    defined = {name for node in proto.node for name in node.output}
    for name in proto.output:
        if name not in defined:
            proto.node.add(op_type="Identity", input=[proto.input[0]], output=[name])


def _newest(versions: Iterable[int], opset: int) -> int:
    """Newest of the opsets in which a body is written that is not past ``opset``."""
    fitting = [version for version in versions if version <= opset]
    if not fitting:
        raise ValueError(f"no body is written in opset {opset} or before")
    return max(fitting)


def _type(value: ir.Value | None) -> onnx.TypeProto:
    proto = onnx.TypeProto()
    if value is not None and value.type is not None:
        ir.serde.serialize_type_into(proto, value.type)
        if value.shape is not None:
            ir.serde.serialize_shape_into(proto, value.shape)
    return proto


def _add_defaults(node: ir.Node, schema: Any) -> None:
    """Write default attributes out: a body refers to the attributes of its call."""
    for name, attribute in schema.attributes.items():
        if name not in node.attributes and attribute.default_value.type:
            node.attributes[name] = ir.serde.deserialize_attribute(attribute.default_value)


def _same_meaning(function: ir.Function, written: int, opset: int) -> bool:
    """Whether every standard node of a body is legal, and means the same, under ``opset``."""
    older, newer = sorted((written, opset))
    return all(
        _is_legal(node, opset) and not older < CHANGED_MEANING.get(node.op_type, 0) <= newer
        for node in function.all_nodes()
        if node.domain in ("", "ai.onnx")
    )


def _is_legal(node: ir.Node, opset: int) -> bool:
    """Whether an opset has the operator, with these attributes and as many inputs."""
    if not onnx.defs.has(node.op_type, opset, ""):
        return False
    schema = onnx.defs.get_schema(node.op_type, opset, "")
    required = {name for name, attribute in schema.attributes.items() if attribute.required}
    return (
        required <= set(node.attributes) <= set(schema.attributes)
        and schema.min_input <= len(node.inputs) <= schema.max_input
    )


def _read_under(function: ir.Function, model: ir.Model) -> None:
    """Let a function of the model be written in the model's own opset."""
    opset, written = model.opset_imports[""], function.opset_imports.get("")
    if written is None or written == opset:
        return
    if not _same_meaning(function, written, opset):
        raise OdtpackError(
            "bad-function",
            f"function {function.name!r} of the model is written in opset {written}, the model "
            f"in {opset}, and not all of its operators mean the same in both",
        )
    function.opset_imports[""] = opset


def _name_after(node: ir.Node, body: ir.Function) -> None:
    """Start the names in a body with that of its call."""
    label = node.name or next((y.name for y in node.outputs if y.name), node.op_type)
    for inner in body:
        inner.name = f"{label}/{inner.name or inner.op_type}"
        for value in inner.outputs:
            value.name = f"{label}/{value.name}"


def _inline(model: ir.Model) -> None:
    _complete_calls(model, [*nodes_of(model.graph)])
    for function in model.functions.values():
        _complete_calls(model, [*function.all_nodes()])
    try:
        InlinePass()(model)
    except (ValueError, ir.passes.InvariantError, ir.passes.PassError) as error:
        raise OdtpackError(
            "bad-function",
            f"the functions of the model cannot be inlined: {error}",
            hint="inline them before, with onnx.inliner.inline_local_functions(model)",
        ) from error


def _complete_calls(model: ir.Model, nodes: Iterable[ir.Node]) -> None:
    """Give every call all outputs of its function; those it left out stay without a name."""
    for node in nodes:
        function = model.functions.get(node.op_identifier())
        if function is None:
            continue
        if len(node.outputs) < len(function.outputs):
            node.resize_outputs(len(function.outputs))
        for value in node.outputs:
            value.name = value.name or None


# Replaces tensor sequences whose members are known by the members themselves.
#
# Exporters write chunk, split, unbind, stack and lists of tensors with sequence operators:
# SplitToSequence and SequenceAt, SequenceConstruct and ConcatFromSequence. Where lengths and
# positions are constants these are a Split and a Concat, which have gradients.

Members = tuple[ir.Value, ...]
_LARGEST = 4096  # members of a sequence; a longer one is left as it is


@dataclasses.dataclass
class _Node:
    """A sequence operator, and the sequences that are known before it."""

    op: Ops
    node: ir.Node
    known: dict[ir.Value, Members]

    def value(self, index: int) -> ir.Value | None:
        return self.node.inputs[index] if index < len(self.node.inputs) else None

    def members(self) -> Members | None:
        """Members of the sequence that the node reads."""
        value = self.value(0)
        return None if value is None else self.known.get(value)

    def constant(self, index: int) -> np.ndarray | None:
        value = self.value(index)
        tensor = None if value is None else ir.convenience.get_const_tensor(value)
        return None if tensor is None else tensor.numpy()

    def position(self, index: int, count: int, last: int) -> int | None:
        """A constant position up to ``last``, which it is if absent."""
        # A negative one counts back from ``count``, the number of members, in every operator:
        # SequenceInsert at -1 puts its tensor in front of the last member.
        if self.value(index) is None:
            return last if last >= 0 else None
        constant = self.constant(index)
        if constant is None or constant.size != 1 or not -count <= int(constant.item()) <= last:
            return None
        place = int(constant.item())
        return place if place >= 0 else place + count

    def integer(self, name: str, default: int) -> int:
        return self.node.attributes.get_int(name, default)


def resolve(graph: ir.Graph) -> bool:
    """Resolve every sequence operator of the graph that can be; return whether any was."""
    # graph: In topological order, with types and shapes inferred; changed in place. Types and
    # shapes of new values are not inferred.
    if not any(node.op_type in _READERS and not node.domain for node in graph):
        return False
    op = Ops(graph, "sequence/")
    known: dict[ir.Value, Members] = {}
    changed = False
    for node in list(graph):
        if node.domain:
            continue
        call = _Node(op, node, known)
        with op.before(node):
            if node.op_type in _WRITERS:
                members = _WRITERS[node.op_type](call)
                if members is not None and len(members) <= _LARGEST:
                    known[node.outputs[0]] = members
            elif node.op_type in _READERS:
                result = _READERS[node.op_type](call)
                if result is not None:
                    _replace(op, node, result)
                    changed = True
    return changed


def _replace(op: Ops, node: ir.Node, result: ir.Value) -> None:
    """Let ``result`` take the place and the name of the node's output."""
    output = node.outputs[0]
    # A member may be read elsewhere, or be an output itself: it keeps its name.
    copy = op.Identity(result)
    copy.type, copy.shape = output.type, output.shape
    name, output.name = output.name, None
    copy.name = name
    output.replace_all_uses_with(copy, replace_graph_outputs=True)
    if node.graph is not None:
        node.graph.remove(node, safe=True)


def _construct(call: _Node) -> Members | None:
    return tuple(value for value in call.node.inputs if value is not None)


def _insert(call: _Node) -> Members | None:
    members, tensor = call.members(), call.value(1)
    if members is None or tensor is None:
        return None
    place = call.position(2, len(members), len(members))
    return None if place is None else (*members[:place], tensor, *members[place:])


def _erase(call: _Node) -> Members | None:
    members = call.members()
    place = None if members is None else call.position(1, len(members), len(members) - 1)
    return None if members is None or place is None else members[:place] + members[place + 1 :]


def _same(call: _Node) -> Members | None:
    return call.members()


def _split(call: _Node) -> Members | None:
    """Parts of given sizes, of one size but the last, or of one element each."""
    op, x = call.op, call.value(0)
    dims = None if x is None else dims_of(x)
    if x is None or not dims:
        return None
    axis = call.integer("axis", 0) % len(dims)
    size = dims[axis]
    if call.value(1) is not None:
        given = call.constant(1)
        if given is None:
            return None
        sizes = [int(part) for part in given.reshape(-1)]
        if given.ndim == 0:
            if not isinstance(size, int) or sizes[0] < 1:
                return None
            sizes = [min(sizes[0], size - start) for start in range(0, size, sizes[0])]
    elif isinstance(size, int):
        sizes = [1] * size
    else:
        return None
    if not 0 < len(sizes) <= _LARGEST:
        return None
    parts = op.split(x, axis, sizes)
    if call.value(1) is None and not call.integer("keepdims", 1):
        parts = tuple(op.squeeze(part, axis) for part in parts)
    return tuple(parts)


def _at(call: _Node) -> ir.Value | None:
    members = call.members()
    place = None if members is None else call.position(1, len(members), len(members) - 1)
    return None if members is None or place is None else members[place]


def _length(call: _Node) -> ir.Value | None:
    members = call.members()
    return None if members is None else call.op.constant(np.array(len(members), np.int64))


def _concat(call: _Node) -> ir.Value | None:
    op, members = call.op, call.members()
    if not members:
        return None
    axis = call.integer("axis", 0)
    if call.integer("new_axis", 0):
        members = tuple(op.unsqueeze(member, axis) for member in members)
    return op.Concat(*members, axis=axis)


_WRITERS: dict[str, Callable[[_Node], Members | None]] = {
    "SequenceConstruct": _construct,
    "SequenceEmpty": lambda _: (),
    "SequenceInsert": _insert,
    "SequenceErase": _erase,
    "SplitToSequence": _split,
    "Identity": _same,
}
_READERS: dict[str, Callable[[_Node], ir.Value | None]] = {
    "SequenceAt": _at,
    "SequenceLength": _length,
    "ConcatFromSequence": _concat,
}


# Unpacks a weight of few bits for each node that reads it, when that node is at work.
#
# A weight W = DequantizeLinear(codes, scales) is read by the forward pass and by the gradient of
# its input. As one value it would lie in float32 from the one to the other, and with it all other
# weights. Each reader gets a chain of nodes of its own:
#
#     y  = MatMul(x, W)               y  = MatMul(x, DequantizeLinear(codes, scales * one(x)))
#     dx = MatMul(dy, W^T)       ->   dx = MatMul(dy, Transpose(DequantizeLinear(codes,
#                                                                        scales * one(dy))))
#
# one(v) is 1, computed from the number of v's elements. So ONNX Runtime neither merges the chains,
# which read different scales, nor runs one before v is there, nor takes MatMulNBits in its place,
# which would round x to 8 bits.

SMALLEST = 256
"""Elements from which on it pays to store a weight in few bits, and to unpack it late."""


def rewrite(op: Ops, graph: ir.Graph) -> bool:
    """Give each reader of an unpacked weight its own chain; return whether there were any."""
    chains = find_chains(graph)
    readers = [
        (node, index, value)
        for node in graph
        if not any(output in chains for output in node.outputs)
        for index, value in enumerate(node.inputs)
        if value is not None and value in chains
    ]
    ones: dict[ir.Value, ir.Value] = {}
    for node, index, value in readers:
        late = next((v for v in node.inputs if v is not None and _is_computed(v, chains)), None)
        if late is None or _is_dequantized(late):
            continue
        with op.before(node):
            if late not in ones:
                # Size is an integer; the least of it and 1 is 1.
                count = op.Min(op.Size(late), 1)
                ones[late] = op.cast(count, ir.DataType.FLOAT)
            copy = _copy(op, value, chains, ones[late], {})
        node.replace_input_with(index, copy)
    return bool(readers)


def _is_dequantized(value: ir.Value) -> bool:
    """Whether a product of integers may take the place of its reader."""
    node = value.producer()
    return node is not None and node.op_type == "DequantizeLinear"


def _is_computed(value: ir.Value, chains: set[ir.Value]) -> bool:
    return value not in chains and not value.is_initializer()


def find_chains(graph: ir.Graph) -> set[ir.Value]:
    """Values that follow from stored codes and other constants alone."""
    found: set[ir.Value] = set()
    constants = {v for v in graph.initializers.values() if not v.is_graph_input()}
    for node in graph:
        inputs = [value for value in node.inputs if value is not None]
        if not inputs or node.domain not in ("", "ai.onnx") or not constants.issuperset(inputs):
            continue
        constants.update(node.outputs)
        starts = node.op_type == "DequantizeLinear" and _size(inputs[0]) >= SMALLEST
        if starts or not found.isdisjoint(inputs):
            found.update(node.outputs)
    return found


def _size(value: ir.Value) -> int:
    return 0 if value.const_value is None else value.const_value.size


def _copy(
    op: Ops,
    value: ir.Value,
    chains: set[ir.Value],
    one: ir.Value,
    made: dict[ir.Value, ir.Value],
) -> ir.Value:
    """The chain that ends in a value, once more, with its scales times one."""
    if value not in chains:
        return value
    if value not in made:
        node = value.producer()
        assert node is not None  # noqa: S101 - chains are of nodes
        inputs = [
            None if each is None else _copy(op, each, chains, one, made) for each in node.inputs
        ]
        if node.op_type == "DequantizeLinear" and inputs[1] is not None:
            inputs[1] = op.Mul(inputs[1], op.cast(one, op.type_of(inputs[1])))
        attributes = {key: each.value for key, each in node.attributes.items()}
        outputs = op.emit(node.op_type, inputs, **attributes)
        for old, new in zip(node.outputs, outputs, strict=True):
            new.type, new.shape = old.type, old.shape
            made[old] = new
    return made[value]
