"""The table of gradient rules, keyed by domain, operator and since-version.

For every operator there are three answers: a rule, declared non-differentiable, or
none, which the walk turns into an error that names the node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from odtpack.autodiff.context import Context


@dataclasses.dataclass(frozen=True)
class WithCaptured:
    """Cotangents of a node with subgraphs.

    Attributes:
        inputs: Cotangent of each input; None for one that has none.
        captured: Cotangents of values that its subgraphs read from around them.
    """

    inputs: Sequence[ir.Value | None]
    captured: Mapping[ir.Value, ir.Value]


Cotangents = ir.Value | Sequence[ir.Value | None] | WithCaptured
RuleFunction = Callable[[Context], Cotangents]


@dataclasses.dataclass(frozen=True)
class Rule:
    """How to differentiate one operator from one opset on.

    Attributes:
        function: Emits the input cotangents of a node; None for an operator that is
            declared non-differentiable (its derivative is zero or undefined everywhere).
        since: First opset of the operator's domain for which the rule holds.
        broadcasts: The inputs broadcast to the output's shape, so that the walk must
            sum each cotangent back to the shape of its input.
    """

    function: RuleFunction | None
    since: int = 1
    broadcasts: bool = False

    @property
    def differentiable(self) -> bool:
        """Whether gradients flow through the operator."""
        return self.function is not None


class Registry:
    """Rules by (domain, operator type); the newest one not past the model's opset wins."""

    def __init__(self) -> None:
        self._rules: dict[tuple[str, str], list[Rule]] = {}

    def add(self, domain: str, op_type: str, rule: Rule) -> None:
        """Register a rule; registering the same operator and version twice is a bug."""
        rules = self._rules.setdefault((domain, op_type), [])
        if any(other.since == rule.since for other in rules):
            raise ValueError(f"two rules for {domain or 'ai.onnx'}::{op_type} since {rule.since}")
        rules.append(rule)
        rules.sort(key=lambda rule: -rule.since)

    def lookup(self, domain: str, op_type: str, opset: int) -> Rule | None:
        """Return the rule in force at ``opset``, or None if there is none."""
        domain = "" if domain == "ai.onnx" else domain
        for rule in self._rules.get((domain, op_type), ()):
            if rule.since <= opset:
                return rule
        return None

    def entries(self) -> list[tuple[str, str, Rule]]:
        """Return every (domain, operator, rule), sorted."""
        return [
            (domain, op_type, rule)
            for (domain, op_type), rules in sorted(self._rules.items())
            for rule in reversed(rules)
        ]


REGISTRY = Registry()

# Operators that passes put in before differentiation and write out as plain ones after it.
INTERNAL_DOMAIN = "odtpack"


def vjp(
    *op_types: str, domain: str = "", since: int = 1, broadcasts: bool = False
) -> Callable[[RuleFunction], RuleFunction]:
    """Register the decorated vector-Jacobian product for the named operators."""

    def register(function: RuleFunction) -> RuleFunction:
        for op_type in op_types:
            REGISTRY.add(domain, op_type, Rule(function, since, broadcasts))
        return function

    return register


def non_differentiable(*op_types: str, domain: str = "") -> None:
    """Declare that no gradient flows through the named operators."""
    for op_type in op_types:
        REGISTRY.add(domain, op_type, Rule(None))
