"""Ranges that two files have in common."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odtpack.update import binary_diff
from odtpack.update.binary_diff import steps


def replay(old: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, int, int]:
    """What the steps make, how many bytes of it are new, and how many steps there are."""
    parts, fresh, count = [np.empty(0, np.uint8)], 0, 0
    for step in steps(old, new):
        assert step.length + step.fresh_to - step.fresh_from > 0
        assert 0 <= step.offset <= step.offset + step.length <= len(old)
        parts += [
            old[step.offset : step.offset + step.length],
            new[step.fresh_from : step.fresh_to],
        ]
        fresh += step.fresh_to - step.fresh_from
        count += 1
    return np.concatenate(parts), fresh, count


def noise(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_steps_make_the_new_file(data: st.DataObject) -> None:
    """Pieces of the old file in any order, runs of zeros and new bytes between them."""
    old = noise(data.draw(st.integers(0, 700)), 1)
    if data.draw(st.booleans()) and len(old):
        old[: len(old) // 2] = 0
    pieces = []
    for _ in range(data.draw(st.integers(0, 6))):
        kind = data.draw(st.sampled_from(["old", "zeros", "noise"]))
        size = data.draw(st.integers(0, 300))
        start = data.draw(st.integers(0, len(old)))
        part = {"old": old[start : start + size], "zeros": np.zeros(size, np.uint8)}
        pieces.append(part.get(kind, noise(size, size)))
    new = np.concatenate([np.empty(0, np.uint8), *pieces])
    made, _, _ = replay(old, new)
    np.testing.assert_array_equal(made, new)


@pytest.mark.parametrize("segment", [2**20, 1000])
def test_what_moved_is_found(monkeypatch: pytest.MonkeyPatch, segment: int) -> None:
    monkeypatch.setattr(binary_diff, "_SEGMENT", segment)
    old = noise(50_000)
    new = np.concatenate([noise(77, 2), old[20_001:], noise(13, 3), old[:20_001]])
    made, fresh, count = replay(old, new)
    np.testing.assert_array_equal(made, new)
    assert fresh <= 77 + 13  # a new byte may happen to be the one that stood there
    assert count == 3


def test_a_changed_tensor_costs_its_own_bytes() -> None:
    old = noise(400_000)
    new = old.copy()
    new[100_000:104_000] = noise(4_000, 5)
    new[300_000] ^= 1
    _, fresh, count = replay(old, new)
    assert fresh <= 4_001
    assert count == 3


def test_large_files_have_larger_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binary_diff, "_MOST_BLOCKS", 64)
    old = noise(64 * 1024)
    new = np.concatenate([old[:30_000], noise(10, 2), old[30_000:]])
    made, fresh, count = replay(old, new)
    np.testing.assert_array_equal(made, new)
    assert (fresh, count) == (10, 2)


def test_zeros_stay_cheap() -> None:
    """Zeros match everywhere: the range that goes on where the last one ended is taken."""
    old = np.zeros(300_000, np.uint8)
    old[:1000] = noise(1000)
    new = old.copy()
    new[150_000] = 1
    _, fresh, count = replay(old, new)
    assert (fresh, count) == (1, 2)
