"""The split and the order of samples."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odtpack_runtime import OdtpackError
from odtpack_runtime.signature import TensorSpec
from odtpack_runtime.simulator.schedule import Schedule, make_schedule

FREE = [TensorSpec("input", np.dtype(np.float32), ("batch", 3))]
FIXED = [TensorSpec("input", np.dtype(np.float32), (4, 3))]


@given(
    samples=st.integers(1, 300),
    batch=st.integers(1, 50),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 10),
    full=st.booleans(),
)
def test_every_sample_has_its_place(
    samples: int, batch: int, epochs: int, seed: int, full: bool
) -> None:
    schedule = Schedule(samples, batch, epochs, seed, full)
    held_out = [i for b in schedule.held_out_batches() for i in b]
    orders = []
    for epoch in range(epochs):
        batches = list(schedule.training_batches(epoch))
        assert len(batches) == schedule.steps_per_epoch
        assert all(len(b) <= schedule.largest_batch for b in batches)
        assert all(len(b) == batch for b in batches[: None if full else -1])
        orders.append([i for b in batches for i in b])
    assert schedule.steps == epochs * schedule.steps_per_epoch
    if full:
        assert set(orders[0]).isdisjoint(held_out)
    else:
        assert len(held_out) == schedule.held_out_samples == samples // 5
        assert all(sorted(order + held_out) == list(range(samples)) for order in orders)


def test_seed_decides() -> None:
    one, same, other = (
        [b.tolist() for b in Schedule(100, 10, 2, seed).training_batches(1)] for seed in (1, 1, 2)
    )
    assert one == same != other
    epochs = [[b.tolist() for b in Schedule(100, 10, 2, 1).training_batches(e)] for e in (0, 1)]
    assert epochs[0] != epochs[1]
    one, two = (sorted(chain.from_iterable(batches)) for batches in epochs)
    assert one == two


def test_fixed_batch_size() -> None:
    schedule = make_schedule(FIXED, 14, batch_size=4, epochs=1, seed=0)
    assert schedule.full_batches
    assert [len(b) for b in schedule.training_batches(0)] == [4, 4, 4]
    with pytest.raises(OdtpackError, match="batches of 4 samples only"):
        make_schedule(FIXED, 14, batch_size=8, epochs=1, seed=0)
    with pytest.raises(OdtpackError, match="have 3 samples, and training needs at least 5"):
        make_schedule(FIXED, 3, batch_size=4, epochs=1, seed=0)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"batch_size": 0}, "bad-batch-size"),
        ({"epochs": 0}, "bad-epochs"),
        ({"seed": -1}, "bad-seed"),
        ({"epochs": True}, "bad-epochs"),
        ({"batch_size": 2**31}, "bad-batch-size"),
    ],
)
def test_bad_parameters(changes: dict[str, int], code: str) -> None:
    with pytest.raises(OdtpackError) as caught:
        make_schedule(FREE, 10, **({"batch_size": 2, "epochs": 1, "seed": 0} | changes))
    assert caught.value.code == code
