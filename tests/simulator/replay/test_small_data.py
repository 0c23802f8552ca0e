"""Whether the held-out samples are enough to tell a metric from its floor."""

import math

import pytest

from odtpack_simulator.result.result import SimulationResult
from tests.simulator.factory import make_result
from tests.simulator.figures.test_judge import DEVICE, check, judged


def learned(metric: float, held_out: int) -> SimulationResult:
    result = make_result([DEVICE])
    training = result.training.model_copy(
        update={"metric_after": metric, "metric_interval": wilson(metric, held_out)}
    )
    data = result.data.model_copy(update={"held_out_samples": held_out})
    return result.model_copy(update={"training": training, "data": data})


def wilson(share: float, n: int) -> tuple[float, float]:
    z = 1.959964
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, middle - half), min(1.0, middle + half)


@pytest.mark.parametrize(("floor", "metric"), [(0.9, 0.92), (0.9, 0.88), (0.99, 0.98), (0.5, 0.6)])
def test_little_data_say_how_many_samples_would_tell(floor: float, metric: float) -> None:
    """With one sample fewer than advised the floor is inside of the interval, and then outside."""
    result = judged(learned(metric, 20), f"[budgets]\naccuracy_floor = {floor}")
    found = check(result, "small_data")
    assert (found.status, found.level, found.actual) == ("fail", "warn", 20)
    assert check(result, "accuracy_floor").status == ("pass" if metric >= floor else "fail")
    needed = int(found.limit or 0)
    assert f"about {needed} samples" in (found.advice or "")
    for held_out, status in ((needed - 1, "fail"), (needed, "pass")):
        again = judged(learned(metric, held_out), f"[budgets]\naccuracy_floor = {floor}")
        assert check(again, "small_data").status == status, held_out


def test_a_floor_at_the_metric_itself_is_never_told() -> None:
    result = judged(learned(0.9, 100_000), "[budgets]\naccuracy_floor = 0.9")
    assert check(result, "small_data").status == "fail"
    assert check(result, "small_data").limit is None
    assert check(result, "accuracy_floor").status == "pass"
    assert result.verdict == "warn"
