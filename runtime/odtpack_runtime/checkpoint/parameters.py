"""Parameters of a checkpoint, and their layout in flat vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from odtpack_runtime.errors import OdtpackError, UnknownKeyError

# Where every parameter lies inside one contiguous buffer.
#
# Trainable parameters lie in one buffer of float32, or of float64, in the order
# of the training model's inputs; their gradients and each of the optimizer's
# moments lie in buffers of the same layout, so that one offset serves all of them
# and the optimizer may run over the whole vector without knowing its parts.
# Frozen parameters and state (running statistics) each have memory of their own.
#
# Every tensor starts at a multiple of 64 bytes: one cache line, and the widest
# vector load. The gaps between tensors hold zeros and stay zero, because every
# optimizer maps a zero parameter with a zero gradient and zero moments to zero.

ALIGNMENT = 64
"""Bytes; every buffer, and every tensor within one, starts at a multiple of it."""

CHUNK_ELEMENTS = 128 * 1024
"""Elements of the flat vectors per run of an optimizer model that takes them in chunks.

Small enough that the vectors of a run, half a MiB each, stay in a processor's
caches, large enough that starting a run costs little and that two threads share
the work. AdamW over 20 million parameters takes half the time of one run over
the whole; chunks of 64 K or 256 K differ by a few percent either way.
"""

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one tensor: ``offset`` and ``nbytes`` in bytes from the buffer's start."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes, without the gap that follows."""
        return self.size * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Layout:
    """Slots in ascending order of offset, and the size in bytes of the buffer they need."""

    slots: tuple[Slot, ...]
    nbytes: int

    @classmethod
    def pack(cls, tensors: Iterable[tuple[str, tuple[int, ...], np.dtype[Any]]]) -> Layout:
        """Lay tensors, given as (name, shape, dtype), one after the other."""
        slots: list[Slot] = []
        offset = 0
        for name, shape, dtype in tensors:
            slot = Slot(name, offset, shape, dtype)
            slots.append(slot)
            offset = round_up(offset + slot.nbytes)
        return cls(tuple(slots), offset)


def allocate(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return ``nbytes`` zero bytes, as a uint8 vector that starts at a multiple of 64."""
    # Zeroed lazily by the system: pages that are not touched are never resident.
    memory = np.zeros(nbytes + ALIGNMENT - 1, np.uint8)
    start = -address(memory) % ALIGNMENT
    return memory[start : start + nbytes]


def view(memory: npt.NDArray[np.uint8], slot: Slot) -> Array:
    """Return the tensor at ``slot``: an array that shares ``memory``."""
    part = memory[slot.offset : slot.offset + slot.nbytes]
    return part.view(slot.dtype).reshape(slot.shape)


def address(array: Array) -> int:
    """Return the address of an array's first byte."""
    return int(array.ctypes.data)


def round_up(offset: int, alignment: int = ALIGNMENT) -> int:
    """Return the first multiple of an alignment from an offset on."""
    return -(-offset // alignment) * alignment


# The parameters of a state: named tensors whose memory training works on.


class Parameter:
    """One named tensor of the state.

    ``data`` and ``grad`` are views of the memory that training works on: they
    show the values of the moment, and writing to ``data`` in place changes the
    parameter. A Module moves the parameters when it is made; views taken before
    that keep the old values. Of a Module on another device they show the values of the moment
    when they were asked for, and what is written to them counts until the next step.
    """

    __slots__ = ("_asked", "_data", "_grad", "_name", "_requires_grad")

    def __init__(self, name: str, data: Array, *, requires_grad: bool) -> None:
        self._name = name
        self._data = data
        self._grad: Array | None = None
        self._asked: Callable[[], None] | None = None
        self._requires_grad = requires_grad

    @property
    def name(self) -> str:
        """Name in the model."""
        return self._name

    @property
    def requires_grad(self) -> bool:
        """True if training changes the parameter by its gradient."""
        return self._requires_grad

    @property
    def data(self) -> Array:
        """The value: a live array of the parameter's shape and dtype.

        Setting it copies the new value; shape and dtype must be the same.

        Raises:
            OdtpackError: ``parameter-shape`` or ``parameter-type`` on setting.
        """
        if self._asked is not None:
            self._asked()
        return self._data

    @data.setter
    def data(self, value: npt.ArrayLike) -> None:
        array = np.asarray(value)
        if array.shape != self._data.shape:
            raise OdtpackError(
                "parameter-shape",
                f"Parameter '{self._name}' has the shape {list(self._data.shape)}, "
                f"and the new value {list(array.shape)}.",
            )
        if array.dtype != self._data.dtype:
            raise OdtpackError(
                "parameter-type",
                f"Parameter '{self._name}' has elements of {self._data.dtype}, "
                f"and the new value of {array.dtype}.",
                hint=f"convert it with .astype('{self._data.dtype}')",
            )
        np.copyto(self.data, array)

    @property
    def grad(self) -> Array | None:
        """The accumulated gradient, live; None if frozen or as long as no Module was made."""
        if self._asked is not None:
            self._asked()
        return self._grad

    def watch(self, asked: Callable[[], None] | None) -> None:
        """Call a function before anyone gets value or gradient. For Module's use."""
        self._asked = asked

    def place(self, data: Array, grad: Array | None, *, keep: bool = True) -> None:
        """Move the value into ``data``; ``grad`` becomes the gradient. For Module's use.

        With ``keep`` false, of a nominal state, there is no value to move.
        """
        if keep:
            np.copyto(data, self._data)
        self._data = data
        self._grad = grad

    def __repr__(self) -> str:
        kind = "trainable" if self._requires_grad else "frozen"
        return f"Parameter('{self._name}', {self._data.dtype}{list(self._data.shape)}, {kind})"


class Parameters:
    """The parameters of a state by name. Iterating yields (name, Parameter), sorted by name.

    Attributes:
        items: The parameters by name, of a nominal state too.
        nominal: True as long as the state has names without values; only counting and
            looking for names work then.
    """

    def __init__(self, parameters: Iterable[Parameter], *, nominal: bool) -> None:
        self.items = {parameter.name: parameter for parameter in parameters}
        self.nominal = nominal

    def __getitem__(self, name: str) -> Parameter:
        self._require_values()
        try:
            return self.items[name]
        except (KeyError, TypeError):
            what = f"The state has no parameter {name!r}."
            hint = f"it has {', '.join(sorted(self.items)) or 'none'}"
            raise UnknownKeyError("unknown-parameter", what, hint=hint) from None

    def __setitem__(self, name: str, value: npt.ArrayLike) -> None:
        """Set a parameter's value; see :attr:`Parameter.data`."""
        self[name].data = value

    def __contains__(self, name: object) -> bool:
        return name in self.items

    def __iter__(self) -> Iterator[tuple[str, Parameter]]:
        self._require_values()
        return iter(sorted(self.items.items()))

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        return f"Parameters({', '.join(sorted(self.items))})"

    def _require_values(self) -> None:
        if self.nominal:
            raise nominal_error("its parameters have no values")


def nominal_error(reason: str) -> OdtpackError:
    """Return the error for a use of a nominal state that needs values."""
    return OdtpackError("nominal-state", f"The checkpoint is nominal: {reason}.")
