"""The limit with the platform's entitlement for more memory, in a result."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from odtpack_runtime.simulator.device_result import _memory
from odtpack_runtime.simulator.profile import AppState, load_profile
from odtpack_runtime.simulator.result import Policy


@pytest.mark.parametrize("state", ["foreground", "background"])
def test_the_entitlement_is_for_the_foreground(state: AppState) -> None:
    profile = load_profile("apple/iphone-16-pro")
    plan: Any = SimpleNamespace(peak=SimpleNamespace(nbytes=1))
    free: Any = SimpleNamespace(peak_bytes=1)
    memory = _memory(profile, Policy(state=state), plan, free, None)
    assert memory.limit_bytes == profile.memory_limit_bytes(state)
    assert (memory.entitled_limit_bytes is not None) == (state == "foreground")
