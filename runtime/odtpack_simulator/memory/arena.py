"""ONNX Runtime's arena: which pages of it a training touches.

A reimplementation of its best-fit allocator with coalescing (``BFCArena``, after TensorFlow's)
with the way to grow that it has by default. Memory comes from the system in regions, each twice
as large as the one before, and never goes back while the arena exists. A request

1. is rounded up to :data:`UNIT` bytes;
2. takes the smallest free chunk that is large enough, of several the one at the lowest address,
   searched bin by bin: a bin holds chunks of one power of two;
3. splits that chunk if it is at least twice as large, or :attr:`Arena.max_dead_bytes` larger;
4. opens a new region if there is no such chunk.

Linux places a region below those before it, which decides between chunks of one size. What is
freed is joined with free neighbours in its region. A page of a region counts once it was part of
a chunk: the system gives memory when it is written to. For every :data:`UNIT` bytes of a region
the arena keeps an index of :data:`_HANDLE_BYTES`, written when it is opened.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from odtpack_runtime.package.manifest_device import SessionInfo
from odtpack_simulator.memory.process_memory import PAGE

UNIT: Final = 256
FIRST_REGION_BYTES: Final = 2**20
_LARGEST_GROWTH: Final = 2**30
MAX_DEAD_BYTES: Final = 128 * 2**20
_HANDLE_BYTES: Final = 8
_TOP: Final = 2**62


@dataclass(slots=True, eq=False)
class Chunk:
    """A piece of a region; its neighbours touch it."""

    region: _Region
    start: int
    size: int
    before: Chunk | None = None
    after: Chunk | None = None
    free: bool = False

    @property
    def key(self) -> tuple[int, int]:
        """Its place in the order in which free chunks are tried: by size, then by address."""
        return self.size, self.region.base + self.start


@dataclass(slots=True, eq=False)
class _Region:
    """Memory from the system, with the pages of it that were touched."""

    base: int
    touched: npt.NDArray[np.bool_]


@dataclass(slots=True)
class Arena:
    """An arena of one process.

    Attributes:
        growth: Bytes of the next region.
        max_dead_bytes: What is left of a chunk that is larger than what is asked for.
        touched: Bytes of pages that were part of a chunk so far.
        reserved: Bytes of all regions.
    """

    growth: int = FIRST_REGION_BYTES
    max_dead_bytes: int = MAX_DEAD_BYTES
    touched: int = 0
    reserved: int = 0
    _keys: list[tuple[int, int]] = field(default_factory=list)
    _free: dict[tuple[int, int], Chunk] = field(default_factory=dict)

    @classmethod
    def of(cls, session: SessionInfo | None) -> Arena:
        """The arena that the sessions of a package share, by what its manifest says."""
        if session is None:
            return cls()
        first = session.initial_chunk_size_bytes or FIRST_REGION_BYTES
        return cls(_rounded(first), session.max_dead_bytes_per_chunk or MAX_DEAD_BYTES)

    @property
    def resident(self) -> int:
        """Bytes that the arena holds of the system's memory, its index included."""
        return self.touched + self.reserved // UNIT * _HANDLE_BYTES

    def allocate(self, nbytes: int) -> Chunk | None:
        """Take memory that is written to; None for none."""
        if nbytes <= 0:
            return None
        size = _rounded(nbytes)
        chunk = self._find(size) or self._open_region(size)
        if chunk.size >= 2 * size or chunk.size - size >= self.max_dead_bytes:
            self._split(chunk, size)
        chunk.free = False
        self._touch(chunk, nbytes)
        return chunk

    def release(self, chunk: Chunk | None) -> None:
        """Free memory."""
        if chunk is None:
            return
        for other, first in ((chunk.after, False), (chunk.before, True)):
            if other is not None and other.free:
                self._unlist(other)
                chunk = _joined(other, chunk) if first else _joined(chunk, other)
        self._list(chunk)

    def _find(self, size: int) -> Chunk | None:
        # Bins are in the order of sizes, too: the first that fits is the smallest that fits.
        at = bisect.bisect_left(self._keys, (size, 0))
        if at == len(self._keys):
            return None
        chunk = self._free[self._keys[at]]
        self._unlist(chunk)
        return chunk

    def _open_region(self, size: int) -> Chunk:
        grown = False
        while size > self.growth:
            self.growth *= 2
            grown = True
        length = self.growth
        if not grown:
            self.growth = min(2 * self.growth, _LARGEST_GROWTH)
        self.reserved += length
        region = _Region(_TOP - self.reserved, np.zeros(-(-length // PAGE), np.bool_))
        return Chunk(region, 0, length)

    def _split(self, chunk: Chunk, size: int) -> None:
        rest = Chunk(chunk.region, chunk.start + size, chunk.size - size, chunk, chunk.after)
        if chunk.after is not None:
            chunk.after.before = rest
        chunk.after, chunk.size = rest, size
        self._list(rest)

    def _list(self, chunk: Chunk) -> None:
        chunk.free = True
        bisect.insort(self._keys, chunk.key)
        self._free[chunk.key] = chunk

    def _unlist(self, chunk: Chunk) -> None:
        key = chunk.key
        del self._keys[bisect.bisect_left(self._keys, key)], self._free[key]
        chunk.free = False

    def _touch(self, chunk: Chunk, nbytes: int) -> None:
        pages = chunk.region.touched[chunk.start // PAGE : -(-(chunk.start + nbytes) // PAGE)]
        fresh = pages.size - int(np.count_nonzero(pages))
        if fresh:
            pages[:] = True
            self.touched += fresh * PAGE


def _rounded(nbytes: int) -> int:
    return -(-nbytes // UNIT) * UNIT


def _joined(chunk: Chunk, following: Chunk) -> Chunk:
    chunk.size += following.size
    chunk.after = following.after
    if chunk.after is not None:
        chunk.after.before = chunk
    return chunk
