"""What to change first: every figure in the advice is checked by making the change."""

import re

import pytest

from odtpack_simulator.campaign import run_campaign
from odtpack_simulator.device.profile import load_profile
from odtpack_simulator.result import (
    DeviceCampaign,
    EvaluationPoint,
    PlannedChange,
    Policy,
    SimulationResult,
)
from odtpack_simulator.values.units import Interval, format_bytes
from tests.simulator.changed import changed, on_devices
from tests.simulator.factory import make_result, same
from tests.simulator.judged import check, judged

DEVICE = "google/pixel-8a"
BASE = make_result([DEVICE])


def advised(result: SimulationResult, key: str, value: str) -> str:
    found = check(judged(result, f"[budgets]\n{key} = {value}"), key)
    assert found.status == "fail"
    assert found.advice
    return found.advice


def campaign(result: SimulationResult = BASE, **update: object) -> SimulationResult:
    return on_devices(result, campaign=update)


def figure(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, text
    return int(found[1])


def with_changes(*changes: PlannedChange) -> SimulationResult:
    return changed(BASE, memory={"changes": list(changes)})


SIZES = [PlannedChange(micro_batch=n, peak_bytes=25_480_000 + n * 2_400_000) for n in (32, 16, 8)]
FREEZES = [
    PlannedChange(freeze="the first 2 of 4 trained layers (up to 'b')", peak_bytes=90_000_000),
    PlannedChange(freeze="the first 3 of 4 trained layers (up to 'c')", peak_bytes=50_000_000),
]
SGD = PlannedChange(stateless_optimizer=True, peak_bytes=168_000_000)
ALL = PlannedChange(
    micro_batch=8, freeze=FREEZES[1].freeze, stateless_optimizer=True, peak_bytes=30_000_000
)
PLANNED = with_changes(*SIZES, *FREEZES, SGD, ALL)


@pytest.mark.parametrize(
    ("limit", "size", "layers"), [(120e6, 32, 2), (80e6, 16, 3), (47e6, 8, None)]
)
def test_the_mildest_plan_of_each_kind_that_is_enough(limit, size, layers):
    text = advised(PLANNED, "peak_memory", f'"{limit:.0f} B"')
    assert text.startswith(f"training in micro-batches of {size} instead of 64 samples")
    assert "accumulated to the same 64 per update" in text
    peak = next(each.peak_bytes for each in SIZES if each.micro_batch == size)
    assert f"needs about {format_bytes(peak)}, which is enough" in text
    assert 1.03 * peak <= limit < 1.03 * (peak + size * 2_400_000)
    assert (f"the first {layers} of 4" in text) if layers else ("freez" not in text)
    assert "SGD" not in text


def test_several_changes_where_one_is_not_enough():
    text = advised(PLANNED, "peak_memory", '"38 MB"')
    assert "micro-batches of 8 " in text
    assert "SGD without momentum" in text
    assert "which is enough" in text
    assert "smaller" not in text


def test_the_model_has_to_be_smaller_only_where_nothing_helps():
    text = advised(PLANNED, "peak_memory", '"19 MB"')
    assert text.startswith("the model has to be smaller: even training in micro-batches of 8 ")
    assert f"needs about {format_bytes(30_000_000)}" in text
    assert advised(with_changes(), "peak_memory", '"1 B"').startswith("the model has to be smaller")


def test_without_plans_nothing_is_proposed():
    """As where a stored result is judged by a limit that it was not simulated with."""
    text = advised(changed(BASE, memory={"changes": None}), "peak_memory", '"19 MB"')
    assert "planned where the package is: odtpack judge" in text
    assert "smaller model" not in text
    assert "has to be smaller" not in text


def test_a_step_that_is_too_long():
    step = BASE.devices[0].latency.step_ms
    text = advised(BASE, "step_latency", f'"{step.typical / 2:.6f} ms"')
    assert figure(r"about (\d+)", text) in (31, 32)
    assert "instead of 64 takes" in text
    assert "Conv takes 33.1 %" in text
    assert "freeze the first of the 4 trained layers" in text
    for layers in (0, 1):  # then there is nothing more to freeze
        result = changed(BASE, package={"trained_layers": layers})
        assert "freeze" not in advised(result, "step_latency", f'"{step.typical / 2:.6f} ms"')


def test_fewer_steps_and_what_they_reach():
    result = campaign(active_s=same(60.0))
    text = advised(result, "time_to_finish", '"45 s"')
    assert "about 180 of the 240 steps" in text
    assert "after 160 steps accuracy is 95.0 %, at the end 96.6 %" in text
    assert "throttles for 35.0 % of the time" in text
    assert "raise the limit: not even one step" in advised(result, "time_to_finish", '"1 ms"')
    assert "about 120 of the 240" in advised(campaign(energy_j=same(2000.0)), "energy", '"1 kJ"')


def test_the_worst_case_is_said_where_only_that_is_too_much():
    """Twice the limit in the worst case, half of it typically: all ends from the same case."""
    wide = Interval(low=10.0, typical=30.0, high=120.0)
    result = campaign(
        active_s=wide, sessions=Interval(low=1.0, typical=1.0, high=2.0),
        restart_s=Interval(low=1.0, typical=1.0, high=12.0),
        battery_share_per_session=Interval(low=0.001, typical=0.005, high=0.02),
    )  # fmt: skip
    text = advised(result, "time_to_finish", '"60 s"')
    assert "about 106 of the 240 steps fit in 60 s in the worst case" in text  # (0.5 - 0.1) / 0.9
    text = advised(result, "time_to_finish", '"31 s"')
    assert "in the worst case" in text
    text = advised(result, "battery_per_session", '"1 %"')
    assert "after about 30.0 s: 6 sessions instead of 2 take 1 % each in the worst case" in text
    assert "worst" not in advised(result, "time_to_finish", '"20 s"')


def test_sessions_days_and_battery():
    result = campaign(
        make_result([DEVICE], policy=Policy(state="background", sessions_per_day=2)),
        sessions=same(20.0), days=same(10.0), repeated_steps=same(60.0),
        active_s=same(600.0), battery_share_per_session=same(0.02),
    )  # fmt: skip
    assert "5 sessions a day instead of 2 end it in 4 days" in advised(result, "days", "4")
    text = advised(result, "sessions", "10")
    assert "about 120 of the 240 steps" in text
    assert "25.0 % of the steps are made twice" in text
    assert "in the foreground" in text
    battery = advised(result, "battery_per_session", '"1 %"')
    assert "after about 15.0 s: 40 sessions instead of 20" in battery


def test_how_often_to_save():
    often = make_result([DEVICE], policy=Policy(state="background", save_every=10))
    result = campaign(often, written_bytes_per_day=same(100e6), repeated_steps=same(60.0))
    text = advised(result, "written_per_day", '"25 MB"')
    assert "save every 240 instead of every 10 steps" in text  # one of 14.5 MB fits
    assert "66.7 % of a checkpoint" in text  # two moments beside the parameters
    assert "save every 3 instead of every 10" in advised(result, "repeated_steps", "20")
    every = make_result([DEVICE], policy=Policy(state="background", save_every=1))
    text = advised(campaign(every, repeated_steps=same(60.0)), "repeated_steps", "20")
    assert "although every one is saved" in text


def test_the_first_step():
    assert "2.3 times a later one" in advised(BASE, "first_step", '"1 ms"')


def test_a_package_with_frozen_weights():
    result = changed(BASE, package={"trainable_parameters": 241_000})
    text = advised(result, "package_size", '"1 MB"')
    assert "80.0 % of them frozen" in text
    assert '"float16" saves about 1.93 MB' in text
    assert '"int8" about 2.89 MB' in text
    assert "smaller model" in advised(BASE, "package_size", '"1 MB"')
    halved = changed(result, package={"parameter_bytes": 2_410_000})
    text = advised(halved, "package_size", '"1 MB"')
    assert "float16" not in text


@pytest.mark.parametrize(("losses", "words"), [
    ([2.0, 1.0, 0.5], "still falling, by 50.0 % in the last 10 steps: train more"),
    ([2.0, 0.5, 0.9], "lowest after 10 of 240 steps, at 0.5: train fewer"),
    ([0.5, 2.0, 0.9], "lowest before the first step, at 0.5: lower the learning rate"),
    ([0.0, 2.0, 0.9], "lowest before the first step, at 0: lower the learning rate"),
    ([2.0, 0.5, 0.499], "no longer falls"),
    ([1.38, 1.292], "still falling, by 6.4 % in the last 10 steps: train more"),
    (
        [1.38, 1.379],
        "too few evaluations to tell whether the loss still falls: train more steps, or",
    ),
    ([0.5, 0.9], "lowest before the first step, at 0.5: lower the learning rate"),
])  # fmt: skip
def test_what_the_curve_says(losses, words):
    curve = [EvaluationPoint(step=10 * i, loss=loss) for i, loss in enumerate(losses)]
    assert words in advised(changed(BASE, training={"curve": curve}), "final_loss", "0.01")


def test_without_a_curve_the_training_losses_speak():
    falling: list[float | None] = [1.0 / (1 + i) for i in range(100)]
    for losses, words in ((falling, "train more steps"), ([1.0] * 100, "too few evaluations")):
        result = changed(BASE, training={"curve": [], "losses": losses})
        assert words in advised(result, "final_loss", "0.01")


# Advice on whole trainings, checked by playing the training again with the change made.


def play(policy: Policy, steps: int = BASE.data.steps) -> DeviceCampaign:
    assert BASE.latency_host.checkpoint_bytes is not None
    return run_campaign(
        load_profile(DEVICE), BASE.devices[0].latency, policy,
        steps=[steps // policy.pieces + (i < steps % policy.pieces) for i in range(policy.pieces)],
        checkpoint_bytes=BASE.latency_host.checkpoint_bytes, curve=[],
    )  # fmt: skip


def played(policy: Policy) -> SimulationResult:
    return on_devices(make_result([DEVICE], policy=policy), campaign=play(policy))


def typical(figure: Interval | None) -> float:
    return figure.typical


MANY = Policy(state="background", sessions_per_day=2, save_every=10, pieces=3)


@pytest.mark.parametrize("limit", [30e6, 60e6, 100e6, 150e6])
def test_saving_less_often_keeps_the_bytes_of_a_day(limit):
    text = advised(played(MANY), "written_per_day", f'"{limit:.0f} B"')
    often = figure(r"save every (\d+) instead of every 10 steps", text)
    assert typical(play(changed(MANY, save_every=often)).written_bytes_per_day) <= limit


def test_one_checkpoint_a_day_takes_one_session_a_day():
    text = advised(played(MANY), "written_per_day", '"20 MB"')
    assert "save only at the end of a session, and train in 1 instead of 2 sessions a day" in text
    after = play(changed(MANY, save_every=None, sessions_per_day=1))
    assert typical(after.written_bytes_per_day) <= 20e6
    assert "a single checkpoint takes 14.5 MB" in advised(played(MANY), "written_per_day", '"1 MB"')


@pytest.mark.parametrize("pieces", [1, 3, 12])
@pytest.mark.parametrize("share", [0.4, 0.7, 0.95])
def test_so_many_steps_fit_in_the_time_with_all_sessions_opened(pieces, share):
    policy = Policy(pieces=pieces)
    limit = share * typical(play(policy).active_s)
    text = advised(played(policy), "time_to_finish", f'"{limit} s"')
    steps = figure(r"about (\d+) of the 240 steps fit", text)
    assert typical(play(policy, steps).active_s) <= 1.01 * limit
    assert typical(play(policy, steps + steps // 10 + 3).active_s) > limit


def test_what_takes_longer_to_open_than_the_limit_is_said():
    result = played(Policy(pieces=12))
    text = advised(result, "time_to_finish", '"0.5 s"')
    assert "the 12 pieces of data take 12 sessions, and opening them alone" in text
    alone = advised(played(Policy(pieces=1)), "time_to_finish", '"0.01 s"')
    assert alone.startswith("raise the limit: opening a session alone takes more than 10 ms")
    text = advised(result, "battery_per_session", '"0.00001 %"')
    assert "opening and saving a session takes more than 1e-05 % already" in text
    assert "each of the 12 pieces of data takes a session" in advised(result, "sessions", "11")


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_shorter_sessions_take_so_much_of_the_battery(share):
    limit = share * typical(play(Policy()).battery_share_per_session)
    text = advised(played(Policy()), "battery_per_session", f'"{100 * limit:.9f} %"')
    count = figure(r": (\d+) sessions instead of 1 take", text)
    assert typical(play(Policy(pieces=count)).battery_share_per_session) <= 1.05 * limit


def test_three_sessions_at_two_a_day_take_two_days():
    found = check(judged(played(MANY), "[budgets]\ndays = 1"), "days")
    assert found.status == "fail"
    assert found.message == "estimated at 2 days, allowed is at most 1"
    assert found.advice == "3 sessions a day instead of 2 end it in 1 day"
    assert judged(played(MANY), "[budgets]\ndays = 2").verdict != "fail"


@pytest.mark.parametrize("days", [1, 2, 3, 5])
def test_so_many_sessions_a_day_end_it_in_time(days):
    policy = Policy(pieces=12, sessions_per_day=2)
    text = advised(played(policy), "days", f"{days}.5")
    often = figure(r"(\d+) sessions a day instead of 2", text)
    assert typical(play(changed(policy, sessions_per_day=often)).days) <= days
    assert typical(play(changed(policy, sessions_per_day=often - 1)).days) > days
    assert "pieces of data takes a session" in advised(played(policy), "days", "0.5")
    assert "raise the limit" in advised(played(Policy()), "days", "0.5")


def test_a_figure_that_is_just_beyond_says_so():
    seconds = typical(play(Policy()).active_s)
    text = f'[budgets]\ntime_to_finish = "{0.99999 * seconds} s"'
    found = check(judged(played(Policy()), text), "time_to_finish")
    assert found.status == "fail"
    assert found.message.endswith(", missed by less than the displayed precision")
