"""Which operators can be differentiated, and how: the source of ``docs/operators.md``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import onnx.defs

from odtpack import contrib
from odtpack.autodiff.registry import INTERNAL_DOMAIN, REGISTRY
from odtpack.targets import MAX_OPSET, MIN_OPSET

How = Literal["rule", "expansion", "rewritten", "no gradient", "none"]

# Replaced before differentiation, where autodiff.sequences and passes.fake_quant can.
REWRITTEN = frozenset({
    "ConcatFromSequence", "QuantizeLinear", "SequenceAt", "SequenceConstruct", "SequenceEmpty",
    "SequenceErase", "SequenceInsert", "SplitToSequence",
})  # fmt: skip

# Inputs that have a derivative, whatever the standard's own mark says.
_ALSO_TRAINABLE = {
    "AffineGrid": ("theta",),
    "Clip": ("min", "max"),
    "DFT": ("input",),
    "GRU": ("initial_h",),
    "GridSample": ("grid",),
    "LSTM": ("initial_h", "initial_c"),
    "Mod": ("B",),
    "OneHot": ("values",),
    "Pad": ("constant_value",),
    "RNN": ("initial_h",),
    "STFT": ("signal", "window"),
    "Unique": ("X",),
}
# Inputs that the standard does not mark, through which no gradient passes: see the rules.
_NOT_TRAINABLE = {"DequantizeLinear": ("x", "x_zero_point"), "RoiAlign": ("rois",)}


@dataclasses.dataclass(frozen=True)
class Coverage:
    """One operator of the standard or a contributed one.

    Attributes:
        domain: Domain, ``"ai.onnx"`` for the standard operators.
        op_type: Operator.
        how: By a rule of its own; by expansion of its function body; rewritten before, in
            the patterns that the documentation names; declared to have no gradient; or none,
            which is an error where a gradient would have to pass.
        since: Opsets in which a rule starts to hold; empty without a rule.
        opsets: Opsets from :data:`MIN_OPSET` on in which the operator's definition changed,
            the one in force there first; empty where the standard does not define it.
        inputs: Names of the inputs through which a gradient passes; empty where none does,
            or where the standard does not name them.
    """

    domain: str
    op_type: str
    how: How
    since: tuple[int, ...] = ()
    opsets: tuple[int, ...] = ()
    inputs: tuple[str, ...] = ()


def coverage() -> list[Coverage]:
    """Return every registered operator and every operator of the newest opset, sorted."""
    rules: dict[tuple[str, str], list[int]] = {}
    stops: set[tuple[str, str]] = set()
    for domain, op_type, rule in REGISTRY.entries():
        if domain == INTERNAL_DOMAIN:
            continue
        key = (domain or "ai.onnx", op_type)
        if rule.differentiable:
            rules.setdefault(key, []).append(rule.since)
        else:
            stops.add(key)
    history = _history()
    found = []
    for domain, op_type in sorted(rules.keys() | stops | {("ai.onnx", name) for name in history}):
        key = (domain, op_type)
        schemas = history.get(op_type, []) if domain == "ai.onnx" else []
        how: How = "rule" if key in rules else "no gradient" if key in stops else "none"
        if how == "none" and any(
            schema.has_function or schema.has_context_dependent_function for schema in schemas
        ):
            how = "expansion"
        if how == "none" and domain == "ai.onnx" and op_type in REWRITTEN:
            how = "rewritten"
        found.append(
            Coverage(
                domain,
                op_type,
                how,
                tuple(rules.get(key, ())),
                tuple(schema.since_version for schema in schemas),
                trainable_inputs(schemas[-1]) if schemas and how in ("rule", "expansion") else (),
            )
        )
    found += [Coverage(contrib.DOMAIN, name, "rewritten") for name in contrib.covered()]
    return found


def trainable_inputs(schema: Any) -> tuple[str, ...]:
    """Names of an operator's inputs that take floating-point values and have a derivative."""
    without = onnx.defs.OpSchema.DifferentiationCategory.NonDifferentiable
    return tuple(
        parameter.name
        for parameter in schema.inputs
        if any("float" in str(kind) or "double" in str(kind) for kind in parameter.types)
        and parameter.name not in _NOT_TRAINABLE.get(schema.name, ())
        and (
            parameter.differentiation_category != without
            or parameter.name in _ALSO_TRAINABLE.get(schema.name, ())
        )
    )


def _history() -> dict[str, list[Any]]:
    """The standard's schemas that a model of a supported opset may mean, oldest first."""
    versions: dict[str, list[Any]] = {}
    schemas: Sequence[Any] = onnx.defs.get_all_schemas_with_history()  # its stubs lack functions
    for schema in schemas:
        if not schema.domain and schema.since_version <= MAX_OPSET:
            versions.setdefault(schema.name, []).append(schema)
    return {
        name: kept
        for name, found in versions.items()
        if (kept := _in_force(sorted(found, key=lambda schema: int(schema.since_version))))
    }


def _in_force(schemas: Iterable[Any]) -> list[Any]:
    """Drop the versions that a later one replaced by the lowest opset, and removed operators."""
    kept: list[Any] = []
    for schema in schemas:
        if schema.since_version <= MIN_OPSET:
            kept.clear()
        kept.append(schema)
    return [] if kept and kept[-1].deprecated else kept
