"""The limit with the platform's entitlement for more memory, in a result."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from odtpack_simulator.device.profile import AppState, load_profile
from odtpack_simulator.device_result import _memory
from odtpack_simulator.memory.memory_phases import Item, MemoryPlan, Phase
from odtpack_simulator.result.result import DeviceMemory, Policy
from odtpack_simulator.simulation import _limits


def memory_of(name: str, policy: Policy) -> DeviceMemory:
    plan = MemoryPlan((Phase("training step", (Item("x", 1, "inputs"),)),), (), ())
    free: Any = SimpleNamespace(peak_bytes=1, phase_peaks={})
    return _memory(load_profile(name), policy, plan, free, None)


@pytest.mark.parametrize("state", ["foreground", "background"])
def test_the_entitlement_is_for_the_foreground(state: AppState) -> None:
    profile = load_profile("apple/iphone-16-pro")
    memory = memory_of(profile.name, Policy(state=state))
    assert memory.limit_bytes == profile.memory_limit_bytes(state)
    assert (memory.entitled_limit_bytes is not None) == (state == "foreground")


def test_an_entitled_app_is_held_to_its_own_limit() -> None:
    entitled = Policy(entitled=True)
    memory = memory_of("apple/iphone-15-pro", entitled)
    assert (memory.limit_bytes, memory.limit_entitled) == (6_000_000_000, True)
    assert memory.warning_bytes is None
    known = [load_profile(name) for name in ("apple/iphone-15-pro", "apple/iphone-13-pro")]
    assert _limits(known, entitled) == (4_200_000_000, 6_000_000_000)
    assert max(_limits(known, Policy())) < 4_000_000_000


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("apple/iphone-xr", "foreground"),  # nobody measured it there
        ("samsung/galaxy-a12", "foreground"),  # Android has none
        ("apple/iphone-15-pro", "background"),
    ],
)
def test_where_the_entitlement_changes_nothing(name: str, state: AppState) -> None:
    plain, entitled = (
        memory_of(name, Policy(state=state, entitled=given)) for given in (False, True)
    )
    assert entitled == plain
    assert not entitled.limit_entitled
