"""What a model's inputs and outputs must be."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime

from odtpack_runtime.checkpoint.parameters import Array
from odtpack_runtime.errors import OdtpackError

# What the builder notes in a training model for the runtime: its ``odtpack.`` metadata.


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """Notes of a training model."""

    # number of classes that labels may name, by input, and the label that does not count, if any
    labels: Mapping[str, tuple[int, int | None]]
    accumulation_steps: int  # batches whose gradients make one optimizer step
    # trainable parameters in the order that the model asks for in memory; none if it asks for no
    # order
    parameter_order: tuple[str, ...]

    @classmethod
    def read(
        cls, session: onnxruntime.InferenceSession, trainable: Collection[str], where: str
    ) -> ModelMetadata:
        """Read and check the notes."""
        metadata = session.get_modelmeta().custom_metadata_map
        labels = {}
        for key in metadata:
            of = key.removeprefix("odtpack.class_count")
            if of != key and (count := _whole_number(metadata, key, where)) is not None:
                ignored = _whole_number(metadata, f"odtpack.ignore_index{of}", where)
                labels[of[1:] or metadata.get("odtpack.labels", "labels")] = count, ignored
        steps = _whole_number(metadata, "odtpack.accumulation_steps", where)
        if steps is not None and steps < 1:
            raise _bad_metadata(f"say odtpack.accumulation_steps = {steps}", where)
        return cls(labels, 1 if steps is None else steps, _memory_order(metadata, trainable, where))


def _whole_number(metadata: dict[str, str], key: str, where: str) -> int | None:
    """Return an integer from a model's metadata, None if it is absent."""
    text = metadata.get(key)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise _bad_metadata(f"say {key} = {text!r}, which is not a number", where) from None


def _memory_order(
    metadata: dict[str, str], trainable: Collection[str], where: str
) -> tuple[str, ...]:
    """Return the order of the trainable parameters in memory, if the model asks for one."""
    text = metadata.get("odtpack.parameter_order")
    if text is None:
        return ()
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        names = None
    if (
        not isinstance(names, list)
        or not all(isinstance(name, str) for name in names)
        or sorted(names) != sorted(trainable)
    ):
        what = "odtpack.parameter_order do not list its trainable parameters"
        raise _bad_metadata(what, where)
    return tuple(names)


def _bad_metadata(what: str, where: str) -> OdtpackError:
    return OdtpackError("bad-metadata", f"The model's metadata {what}.", where=where)


# What a graph takes and gives: tensor specifications, and the roles of a training graph's names.
#
# A training graph is recognised by its names, which are a contract. Inputs, in
# order: user inputs; every parameter; ``<p>_grad.accumulation.buffer`` for each
# trainable parameter ``p``; ``lazy_reset_grad``. Outputs, in order: user outputs,
# the loss first; ``<p>_grad.accumulation.out`` for each trainable ``p``;
# ``<s>.update.out`` for each state ``s`` that the step updates. An evaluation
# graph has user inputs, parameters and user outputs.
#
# A step graph updates trainable parameters as well. It has no gradients; its inputs
# end in ``p.m`` for each trainable ``p`` and what the optimizer keeps of it,
# ``update.learning_rate`` and ``update.step``, its outputs in ``X.update.out`` for
# each ``p`` and ``p.m``.

BUFFER_SUFFIX = "_grad.accumulation.buffer"
GRADIENT_SUFFIX = "_grad.accumulation.out"
UPDATE_SUFFIX = ".update.out"
OWN_TYPE_SUFFIX = ".own_type"
"""Ends the name of a parameter in the type that the model computes in, where that is not the
type that it is trained or stored in."""
UNSCALED_SUFFIX = ".unscaled"
"""Ends the name of a parameter on the way there that is stored as int8, before it is scaled."""
RESET_NAME = "lazy_reset_grad"
RATE_NAME = "update.learning_rate"
STEP_NAME = "update.step"
KEPT_NAME = "update.kept"
"""Output of a step graph: which trainable parameters, in the order of its inputs, kept their
values because the loss or their gradient is not finite."""
ORDER_PREFIX = "update.order."
"""Begins the names of a step graph's outputs that only order its nodes, and are not asked for."""
LOSS_SCALE_NAMES = ("mixed.loss_scale", "mixed.good_steps")
"""States of a model that trains in mixed precision. Gradients that are not finite lower the scale,
so these are not put back with what such a step changed."""
COTANGENT_SUFFIX = ".cotangent"
"""Ends the name of the gradient of a value between two segments."""

