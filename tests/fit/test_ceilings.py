"""What is dropped before training is what the judge would refuse."""

from __future__ import annotations

import pytest

from odtpack.fit.package_cache import Ceiling, memory_ceiling, size_ceiling
from odtpack_simulator.device.app_footprint import runtime_bytes
from odtpack_simulator.device.profile import load_profile
from odtpack_simulator.figures.judge import judge
from odtpack_simulator.figures.limits import parse_budgets
from odtpack_simulator.values.memory_fit import MARGIN, with_margin
from tests.simulator.factory import make_result

NAMES = ["google/pixel-8a", "apple/iphone-16-pro"]
BUDGETS = """
[budgets]
package_size = "6 MB"
memory_headroom = "20 %"
peak_memory = { limit = "1 MB", level = "warn" }
[class.android]
peak_memory = "200 MB"
[device."apple/iphone-16-pro"]
package_size = "5 MB"
"""


def profiles() -> list:  # type: ignore[type-arg]
    return [load_profile(name) for name in NAMES]


@pytest.mark.parametrize("scale", [0.2, 0.8, 0.95, 1.0, 1.05, 1.3, 5.0, 30.0])
@pytest.mark.parametrize("text", ["", BUDGETS])
def test_excess_agrees_with_the_judge(scale: float, text: str) -> None:
    budgets = parse_budgets(text.encode())
    result = judge(make_result(NAMES, scale=scale), budgets)
    checks = [check for _, check in result.all_checks() if check.level == "error"]
    memory = ("memory_limit", "peak_memory", "memory_headroom")
    failed = any(check.metric in memory and check.status == "fail" for check in checks)
    ceiling = memory_ceiling(profiles(), budgets)
    assert ceiling is not None
    peak = with_margin(max(device.memory.peak_bytes for device in result.devices))
    assert (ceiling.excess(peak) > 0) == failed


def test_size() -> None:
    budgets = parse_budgets(BUDGETS.encode())
    ceiling = size_ceiling(profiles(), budgets)
    assert ceiling is not None
    assert ceiling.limit == 5e6
    result = judge(make_result(NAMES), budgets)
    failed = [check.limit for _, check in result.all_checks() if check.status == "fail"]
    assert 5e6 in failed
    assert ceiling.excess(result.package.package_bytes) > 0
    assert "budgets.toml" in ceiling.describe("the package", 6e6)


def test_no_limit() -> None:
    assert size_ceiling(profiles(), parse_budgets(b"")) is None
    assert memory_ceiling([], parse_budgets(b"")) is None


def test_a_limit_of_nothing_is_exceeded_by_anything() -> None:
    assert Ceiling(0, "a budget").excess(1) == float("inf")


def test_headroom_leaves_the_rest_of_what_is_granted() -> None:
    """At a share other than half, and where no other limit is lower; the app is in it, too."""
    profile = load_profile("google/pixel-8a")
    budgets = parse_budgets(b'[budgets]\nmemory_headroom = "20 %"\napp_footprint = "50 MB"')
    ceiling = memory_ceiling([profile], budgets)
    assert ceiling is not None
    left = 0.8 * (profile.memory_limit_bytes() or 0) - 50e6
    # What may be taken and what a process of that kit takes besides is what is left.
    planned = int(ceiling.limit / (1 + MARGIN))
    assert ceiling.limit + runtime_bytes("kotlin", "android", planned) == pytest.approx(left)
