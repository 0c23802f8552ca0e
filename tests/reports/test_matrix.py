"""What each cell of the device matrix says, and figures as text."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from odtpack_simulator.figures.judge import judge
from odtpack_simulator.figures.limits import parse_budgets
from odtpack_simulator.figures.metric import worst
from odtpack_simulator.reports import render_report, report_of
from odtpack_simulator.reports.console import print_result
from odtpack_simulator.reports.html_report import render_html
from odtpack_simulator.reports.report import Cell, check_rows, first_fixes, location
from odtpack_simulator.reports.simulation import (
    CHECKS,
    TOPICS,
    campaign_rows,
    cells,
    interruption_words,
    policy_words,
    shown,
    simulation_report,
    unknown_rows,
)
from odtpack_simulator.reports.simulation_page import interruption_rows
from odtpack_simulator.result import (
    DeviceCampaign,
    Interruption,
    InterruptionInfo,
    NotJudged,
    Policy,
    SimulationResult,
)
from odtpack_simulator.values.figure import WORST_FIRST, Check, shortened
from odtpack_simulator.values.text import clean
from odtpack_simulator.values.units import (
    Interval,
    format_bytes,
    format_energy,
    format_interval,
    format_value,
)
from tests.reports.demo import stored_result
from tests.simulator.changed import changed, on_devices
from tests.simulator.factory import make_result, same


def printed(result: SimulationResult) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    print_result(result, console)
    return console.export_text()


def cell(name: str, topic: str) -> Cell:
    result = stored_result()
    device = next(device for device in result.devices if device.name == name)
    return cells(result, device)[TOPICS.index(topic)]


@pytest.mark.parametrize(("name", "topic", "state", "figure", "words"), [
    ("google/pixel-8a", "Memory", "pass", "331 MB", "within 500 MB"),
    ("google/pixel-8a", "Metric", "pass", "96.6 %", "at least 95 %"),
    ("samsung/galaxy-a12", "Step", "warn", "140 ms", "over 100 ms"),
    ("samsung/galaxy-a12", "Finish", "warn", "40.5 s", "may exceed 60 s"),
    ("raspberrypi/zero-2-w", "Step", "fail", "549 ms", "over 150 ms"),
    ("raspberrypi/zero-2-w", "Memory", "fail", "359 MB", "over 336 MB"),
    ("raspberrypi/zero-2-w", "Energy", "warn", "657 J", "over 250 J"),
    ("apple/iphone-12-mini", "Step", "not judged", "not judged", ""),
])  # fmt: skip
def test_cells(name, topic, state, figure, words):
    found = cell(name, topic)
    assert (found.state, found.figure, found.words) == (state, figure, words)


def test_the_memory_cell_says_whose_memory_it_is():
    result = stored_result(["google/pixel-8a"])
    memory = TOPICS.index("Memory")
    for text, of in (
        (b"", "whole process"),
        (b'[budgets]\npeak_memory = "900 MB"', "training only"),
        (b'[budgets]\napp_footprint = "30 GB"\npeak_memory = "900 MB"', "whole process"),
    ):
        judged = judge(result, parse_budgets(text) if text else None)
        assert cells(judged, judged.devices[0])[memory].ends == of
        assert of in printed(judged)
    unjudged = cells(changed(result, checks=[]), changed(result.devices[0], checks=[]))
    assert unjudged[memory].ends == "training only"


def test_a_floor_that_too_few_samples_cannot_tell():
    result = changed(
        stored_result(["google/pixel-8a"]),
        training={"metric_after": 0.95, "metric_interval": (0.92, 0.97)},
    )
    judged = judge(result, parse_budgets(b"[budgets]\naccuracy_floor = 0.94"))
    (check,) = [c for c in judged.checks if c.metric == "small_data"]
    words = f"Too few held-out samples: {check.actual:.0f} of about {check.limit:.0f} needed"
    assert cells(judged, judged.devices[0])[TOPICS.index("Metric")].words == words


def test_the_memory_cell_shows_what_was_compared():
    budgets = parse_budgets(b'[budgets]\napp_footprint = "30 GB"')
    result = judge(stored_result(["google/pixel-8a"]), budgets)
    memory = cells(result, result.devices[0])[TOPICS.index("Memory")]
    (check,) = [c for c in result.devices[0].checks if c.metric == "memory_limit"]
    assert check.actual == result.devices[0].memory.need_bytes > 30e9
    assert memory.figure == format_bytes(int(check.actual))
    assert memory.words.startswith("over ")
    assert f"✗ {memory.figure}" in printed(result)
    for form in ("markdown", "html"):
        text = render_report(result, form).decode().replace("\N{NO-BREAK SPACE}", " ")
        assert memory.figure in text


def test_the_summary_says_what_each_figure_is_of():
    result = changed(stored_result(), training={"eval_loss_after": None})
    assert simulation_report(result).summary == (
        f"On training samples in {result.data.steps} steps: loss 1.94 → 0.12; "
        f"on {result.data.held_out_samples} held-out samples: accuracy 9.4 → 96.6 %"
    )


def test_a_replay_that_was_ended_although_the_plan_fits():
    result = stored_result(["raspberrypi/zero-2-w"])
    killed = {"outcome": "killed"}
    result = judge(on_devices(result, memory=killed, training=killed))
    found = dict(zip(TOPICS, cells(result, result.devices[0]), strict=True))
    assert (found["Memory"].state, found["Memory"].words) == ("fail", "ended there")
    assert found["Metric"].figure == "ended early"
    assert simulation_report(result).headline == "The device does not pass"


def test_without_a_budget_a_figure_stands_alone():
    result = stored_result(["google/pixel-8a"])
    found = cells(changed(result, checks=[]), changed(result.devices[0], checks=[]))
    assert {each.state for each in found} == {None}
    assert {each.words for each in found} == {"no budget"}
    assert found[TOPICS.index("Step")].figure == "50.5 ms"


def test_a_floor_that_is_missed():
    result = stored_result(["google/pixel-8a"])
    checks = [
        changed(check, limit=0.99, status="fail") if check.metric == "accuracy_floor" else check
        for check in result.checks
    ]
    assert cells(changed(result, checks=checks), result.devices[0])[-1].words == "below 99 %"


def test_a_floor_that_only_the_low_end_misses():
    result = stored_result(["google/pixel-8a"])
    result = on_devices(result, memory={"limit_low_bytes": 1_000_000_000})
    judged = judge(result, parse_budgets(b'[budgets]\nmemory_headroom = "60 %"'))
    memory = cells(judged, judged.devices[0])[TOPICS.index("Memory")]
    assert (memory.state, memory.figure, memory.words) == ("warn", "88.4 %", "may be below 60 %")


def test_words_name_a_metric_that_the_figure_does_not_speak_for():
    result = stored_result(["google/pixel-8a"])
    device = result.devices[0]
    missed = {"metric": "written_per_day", "limit": 20e6, "actual": 43e6, "status": "fail"}
    written = changed(device.checks[0], **missed)
    bad = changed(device, checks=[*device.checks, written])
    sessions = cells(result, bad)[TOPICS.index("Sessions")]
    assert (sessions.figure, sessions.words) == ("1", "Written per day: over 20 MB")
    good = changed(device, checks=[changed(written, status="pass", limit=50e6), *device.checks])
    assert cells(result, good)[TOPICS.index("Sessions")].words == "within 3"


def test_what_to_change_first_is_of_the_device_that_is_furthest_off():
    """A failure before a warning; a figure near its limit before one far below it."""
    result = stored_result(["google/pixel-8a", "raspberrypi/pi-4", "samsung/galaxy-a12"])
    missed = {"metric": "energy", "unit": "J", "limit": 100.0, "status": "fail"}
    base = changed(result.devices[0].checks[0], **missed)
    for levels, actuals, expected in (
        (("warn", "warn", "warn"), (28.0, 90.0, 50.0), 1),
        (("warn", "error", "warn"), (400.0, 120.0, 50.0), 1),
        (("error", "error", "error"), (120.0, 150.0, 400.0), 2),
    ):
        devices = [
            changed(device, checks=[changed(base, level=level, actual=actual, advice=device.name)])
            for device, level, actual in zip(result.devices, levels, actuals, strict=True)
        ]
        (fix,) = first_fixes(report_of(changed(result, devices=devices, checks=[])))
        assert fix.advice == devices[expected].name
    floor = changed(base, metric="accuracy_floor", limit=0.9)
    pair = [(None, changed(floor, actual=actual)) for actual in (0.8, 0.5)]
    assert worst(pair, CHECKS, WORST_FIRST)[1].actual == 0.5
    for limit, off, further in ((0.0, 1.0, 3.0), (-2.0, -1.0, 5.0)):
        pair = [
            (None, changed(base, metric="final_loss", limit=limit, actual=actual))
            for actual in (off, further)
        ]
        assert worst(pair, CHECKS, WORST_FIRST)[1].actual == further


def test_a_metric_without_a_title_is_called_by_its_name():
    check = Check(
        metric="ink_used", limit=1, actual=2, unit="1", level="error", status="fail",
        message="m", advice="write less",
    )  # fmt: skip
    result = changed(stored_result(), checks=[check])
    assert "Ink used" in [row.title for row in check_rows(report_of(result))]
    assert "Ink used" in [fix.title for fix in first_fixes(report_of(result))]


def test_the_time_to_finish_is_that_of_the_campaign():
    device = stored_result(["google/pixel-8a"]).devices[0]
    result = stored_result(["google/pixel-8a"])
    figure = cells(result, device)[TOPICS.index("Finish")].figure
    assert figure == format_value(device.campaign.active_s.typical, "s")
    bare = changed(device, campaign=DeviceCampaign(), checks=[])
    for topic in ("Sessions", "Energy", "Finish"):
        assert cells(result, bare)[TOPICS.index(topic)].figure == "–"


@pytest.mark.parametrize(
    ("elapsed", "words"), [(2e-5, "in 1 day"), (1.0, "in 1 day"), (1.00002, "in 2 days")]
)
def test_days_are_told_as_on_a_calendar(elapsed, words):
    result = on_devices(stored_result(["google/pixel-8a"]), campaign={"days": same(elapsed)})
    told = changed(result.devices[0], checks=[])
    assert cells(result, told)[TOPICS.index("Sessions")].detail == words
    (row,) = campaign_rows(result)
    assert ("Days", words.split(" ")[1], words.split(" ")[1]) in row.figures


def test_reasons_are_grouped_by_what_they_leave_out():
    result = stored_result(["google/pixel-8a", "raspberrypi/pi-4"])
    reason = NotJudged(figure="days", reason="r")
    (entry,) = unknown_rows(on_devices(result, campaign={"not_judged": [reason]}))
    assert (entry.figures, entry.reason) == ("days", "r")
    assert entry.devices == "Google Pixel 8a, Raspberry Pi 4 (4 GB)"


def test_what_is_counted_as_nothing_is_shown():
    """A figure that is too low because something is unknown must say so on the page."""
    result = stored_result(["google/pixel-8a"])
    entry = NotJudged(figure="checkpoint_save_ms", reason="no storage <rate> is known")
    page = render_html(on_devices(result, campaign={"left_out": [entry]})).decode()
    assert "<span>counted as nothing</span>" in page
    assert "no storage &lt;rate&gt; is known" in page
    assert "saving checkpoints</td>" in page
    assert "counted as nothing" not in render_html(result).decode()


def test_interruptions_in_words():
    info = InterruptionInfo(interruptions=[], save_every=5, saves=3, equal=None, detail="why 3 MB")
    assert interruption_words(info) == (
        "The training was not interrupted; it repeated 0 steps; whether it ended with the same "
        "weights was not judged. Why 3 MB."
    )


def test_one_is_one_step_and_a_session_in_a_month_is_not_none():
    policy = Policy(sessions_per_day=1 / 30, save_every=1)
    words = "0.03333 sessions a day, a checkpoint every 1 step. "
    assert policy_words(changed(stored_result(), policy=policy)).startswith(words)
    once = Interruption(at="step", step=5, resumed_from_step=4, repeated_steps=1)
    info = InterruptionInfo(interruptions=[once], save_every=4, saves=3, equal=True)
    assert "; it repeated 1 step, and ended" in interruption_words(info)
    (row,) = interruption_rows(changed(stored_result(), interruption=info))
    assert row.detail == "1 step repeated"


@given(st.floats(1e-3, 1e9))
def test_energy_has_three_digits_and_its_unit(value):
    number, unit = format_energy(value).split(" ")
    factor = {"J": 1.0, "kJ": 1e3, "MJ": 1e6}[unit]
    assert float(number) * factor == pytest.approx(value, rel=6e-3)
    assert unit == "MJ" or float(number) < 1000


def test_counts_and_ends_in_words():
    assert shown(Interval(low=1, typical=2.5, high=3), "count") == ("2.5", "1 to 3")
    assert shown(same(1), "count") == ("1", "1")
    assert format_interval(Interval(low=20, typical=30, high=40), "J") == "20.0 to 40.0 J"
    assert format_interval(Interval(low=200, typical=300, high=4000), "J") == "200 J to 4.00 kJ"


def test_not_validated_in_words():
    result = stored_result(["google/pixel-8a", "raspberrypi/pi-4"])
    assert report_of(result).caution.startswith("The profiles are not validated")
    one = changed(result.devices[0], validated=True)
    mixed = changed(result, devices=[one, result.devices[1]])
    assert report_of(mixed).caution.startswith("1 of 2 profiles is not validated")
    assert report_of(make_result([])).caution == ""


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("budgets.toml:12", ("budgets.toml", 12)),
        ("C:\\ci\\budgets.toml:3", ("C:\\ci\\budgets.toml", 3)), ("budgets.toml", None),
        (":3", None), ("a:b", None), ("a:1234567890", None), (None, None),
    ],
)  # fmt: skip
def test_locations(text, place):
    assert location(text) == place


@given(st.text())
def test_clean_text_is_one_line_of_printable_characters(text):
    found = clean(text)
    assert len(found) == len(text)
    assert "\n" not in found
    assert len(shortened(found, 5)) <= 5
    found.encode("utf-8")
