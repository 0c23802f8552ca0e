"""What a gradient rule sees of its node, and the table of rules."""

from __future__ import annotations

import builtins
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from odtpack.errors import OdtpackError
from odtpack.graph.graphs import Dims, Ops, constant, dims_of

Differentiate = Callable[
    [ir.Graph, Mapping[ir.Value, ir.Value], Iterable[ir.Value], Ops], dict[ir.Value, ir.Value]
]


class Context:
    """One node on the way back: its inputs, outputs, attributes and output cotangents.

    Attributes:
        node: The forward node.
        op: Writes new nodes, as in ``ctx.op.Mul(ctx.dy(), ctx.y())``.
        captured: Values that the node's subgraphs read from around them and whose
            cotangents are wanted.
        discarded: The output may be NaN or infinite in places where the model discards it;
            there the cotangents are zero, and so are those of the inputs.
        unbounded: The cotangent of the output may be infinite, or NaN, in places.
        rooted: The node takes the root of a norm; its slope is 0 where that is 0.
    """

    def __init__(
        self,
        node: ir.Node,
        op: Ops,
        cotangents: Sequence[ir.Value | None],
        needed: Sequence[bool],
        captured: Sequence[ir.Value] = (),
        differentiate: Differentiate | None = None,
        *,
        discarded: bool = False,
        unbounded: bool = False,
        rooted: bool = False,
    ) -> None:
        self.node = node
        self.op = op
        self.captured = captured
        self.discarded = discarded
        self.unbounded = unbounded
        self.rooted = rooted
        self._cotangents = cotangents
        self._needed = needed
        self._differentiate = differentiate

    def differentiate(
        self, graph: ir.Graph, seeds: Mapping[ir.Value, ir.Value], wrt: Iterable[ir.Value], op: Ops
    ) -> dict[ir.Value, ir.Value]:
        """Differentiate a subgraph of the node, as ``autodiff.backward.differentiate`` does.

        New nodes go where ``op`` writes, which may be another graph.
        """
        if self._differentiate is None:
            raise self.unsupported("it is looked at outside of a backward walk")
        return self._differentiate(graph, seeds, wrt, op)

    def x(self, index: builtins.int = 0) -> ir.Value:
        """Input ``index``, which must be present."""
        value = self.maybe_x(index)
        if value is None:
            raise OdtpackError(
                "missing-input",
                f"node {self.node.name!r} ({self.node.op_type}) lacks its input {index}",
            )
        return value

    def maybe_x(self, index: builtins.int) -> ir.Value | None:
        """Input ``index``, or None where an optional input is absent."""
        return self.node.inputs[index] if index < len(self.node.inputs) else None

    def y(self, index: builtins.int = 0) -> ir.Value:
        """Output ``index`` of the forward node."""
        return self.node.outputs[index]

    def dy(self, index: builtins.int = 0) -> ir.Value:
        """Cotangent of output ``index``, which must be present."""
        value = self.maybe_dy(index)
        if value is None:
            raise self.unsupported(f"its output {index} is used without its first output")
        return value

    def maybe_dy(self, index: builtins.int) -> ir.Value | None:
        """Cotangent of output ``index``; None if the loss does not depend on it."""
        return self._cotangents[index] if index < len(self._cotangents) else None

    def needs(self, index: builtins.int) -> bool:
        """Whether the cotangent of input ``index`` is wanted."""
        return index < len(self._needed) and self._needed[index]

    def extra_output(
        self, index: builtins.int, dtype: ir.DataType, dims: Dims | None = None
    ) -> ir.Value:
        """Output ``index`` of the forward node, added to the node if it was left out.

        Args:
            index: Which output.
            dtype: Its element type.
            dims: Its dimensions, if they are known.
        """
        if index >= len(self.node.outputs):
            self.node.resize_outputs(index + 1)
            for left_out in self.node.outputs:
                left_out.name = left_out.name or ""  # which says that it is absent
        value = self.node.outputs[index]
        if not value.name:
            named = next(output.name for output in self.node.outputs if output.name)
            value.name = self.op.fresh_name(f"{named}_output{index}")
        if value.type is None:
            value.type = ir.TensorType(dtype)
        if value.shape is None and dims is not None:
            value.shape = ir.Shape(dims)
        return value

    # Attributes, with the default that the operator's specification names.

    def int(self, name: str, default: builtins.int) -> builtins.int:
        """Integer attribute."""
        return self.node.attributes.get_int(name, default)

    def ints(self, name: str, default: Sequence[builtins.int]) -> tuple[builtins.int, ...]:
        """Integer list attribute."""
        return tuple(self.node.attributes.get_ints(name, tuple(default)))

    def float(self, name: str, default: builtins.float) -> builtins.float:
        """Float attribute."""
        return self.node.attributes.get_float(name, default)

    def floats(
        self, name: str, default: Sequence[builtins.float] = ()
    ) -> tuple[builtins.float, ...]:
        """Float list attribute."""
        return tuple(self.node.attributes.get_floats(name, tuple(default)))

    def string(self, name: str, default: str) -> str:
        """String attribute."""
        return self.node.attributes.get_string(name, default)

    def strings(self, name: str, default: Sequence[str] = ()) -> tuple[str, ...]:
        """String list attribute."""
        return tuple(self.node.attributes.get_strings(name, tuple(default)))

    def dims(self, value: ir.Value) -> Dims:
        """Dimensions of a value: an int, a symbol or None each.

        Raises:
            OdtpackError: The rank is unknown.
        """
        dims = dims_of(value)
        if dims is None:
            raise OdtpackError(
                "unknown-rank",
                f"the rank of {value.name!r}, used by node {self.node.name!r} "
                f"({self.node.op_type}), is unknown",
                hint="give the model's inputs static ranks, or export it with shapes",
            )
        return dims

    def dtype(self, value: ir.Value) -> ir.DataType:
        """Element type of a value.

        Raises:
            OdtpackError: It is unknown.
        """
        if value.dtype is None:
            raise self.unsupported(f"the element type of {value.name!r} is unknown")
        return value.dtype

    def rank(self, value: ir.Value) -> builtins.int:
        """Number of axes of a value."""
        return len(self.dims(value))

    def size(self, value: ir.Value, axis: builtins.int) -> builtins.int:
        """Length of one axis.

        Raises:
            OdtpackError: It is unknown.
        """
        size = self.dims(value)[axis]
        if not isinstance(size, builtins.int):
            raise self.unsupported(f"the length of axis {axis} of {value.name!r} is unknown")
        return size

    def axis(
        self, name: str = "axis", default: builtins.int = 0, value: ir.Value | None = None
    ) -> builtins.int:
        """Axis attribute, counted from the front."""
        axis = self.int(name, default)
        return axis if axis >= 0 else axis + self.rank(value or self.x())

    def constant(self, index: builtins.int) -> np.ndarray | None:
        """Value of input ``index`` where it is known before the model runs, else None.

        An initializer that is differentiated is not known: training changes it.
        """
        return constant(None if self.needs(index) else self.maybe_x(index))

    def unsupported(self, why: str) -> OdtpackError:
        """The error for an attribute or shape that the rule does not cover."""
        return OdtpackError(
            "unsupported-node",
            f"no gradient for node {self.node.name!r} ({self.node.op_type}): {why}",
        )


