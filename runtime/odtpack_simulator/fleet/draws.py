"""Random numbers without state: functions of a seed, a purpose and the number of a client."""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.uint64]
Uniforms = npt.NDArray[np.float64]


@functools.lru_cache(maxsize=4096)
def _key(words: tuple[int, ...]) -> np.uint64:
    return np.uint64(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])


def uniforms(words: tuple[int, ...], numbers: npt.NDArray[np.int64]) -> Uniforms:
    """Numbers from 0 to below 1, one for each client.

    The mixing function is that of SplitMix64 (Steele, Lea and Flood 2014).

    Args:
        words: Seed and purpose.
        numbers: Numbers of the clients.
    """
    with np.errstate(over="ignore"):
        x = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x += _key(words)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def uniform(words: tuple[int, ...], number: int) -> float:
    """The same for one client."""
    return float(uniforms(words, np.array([number], np.int64))[0])


def shuffled(words: tuple[int, ...], start: int, stop: int, count: int) -> npt.NDArray[np.int64]:
    """Places ``start`` to ``stop`` of an order of the numbers from 0 to below ``count``.

    No memory but that of the answer: number ``k`` of the order is ``(a k + b) mod count``, where
    a has no factor in common with the count. Clients are derived from their numbers by a mixing
    function, so that such a set of them is as good as any.
    """
    key = int(_key(words))
    step = key % count or 1
    while math.gcd(step, count) != 1:
        step += 1
    offset = (key >> 32) % count
    # Below 2**60: counts are at most 10**9.
    places = np.arange(start, min(stop, count), dtype=np.int64)
    return (places * (step % count) + offset) % count
