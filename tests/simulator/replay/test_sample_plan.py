"""The split and the order of samples."""

import itertools
from itertools import chain
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odtpack_runtime import OdtpackError
from odtpack_runtime.session.graph_signature import TensorSpec
from odtpack_simulator.replay.child.timing_run import whole_steps
from odtpack_simulator.replay.job import Job, SamplePlan, make_sample_plan
from odtpack_simulator.replay.replay import evenly_spaced
from tests.refused import refused

FREE = [TensorSpec("input", np.dtype(np.float32), ("batch", 3))]
FIXED = [TensorSpec("input", np.dtype(np.float32), (4, 3))]


@given(
    samples=st.integers(1, 300), batch=st.integers(1, 50), epochs=st.integers(1, 3),
    seed=st.integers(0, 10), full=st.booleans(), apart=st.sampled_from([0, 0, 1, 7]),
    holdout=st.sampled_from([0.2, 0.0, 0.5]),
)  # fmt: skip
def test_every_sample_has_its_place(samples, batch, epochs, seed, full, apart, holdout):
    samples += apart
    schedule = SamplePlan(samples, batch, epochs, seed, full, holdout=holdout, apart=apart)
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
        own = [*range(samples - apart, samples)]
        assert not apart or held_out == own
        assert len(held_out) == schedule.held_out_samples == (apart or int(samples * holdout))
        assert all(sorted(order + held_out) == list(range(samples)) for order in orders)


@pytest.mark.parametrize(
    ("batch", "accumulate", "pieces", "full"),
    [(8, 1, 1, False), (32, 16, 1, False), (32, 2, 1, False), (30, 4, 1, False), (30, 4, 1, True),
     (30, 9, 3, False), (200, 3, 2, False), (16, 3, 4, True)],
)  # fmt: skip
def test_the_largest_step_is_one_that_occurs(batch, accumulate, pieces, full):
    plan = SamplePlan(200, batch, 2, 1, full, accumulate, pieces)
    passes = [list(plan.training_steps(0, piece)) for piece in range(pieces)]
    made = [len(step) for steps in passes for step in steps]
    assert plan.step_samples == max(sum(map(len, step)) for steps in passes for step in steps)
    assert plan.mean_step == pytest.approx(sum(made) / len(made) / max(made))
    timed = itertools.islice(whole_steps(cast(Job, SimpleNamespace(schedule=plan))), 9)
    assert {sum(map(len, step)) for step in timed} == {plan.step_samples}


def test_seed_decides():
    one, same, other = (
        [b.tolist() for b in SamplePlan(100, 10, 2, seed).training_batches(1)] for seed in (1, 1, 2)
    )
    assert one == same != other
    epochs = [[b.tolist() for b in SamplePlan(100, 10, 2, 1).training_batches(e)] for e in (0, 1)]
    assert epochs[0] != epochs[1]
    one, two = (sorted(chain.from_iterable(batches)) for batches in epochs)
    assert one == two


@given(
    samples=st.integers(1, 200), batch=st.integers(1, 50), epochs=st.integers(1, 3),
    pieces=st.integers(1, 12), accumulate=st.integers(1, 3), full=st.booleans(),
)  # fmt: skip
def test_pieces_come_in_order(samples, batch, epochs, pieces, accumulate, full):
    schedule = SamplePlan(samples, batch, epochs, 4, full, accumulate, pieces)
    held_out = {i for b in SamplePlan(samples, batch, 1, 4).held_out_batches() for i in b.tolist()}
    sizes = [schedule.piece_samples(piece) for piece in range(pieces)]
    assert sum(sizes) == schedule.train_samples
    assert max(sizes) - min(sizes) <= 1
    arrived: list[int] = []
    made = 0
    for piece in range(pieces):
        for epoch in range(epochs):
            assert schedule.steps_before(piece * epochs + epoch) == made
            steps = list(schedule.training_steps(epoch, piece))
            assert len(steps) == schedule.piece_steps(piece)
            made += len(steps)
            batches = [each for step in steps for each in step]
            assert all(len(each) <= schedule.largest_batch for each in batches)
            seen = [i for each in batches for i in each.tolist()]
            assert len(set(seen)) == len(seen)
            if not full:
                assert len(seen) == sizes[piece]
            assert not held_out & set(seen)
            assert all(i > last for i in seen for last in arrived[-1:])
        arrived += sorted(seen)
        assert made == sum(schedule.steps_by_piece()[: piece + 1])
    assert made == schedule.steps == schedule.steps_before(schedule.passes)
    assert schedule.steps == epochs * schedule.steps_per_epoch
    if not full or sizes[0] >= batch:  # make_schedule refuses others
        assert all(len(b) <= schedule.largest_batch for b in schedule.held_out_batches())
    if not full:
        assert {i for b in schedule.held_out_batches() for i in b.tolist()} == held_out


def test_one_piece_is_the_training_without_pieces():
    """The order of earlier versions, from the formula: results must not change under users."""
    schedule = SamplePlan(23, 4, 2, 9)
    train = np.random.default_rng([9, 0]).permutation(23)[:19]
    order = np.random.default_rng([9, 2]).permutation(train)
    assert np.concatenate(list(schedule.training_batches(1))).tolist() == order.tolist()


@given(
    samples=st.integers(5, 60), epochs=st.integers(1, 4), pieces=st.integers(1, 4),
    accumulate=st.integers(1, 3), data=st.data(),
)  # fmt: skip
def test_steps_from_the_middle(samples, epochs, pieces, accumulate, data):
    schedule = SamplePlan(samples, 3, epochs, 2, False, accumulate, pieces)

    def listed(done: int) -> list[list[list[int]]]:
        return [[b.tolist() for b in step] for step in schedule.steps_from(done)]

    whole = listed(0)
    assert len(whole) == schedule.steps
    done = data.draw(st.integers(0, schedule.steps))
    assert listed(done) == whole[done:]


