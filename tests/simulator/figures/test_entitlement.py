"""The limit with the platform's entitlement for more memory, in a result."""

from __future__ import annotations

import pytest

from odtpack_simulator.device.app_footprint import RUNTIME_LIBRARY_BYTES, default_footprint
from odtpack_simulator.device.profile import AppState, load_profile
from odtpack_simulator.memory.arena import SessionUse
from odtpack_simulator.memory.memory_phases import Item, MemoryPlan, Phase
from odtpack_simulator.result.result import DeviceMemory, Policy
from odtpack_simulator.simulation import _AppOnDevice, _memory


def app_on(name: str, policy: Policy) -> _AppOnDevice:
    profile = load_profile(name)
    return _AppOnDevice(
        profile, policy, "swift", SessionUse("shared", False), default_footprint(profile), 1
    )


def memory_of(name: str, policy: Policy) -> DeviceMemory:
    plan = MemoryPlan((Phase("training step", (Item("x", 1, "inputs"),)),), (), ())
    return _memory(app_on(name, policy), plan, 1, None)


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
    assert app_on("apple/iphone-13-pro", entitled).limit == 4_200_000_000
    assert (app_on("apple/iphone-13-pro", Policy()).limit or 0) < 4_000_000_000


def test_what_the_app_holds_is_not_left_to_the_training() -> None:
    memory = memory_of("apple/iphone-15-pro", Policy())
    assert memory.limit_bytes is not None
    assert memory.room_bytes == memory.limit_bytes - 150_000_000 - RUNTIME_LIBRARY_BYTES
    assert memory.need_bytes == 1 + 150_000_000 + RUNTIME_LIBRARY_BYTES
    assert (memory.kit, memory.sharing) == ("swift", "shared")


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
