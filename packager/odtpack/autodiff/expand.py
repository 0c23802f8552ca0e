"""Replaces operators that have no gradient rule by their definition."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from odtpack.autodiff.backward import dependents, opset_of
from odtpack.autodiff.context import REGISTRY, Registry
from odtpack.errors import OdtpackError
from odtpack.graph.fold import fold, share_constants
from odtpack.graph.graphs import (
    InlinePass,
    Ops,
    ancestors,
    captures,
    constant,
    dims_of,
    nodes_of,
    operand,
    producer,
    reads,
    replace,
    subgraphs,
    typed,
)
from odtpack.graph.inference import infer_shapes

# The ONNX specification defines many operators as functions of others (Celu, Mish,
# GroupNormalization, Attention, ...), and a model may bring functions of its own. A body in
# place of its call is differentiated like any other part of the graph, so that such an
# operator needs a rule only where that is quicker or more stable than its body.

_DOMAIN = "odtpack.body"  # of the functions that exist for the length of one expansion

# Operators that the same attributes mean something else for from this opset on. All other
# changes between opsets add to an operator, or take an attribute away, which is found out.
CHANGED_MEANING = {
    "Softmax": 13, "LogSoftmax": 13, "Hardmax": 13, "BatchNormalization": 14, "RoiAlign": 16,
    "Split": 18, "Resize": 18, "DFT": 20, "GridSample": 20, "GroupNormalization": 21,
}  # fmt: skip


def expand(model: ir.Model, sources: Collection[str], registry: Registry = REGISTRY) -> ir.Model:
    """Expand every node without a rule between ``sources`` and the outputs that has a body."""
    # Nodes inside the bodies of control flow are expanded there.
    # Functions of the model itself are all inlined, and integer arithmetic on known shapes, which
    # bodies are full of, is folded; sequences of known tensors are replaced by the tensors. Names
    # of inputs, outputs and initializers stay; the values of a body are named after its node.
    # model: Types and shapes inferred, as of what is returned; changed in place. sources: Names of
    # the inputs and initializers whose gradients are wanted.
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
        causal = None
        if node.op_type == "Attention" and any(node.inputs[4:5]):
            dims = dims_of(node.inputs[0])
            if dims is not None and dims[-2] == 1:  # one query behind a past sees all
                causal = node.attributes.pop("is_causal", None)
        body = _body(node, graph)
        if body is None:
            if causal is not None:
                node.attributes["is_causal"] = causal
            continue
        label = node.name or next((y.name for y in node.outputs if y.name), node.op_type)
        for inner in body:  # its names start with that of its call
            inner.name = f"{label}/{inner.name or inner.op_type}"
            for value in inner.outputs:
                value.name = f"{label}/{value.name}"
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
    if node.domain or not onnx.defs.has(node.op_type, opset, ""):
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
    # Outputs that a body leaves undefined, as its call does not ask for them, get any value.
    defined = {name for node in proto.node for name in node.output}
    for name in proto.output:
        if name not in defined:
            proto.node.add(op_type="Identity", input=[proto.input[0]], output=[name])
    function = ir.serde.deserialize_function(proto)
    if not _same_meaning(function, function.opset_imports.get("", opset), opset):
        return None
    function.opset_imports.clear()
    function.opset_imports[""] = opset
    for name, attribute in schema.attributes.items():  # to which a body refers
        if name not in node.attributes and attribute.default_value.type:
            node.attributes[name] = ir.serde.deserialize_attribute(attribute.default_value)
    return function


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


def _same_meaning(function: ir.Function, written: int, opset: int) -> bool:
    """Whether every standard node of a body is legal, and means the same, under ``opset``."""
    older, newer = sorted((written, opset))
    return all(
        _is_legal(node, opset) and not older < CHANGED_MEANING.get(node.op_type, 0) <= newer
        for node in function.all_nodes()
        if not node.domain
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


def _inline(model: ir.Model) -> None:
    bodies = (node for function in model.functions.values() for node in function.all_nodes())
    for node in [*nodes_of(model.graph), *bodies]:
        function = model.functions.get(node.op_identifier())
        if function is not None:  # outputs of it that a call left out stay without a name
            if len(node.outputs) < len(function.outputs):
                node.resize_outputs(len(function.outputs))
            for value in node.outputs:
                value.name = value.name or None
    try:
        InlinePass()(model)
    except (ValueError, ir.passes.InvariantError, ir.passes.PassError) as error:
        raise OdtpackError(
            "bad-function",
            f"the functions of the model cannot be inlined: {error}",
            hint="inline them before, with onnx.inliner.inline_local_functions(model)",
        ) from error


# Replaces tensor sequences whose members are known by the members themselves.
#
# Exporters write chunk, split, unbind, stack and lists of tensors with sequence operators:
# SplitToSequence and SequenceAt, SequenceConstruct and ConcatFromSequence. Where lengths and
# positions are constants these are a Split and a Concat, which have gradients.

Members = tuple[ir.Value, ...]
_LARGEST = 4096  # members of a sequence; a longer one is left as it is


_SEQUENCE_OPERATORS = {
    "ConcatFromSequence", "Identity", "SequenceAt", "SequenceConstruct", "SequenceEmpty",
    "SequenceErase", "SequenceInsert", "SequenceLength", "SplitToSequence",
}  # fmt: skip
_READERS = {"ConcatFromSequence", "SequenceAt", "SequenceLength"}  # of which results are tensors


def resolve(graph: ir.Graph) -> bool:
    """Resolve every sequence operator of the graph that can be; return whether any was."""
    # graph: In topological order, with types and shapes inferred; changed in place. Types and
    # shapes of new values are not inferred.
    if not any(node.op_type in _READERS and not node.domain for node in graph):
        return False
    op = Ops(graph, "sequence/")
    known: dict[ir.Value, Members] = {}  # sequences that are known before a node
    changed = False
    for node in list(graph):
        if node.domain or node.op_type not in _SEQUENCE_OPERATORS:
            continue
        with op.before(node):
            result = _resolved(op, node, known)
            if isinstance(result, tuple):
                if len(result) <= _LARGEST:
                    known[node.outputs[0]] = result
            elif result is not None:
                # A member may be read elsewhere, or be an output itself: it keeps its name.
                replace(node.outputs[0], op.Identity(result), [node])
                changed = True
    return changed


def _resolved(op: Ops, node: ir.Node, known: dict[ir.Value, Members]) -> Members | ir.Value | None:
    """The members of a node's sequence, or the tensor that it reads from one, where known."""
    given = [*node.inputs, None, None, None]
    members = None if given[0] is None else known.get(given[0])
    if node.op_type == "SequenceConstruct":
        return tuple(value for value in node.inputs if value is not None)
    if node.op_type == "SequenceEmpty":
        return ()
    if node.op_type == "SplitToSequence":
        return _split(op, node)
    if members is None and node.op_type == "ConcatFromSequence":
        return _stacked(op, node)
    if members is None or node.op_type == "Identity":
        return members
    count = len(members)
    if node.op_type == "SequenceLength":
        return op.constant(np.array(count, np.int64))
    if node.op_type == "ConcatFromSequence":
        axis = node.attributes.get_int("axis", 0)
        if node.attributes.get_int("new_axis", 0) and members:
            members = tuple(op.unsqueeze(member, axis) for member in members)
        return op.Concat(*members, axis=axis) if members else None
    if node.op_type == "SequenceInsert":
        tensor, place = given[1], _position(given[2], count, count)
        if tensor is None or place is None:
            return None
        return (*members[:place], tensor, *members[place:])
    place = _position(given[1], count, count - 1)
    if place is None:
        return None
    erased = members[:place] + members[place + 1 :]
    return members[place] if node.op_type == "SequenceAt" else erased