Dim = int | str | None

_DTYPES: dict[str, np.dtype[Any]] = {
    f"tensor({name})": np.dtype(name)
    for name in (
        *("float16", "double", "int8", "int16", "int32", "int64"),
        *("uint8", "uint16", "uint32", "uint64", "bool"),
    )
} | {"tensor(float)": np.dtype(np.float32), "tensor(string)": np.dtype(object)}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, element type and shape of a graph input or output."""

    name: str  # name in the graph
    dtype: np.dtype[Any]  # element type; `object` for text
    # One entry per axis: its size, the name of a size that may vary but is the same wherever the
    # name occurs, or None for any size. ONNX Runtime reports an unknown rank as a scalar, so an
    # empty shape promises nothing.
    shape: tuple[Dim, ...]

    @classmethod
    def of_node(cls, node: Any, where: str) -> TensorSpec:
        """Return the specification of a session's input or output."""
        dtype = _DTYPES.get(node.type)
        if dtype is None:
            what = f"'{node.name}' is a {node.type}, which numpy cannot hold."
            raise OdtpackError("unsupported-type", what, where=where)
        return cls(node.name, dtype, tuple(node.shape))

    def __str__(self) -> str:
        dims = ", ".join("?" if dim is None else str(dim) for dim in self.shape)
        return f"{'text' if self.dtype == object else self.dtype}[{dims}]"

    def fits(self, dtype: np.dtype[Any], shape: Sequence[int]) -> bool:
        """Return whether a tensor agrees in type, rank and fixed dimensions."""
        if dtype != self.dtype:
            return False
        return not self.shape or (
            len(shape) == len(self.shape)
            and all(
                size == dim
                for size, dim in zip(shape, self.shape, strict=True)
                if isinstance(dim, int)
            )
        )


def check_tensors(
    specs: Sequence[TensorSpec], tensors: Sequence[tuple[np.dtype[Any], tuple[int, ...]]]
) -> None:
    """Check tensors, given as (dtype, shape), against the user inputs they are meant for."""
    sizes: dict[str, tuple[int, str]] = {}
    for spec, (dtype, shape) in zip(specs, tensors, strict=True):
        if dtype != spec.dtype:
            what = f"Input '{spec.name}' must be {spec}, and it has elements of {dtype}."
            raise OdtpackError("input-type", what, hint=f"convert it with .astype('{spec.dtype}')")
        if not spec.fits(dtype, shape):
            what = f"Input '{spec.name}' must be {spec}, and its shape is {list(shape)}."
            raise OdtpackError("input-shape", what)
        for dim, size in zip(spec.shape, shape, strict=bool(spec.shape)):
            if size == 0 and dim != 0:
                what = f"Input '{spec.name}' is empty: its shape is {list(shape)}."
                raise OdtpackError("empty-batch", what)
            if isinstance(dim, str):
                known, owner = sizes.setdefault(dim, (size, spec.name))
                if size != known:
                    raise OdtpackError(
                        "input-sizes-differ",
                        f"'{dim}' is {known} in input '{owner}' and {size} in input '{spec.name}'.",
                    )


def check_labels(
    labels: Array, class_count: int, ignored: int | None = None, *, name: str = "labels"
) -> None:
    """Check that integer labels name existing classes."""
    # Read as uint64 a negative label is huge: one reduction instead of two.
    if labels.size == 0 or labels.view(np.uint64).max() < class_count:
        return
    wrong = (labels < 0) | (labels >= class_count)
    if ignored is not None:
        wrong &= labels != ignored
    if wrong.any():
        index = np.unravel_index(int(np.argmax(wrong)), labels.shape)
        place = ", ".join(str(int(axis)) for axis in index)
        raise OdtpackError(
            "label-out-of-range",
            f"Input {name!r} holds the label {int(labels[index])} at [{place}], and the model's "
            f"{class_count} classes are numbered 0 to {class_count - 1}.",
        )


