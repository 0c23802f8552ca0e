"""Finds what two files have in common: ranges of one that occur, moved or not, in the other.

Hashes of blocks of the old file are looked up at every offset of the new one, with the rolling
polynomial hash of Karp and Rabin modulo 2^64; every match is compared byte by byte and then
extended both ways. Time and memory are linear in the sizes of the files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]

_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
_LEAST_BLOCK = 32
_MOST_BLOCKS = 2**18
_SEGMENT = 2**20
_SEEN_BITS = 22
_SEEN_SHIFT = np.uint64(64 - _SEEN_BITS)
_PORTION = 2**12
_COMPARED = 2**16


@dataclass(frozen=True, slots=True)
class Step:
    """A range of the old file, then bytes of the new one that follow it.

    Attributes:
        offset: Where the range begins in the old file.
        length: Bytes of the range; may be 0.
        fresh_from: Where the bytes after it begin in the new file.
        fresh_to: Where they end.
    """

    offset: int
    length: int
    fresh_from: int
    fresh_to: int


def steps(old: Bytes, new: Bytes) -> Iterator[Step]:
    """Yield the steps that make the new file from the old one, in order.

    Args:
        old: Bytes of the old file.
        new: Bytes of the new file.
    """
    offset = length = at = 0
    for start, source, matched in _matches(old, new):
        if length or start:
            yield Step(offset, length, at, start)
        offset, length, at = source, matched, start + matched
    if length or len(new):
        yield Step(offset, length, at, len(new))


def _matches(old: Bytes, new: Bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (offset in new, offset in old, length), in order and without overlap."""
    block = _LEAST_BLOCK
    while len(old) // block > _MOST_BLOCKS:
        block *= 2
    if min(len(old), len(new)) < block:
        return
    index: _Index | None = None
    begin = done = shift = 0
    while begin + block <= len(new):
        # What lies as far from its old place as the last match is likeliest to go on: it costs
        # a comparison, and all else a search.
        if _same(old, begin + shift, new, begin, block):
            length = _common(old[begin + shift :], new[begin:])
            yield begin, begin + shift, length
            begin = done = begin + length
            continue
        index = index or _Index(old, block)
        segment = new[begin : begin + _SEGMENT + block - 1]
        for at, source in index.candidates(segment):
            at += begin  # noqa: PLW2901
            if at < done:
                continue
            for place in (at + shift, source):
                if _same(old, place, new, at, block):
                    back = _common(old[:place][::-1], new[done:at][::-1])
                    ahead = _common(old[place + block :], new[at + block :])
                    yield at - back, place - back, back + block + ahead
                    done, shift = at + block + ahead, place - at
                    break
            if done >= begin + _SEGMENT:
                break
        begin = max(done, begin + _SEGMENT)


class _Index:
    """Finds blocks of the old file by their hash."""

    def __init__(self, old: Bytes, block: int) -> None:
        self._block = block
        self._powers = _powers(_BASE, _SEGMENT + block)
        self._inverse = _powers(pow(_BASE, -1, 2**64), _SEGMENT)
        count = len(old) // block
        hashes = np.empty(count, np.uint64)
        rows = max(_SEGMENT // block, 1)
        for begin in range(0, count, rows):
            end = min(begin + rows, count)
            part = old[begin * block : end * block].reshape(-1, block).astype(np.uint64)
            part *= self._powers[:block]
            hashes[begin:end] = part.sum(axis=1, dtype=np.uint64)
        self._hashes, first = np.unique(hashes, return_index=True)
        self._offsets = first * block
        # Most windows are not a block: their first bits show it without a search.
        self._seen = np.zeros(2**_SEEN_BITS, np.bool_)
        self._seen[self._hashes >> _SEEN_SHIFT] = True

    def candidates(self, segment: Bytes) -> Iterator[tuple[int, int]]:
        """Yield (offset in the segment, offset of a block in the old file) of equal hashes."""
        sums = np.zeros(len(segment) + 1, np.uint64)
        np.cumsum(segment * self._powers[: len(segment)], out=sums[1:])
        window: Words = sums[self._block :] - sums[: -self._block]
        window *= self._inverse[: len(window)]
        places = np.flatnonzero(self._seen[window >> _SEEN_SHIFT])
        found = np.searchsorted(self._hashes, window[places])
        found = np.minimum(found, len(self._hashes) - 1)
        equal = self._hashes[found] == window[places]
        places, sources = places[equal], self._offsets[found[equal]]
        for start in range(0, len(places), _PORTION):
            portion = slice(start, start + _PORTION)
            yield from zip(places[portion].tolist(), sources[portion].tolist(), strict=True)


def _powers(base: int, count: int) -> Words:
    powers = np.full(count, base, np.uint64)
    powers[:1] = 1
    return np.cumprod(powers, dtype=np.uint64)


def _same(old: Bytes, source: int, new: Bytes, at: int, size: int) -> bool:
    if not 0 <= source <= len(old) - size:
        return False
    return bool(np.array_equal(old[source : source + size], new[at : at + size]))


def _common(first: Bytes, second: Bytes) -> int:
    """Length of the common start of two arrays."""
    end = min(len(first), len(second))
    size = 64
    at = 0
    while at < end:
        stop = min(at + size, end)
        different = first[at:stop] != second[at:stop]
        if different.any():
            return at + int(different.argmax())
        at, size = stop, min(size * 4, _COMPARED)
    return end
