"""The binary search over memory limits, against a training that needs so and so much."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odtpack_simulator.replay import replay
from odtpack_simulator.replay.job import Job, SamplePlan
from odtpack_simulator.replay.replay import FAR, ReplayResult, check_limits

JOB = Job("train", "", "", "", "", "", {}, SamplePlan(1, 1, 1, 0), learning_rate=1, threads=1)


def gigabytes(number: int) -> int:
    """Bytes; of so many the plan's margin is a share."""
    return number * 10**9


@given(
    need=st.integers(1, 10_000).map(gigabytes),
    planned=st.integers(1, 10_000).map(gigabytes),
    limits=st.sets(st.integers(1, 20_000).map(gigabytes)),
)
def test_every_limit_that_the_plan_fits_is_settled(need, planned, limits):
    tried: list[int] = []

    def hold(job: Job) -> ReplayResult:
        assert job.limit_bytes is not None
        tried.append(job.limit_bytes)
        fits = job.limit_bytes >= need
        return ReplayResult(job.limit_bytes, outcome="completed" if fits else "killed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "hold", hold)
        settled = check_limits(JOB, limits, planned)
    near = {limit for limit in limits if 103 * planned <= 100 * limit < 100 * FAR * planned}
    assert set(settled) == near
    # Where the plan is right, one replay settles all.
    right = all(limit >= need for limit in near)
    assert len(tried) <= (1 if right else 1 + math.ceil(math.log2(len(near) + 1)))
    for limit, found in settled.items():
        run = found.run
        assert (run.outcome == "completed") == (limit >= need)
        assert found.exact == (limit in tried)
        # What did not fit was given at least as much, what did fit at most as much.
        assert run.limit_bytes >= limit if run.outcome == "killed" else run.limit_bytes <= limit


def test_what_address_space_refuses_is_settled_by_what_is_resident(tmp_path, monkeypatch):
    tried: list[list[str]] = []

    def run(job: Job) -> ReplayResult:
        tried.append(list(job.limit_methods))
        if job.limit_methods == ["watchdog"]:
            return ReplayResult(job.limit_bytes, outcome="completed", limit_method="watchdog")
        return ReplayResult(job.limit_bytes, outcome="killed", limit_method="rlimit")

    monkeypatch.setattr(replay, "run_training_child", run)
    job = dataclasses.replace(JOB, folder=str(tmp_path), limit_bytes=1000)
    assert replay.hold(job).outcome == "completed"
    assert len(tried) == 4  # it is resumed as well


@pytest.mark.parametrize(("steps", "first"), [(1, 1), (2, 1), (3, 1), (4, 2), (5, 3), (9, 3)])
def test_the_second_process_makes_two_steps_where_there_are_three(
    steps, first, tmp_path, monkeypatch
):
    made: list[int | None] = []

    def run(job: Job) -> ReplayResult:
        made.append(job.max_steps)
        return ReplayResult(None, "completed")

    monkeypatch.setattr(replay, "run_training_child", run)
    size = JOB.schedule.train_samples
    schedule = SamplePlan(1, size, steps, 0)
    job = dataclasses.replace(JOB, folder=str(tmp_path), schedule=schedule)
    assert job.schedule.steps == steps
    replay.hold(job)
    assert made == [first, 6]


def test_a_training_that_was_ended_is_held_to_the_limit_again(tmp_path, monkeypatch):
    """The second process loads what the first one saved: moments besides the parameters."""
    made: list[Job] = []

    def run(job: Job) -> ReplayResult:
        made.append(job)
        if len(made) == 1:
            assert not job.saved_checkpoint.exists()
            phases = {"loading": 50, "step": 90, "saving": 80}
            return ReplayResult(100, "completed", 3, peak_bytes=90, phase_peaks=phases)
        return ReplayResult(100, "killed", 0, detail="out of memory in loading the package")

    monkeypatch.setattr(replay, "run_training_child", run)
    schedule = SamplePlan(1, 1, 9, 0)
    job = dataclasses.replace(JOB, folder=str(tmp_path), schedule=schedule, limit_bytes=100)
    job.saved_checkpoint.write_text("of a replay under another limit")
    found = replay.hold(job)
    assert [(each.resume, each.max_steps) for each in made] == [(True, 3), (True, 6)]
    assert found.outcome == "killed"
    assert found.steps_done == 3
    assert found.detail.startswith("resumed after it was ended: out of memory")


def test_the_phases_of_both_processes(tmp_path, monkeypatch):
    peaks = iter([{"loading": 50, "step": 90}, {"loading": 95, "step": 70}])

    def run(job: Job) -> ReplayResult:
        phases = next(peaks)
        return ReplayResult(
            None, "completed", 3, peak_bytes=max(phases.values()), phase_peaks=phases
        )

    monkeypatch.setattr(replay, "run_training_child", run)
    found = replay.hold(dataclasses.replace(JOB, folder=str(tmp_path)))
    assert found.phase_peaks == {"loading": 50, "step": 90, "resuming": 95}
    assert (found.peak_bytes, found.steps_done) == (95, 6)
