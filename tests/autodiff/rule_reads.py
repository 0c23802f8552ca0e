"""What gradient rules read of their nodes, from their source: names and values of attributes."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

_RULES = "odtpack.autodiff.rules"
_GETTERS = {"int", "ints", "float", "floats", "string", "strings"}

Function = Callable[..., Any]


def attributes(rule: Function) -> set[str]:
    """Names of the attributes that a rule reads by name, itself or through its helpers."""
    found = set()
    for node in _nodes(rule):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "ctx"
        ):
            name = node.args[0] if node.args else None
            if node.func.attr in {*_GETTERS, "axis"} and isinstance(name, ast.Constant):
                found.add(str(name.value))
            elif node.func.attr == "axis" and name is None:
                found.add("axis")
    return found


def compared_words(rule: Function) -> set[str]:
    """The words that a rule compares something with: each begins a branch."""
    return {
        part.value
        for node in _nodes(rule)
        if isinstance(node, ast.Compare)
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    }


def _nodes(rule: Function) -> Iterator[ast.AST]:
    """The syntax of a rule and of the helpers in the rules' modules that it names."""
    seen: set[Function] = set()
    waiting = [rule]
    while waiting:
        function = inspect.unwrap(waiting.pop())
        if function in seen or not function.__module__.startswith(_RULES):
            continue
        seen.add(function)
        known = vars(inspect.getmodule(function))
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
            yield node
            named = known.get(node.id) if isinstance(node, ast.Name) else None
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module = known.get(node.value.id)
                named = getattr(module, node.attr, None) if inspect.ismodule(module) else None
            if inspect.isfunction(named):
                waiting.append(named)
