"""Values that no gradient passes, and values with the gradient of another.

Before differentiation: odtpack.StopGradient(x), which has x's value and no gradient. After
it, and in evaluation models, its readers read x.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import onnx_ir as ir

from odtpack.autodiff.context import INTERNAL_DOMAIN
from odtpack.errors import UnknownNameError, near_names, quoted
from odtpack.graph.graphs import Ops, nodes_of, replace, typed

_OP_TYPE = "StopGradient"
STRAIGHT_THROUGH = "StraightThrough"
_PREFIX = "stop/"


def stop(op: Ops, value: ir.Value) -> ir.Value:
    """The same value, a constant to differentiation."""
    return typed(op.emit(_OP_TYPE, [value], domain=INTERNAL_DOMAIN)[0], value)


def stand_in(op: Ops, actual: ir.Value, exact: ir.Value) -> ir.Value:
    """The first value, with the gradient of the second, which is not computed."""
    return typed(op.emit(STRAIGHT_THROUGH, [actual, exact], domain=INTERNAL_DOMAIN)[0], exact)


def has_stand_in(node: ir.Node) -> bool:
    """Whether another value brings back the gradient of what a node gives."""
    readers = (use for output in node.outputs for use in output.uses())
    return any(user.op_type == STRAIGHT_THROUGH and place == 0 for user, place in readers)


def stop_at(graph: ir.Graph, wanted: Iterable[str]) -> None:
    """Let no gradient pass ``VALUE``, or ``VALUE@OUTPUT``: where the node of OUTPUT reads it."""
    # Each may be a pattern. A value that is stopped keeps its name, also as an output.
    computed = {str(y.name): y for node in nodes_of(graph) for y in node.outputs}
    computed |= {str(v.name): v for body in graph.subgraphs() for v in body.inputs}
    known = {str(v.name): v for v in graph.inputs} | dict(graph.initializers) | computed
    op = Ops(graph, _PREFIX)
    for text in wanted:
        values, readers = _named(computed, text), set[ir.Node | None]()
        if not values and "@" in text:
            name, _, output = text.rpartition("@")
            readers = {y.producer() for y in _named(computed, output)}
            values = [v for v in _named(known, name) if readers.intersection(v.consumers())]
        if not values:
            raise UnknownNameError(
                "unknown-value",
                f"--stop-gradient names {text!r}, which the graph does not compute",
                hint=f"freeze it (--freeze {quoted(text)})"
                if text in graph.initializers
                else near_names(text, computed, "name an output of a node"),
            )
        for value in values:
            node, uses, home = value.producer(), list(value.uses()), value.graph or graph
            with op.before(home[0]) if node is None else op.after(node):
                held = stop(op, value)
            for reader, index in uses:
                if not readers or reader in readers:
                    reader.replace_input_with(index, held)
            if not readers:
                home.outputs[:] = [held if each is value else each for each in home.outputs]
                held.name, value.name = value.name, held.name


def _named(values: Mapping[str, ir.Value], text: str) -> list[ir.Value]:
    """The value of a name, or those that a pattern matches."""
    exact = [values[text]] if text in values else []
    return exact or [value for name, value in values.items() if fnmatchcase(name, text)]


def lower(graph: ir.Graph) -> None:
    """Write the operators out."""
    for node in [*nodes_of(graph)]:
        if node.domain == INTERNAL_DOMAIN and node.op_type == STRAIGHT_THROUGH:
            actual, exact = node.inputs
            if actual is not None and exact is not None:
                if exact is not actual:
                    exact.replace_all_uses_with(actual)
                replace(node.outputs[0], actual, [node])
        if node.domain == INTERNAL_DOMAIN and node.op_type == _OP_TYPE:
            value, home = node.inputs[0], node.graph
            if value is None or home is None:
                continue
            own = value.producer()
            given = node.outputs[0].is_graph_output() and (own is None or own.graph is not home)
            if home is not graph and given:
                node.op_type, node.domain = "Identity", ""  # a body gives what it computes
                continue
            renamed = node.outputs[0].is_graph_output() or str(value.name).startswith(_PREFIX)
            if renamed and own is not None:
                value.name, node.outputs[0].name = node.outputs[0].name, value.name
            ir.convenience.replace_all_uses_with(node.outputs[0], value, replace_graph_outputs=True)
            home.remove(node, safe=True)
    graph.opset_imports.pop(INTERNAL_DOMAIN, None)
