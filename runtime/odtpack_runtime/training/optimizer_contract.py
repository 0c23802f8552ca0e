"""What optimizer and step models say about themselves: how they are run, what they keep.

The model's inputs and its metadata say it. Both come from outside and are checked before
anything is bound to memory. Metadata:

- ``odtpack.optimizer``: the kind, such as ``adamw``. Checkpoints with optimizer state name it.
- ``odtpack.state``: what is kept, a JSON list of ``{"name": ..., "axes": [...]}``. With
  ``axes`` the model is run parameter by parameter, each a matrix [rows, columns] (see
  :func:`matrix_axis`), and these of its two axes are kept. Without the key the moments are
  those of :data:`MOMENT_NAMES` that the model has as inputs.
- ``odtpack.elementwise``: ``false`` if a model over flat vectors must see them whole.
- ``odtpack.privacy``: ``{"clip_norm": ..., "noise_multiplier": ...}`` if a step may only be made
  with private gradients (:mod:`odtpack_runtime.training.private`).
- ``odtpack.groups``: a JSON list of ``{"learning_rate_scale": ..., "weight_decay": ...,
  "parameters": [...]}``; every trainable parameter is in one of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import numpy as np

from odtpack_runtime.checkpoint.parameters import Array
from odtpack_runtime.checkpoint.state import CheckpointState
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.session.graph_signature import (
    KEPT_NAME,
    RATE_NAME,
    STEP_NAME,
    UPDATE_SUFFIX,
    StepSignature,
    TensorSpec,
    model_mismatch,
)
from odtpack_runtime.session.session import BoundGraph

MOMENT_NAMES = ("first_order_moments", "second_order_moments")

PRIVACY = "odtpack.privacy"

_RESERVED = ("params", "gradients", "learning_rate", "step", "factored", "gradient_norm",
             "weight_decay")  # fmt: skip
_MAX_STATE = 8
_PROBE = (3, 4)
"""A shape that no model's fixed sizes should contradict."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StateVector:
    """Something that is kept for every parameter; see the module for ``axes``."""

    name: str
    axes: tuple[int, ...] | None = None

    def stored_shape(self, shape: Shape) -> Shape:
        """Shape for a parameter of this shape, in memory and in a checkpoint."""
        # It has the parameter's rank; axes that are not kept have length 1.
        if self.axes is None:
            return shape
        cut = matrix_axis(shape)
        return tuple(s if int(i >= cut) in self.axes else 1 for i, s in enumerate(shape))

    def bound_shape(self, shape: Shape) -> Shape:
        """Shape in the run for a parameter of this shape."""
        return tuple(s if i in (self.axes or ()) else 1 for i, s in enumerate(matrix(shape)))


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters with a learning rate and a weight decay of their own."""

    learning_rate_scale: float
    weight_decay: float
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Privacy:
    """What a package asks for."""

    clip_norm: float  # C, the norm that the gradient of one sample is scaled down to
    noise_multiplier: float  # s, standard deviation of the noise as a multiple of C

    @property
    def valid(self) -> bool:
        """Whether both are numbers that make sense."""
        return 0 < self.clip_norm < math.inf and 0 <= self.noise_multiplier < math.inf


@dataclass(frozen=True, slots=True)
class OptimizerContract:
    """How an optimizer model is run."""

    state: tuple[StateVector, ...]  # what is kept, in the order of a checkpoint's moments
    by_parameter: bool  # whether it is run parameter by parameter
    whole: bool  # whether flat vectors must not be cut into chunks
    groups: tuple[Group, ...]  # parameter groups; empty if all are updated in the same way
    clips_norm: bool  # whether it takes the norm of all gradients, `gradient_norm`
    takes_decay: bool  # whether it takes `weight_decay`, that of the group
    kind: str | None = None  # kind of the optimizer; None if the model does not say
    # what gradients must be made private with; None if they need not
    privacy: Privacy | None = None

    @property
    def run(self) -> Literal["chunks", "whole", "parameters"]:
        """What one run of the model is over."""
        return "parameters" if self.by_parameter else "whole" if self.whole else "chunks"

    def check_groups(self, names: Collection[str], where: str) -> None:
        """Check that the groups cover these parameters."""
        found = {name for group in self.groups for name in group.parameters}
        odd = found ^ set(names)
        if self.groups and odd:
            what = f"The optimizer model's groups and the checkpoint disagree about '{min(odd)}'."
            hint = "use the optimizer model and the checkpoint of one package"
            raise OdtpackError("model-mismatch", what, where=where, hint=hint)


def matrix_axis(shape: Shape) -> int:
    """Return the first axis that belongs to the columns of a parameter seen as a matrix."""
    # Of all cuts between two axes it is the one with the fewest rows and columns together, the
    # first of equal ones. A vector or a scalar is one row.
    cuts = range(1, len(shape))
    return min(cuts, key=lambda i: math.prod(shape[:i]) + math.prod(shape[i:]), default=0)


def matrix(shape: Shape) -> tuple[int, int]:
    """Return [rows, columns] of a parameter."""
    cut = matrix_axis(shape)
    return math.prod(shape[:cut]), math.prod(shape[cut:])


def read_contract(
    metadata: Mapping[str, str], inputs: Collection[str], where: str
) -> OptimizerContract:
    """Read the metadata of an optimizer model."""
    state = _read_state(metadata, inputs, where)
    shaped = [vector for vector in state if vector.axes is not None]
    if shaped and len(shaped) < len(state):
        _refuse("odtpack.state mixes vectors with and without axes", where)
    groups = _read_groups(metadata, where)
    whole = metadata.get("odtpack.elementwise") == "false"
    if len(groups) > 1 and whole:
        _refuse("it has groups and must see all parameters at once", where)
    if "weight_decay" in inputs and not groups:
        _refuse("it takes a weight decay and has no groups that give it", where)
    return OptimizerContract(
        state,
        bool(shaped),
        whole,
        groups,
        clips_norm="gradient_norm" in inputs,
        takes_decay="weight_decay" in inputs,
        kind=metadata.get("odtpack.optimizer"),
        privacy=_read_privacy(metadata, where),
    )


def check_signature(
    contract: OptimizerContract, inputs: Sequence[Any], outputs: Sequence[Any],
    dtype: np.dtype[Any], where: str,
) -> None:  # fmt: skip
    """Check inputs and outputs of an optimizer model."""
    shapes: dict[str, Shape] = {}
    for name, axes in (
        *((name, (0, 1)) for name in ("params", "gradients")),
        *((vector.name, vector.axes or ()) for vector in contract.state),
    ):
        kept = tuple(size if axis in axes else 1 for axis, size in enumerate(_PROBE))
        shapes[name] = kept if contract.by_parameter else (math.prod(_PROBE),)
    wanted = {name: (dtype, shape) for name, shape in shapes.items()}
    results = {f"{name}.out": spec for name, spec in wanted.items() if name != "gradients"}
    for name, kind, needed in (
        ("learning_rate", np.dtype(np.float32), True),
        ("step", np.dtype(np.int64), True),
        ("factored", np.dtype(np.bool_), contract.by_parameter),
        ("gradient_norm", dtype, contract.clips_norm),
        ("weight_decay", dtype, contract.takes_decay),
    ):
        if needed:
            wanted[name] = kind, (1,)
    for nodes, expected in ((inputs, wanted), (outputs, results)):
        specs = {node.name: TensorSpec.of_node(node, where) for node in nodes}
        wrong = specs.keys() ^ expected.keys()
        wrong |= {name for name in expected.keys() - wrong if not specs[name].fits(*expected[name])}
        if wrong:
            raise OdtpackError(
                "not-an-optimizer",
                f"The model is not an optimizer model of odtpack: '{min(wrong)}' is missing, not "
                "expected, or of another type or shape.",
                where=where,
                hint="pass the optimizer_model.onnx of the package",
            )


def _read_state(
    metadata: Mapping[str, str], inputs: Collection[str], where: str
) -> tuple[StateVector, ...]:
    if "odtpack.state" not in metadata:
        return tuple(StateVector(name) for name in MOMENT_NAMES if name in inputs)
    entries = _read_list(metadata, "odtpack.state", where)
    if len(entries) > _MAX_STATE:
        _refuse(f"odtpack.state has more than {_MAX_STATE} entries", where)
    state = []
    for entry in entries:
        name, axes = entry.get("name"), entry.get("axes")
        good = axes is None or (
            isinstance(axes, list)
            and all(type(axis) is int and 0 <= axis < 2 for axis in axes)
            and axes == sorted(set(axes))
        )
        if not isinstance(name, str) or not name or name in _RESERVED or not good:
            _refuse(f"odtpack.state has the entry {entry!r:.80}", where)
        state.append(StateVector(name, None if axes is None else tuple(axes)))
    if len({vector.name for vector in state}) < len(state):
        _refuse("odtpack.state names a vector twice", where)
    return tuple(state)


def _read_groups(metadata: Mapping[str, str], where: str) -> tuple[Group, ...]:
    if "odtpack.groups" not in metadata:
        return ()
    groups = []
    seen: set[str] = set()
    for entry in _read_list(metadata, "odtpack.groups", where):
        numbers: list[Any] = [entry.get(key) for key in ("learning_rate_scale", "weight_decay")]
        names = entry.get("parameters")
        if (
            any(type(n) not in (int, float) or not 0 <= float(n) < math.inf for n in numbers)
            or not isinstance(names, list)
            or not names
            or not all(isinstance(name, str) for name in names)
        ):
            _refuse(f"odtpack.groups has the entry {entry!r:.80}", where)
        if len(set(names)) < len(names) or seen & set(names):
            _refuse("odtpack.groups names a parameter twice", where)
        seen |= set(names)
        groups.append(Group(float(numbers[0]), float(numbers[1]), tuple(names)))
    return tuple(groups)


def _read_privacy(metadata: Mapping[str, str], where: str) -> Privacy | None:
    if PRIVACY not in metadata:
        return None
    try:
        content = json.loads(metadata[PRIVACY])
        found = Privacy(*(float(content[key]) for key in ("clip_norm", "noise_multiplier")))
    except (ValueError, RecursionError, TypeError, KeyError, OverflowError):
        found = None
    if found is None or not found.valid:
        _refuse(f"{PRIVACY} is {metadata[PRIVACY][:80]!r}", where)
    return found


def _read_list(metadata: Mapping[str, str], key: str, where: str) -> list[dict[str, Any]]:
    """Return a list of JSON objects from a model's metadata."""
    try:
        entries = json.loads(metadata[key])
    except (ValueError, RecursionError):
        entries = None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        _refuse(f"{key} is not a list of objects", where)
    return entries