@given(epochs=st.integers(1, 2**31 - 1), pieces=st.integers(1, 100))
def test_evaluations_are_few_and_even(epochs, pieces):
    schedule = SamplePlan(125 * pieces, 3, epochs, 2, pieces=pieces)
    each = schedule.steps_before(1)
    steps = schedule.evaluation_steps()
    assert 2 <= len(steps) <= 12
    assert (steps[0], steps[-1]) == (0, schedule.steps)
    assert len(steps) == min(schedule.passes, 11) + 1
    passes = [divmod(step, each) for step in steps]
    assert not any(rest for _, rest in passes)
    gaps = [right - left for (left, _), (right, _) in itertools.pairwise(passes)]
    assert 1 <= min(gaps) <= max(gaps) <= min(gaps) + 1


def test_evaluations_end_passes():
    assert SamplePlan(10, 4, 3, 0).evaluation_steps() == (0, 2, 4, 6)
    assert SamplePlan(10, 4, 2, 0, pieces=2).evaluation_steps() == (0, 1, 2, 3, 4)
    assert SamplePlan(5, 4, 22, 0).evaluation_steps() == tuple(range(0, 23, 2))


def test_fixed_batch_size():
    schedule = make_sample_plan(FIXED, 14, batch_size=4, epochs=1, seed=0)
    assert schedule.full_batches
    assert [len(b) for b in schedule.training_batches(0)] == [4, 4, 4]
    with pytest.raises(OdtpackError, match="batches of 4 samples only"):
        make_sample_plan(FIXED, 14, batch_size=8, epochs=1, seed=0)
    with pytest.raises(OdtpackError, match="have 3 samples, and training needs at least 4"):
        make_sample_plan(FIXED, 3, batch_size=4, epochs=1, seed=0)
    assert make_sample_plan(FIXED, 4, batch_size=4, epochs=1, seed=0).steps == 1


def test_too_few_samples_for_the_pieces():
    """The error names the least number, and that is the least."""
    for inputs, pieces in ((FREE, 7), (FIXED, 3), (FIXED, 11)):
        with refused("too-few-samples", f"in {pieces} pieces needs at least") as caught:
            make_sample_plan(inputs, 6, batch_size=4, epochs=1, seed=0, pieces=pieces)
        assert caught.value.hint is not None
        assert "fewer pieces" in caught.value.hint
        needed = int(caught.value.what.split()[-1].rstrip("."))
        schedule = make_sample_plan(inputs, needed, batch_size=4, epochs=1, seed=0, pieces=pieces)
        assert schedule.steps == pieces
        with pytest.raises(OdtpackError, match=f"needs at least {needed}"):
            make_sample_plan(inputs, needed - 1, batch_size=4, epochs=1, seed=0, pieces=pieces)


@pytest.mark.parametrize(("changes", "code"), [
    ({"batch_size": 0}, "bad-batch-size"), ({"epochs": 0}, "bad-epochs"),
    ({"seed": -1}, "bad-seed"), ({"epochs": True}, "bad-epochs"),
    ({"batch_size": 2**31}, "bad-batch-size"), ({"pieces": 0}, "bad-pieces"),
    ({"pieces": 10_001}, "bad-pieces"), ({"pieces": 1.0}, "bad-pieces"),
])  # fmt: skip
def test_bad_parameters(changes, code):
    with refused(code):
        make_sample_plan(FREE, 10, **({"batch_size": 2, "epochs": 1, "seed": 0} | changes))


def test_every_pass_over_every_piece_has_an_order_of_its_own():
    schedule = SamplePlan(samples=40, batch_size=16, epochs=2, seed=3, pieces=2)
    train = list(np.random.default_rng([3, 0]).permutation(40)[:32])
    orders = set()
    for piece, epoch in itertools.product(range(2), range(2)):
        (batch,) = schedule.training_batches(epoch, piece)
        own = [index for index in train if index in set(batch)]
        orders.add(tuple(own.index(index) for index in batch))
    assert len(orders) == 4


class TestSample:
    def test_a_short_training_is_all_of_it(self):
        plan = SamplePlan(100, 8, 3, 1)
        assert plan.sample(plan.steps) is plan

    def test_a_million_epochs_are_the_first_ones(self):
        plan = SamplePlan(100, 8, 10**6, 1)
        part = plan.sample(1000)
        assert (part.samples, part.epochs, part.steps) == (100, 100, 1000)
        for own, other in zip(part.training_steps(3), plan.training_steps(3), strict=True):
            np.testing.assert_array_equal(own[0], other[0])

    def test_a_billion_samples_are_fewer(self):
        """Counting its steps makes no array of a billion numbers."""
        plan = SamplePlan(10**9, 8, 10**6, 1, accumulation_steps=2, pieces=10)
        part = plan.sample(1000)
        assert part.epochs == 1
        assert 900 <= part.steps <= 1100
        assert part.samples < 10**5
        assert sum(plan.steps_by_piece()) == plan.steps == 10**6 * 5 * 10**7

    def test_every_piece_keeps_a_batch(self):
        part = SamplePlan(10**6, 32, 2, 1, pieces=100, full_batches=True).sample(7)
        assert min(part.piece_steps(piece) for piece in range(100)) >= 1


def test_evenly_spaced_samples_are_views():
    arrays = {"x": np.arange(100).reshape(50, 2), "y": np.arange(50)}
    part = evenly_spaced(arrays, 20)
    assert part["y"].tolist() == list(range(0, 40, 2))
    np.testing.assert_array_equal(part["x"], arrays["x"][0:40:2])
    assert all(np.shares_memory(part[name], arrays[name]) for name in arrays)
