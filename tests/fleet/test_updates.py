"""What one answer can do to a round's model, with everything that it may lie about."""

from __future__ import annotations

import numpy as np
import pytest

from odtpack_simulator.fleet.updates import (
    ROBUST,
    capped,
    coordinate_median,
    refusals,
    trimmed_mean,
    weighted_mean,
)


def rounds(count: int, seed: int = 0) -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    """A model, and answers that all say about the same."""
    random = np.random.default_rng(seed)
    begun = {"w": random.standard_normal((5, 4), np.float32), "b": np.ones(4, np.float32)}
    step = {name: random.standard_normal(array.shape) * 0.1 for name, array in begun.items()}
    answers = [
        {
            name: (array + step[name] + 0.01 * random.standard_normal(array.shape)).astype("f4")
            for name, array in begun.items()
        }
        for _ in range(count)
    ]
    return begun, answers


def moved(begun: dict[str, np.ndarray], model: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([(model[name] - begun[name]).ravel() for name in begun])


def test_a_client_that_claims_many_samples_does_not_own_the_model() -> None:
    begun, answers = rounds(6)
    flipped = {name: 2 * begun[name] - array for name, array in answers[0].items()}
    weights = [20, 25, 30, 22, 28, 10**9]
    assert capped(weights) == [20, 25, 30, 22, 28, 79]
    assert capped([20, 25, 30]) == [20, 25, 30]
    assert capped([]) == []
    honest = moved(begun, weighted_mean(answers[:5], weights[:5]))
    own = moved(begun, weighted_mean([*answers[:5], flipped], weights))
    held = moved(begun, weighted_mean([*answers[:5], flipped], capped(weights)))
    assert own @ honest < 0  # it owned the model
    assert held @ honest > 0


@pytest.mark.parametrize("count", [1, 2])
def test_few_answers_are_compared_with_the_model(count: int) -> None:
    begun, answers = rounds(count)
    assert refusals(begun, answers) == [None] * count
    far = {name: begun[name] + 1e6 * (array - begun[name]) for name, array in answers[0].items()}
    *others, reason = refusals(begun, [*answers[1:], far])
    assert others == [None] * (count - 1)
    assert reason is not None
    assert "times that of the model" in reason
    zeros = {name: np.zeros_like(array) for name, array in begun.items()}
    assert refusals(zeros, answers) == [None] * count  # nothing to compare with


@pytest.mark.parametrize("name", ["median", "trimmed_mean"])
@pytest.mark.parametrize("count", [5, 10])
def test_robust_aggregates_stay_among_what_the_others_say(name: str, count: int) -> None:
    begun, answers = rounds(count)
    bad = [
        {key: begun[key] - 9 * (array - begun[key]) for key, array in answer.items()}
        for answer in answers[: count // 5]
    ]
    assert refusals(begun, [*bad, *answers[len(bad) :]]) == [None] * count  # not long enough
    good = answers[len(bad) :]
    found = ROBUST[name]([*bad, *good])
    for key, array in found.items():
        assert array.dtype == np.float32
        stack = np.stack([answer[key] for answer in good])
        assert (stack.min(axis=0) - 1e-6 <= array).all()
        assert (array <= stack.max(axis=0) + 1e-6).all()
    mean = weighted_mean([*bad, *good], [1] * count)
    assert np.abs(moved(found, mean)).max() > 0.05  # which the mean does not


def test_robust_aggregates_by_hand() -> None:
    answers = [{"w": np.array([value, -value], np.float32)} for value in (1, 2, 9, 4, 100)]
    np.testing.assert_array_equal(coordinate_median(answers)["w"], [4, -4])
    np.testing.assert_array_equal(trimmed_mean(answers)["w"], [5, -5])
    np.testing.assert_array_equal(trimmed_mean(answers, 0.4)["w"], [4, -4])
    np.testing.assert_array_equal(trimmed_mean(answers[:2], 0.4)["w"], [1.5, -1.5])
    np.testing.assert_array_equal(trimmed_mean(answers[:1])["w"], [1, -1])
