"""What optimizers share: the formula's interface, moments and groups."""

from __future__ import annotations

import abc
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from odtpack.errors import OdtpackError, UnknownNameError, quoted
from odtpack.option import is_too_large, option, options_of

if TYPE_CHECKING:
    import onnx_ir as ir

    from odtpack.graph import graphs

Ops: TypeAlias = "graphs.Ops"
Value: TypeAlias = "ir.Value"
Values: TypeAlias = "Mapping[str, Value]"

# What Adam and AdamW share: two moments, and the change that follows from them.


def moments(
    op: Ops, values: Values, gradients: Value, beta1: float, beta2: float
) -> tuple[Value, Value]:
    """Return both moments after a step."""
    m = lerp(op, values[FIRST], gradients, beta1)
    return m, lerp(op, values[SECOND], op.Mul(gradients, gradients), beta2)


def change(
    op: Ops, values: Values, m: Value, v: Value, optimizer: Any, *, scaled_epsilon: bool
) -> Value:
    """Return lr sqrt(u2) / u1 m / (sqrt(v) + epsilon'), where u = 1 - b^t."""
    # optimizer: Adam or AdamW. epsilon' is epsilon, or with ``scaled_epsilon`` sqrt(u2) epsilon:
    # the same as dividing sqrt(v) by sqrt(u2) first, with a pass over the vector less.
    size, epsilon = values["learning_rate"], optimizer.epsilon
    if optimizer.bias_correction:
        t = op.cast(values["step"], op.type_of(size))
        root2 = op.Sqrt(_unbias(op, t, optimizer.beta2))
        if scaled_epsilon:
            epsilon = op.Mul(root2, epsilon)
        size = op.Mul(size, op.Div(root2, _unbias(op, t, optimizer.beta1)))
    return op.Mul(op.Div(m, op.Add(op.Sqrt(v), epsilon)), size)


def _unbias(op: Ops, t: Value, beta: float) -> Value:
    """Return 1 - beta^t, of the type of t, [1]."""
    # It is 1 - exp(-2 x) with x = -t ln(beta) / 2, written 2 tanh(x) / (1 + tanh(x)): with b2 =
    # 0.999 a difference of 1 would lose four digits of the first steps in float32, and float64 is
    # what not every runtime has.
    half = op.Tanh(op.Mul(t, -math.log(beta) / 2))
    return op.Div(op.Mul(half, 2.0), op.Add(half, 1.0))


FIRST, SECOND = "first_order_moments", "second_order_moments"


@dataclasses.dataclass(frozen=True)
class StateVector:
    """What an optimizer keeps from step to step for every parameter."""

    name: str  # input of the optimizer model; its new value is the output ``<name>.out``
    # None if it has the parameter's shape. Otherwise the optimizer is run parameter by parameter,
    # each seen as a matrix [rows, columns], and these of the two axes are kept; the other has
    # length 1.
    axes: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Optimizer(abc.ABC):
    """A formula; its fields are its hyperparameters, each declared by an option."""

    kind: ClassVar[str]  # as the manifest and the command line have it; that of its file
    summary: ClassVar[str]  # what it is, in a sentence
    source: ClassVar[str]  # whose formula it is, for the documentation
    keeps: ClassVar[str]  # what it keeps for each parameter, for the documentation
    learning_rates: ClassVar[tuple[float, ...]] = (0.001, 0.003, 0.0003)  # for a search, in order
    weight_decay: float = option(
        0.0, "Strength of the weight decay; `adam` and `sgd`: an L2 penalty.", least=0
    )

    def __post_init__(self) -> None:
        for each in options_of(type(self)):
            value = getattr(self, each.name)
            if not each.takes(value):
                shown = f"{value:g}" if type(value) is float else str(value)
                default = each.default if type(each.default) is not float else f"{each.default:g}"
                raise OdtpackError(
                    "bad-hyperparameter",
                    f"{each.name} is {shown[:60]}; it must be {each.range}"
                    + (" that float32 holds" if is_too_large(value) else ""),
                    hint=f"leave it out: the default is {default}",
                )

    @property
    @abc.abstractmethod
    def state(self) -> tuple[StateVector, ...]:
        """What is kept, in the order of the checkpoint's ``momentum0``, ``momentum1``."""

    @abc.abstractmethod
    def write(self, op: Ops, values: Values, weight_decay: Value | float) -> dict[str, Value]:
        """Write one step: the new value of ``params`` and of each state vector."""
        # values: ``params``, ``gradients`` (clipped) and the state by name, of one element type;
        # ``learning_rate`` of that type, [1]; ``step`` INT64[1], the number of the step from 1.
        # weight_decay: The decay: a number, or [1] where it differs between groups.

    def settings(self) -> dict[str, Any]:
        """Hyperparameters, for the manifest."""
        return dataclasses.asdict(self)


def keep_factor(op: Ops, rate: Value, weight_decay: Value | float) -> Value | None:
    """Return 1 - rate decay, the factor of decoupled weight decay; None without decay."""
    if isinstance(weight_decay, float | int) and weight_decay == 0:
        return None
    return op.Sub(1.0, op.Mul(rate, weight_decay))


def add_decay(op: Ops, gradients: Value, params: Value, weight_decay: Value | float) -> Value:
    """Return g + decay p, the gradient with an L2 penalty; g without decay."""
    if isinstance(weight_decay, float | int) and weight_decay == 0:
        return gradients
    return op.Add(gradients, op.Mul(params, weight_decay))


def lerp(op: Ops, old: Value, new: Value, keep: float) -> Value:
    """Return keep old + (1 - keep) new."""
    return op.Add(op.Mul(old, keep), op.Mul(new, 1 - keep))


# Parameter groups: which parameters get another learning rate or weight decay.


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
                hint=f"--freeze {quoted(self.pattern)} keeps parameters where they are",
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
    called: Mapping[str, Sequence[str]] | None = None,
) -> tuple[Group, ...]:
    """Divide the trained parameters into groups, that of the first parameter first."""
    # The first rule whose pattern matches a parameter holds for it, and if none does the
    # optimizer's own numbers. Parameters with equal numbers are one group.
    # ranks: Number of axes of each trained parameter, by name in the model's order. decay_vectors:
    # If false, parameters with less than two axes (biases, the scales of normalizations) do not
    # decay, unless a rule gives them a decay. called: Further names of parameters, by which
    # patterns match them, too.
    found: dict[tuple[float, float], list[str]] = {}
    used: set[GroupRule] = set()

    def holds(rule: GroupRule, name: str) -> bool:
        names = (name, *(called or {}).get(name, ()))
        return any(fnmatchcase(each, rule.pattern) for each in names)

    for name, rank in ranks.items():
        rule = next((r for r in rules if holds(r, name)), None)
        decay = weight_decay if decay_vectors or rank > 1 else 0.0
        scale = 1.0
        if rule is not None:
            used.add(rule)
            scale = rule.learning_rate_scale
            decay = decay if rule.weight_decay is None else rule.weight_decay
        found.setdefault((scale, decay), []).append(name)
    for rule in rules:
        if rule not in used:
            taken = any(holds(rule, name) for name in ranks)
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
