"""Replaces operators that have no gradient rule by what they are defined as.

The ONNX specification defines many operators as functions of others (Celu, Mish,
GroupNormalization, Attention, ...), and a model may bring functions of its own. A body in
place of its call is differentiated like any other part of the graph, so that such an
operator needs a rule only where that is quicker or more stable than its body.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import onnx
import onnx_ir as ir

from odtpack.autodiff import sequences
from odtpack.autodiff.backward import ancestors, dependents, opset_of
from odtpack.autodiff.registry import REGISTRY, Registry
from odtpack.errors import OdtpackError
from odtpack.graph.fold import fold, share_constants
from odtpack.graph.graphs import captures, nodes_of, reads, subgraphs
from odtpack.graph.inference import infer_shapes
from odtpack.graph.inline import InlinePass

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
    """Expand every node without a rule between ``sources`` and the outputs that has a body.

    Nodes inside the bodies of control flow are expanded there.

    Functions of the model itself are all inlined, and integer arithmetic on known shapes,
    which bodies are full of, is folded; sequences of known tensors are replaced by the
    tensors. Names of inputs, outputs and initializers stay; the values of a body are named
    after its node.

    Args:
        model: Types and shapes inferred; changed in place.
        sources: Names of the inputs and initializers whose gradients are wanted.
        registry: Rules that make an expansion unnecessary.

    Returns:
        An equivalent model. Types and shapes of its new values are inferred.

    Raises:
        OdtpackError: A function of the model calls itself, or needs another opset
            (code ``bad-function``).
    """
    sources = frozenset(sources)
    if model.functions:
        for function in model.functions.values():
            _read_under(function, model)
        _inline(model)
        model = infer_shapes(model)
    if share_constants(model.graph, keep=sources):
        model = infer_shapes(model)
    while True:
        while fold(model.graph, keep=sources) or sequences.resolve(model.graph):
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
