"""All parameters and gradients as flat vectors, and checks of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from odtpack_runtime.checkpoint.parameters import Array, allocate, view
from odtpack_runtime.checkpoint.state import FlatState
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.session.device import Device

# Parameters as one vector, without gaps: what devices and a server exchange.


def gather(arrays: Sequence[Array], dtype: np.dtype[Any]) -> Array:
    """Return a copy of parameters as one vector of ``dtype``."""
    for array in arrays:
        _require_fits(array, dtype)
    size = sum(array.size for array in arrays)
    vector = allocate(size * dtype.itemsize).view(dtype)
    at = 0
    for array in arrays:
        vector[at : at + array.size] = array.reshape(-1)
        at += array.size
    return vector


def scatter(
    vector: Any, arrays: Sequence[Array], dtype: np.dtype[Any], trainable_only: bool
) -> None:
    """Set parameters from one vector, an array or OrtValue of ``dtype``."""
    # Raises OdtpackError: `buffer-type`, `buffer-size` or `parameter-type`. Nothing is changed
    # then.
    if not isinstance(vector, np.ndarray) and hasattr(vector, "numpy"):
        vector = vector.numpy()
    if not isinstance(vector, np.ndarray) or vector.dtype != dtype:
        what = f"Parameters are set from an OrtValue or an array of {dtype}."
        raise OdtpackError("buffer-type", what)
    size = sum(array.size for array in arrays)
    if vector.size != size:
        raise OdtpackError(
            "buffer-size",
            f"The buffer holds {vector.size} elements, and the parameters have {size}.",
            hint=f"pass trainable_only={not trainable_only} if it holds "
            + ("all parameters" if trainable_only else "trainable parameters only"),
        )
    for array in arrays:
        _require_fits(array, dtype)
    values = vector.reshape(-1)
    at = 0
    for array in arrays:
        part = values[at : at + array.size].reshape(array.shape)
        np.copyto(array, part, casting="same_kind")
        at += array.size


def _require_fits(array: Array, dtype: np.dtype[Any]) -> None:
    if array.dtype.kind != "f" or array.dtype.itemsize > dtype.itemsize:
        raise OdtpackError(
            "parameter-type",
            f"A parameter has elements of {array.dtype}, and a flat buffer is {dtype} throughout.",
            hint="pass trainable_only=True",
        )


# The norm of all gradients together.

_NORM_ELEMENTS = 8 * 1024
"""Elements whose squares are summed at once: few enough for a cache, and for one thread (OpenBLAS
takes several from 10,000 on, which wait for each other): the sum is the same in every run."""


def gradient_norm(gradients: npt.NDArray[Any]) -> float:
    """Return the L2 norm of a flat vector, which an optimizer model that clips by it takes."""
    # Squares and sum are float64, so that every language has the same float32, whatever the order
    # in which it adds.
    # `gradients`: all gradients, float32 or float64; the gaps between them are zero.
    wide = np.empty(min(gradients.size, _NORM_ELEMENTS))
    total = 0.0
    for start in range(0, gradients.size, _NORM_ELEMENTS):
        part = gradients[start : start + _NORM_ELEMENTS]
        values = wide[: part.size]
        np.copyto(values, part)
        total += float(np.dot(values, values))
    return math.sqrt(total)


# Steps whose loss or gradients are not finite: seen, and undone.
#
# One NaN in a sample would make every parameter NaN, and every loss after it.

NotFinitePolicy = Literal["skip", "stop"]
NotFiniteCode = Literal["loss-not-finite", "gradient-not-finite"]

MOST_NAMES = 10
"""Parameters that a report names."""

_CHUNK = 1 << 16
"""Elements that are looked at at once: few enough for a cache."""


@dataclass(frozen=True, slots=True)
class NotFinite:
    """A step that was not made, or not for some parameters."""

    code: NotFiniteCode  # `loss-not-finite`, or `gradient-not-finite` with a finite loss
    step: int  # the optimizer step that it was, or was to be a part of, from 1
    # the first parameters whose gradients are not finite; none if the loss is not
    parameters: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.code == "loss-not-finite":
            return f"step {self.step:,}: the loss is not finite"
        more = ", ..." if len(self.parameters) == MOST_NAMES else ""
        return f"step {self.step:,}: not finite: gradient of {', '.join(self.parameters)}{more}"

    def raise_error(self) -> NoReturn:
        """Raise it as an error."""
        what = f"The step was undone where it was not finite ({self})."
        hint = "look for NaN in the batch; where there is none, lower the learning rate"
        raise OdtpackError(self.code, what, hint=hint)


def all_finite(vector: npt.NDArray[Any]) -> bool:
    """Whether all elements of a vector are finite, with one pass over it."""
    return all(
        np.isfinite(vector[start : start + _CHUNK]).all() for start in range(0, len(vector), _CHUNK)
    )


class Undo:
    """Keeps what a step of the training model changes, and puts it back."""

    # `statistics`: what a step updates without a gradient, as running statistics, by name.

    def __init__(
        self, flat: FlatState, statistics: Mapping[str, Array], device: Device | None = None
    ) -> None:
        self._flat = flat
        self._device = device
        self._slots = {slot.name: slot for slot in flat.trainable.slots if slot.size}
        self._gradients = flat.gradients.view(flat.dtype)
        self._kept_gradients: Array | None = None
        self._statistics = [(array, np.empty_like(array)) for array in statistics.values()]

    def keep(self, *, gradients: bool) -> None:
        """Copy what the next step changes."""
        # `gradients`: whether it adds to gradients; else it replaces them.
        if self._device is not None:
            self._device.keep(self._changed(gradients))
            return
        for array, kept in self._statistics:
            np.copyto(kept, array)
        if gradients:
            if self._kept_gradients is None:
                self._kept_gradients = np.empty_like(self._gradients)
            np.copyto(self._kept_gradients, self._gradients)

    def gradients(self) -> list[Array]:
        """The gradient of each parameter that has elements."""
        return [view(self._flat.gradients, slot) for slot in self._slots.values()]

    def _changed(self, gradients: bool) -> list[Array]:
        statistics = [array for array, _ in self._statistics]
        return [*statistics, *(self.gradients() if gradients else ())]

    def put_back(self, *, gradients: bool) -> None:
        """Undo the step; takes what :meth:`keep` was given."""
        if self._device is not None:
            self._device.put_back(self._changed(gradients))
            return
        for array, kept in self._statistics:
            np.copyto(array, kept)
        if gradients and self._kept_gradients is not None:
            np.copyto(self._gradients, self._kept_gradients)

    def clear_gradients(self) -> None:
        """Set the gradients to zero, which a step that was undone has written over."""
        self._gradients[:] = 0
        if self._device is not None:
            self._device.push(self.gradients())

    def problem(self, loss: object, step: int, order: Iterable[str]) -> NotFinite | None:
        """What is not finite after a step of the training model."""
        if not np.isfinite(loss).all():  # type: ignore[call-overload]
            return NotFinite("loss-not-finite", step)
        if self._device is not None:
            arrays = self.gradients()
            fine = np.isfinite(self._device.sums("ReduceL1", arrays)) if arrays else np.ones(0)
            if fine.all():
                return None
            known = dict(zip(self._slots, fine, strict=True))
            bad = [name for name in order if not known.get(name, True)]
        else:
            if all_finite(self._gradients):
                return None
            own = {name: view(self._flat.gradients, slot) for name, slot in self._slots.items()}
            bad = [name for name in order if name in own and not all_finite(own[name].reshape(-1))]
        return NotFinite("gradient-not-finite", step, tuple(bad[:MOST_NAMES]))