# The table of gradient rules, keyed by domain, operator and since-version.
#
# For every operator there are three answers: a rule, declared non-differentiable, or
# none, which the walk turns into an error that names the node.


@dataclasses.dataclass(frozen=True)
class WithCaptured:
    """Cotangents of a node with subgraphs."""

    inputs: Sequence[ir.Value | None]  # cotangent of each input; None for one that has none
    # Cotangents of values that its subgraphs read from around them.
    captured: Mapping[ir.Value, ir.Value]


Cotangents = ir.Value | Sequence[ir.Value | None] | WithCaptured
RuleFunction = Callable[[Context], Cotangents]


@dataclasses.dataclass(frozen=True)
class Rule:
    """How to differentiate one operator from one opset on."""

    # Emits the input cotangents of a node; None for an operator that is declared non-differentiable
    # (its derivative is zero or undefined everywhere).
    function: RuleFunction | None
    since: int = 1  # first opset of the operator's domain for which the rule holds
    # The inputs broadcast to the output's shape, so that the walk must sum each cotangent back to
    # the shape of its input.
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


# Cotangents that fill a part of their value: joined, not padded with zeros and added.
#
# Where a model cuts a value into pieces, by Slice or by Gather with one index, as exporters
# write the q, k and v of an attention, each piece brings back a cotangent of its own part.
# Together they are one Concat, without a tensor of zeros for each and the sum of them.

_KEY = "odtpack.placed"


@dataclasses.dataclass(frozen=True)
class Placed:
    """A cotangent and where it lies along one axis of its value."""

    part: ir.Value
    axis: int
    start: int
    stop: int
    size: int


def place(
    op: Ops, part: ir.Value, before: Sequence[int], after: Sequence[int], sizes: Sequence[object]
) -> ir.Value:
    """Pad a part with zeros, and remember it where it is padded along one axis alone."""
    whole = op.pad(part, before, after)
    padded = [axis for axis, pads in enumerate(zip(before, after, strict=True)) if any(pads)]
    node = whole.producer()
    if len(padded) == 1 and node is not None:
        (axis,) = padded
        size = sizes[axis]
        if isinstance(size, int):
            stop = size - after[axis]
            node.meta[_KEY] = Placed(part, axis, before[axis], stop, size)
    return whole


def join(op: Ops, parts: Sequence[ir.Value]) -> list[ir.Value]:
    """Replace parts that fill an axis without gap or overlap by their Concat."""
    # parts: Cotangents of one value; those that are returned have the same sum.
    placed: defaultdict[tuple[int, int], list[tuple[Placed, ir.Value]]] = defaultdict(list)
    for whole in parts:
        node = whole.producer()
        found = None if node is None else node.meta.get(_KEY)
        if isinstance(found, Placed):
            placed[found.axis, found.size].append((found, whole))
    for (axis, size), group in placed.items():
        ordered = sorted((each for each, _ in group), key=lambda each: each.start)
        starts = [*(each.start for each in ordered), size]
        if starts == [0, *(each.stop for each in ordered)]:
            joined = op.join([each.part for each in ordered], axis)
            replaced = [whole for _, whole in group]
            return [joined, *(part for part in parts if part not in replaced)]
    return list(parts)
