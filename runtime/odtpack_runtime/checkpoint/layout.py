"""Where every parameter lies inside one contiguous buffer.

Trainable parameters lie in one buffer of float32, or of float64, in the order
of the training model's inputs; their gradients and each of the optimizer's
moments lie in buffers of the same layout, so that one offset serves all of them
and the optimizer may run over the whole vector without knowing its parts.
Frozen parameters and state (running statistics) each have memory of their own.

Every tensor starts at a multiple of 64 bytes: one cache line, and the widest
vector load. The gaps between tensors hold zeros and stay zero, because every
optimizer maps a zero parameter with a zero gradient and zero moments to zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

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
            offset = _round_up(offset + slot.nbytes)
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


def _round_up(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
