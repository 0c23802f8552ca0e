"""Parameter groups: which parameters get another learning rate or weight decay."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np

from odtpack.errors import OdtpackError, UnknownNameError


@dataclasses.dataclass(frozen=True)
class GroupRule:
    """What holds for the trained parameters that a pattern matches.

    Attributes:
        pattern: Shell pattern over names, as of ``--train``.
        learning_rate_scale: Factor of the learning rate, a float32 above 0; what is to stay where
            it is is frozen instead.
        weight_decay: Weight decay in place of the optimizer's; None for the optimizer's.

    Raises:
        OdtpackError: A number is out of range.
    """

    pattern: str
    learning_rate_scale: float = 1.0
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("lr", self.learning_rate_scale), ("decay", self.weight_decay)):
            if value is not None and not 0 <= value < math.inf:
                raise OdtpackError(
                    "bad-group",
                    f"{name} of the group {self.pattern!r} is {value:g}; it must be 0 or more",
                )
        with np.errstate(all="ignore"):
            scale = np.float32(self.learning_rate_scale)
        if not 0 < scale < np.inf:
            raise OdtpackError(
                "bad-group",
                f"lr of the group {self.pattern!r} is {self.learning_rate_scale:g}; as a float32 "
                "it must be above 0 and finite",
                hint=f"--freeze {self.pattern!r} keeps parameters where they are",
            )


@dataclasses.dataclass(frozen=True)
class Group:
    """Parameters that are updated alike, by name in the order of the model."""

    learning_rate_scale: float
    weight_decay: float
    parameters: tuple[str, ...]


def resolve_groups(
    ranks: Mapping[str, int],
    rules: Sequence[GroupRule],
    weight_decay: float,
    *,
    decay_vectors: bool = True,
) -> tuple[Group, ...]:
    """Divide the trained parameters into groups.

    The first rule whose pattern matches a parameter holds for it, and if none does the
    optimizer's own numbers. Parameters with equal numbers are one group.

    Args:
        ranks: Number of axes of each trained parameter, by name in the model's order.
        rules: What holds for which parameters.
        weight_decay: Weight decay of the optimizer.
        decay_vectors: If false, parameters with less than two axes (biases, the scales of
            normalizations) do not decay, unless a rule gives them a decay.

    Returns:
        The groups, that of the first parameter first; one if all are updated alike.

    Raises:
        UnknownNameError: A rule holds for no parameter.
    """
    found: dict[tuple[float, float], list[str]] = {}
    used: set[GroupRule] = set()
    for name, rank in ranks.items():
        rule = next((r for r in rules if fnmatchcase(name, r.pattern)), None)
        decay = weight_decay if decay_vectors or rank > 1 else 0.0
        scale = 1.0
        if rule is not None:
            used.add(rule)
            scale = rule.learning_rate_scale
            decay = decay if rule.weight_decay is None else rule.weight_decay
        found.setdefault((scale, decay), []).append(name)
    for rule in rules:
        if rule not in used:
            taken = any(fnmatchcase(name, rule.pattern) for name in ranks)
            raise UnknownNameError(
                "unknown-parameter",
                f"--group {rule.pattern!r} "
                + ("comes after groups that match all of its parameters" if taken else
                   "matches no parameter that is trained"),
                hint="put the narrower pattern first" if taken
                else f"these are trained: {', '.join(list(ranks)[:4])}"
                f"{', ...' if len(ranks) > 4 else ''}",
            )  # fmt: skip
    return tuple(Group(scale, decay, tuple(names)) for (scale, decay), names in found.items())


def memory_order(groups: Sequence[Group]) -> str:
    """The names of all parameters, group by group, as JSON for a model's metadata."""
    return json.dumps([name for group in groups for name in group.parameters])
