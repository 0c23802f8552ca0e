"""What a graph takes and gives: tensor specifications, and the roles of a training graph's names.

A training graph is recognised by its names, which are a contract. Inputs, in
order: user inputs; every parameter; ``<p>_grad.accumulation.buffer`` for each
trainable parameter ``p``; ``lazy_reset_grad``. Outputs, in order: user outputs,
the loss first; ``<p>_grad.accumulation.out`` for each trainable ``p``;
``<s>.update.out`` for each state ``s`` that the step updates. An evaluation
graph has user inputs, parameters and user outputs.

A step graph updates trainable parameters as well. It has no gradients; its inputs
end in ``p.m`` for each trainable ``p`` and what the optimizer keeps of it,
``update.learning_rate`` and ``update.step``, its outputs in ``X.update.out`` for
each ``p`` and ``p.m``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from odtpack_runtime.checkpoint.layout import Array
from odtpack_runtime.errors import OdtpackError

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
COTANGENT_SUFFIX = ".cotangent"
"""Ends the name of the gradient of a value between two segments."""

Dim = int | str | None

_DTYPES: dict[str, np.dtype[Any]] = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(double)": np.dtype(np.float64),
    "tensor(float16)": np.dtype(np.float16),
    "tensor(int8)": np.dtype(np.int8),
    "tensor(int16)": np.dtype(np.int16),
    "tensor(int32)": np.dtype(np.int32),
    "tensor(int64)": np.dtype(np.int64),
    "tensor(uint8)": np.dtype(np.uint8),
    "tensor(uint16)": np.dtype(np.uint16),
    "tensor(uint32)": np.dtype(np.uint32),
    "tensor(uint64)": np.dtype(np.uint64),
    "tensor(bool)": np.dtype(np.bool_),
    "tensor(string)": np.dtype(object),
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, element type and shape of a graph input or output.

    Attributes:
        name: Name in the graph.
        dtype: Element type; ``object`` for text.
        shape: One entry per axis: its size, the name of a size that may vary but
            is the same wherever the name occurs, or None for any size. ONNX
            Runtime reports an unknown rank as a scalar, so an empty shape
            promises nothing.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[Dim, ...]

    @classmethod
    def of_node(cls, node: Any, where: str) -> TensorSpec:
        """Return the specification of a session's input or output.

        Raises:
            OdtpackError: ``unsupported-type`` if it is not a tensor of a type numpy has.
        """
        dtype = _DTYPES.get(node.type)
        if dtype is None:
            raise OdtpackError(
                "unsupported-type",
                f"'{node.name}' is a {node.type}, which numpy cannot hold.",
                where=where,
            )
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
    """Check tensors, given as (dtype, shape), against the user inputs they are meant for.

    Raises:
        OdtpackError: ``input-type`` or ``input-shape`` for a tensor that does
            not fit, ``input-sizes-differ`` if two inputs disagree about a named
            size, ``empty-batch`` if a size that may vary is 0.
    """
    sizes: dict[str, tuple[int, str]] = {}
    for spec, (dtype, shape) in zip(specs, tensors, strict=True):
        if dtype != spec.dtype:
            raise OdtpackError(
                "input-type",
                f"Input '{spec.name}' must be {spec}, and it has elements of {dtype}.",
                hint=f"convert it with .astype('{spec.dtype}')",
            )
        if not spec.fits(dtype, shape):
            raise OdtpackError(
                "input-shape",
                f"Input '{spec.name}' must be {spec}, and its shape is {list(shape)}.",
            )
        for dim, size in zip(spec.shape, shape, strict=bool(spec.shape)):
            if size == 0 and dim != 0:
                raise OdtpackError(
                    "empty-batch", f"Input '{spec.name}' is empty: its shape is {list(shape)}."
                )
            if isinstance(dim, str):
                known, owner = sizes.setdefault(dim, (size, spec.name))
                if size != known:
                    raise OdtpackError(
                        "input-sizes-differ",
                        f"'{dim}' is {known} in input '{owner}' and {size} in input '{spec.name}'.",
                    )


def check_labels(name: str, labels: Array, class_count: int, ignored: int | None = None) -> None:
    """Check that integer labels name existing classes.

    Args:
        name: Name of the input, for the message.
        labels: int64 labels of any shape.
        class_count: Number of classes; valid labels are 0 to ``class_count - 1``.
        ignored: A further label that is allowed: samples that do not count.

    Raises:
        OdtpackError: ``label-out-of-range``.
    """
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
            f"Input '{name}' holds the label {int(labels[index])} at [{place}], and the model's "
            f"{class_count} classes are numbered 0 to {class_count - 1}.",
        )


@dataclass(frozen=True, slots=True)
class GraphSignature:
    """The inputs and outputs of a training or evaluation graph, by role.

    Attributes:
        inputs: User inputs.
        parameters: Names of the parameters, in the order of the graph's inputs.
        outputs: User outputs.
        gradients: Names of the parameters whose gradient the graph accumulates.
        updates: Names of the state parameters that the graph updates.
    """

    inputs: tuple[TensorSpec, ...]
    parameters: tuple[str, ...]
    outputs: tuple[TensorSpec, ...]
    gradients: tuple[str, ...]
    updates: tuple[str, ...]

    @classmethod
    def read(
        cls,
        where: str,
        inputs: Iterable[Any],
        outputs: Iterable[Any],
        trainable: Mapping[str, Array],
        frozen: Mapping[str, Array],
    ) -> GraphSignature:
        """Classify a graph's names with the help of the parameters of a checkpoint.

        Args:
            where: Name of the model, for messages.
            inputs: The session's inputs (``onnxruntime.NodeArg``).
            outputs: The session's outputs.
            trainable: The checkpoint's trainable parameters.
            frozen: The checkpoint's other parameters.

        Raises:
            OdtpackError: ``model-mismatch`` if graph and checkpoint contradict
                each other, ``unsupported-type``.
        """
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
        hint="use the models and the checkpoint of one package, written by one odtpack build",
    )
