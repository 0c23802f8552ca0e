"""Advice on whole trainings, checked by playing the training again with the change made."""

from __future__ import annotations

import re

import pytest

from odtpack_simulator.campaign.campaign import run_campaign
from odtpack_simulator.device.profile import load_profile
from odtpack_simulator.figures.judge import judge
from odtpack_simulator.figures.limits import parse_budgets
from odtpack_simulator.result.result import DeviceCampaign, Policy, SimulationResult
from odtpack_simulator.values.units import Interval
from tests.simulator.factory import make_result

DEVICE = "google/pixel-8a"
BASE = make_result([DEVICE])


def play(policy: Policy, steps: int = BASE.data.steps) -> DeviceCampaign:
    assert BASE.latency_host.checkpoint_bytes is not None
    return run_campaign(
        load_profile(DEVICE),
        BASE.devices[0].latency,
        policy,
        steps=[steps // policy.pieces + (i < steps % policy.pieces) for i in range(policy.pieces)],
        checkpoint_bytes=BASE.latency_host.checkpoint_bytes,
        curve=[],
    )


def played(policy: Policy) -> SimulationResult:
    result = make_result([DEVICE], policy=policy)
    device = result.devices[0].model_copy(update={"campaign": play(policy)})
    return result.model_copy(update={"devices": [device]})


def advised(result: SimulationResult, key: str, value: str) -> str:
    judged = judge(result, parse_budgets(f"[budgets]\n{key} = {value}".encode()))
    (check,) = [c for _, c in judged.all_checks() if c.metric == key]
    assert check.status == "fail"
    assert check.advice
    return check.advice


def typical(figure: Interval | None) -> float:
    assert figure is not None
    return figure.typical


def number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, text
    return int(found[1])


MANY = Policy(state="background", sessions_per_day=2, save_every=10, pieces=3)


@pytest.mark.parametrize("limit", [30e6, 60e6, 100e6, 150e6])
def test_saving_less_often_keeps_the_bytes_of_a_day(limit: float) -> None:
    text = advised(played(MANY), "written_per_day", f'"{limit:.0f} B"')
    often = number(r"save every (\d+) instead of every 10 steps", text)
    after = play(MANY.model_copy(update={"save_every": often}))
    assert typical(after.written_bytes_per_day) <= limit


def test_one_checkpoint_a_day_takes_one_session_a_day() -> None:
    text = advised(played(MANY), "written_per_day", '"20 MB"')
    assert "save only at the end of a session, and train in 1 instead of 2 sessions a day" in text
    after = play(MANY.model_copy(update={"save_every": None, "sessions_per_day": 1}))
    assert typical(after.written_bytes_per_day) <= 20e6
    assert "a single checkpoint takes 14.5 MB" in advised(played(MANY), "written_per_day", '"1 MB"')


@pytest.mark.parametrize("pieces", [1, 3, 12])
@pytest.mark.parametrize("share", [0.4, 0.7, 0.95])
def test_so_many_steps_fit_in_the_time_with_all_sessions_opened(pieces: int, share: float) -> None:
    policy = Policy(pieces=pieces)
    limit = share * typical(play(policy).active_s)
    text = advised(played(policy), "time_to_finish", f'"{limit} s"')
    steps = number(r"about (\d+) of the 240 steps fit", text)
    assert typical(play(policy, steps).active_s) <= 1.01 * limit
    assert typical(play(policy, steps + steps // 10 + 3).active_s) > limit


def test_what_takes_longer_to_open_than_the_limit_is_said() -> None:
    result = played(Policy(pieces=12))
    text = advised(result, "time_to_finish", '"0.5 s"')
    assert "the 12 pieces of data take 12 sessions, and opening them alone" in text
    text = advised(result, "battery_per_session", '"0.00001 %"')
    assert "opening and saving a session takes more than 1e-05 % already" in text
    assert "each of the 12 pieces of data takes a session" in advised(result, "sessions", "11")


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_shorter_sessions_take_so_much_of_the_battery(share: float) -> None:
    before = typical(play(Policy()).battery_share_per_session)
    limit = share * before
    text = advised(played(Policy()), "battery_per_session", f'"{100 * limit:.9f} %"')
    count = number(r": (\d+) sessions instead of 1 take", text)
    after = typical(play(Policy(pieces=count)).battery_share_per_session)
    assert after <= 1.05 * limit


def test_three_sessions_at_two_a_day_take_two_days() -> None:
    judged = judge(played(MANY), parse_budgets(b"[budgets]\ndays = 1"))
    (check,) = [c for _, c in judged.all_checks() if c.metric == "days"]
    assert check.status == "fail"
    assert check.message == "estimated at 2 days, allowed is at most 1"
    assert check.advice == "3 sessions a day instead of 2 end it in 1 day"
    assert judge(played(MANY), parse_budgets(b"[budgets]\ndays = 2")).verdict != "fail"


@pytest.mark.parametrize("days", [1, 2, 3, 5])
def test_so_many_sessions_a_day_end_it_in_time(days: int) -> None:
    policy = Policy(pieces=12, sessions_per_day=2)
    text = advised(played(policy), "days", f"{days}.5")
    often = number(r"(\d+) sessions a day instead of 2", text)
    assert typical(play(policy.model_copy(update={"sessions_per_day": often})).days) <= days
    rarer = policy.model_copy(update={"sessions_per_day": often - 1})
    assert typical(play(rarer).days) > days
    assert "pieces of data takes a session" in advised(played(policy), "days", "0.5")
    assert "raise the limit" in advised(played(Policy()), "days", "0.5")


def test_a_figure_that_is_just_beyond_says_so() -> None:
    seconds = typical(play(Policy()).active_s)
    budgets = parse_budgets(f'[budgets]\ntime_to_finish = "{0.99999 * seconds} s"'.encode())
    (check,) = [
        c for _, c in judge(played(Policy()), budgets).all_checks() if c.metric == "time_to_finish"
    ]
    assert check.status == "fail"
    assert check.message.endswith(", missed by less than the displayed precision")
