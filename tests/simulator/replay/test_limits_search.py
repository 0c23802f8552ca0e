"""The binary search over memory limits, against a training that needs so and so much."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odtpack_simulator.replay import limits_search
from odtpack_simulator.replay.job import Job
from odtpack_simulator.replay.limits_search import FAR, bisect_limits
from odtpack_simulator.replay.replay import ReplayResult

JOB = Job(
    "train", "", "", "", "", "", {}, 1, 1, 1, 0, full_batches=False, learning_rate=1, threads=1
)


@given(
    need=st.integers(1, 10_000),
    limits=st.sets(st.integers(1, 20_000)),
    known=st.booleans(),
)
def test_every_limit_is_settled(need: int, limits: set[int], known: bool) -> None:
    tried: list[int] = []

    def hold(job: Job, peak: int | None) -> ReplayResult:
        assert peak == (need if known else None)
        assert job.limit_bytes is not None
        fits = job.limit_bytes >= need
        return ReplayResult(job.limit_bytes, outcome="completed" if fits else "killed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits_search, "hold", hold)
        settled = bisect_limits(JOB, limits, need if known else None, on_run=tried.append)
    near = {limit for limit in limits if not known or limit < FAR * need}
    assert set(settled) == near
    assert len(tried) <= math.ceil(math.log2(len(near) + 1))
    for limit, found in settled.items():
        run = found.run
        assert (run.outcome == "completed") == (limit >= need)
        assert found.exact == (limit in tried)
        assert run.limit_bytes is not None
        # What did not fit was given at least as much, what did fit at most as much.
        assert run.limit_bytes >= limit if run.outcome == "killed" else run.limit_bytes <= limit


@pytest.mark.parametrize(
    ("peak", "settled"), [(900, True), (1000, True), (1001, False), (None, False)]
)
def test_what_address_space_refuses_is_settled_by_what_is_resident(
    peak: int | None, settled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[list[str]] = []

    def run(job: Job) -> ReplayResult:
        tried.append(list(job.limit_methods))
        if job.limit_methods == ["watchdog"]:
            return ReplayResult(job.limit_bytes, outcome="completed", limit_method="watchdog")
        return ReplayResult(job.limit_bytes, outcome="killed", limit_method="rlimit")

    monkeypatch.setattr(limits_search, "run_training_child", run)
    found = limits_search.hold(dataclasses.replace(JOB, limit_bytes=1000), peak)
    assert (found.outcome == "completed") == settled
    assert len(tried) == 1 + settled
