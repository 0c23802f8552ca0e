"""What inlining a model's functions will produce: counted before it is done.

A function that calls another twice doubles it, level by level: forty levels in four kilobytes make
10^12 nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import onnx

from odtpack.errors import OdtpackError

_ALWAYS_ALLOWED: Final = 10_000
_TIMES_STORED: Final = 100
"""How many times the nodes of a file inlining may produce. A layer that is stored once and called
for each layer of a deep network makes 100 of one."""

_Name = tuple[str, str, str]


def check_functions(proto: onnx.ModelProto, where: str) -> None:
    """Check that inlining makes no more nodes than a file of this size can mean.

    Raises:
        OdtpackError: ``functions-too-large``; ``bad-function`` if one calls itself.
    """
    if not proto.functions:
        return
    bodies = {_name(function): function for function in proto.functions}
    calls: dict[_Name, list[_Name]] = {}
    sizes: dict[_Name, int] = {}
    for name, function in bodies.items():
        sizes[name], calls[name] = _count(function.node, bodies)
    stored, called = _count(proto.graph.node, bodies)
    allowed = max(_ALWAYS_ALLOWED, _TIMES_STORED * (stored + sum(sizes.values())))
    total: dict[_Name, int] = {}
    for name in _callees_first(calls, where):
        total[name] = sizes[name] + sum(total[each] for each in calls[name])
    made = stored + sum(total[each] for each in called)
    if made > allowed:
        shown = f"{made:,}" if made < 10**12 else f"2^{made.bit_length() - 1}"
        raise OdtpackError(
            "functions-too-large",
            f"the functions of the model call each other so often that the graph would have "
            f"{shown} nodes, and {allowed:,} are allowed for a file of its size",
            where=where,
        )


def _name(function: onnx.FunctionProto) -> _Name:
    return _domain(function.domain), function.name, getattr(function, "overload", "")


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _count(nodes: object, bodies: dict[_Name, onnx.FunctionProto]) -> tuple[int, list[_Name]]:
    """The number of nodes, those of subgraphs included, and the functions that they call."""
    count, called = 0, []
    for node in _all_nodes(nodes):
        count += 1
        name = _domain(node.domain), node.op_type, getattr(node, "overload", "")
        if name in bodies:
            called.append(name)
    return count, called


def _all_nodes(nodes: object) -> Iterator[onnx.NodeProto]:
    waiting = [nodes]
    while waiting:
        for node in waiting.pop():  # type: ignore[attr-defined]
            yield node
            for attribute in node.attribute:
                waiting += [graph.node for graph in (attribute.g, *attribute.graphs) if graph.node]


def _callees_first(calls: dict[_Name, list[_Name]], where: str) -> Iterator[_Name]:
    """The functions in an order in which each follows those that it calls."""
    begun: set[_Name] = set()
    finished: set[_Name] = set()
    for first, callees in calls.items():
        stack = [(first, iter(dict.fromkeys(callees)))] if first not in begun else []
        begun.add(first)
        while stack:
            name, rest = stack[-1]
            callee = next(rest, None)
            if callee is None:
                stack.pop()
                finished.add(name)
                yield name
            elif callee not in begun:
                begun.add(callee)
                stack.append((callee, iter(dict.fromkeys(calls[callee]))))
            elif callee not in finished:
                raise OdtpackError(
                    "bad-function",
                    f"function {callee[1]!r} of the model calls itself",
                    where=where,
                )