@dataclass(frozen=True, slots=True)
class GraphSignature:
    """The inputs and outputs of a training or evaluation graph, by role."""

    inputs: tuple[TensorSpec, ...]  # user inputs
    parameters: tuple[str, ...]  # names of the parameters, in the order of the graph's inputs
    outputs: tuple[TensorSpec, ...]  # user outputs
    gradients: tuple[str, ...]  # names of the parameters whose gradient the graph accumulates
    updates: tuple[str, ...]  # names of the state parameters that the graph updates

    @classmethod
    def read(
        cls,
        where: str,
        inputs: Iterable[Any],
        outputs: Iterable[Any],
        trainable: Mapping[str, Array],
        frozen: Mapping[str, Array],
    ) -> GraphSignature:
        """Classify a graph's names with the help of the parameters of a checkpoint."""
        roles = {**trainable, **frozen}
        roles |= {name + BUFFER_SUFFIX: array for name, array in trainable.items()}
        roles[RESET_NAME] = np.zeros(1, np.bool_)
        user, found = _read_inputs(where, inputs, roles)
        parameters = tuple(name for name in found if name in trainable or name in frozen)
        out: list[TensorSpec] = []
        gradients: list[str] = []
        updates: list[str] = []
        for node in outputs:
            spec = TensorSpec.of_node(node, where)
            owner, suffix = _owner(spec.name, trainable, frozen)
            if suffix is None:
                out.append(spec)
                continue
            if not spec.fits(roles[owner].dtype, roles[owner].shape):
                raise model_mismatch(
                    where, f"its output '{spec.name}' is {spec}, unlike the parameter"
                )
            if owner not in parameters:
                raise model_mismatch(where, f"it updates '{owner}', which is not among its inputs")
            (gradients if suffix == GRADIENT_SUFFIX else updates).append(owner)
        buffers = {name for name in found if name.endswith(BUFFER_SUFFIX)}
        for name in buffers ^ {name + BUFFER_SUFFIX for name in gradients}:
            raise model_mismatch(where, f"'{name}' lacks its input or its output")
        if gradients and RESET_NAME not in found:
            raise model_mismatch(where, f"it has no input '{RESET_NAME}'")
        if not out:
            raise model_mismatch(where, "it has no outputs for the user")
        return cls(user, parameters, tuple(out), tuple(gradients), tuple(updates))


def _read_inputs(
    where: str, inputs: Iterable[Any], roles: Mapping[str, Array]
) -> tuple[tuple[TensorSpec, ...], list[str]]:
    """Return the user inputs, and the names of all others in order."""
    user: list[TensorSpec] = []
    found: list[str] = []
    for node in inputs:
        spec = TensorSpec.of_node(node, where)
        array = roles.get(spec.name)
        if array is not None:
            if not spec.fits(array.dtype, array.shape):
                raise model_mismatch(
                    where,
                    f"'{spec.name}' is {spec} in the model, and {array.dtype}{list(array.shape)} "
                    "in the checkpoint",
                )
            found.append(spec.name)
        elif found or spec.name.endswith(BUFFER_SUFFIX):
            # User inputs come first: this is a parameter that the checkpoint does not have.
            raise model_mismatch(
                where, f"its input '{spec.name}' belongs to no parameter of the checkpoint"
            )
        else:
            user.append(spec)
    return tuple(user), found


def _owner(
    name: str, trainable: Mapping[str, Array], frozen: Mapping[str, Array]
) -> tuple[str, str | None]:
    """Return the parameter that an output belongs to, and the suffix that says how."""
    for suffix, owners in ((GRADIENT_SUFFIX, trainable), (UPDATE_SUFFIX, frozen)):
        owner = name.removesuffix(suffix)
        if owner != name and owner in owners:
            return owner, suffix
    return name, None


