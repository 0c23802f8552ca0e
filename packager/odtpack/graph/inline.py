"""Inlines the functions of a model, in time proportional to what that makes."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common as common_passes
from onnx_ir.passes.common import inliner


class InlinePass(common_passes.InlinePass):
    """onnx-ir's, in time proportional to what it makes.

    That one tries ``name_2``, ``name_3`` and so on for every copy of a value from the start, so
    that the copies of a function that is called n times take n^2 tries.
    """

    def _reset(self, model: ir.Model) -> None:
        super()._reset(model)
        self._used_value_names = _CountedNames(self._used_value_names)
        self._used_node_names = _CountedNames(self._used_node_names)


class _CountedNames(set[str]):
    """Names that are taken, and the number at which the search for another goes on."""

    def __init__(self, names: set[str]) -> None:
        super().__init__(names)
        self.reached: dict[str, int] = {}


def _make_unique_name(name: str, callstack: list[str], used_names: set[str]) -> str:
    """As onnx-ir's: the same names, found sooner where the set remembers how far it got."""
    reached = used_names.reached if isinstance(used_names, _CountedNames) else {}
    candidate, number = name, reached.get(name, 1)
    if number > 1:
        candidate = f"{name}_{number}"
    while candidate in used_names:
        number += 1
        candidate = f"{name}_{number}"
    reached[name] = number
    used_names.add(candidate)
    return candidate


inliner._make_unique_name = _make_unique_name
