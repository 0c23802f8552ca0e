"""Which operators can be differentiated, and how: the source of ``docs/operators.md``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import onnx.defs

from odtpack.autodiff.registry import INTERNAL_DOMAIN, REGISTRY
from odtpack.targets import MAX_OPSET

How = Literal["rule", "expansion", "no gradient", "none"]


@dataclasses.dataclass(frozen=True)
class Coverage:
    """One operator of the standard or a contributed one.

    Attributes:
        domain: Domain, ``"ai.onnx"`` for the standard operators.
        op_type: Operator.
        how: By a rule of its own; by expansion of its function body; declared to have no
            gradient; or none, which is an error where a gradient would have to pass.
        since: Opsets in which a rule starts to hold; empty without a rule.
    """

    domain: str
    op_type: str
    how: How
    since: tuple[int, ...] = ()


def coverage() -> list[Coverage]:
    """Return every registered operator and every operator of the newest opset, sorted."""
    found: dict[tuple[str, str], Coverage] = {}
    for domain, op_type, rule in REGISTRY.entries():
        if domain == INTERNAL_DOMAIN:
            continue
        key = (domain or "ai.onnx", op_type)
        how: How = "rule" if rule.differentiable else "no gradient"
        since = (*found[key].since, rule.since) if key in found else (rule.since,)
        found[key] = Coverage(*key, how, since if how == "rule" else ())
    schemas: Sequence[Any] = onnx.defs.get_all_schemas()  # its stubs lack functions
    for schema in schemas:
        key = ("ai.onnx", schema.name)
        if schema.domain or schema.deprecated or key in found or schema.since_version > MAX_OPSET:
            continue
        function = schema.has_function or schema.has_context_dependent_function
        found[key] = Coverage(*key, "expansion" if function else "none")
    return [found[key] for key in sorted(found)]