def _stacked(op: Ops, node: ir.Node) -> ir.Value | None:
    """What a node joins of a sequence that a Loop appends to once in each turn: a stack of it."""
    # PyTorch's exporter writes EmbeddingBag in this way.
    sequence = operand(node, 0)
    loop, axis = producer(sequence, "Loop"), node.attributes.get_int("axis", 0)
    if loop is None or axis or len(sequence.uses()) > 1 or sequence.is_graph_output():
        return None
    place, body = loop.outputs.index(sequence), loop.attributes["body"].as_graph()
    first, before, after = loop.inputs[2 + place], body.inputs[2 + place], body.outputs[1 + place]
    append = producer(after, "SequenceInsert")
    if producer(first, "SequenceEmpty") is None or append is None or after.uses():
        return None
    if append.inputs[0] is not before or append.inputs[2:] or len(before.uses()) > 1:
        return None
    if append.inputs[1] is None or sum(value is after for value in body.outputs) > 1:
        return None
    part, new_axis = operand(append, 1), node.attributes.get_int("new_axis", 0)
    if not new_axis and (dims_of(part) or (None,))[0] != 1:
        return None
    del body.inputs[2 + place], body.outputs[1 + place]
    body.remove(append, safe=True)
    body.outputs.append(typed(op.inside(body).Identity(part), part))
    inputs = [*loop.inputs[: 2 + place], *loop.inputs[3 + place :]]
    others = [value for value in loop.outputs if value is not sequence]
    with op.before(loop):
        attribute = ir.AttrGraph("body", body)
        *results, stack = op.emit("Loop", inputs, outputs=len(others) + 1, body=attribute)
    for old, new in zip(others, results, strict=True):
        replace(old, new, [])
    stack.type = part.type
    node.replace_input_with(0, first)
    op.graph.remove(loop, safe=True)
    return stack if new_axis else op.squeeze(stack, 1)


def _position(value: ir.Value | None, count: int, last: int) -> int | None:
    """A constant position up to ``last``, which it is if absent."""
    # A negative one counts back from ``count``, the number of members, in every operator:
    # SequenceInsert at -1 puts its tensor in front of the last member.
    if value is None:
        return last if last >= 0 else None
    array = constant(value, largest=1)
    if array is None or array.size != 1:
        return None
    place = int(array.item())
    return None if not -count <= place <= last else place if place >= 0 else place + count


def _split(op: Ops, node: ir.Node) -> Members | None:
    """Parts of given sizes, of one size but the last, or of one element each."""
    x, lengths, *_ = [*node.inputs, None]
    dims = dims_of(x)
    if x is None or not dims:
        return None
    axis = node.attributes.get_int("axis", 0) % len(dims)
    size = dims[axis]
    if lengths is not None:
        given = constant(lengths)
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
    if lengths is None and not node.attributes.get_int("keepdims", 1):
        parts = tuple(op.squeeze(part, axis) for part in parts)
    return tuple(parts)