def model_mismatch(where: str, reason: str) -> OdtpackError:
    """Return the error for a model that contradicts the checkpoint."""
    return OdtpackError(
        "model-mismatch",
        f"The model does not go with the checkpoint: {reason}.",
        where=where,
        hint="use the models and the checkpoint of one package, written by one odtpack build; "
        "after an update take the trained parameters over with carry_over (odtpack carry-over)",
    )


# What a step graph takes and gives: a training graph that updates the parameters itself.

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepSignature:
    """The inputs and outputs of a step graph, by role."""

    graph: GraphSignature  # what it has in common with a training graph; it has no gradients
    # Shape of the new value of each trainable parameter and of each vector of the optimizer's
    # state, by the name of the input, whose memory it may take. It may cut what it updates into
    # parts: only the number of elements is that of the input.
    updates: Mapping[str, Shape]
    state: Mapping[str, Shape]  # shape of the inputs with the optimizer's state, by name
    groups: int  # number of parameter groups, each with a learning rate
    kept: int  # length of the output that says which trainable parameters kept their values

    @classmethod
    def read(
        cls,
        where: str,
        inputs: Iterable[Any],
        outputs: Iterable[Any],
        trainable: Mapping[str, Array],
        frozen: Mapping[str, Array],
    ) -> StepSignature:
        """Classify a graph's names: takes and raises what :meth:`GraphSignature.read` does."""
        nodes = {node.name: node for node in inputs}
        given = {node.name: node for node in outputs if not node.name.startswith(ORDER_PREFIX)}
        updated = {
            name.removesuffix(UPDATE_SUFFIX): TensorSpec.of_node(node, where)
            for name, node in given.items()
            if name.endswith(UPDATE_SUFFIX) and name.removesuffix(UPDATE_SUFFIX) not in frozen
        }
        taken = {name: nodes.get(name) for name in (*updated, RATE_NAME, STEP_NAME)}
        specs: dict[str, TensorSpec] = {}
        for name, node in taken.items():
            if node is None:
                raise model_mismatch(where, f"it has no input '{name}'")
            specs[name] = TensorSpec.of_node(node, where)
        rate, step = specs[RATE_NAME], specs[STEP_NAME]
        groups = rate.shape[0] if len(rate.shape) == 1 else None
        if rate.dtype != np.float32 or not isinstance(groups, int) or groups < 1:
            raise model_mismatch(where, f"its input '{RATE_NAME}' is {rate}")
        if step.dtype != np.int64 or step.shape != (1,):
            raise model_mismatch(where, f"its input '{STEP_NAME}' is {step}")
        kept = given.pop(KEPT_NAME, None)
        if kept is None:
            raise model_mismatch(where, f"it has no output '{KEPT_NAME}'")
        kept_spec = TensorSpec.of_node(kept, where)
        if kept_spec.dtype != np.bool_ or kept_spec.shape != (len(trainable),):
            raise model_mismatch(where, f"its output '{KEPT_NAME}' is {kept_spec}")
        for name, spec in updated.items():
            sizes = [_size(each) for each in (spec, specs[name])]
            if None in sizes or sizes[0] != sizes[1] or spec.dtype != specs[name].dtype:
                raise model_mismatch(where, f"its input '{name}' and its update differ")
        apart = {RATE_NAME, STEP_NAME, *(name for name in updated if name not in trainable)}
        graph = GraphSignature.read(
            where,
            [node for name, node in nodes.items() if name not in apart],
            [node for name, node in given.items()
             if name.removesuffix(UPDATE_SUFFIX) not in updated],
            trainable,
            frozen,
        )  # fmt: skip
        for name in trainable:
            if name in graph.parameters and name not in updated:
                raise model_mismatch(where, f"it does not update '{name}', which is trainable")
        return cls(
            graph,
            {name: _shape(spec) for name, spec in updated.items()},
            {name: _shape(specs[name]) for name in updated if name not in trainable},
            groups,
            len(trainable),
        )


def _shape(spec: TensorSpec) -> Shape:
    return tuple(dim for dim in spec.shape if isinstance(dim, int))


def _size(spec: TensorSpec) -> int | None:
    """Number of elements, if it is fixed."""
    shape = _shape(spec)
    return math.prod(shape) if len(shape) == len(spec.shape) else None
