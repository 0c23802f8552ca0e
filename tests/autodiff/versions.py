"""Repeats every case at every opset at which the definition of its operator changed."""

import collections
import dataclasses
import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import onnx.defs

from odtpack.autodiff.expand import CHANGED_MEANING
from odtpack.ort import kernel_needs
from odtpack.targets import MAX_OPSET, MIN_OPSET
from tests.autodiff.oracle import Array, Case

# Values of attributes that came later than the attribute.
_VALUE_SINCE = {("mode", "wrap"): 19, ("reduction", "max"): 18, ("reduction", "min"): 18}
# Before opset 16 ScatterElements cannot add, so that a border copied by bounds that are
# known only when the model runs has no gradient; ``test_rules`` holds the refusal.
_LABEL_SINCE = {
    ("Pad", label): 16
    for label in ("edge-at-run-time", "reflect-at-run-time", "edge-of-batch", "edge-negative")
}
# Which kernels there are in any release of ONNX Runtime.
_KERNELS = json.loads(Path(kernel_needs.__file__).with_name("kernels.json").read_text())["kernels"][
    "ai.onnx"
]
_TYPES = {"float32": "float", "float64": "double"}  # the others are called as in numpy


@functools.cache
def versions(op_type: str) -> tuple[int, ...]:
    """Opsets from the lowest on in which a new definition of an operator came into force."""
    return tuple(sorted({max(MIN_OPSET, version) for version in _definitions()[op_type]}))


@functools.cache
def _definitions() -> dict[str, set[int]]:
    """Opsets up to the newest in which a definition of each operator came into force."""
    found: dict[str, set[int]] = collections.defaultdict(set)
    for schema in onnx.defs.get_all_schemas_with_history():
        if not schema.domain and schema.since_version <= MAX_OPSET:
            found[schema.name].add(schema.since_version)
    return found


def at_every_version(table: Iterable[Case]) -> list[Case]:
    """The cases, and copies of them at other opsets whose definition allows the node."""
    groups: dict[tuple[str, str, bool], list[Case]] = {}
    for case in table:
        groups.setdefault((case.op, case.label, bool(case.batch)), []).append(case)
    found: list[Case] = []
    for cases in groups.values():
        found += cases
        if cases[0].domain:
            continue
        known = {case.opset for case in cases}
        in_force = {_in_force(case.op, case.opset) for case in cases}
        for version in versions(cases[0].op):
            base = min(cases, key=lambda case: abs(case.opset - version))
            if version not in known and version not in in_force and _allowed(base, version):
                found.append(dataclasses.replace(base, opset=version))
    return found


def _in_force(op_type: str, opset: int) -> int:
    return max((version for version in versions(op_type) if version <= opset), default=0)


def _allowed(case: Case, opset: int) -> bool:
    """Whether the node is legal in an opset, and means the same there."""
    if not onnx.defs.has(case.op, opset, ""):
        return False
    schema: Any = onnx.defs.get_schema(case.op, opset, "")
    older, newer = sorted((case.opset, opset))
    required = {name for name, attribute in schema.attributes.items() if attribute.required}
    return (
        _runs(case.op, opset)
        and not older < CHANGED_MEANING.get(case.op, 0) <= newer
        and required <= set(case.attrs) <= set(schema.attributes)
        and schema.min_input <= len(case.inputs) <= schema.max_input
        and all(opset >= _VALUE_SINCE.get((k, v), 0) for k, v in case.attrs.items()
                if isinstance(v, str))
        and opset >= _LABEL_SINCE.get((case.op, case.label), 0)
        and all(_takes(schema, i, a) for i, a in enumerate(case.inputs.values()))
    )  # fmt: skip


@functools.cache
def _runs(op_type: str, opset: int) -> bool:
    """Whether a release has a kernel of this version, or expands its function."""
    schema: Any = onnx.defs.get_schema(op_type, opset, "")
    kernels = [key for key in _KERNELS if key.startswith(f"{schema.name};")]
    found = f"{schema.name};{schema.since_version}" in kernels
    return found or not kernels or schema.has_function or schema.has_context_dependent_function


def _takes(schema: Any, index: int, array: Array | None) -> bool:
    """Whether an input may have the type of an array."""
    if array is None:
        return True
    parameter = schema.inputs[min(index, len(schema.inputs) - 1)]
    name = array.dtype.name
    return f"tensor({_TYPES.get(name, name)})" in parameter.types
