"""System calls that go wrong lose nothing: the old state, the new one, or one on the way.

``make test`` makes each fault at a few of the calls of each action, ``make sweep`` at three times
as many, and ``make faults`` at every call.
"""

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.actions import ACTIONS
from tests.faults.inject import FAULTS, compile_library, run_faults
from tests.packages import killing

FEW = {
    "save a checkpoint": 4, "sign": 8, "resume": 19, "train, data outside": 27, "export": 25,
    "export with ORT format": 61, "adapter export": 61, "install": 43, "carry over": 31,
    "build": 47,
}  # fmt: skip
"""Each fault happens at one of so many calls, every fault at others."""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return compile_library(tmp_path_factory.mktemp("library"))
    except FileNotFoundError:
        if os.environ.get("CI"):
            pytest.fail("there is no C compiler")
        pytest.skip("the library that makes system calls fail needs Linux and a C compiler")


def check(library: Path, action: str, folder: Path, every: int) -> None:
    attempts = list(run_faults(library, action, folder, every))
    wrong = [attempt for attempt in attempts if attempt["wrong"]]
    assert not wrong, f"{len(wrong)} of {len(attempts)}: {wrong[:3]}"
    made = Counter(attempt["fault"] for attempt in attempts)
    assert made["killed"] > 3 / every
    ends = Counter((attempt["fault"], attempt["code"]) for attempt in attempts)
    # Faults that did not reach the action would all look harmless.
    assert ends["killed", -1] == made["killed"]
    assert ends["EIO", 3] > 0
    harmless = {fault.name for fault in FAULTS if fault.harmless}
    assert all(code == 0 for name, code in ends if name in harmless)


@pytest.mark.sweep
@pytest.mark.parametrize("action", killing.ACTIONS)
def test_a_kill_leaves_the_old_or_the_new(library, action, tmp_path):
    """At whatever call: what is there once is never gone again."""
    faults = "killed", "torn write, killed"
    attempts = list(run_faults(library, action, tmp_path, faults=faults))
    assert [attempt for attempt in attempts if attempt["wrong"]] == []
    assert len(attempts) > (5 if action in ("save a checkpoint", "sign") else 40)
    assert {attempt["done"] for attempt in attempts} == {False, True}
    assert {each["code"] for each in attempts if each["fault"] == "killed"} == {-1}
    for fault in faults:
        done = [attempt["done"] for attempt in attempts if attempt["fault"] == fault]
        assert done == sorted(done)


@pytest.mark.parametrize("action", FEW)
def test_nothing_is_lost(library, action, tmp_path):
    check(library, action, tmp_path, FEW[action])


@pytest.mark.sweep
@pytest.mark.parametrize("action", ACTIONS)
def test_nothing_is_lost_at_many_calls(library, action, tmp_path):
    check(library, action, tmp_path, max(1, FEW.get(action, 50) // 3))