def _refuse(what: str, where: str) -> NoReturn:
    raise OdtpackError(
        "bad-metadata", f"The optimizer model's metadata are wrong: {what}.", where=where
    )


# What models take and give, read against the parameters of a state.


def roles(
    state: CheckpointState, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Trainable parameters and the others; those of a nominal state without values."""
    both = (state.arrays(trainable=True), state.arrays(trainable=False))
    for arrays in both:
        for name in arrays.keys() & shapes.keys():
            # An array of that shape without memory of its own: only shape and dtype count.
            arrays[name] = np.broadcast_to(arrays[name].dtype.type(), shapes[name])
    return both


def nominal_shapes(
    state: CheckpointState, models: Sequence[tuple[str, Sequence[Any], Sequence[Any]]]
) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of a nominal state, which only the models know."""
    shapes: dict[str, tuple[int, ...]] = {}
    for where, inputs, _ in models:
        for node in inputs:
            if node.name in state.parameters:
                if not all(isinstance(size, int) for size in node.shape):
                    raise model_mismatch(where, f"the shape of '{node.name}' is not known")
                shapes.setdefault(node.name, tuple(node.shape))
    return shapes


# A step model on the memory of its parameters and of the optimizer's state.


class StepGraph:
    """A step model, whose new values are written over the old ones."""

    # `kept`: after a step, whether each trainable parameter and its state kept their values because
    # the loss or its gradient was not finite; in the order of the model's inputs.

    def __init__(self, graph: BoundGraph, signature: StepSignature) -> None:
        self.graph = graph
        self._signature = signature
        self.kept = np.zeros(signature.kept, np.bool_)
        graph.bind_output(KEPT_NAME, self.kept)

    def bind_updated(self, name: str, memory: Array) -> None:
        """Let the new value of an input lie in its memory."""
        shape = self._signature.updates[name]
        self.graph.bind_output(name + UPDATE_SUFFIX, memory.reshape(shape))

    def check_optimizer(self, sizes: Mapping[str, int], groups: int, where: str) -> None:
        """Check that it knows what the optimizer keeps."""
        # `sizes`: elements of each vector, by the names of its inputs.
        known = self._signature.state
        odd = known.keys() ^ sizes.keys()
        odd |= {name for name in known.keys() - odd if np.prod(known[name]) != sizes[name]}
        if odd:
            raise model_mismatch(where, f"the step model knows another state '{min(odd)}'")
        if groups != self._signature.groups:
            raise model_mismatch(where, "the step model knows other parameter groups")

    def bind_optimizer(self, state: Mapping[str, Array], rates: Array, step: Array) -> None:
        """Give it what the optimizer keeps, which :meth:`check_optimizer` has looked at."""
        # `state`: the vectors, contiguous, by the names of their inputs.
        # `rates`: FLOAT, the learning rate of each group.
        # `step`: INT64 [1], the number of the step, from 1.
        known = self._signature.state
        for name, memory in state.items():
            self.graph.bind_input(name, memory.reshape(known[name]))
            self.bind_updated(name, memory)
        self.graph.bind_input(RATE_NAME, rates)
        self.graph.bind_input(STEP_NAME, step)
