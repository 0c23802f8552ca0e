"""What changed between two results, and how it is shown."""

import json
import re
from collections.abc import Sequence

import pytest

from odtpack_simulator.figures.compare import Change, Comparison, compare
from odtpack_simulator.figures.judge import judge
from odtpack_simulator.figures.limits import parse_budgets
from odtpack_simulator.figures.simulated import all_figures
from odtpack_simulator.reports.comparison import (
    MAX_COMMENT,
    check_lines,
    headline,
    render_markdown,
    render_text,
    rows,
)
from odtpack_simulator.result import DeviceCampaign, DeviceResult, Policy, SimulationResult
from tests.simulator.changed import changed, on_devices
from tests.simulator.factory import make_result, rebuilt, same

DEVICE = "google/pixel-8a"


def times(factor: float) -> SimulationResult:
    """Everything on host and device takes longer by a factor."""
    result = make_result([DEVICE])
    device = result.devices[0]
    latency = {"step_ms": device.latency.step_ms.scaled(factor)}
    campaign = {"active_s": device.campaign.active_s.scaled(factor)}
    return rebuilt(on_devices(result, latency=latency, campaign=campaign), factor)


def learned(metric: float, loss: float, interval: tuple[float, float]) -> SimulationResult:
    training = {"metric_after": metric, "metric_interval": interval, "eval_loss_after": loss}
    return changed(make_result([DEVICE]), training=training)


def figure(comparison: Comparison, metric: str) -> Change:
    (found,) = [figure for _, figure in comparison.figures() if figure.metric == metric]
    return found


def test_a_result_against_itself():
    result = make_result()
    comparison = compare(result, result)
    assert {f.direction for _, f in comparison.figures()} == {"same"}
    assert {f.change_percent for _, f in comparison.figures()} <= {0.0, None}
    assert {d.presence for d in comparison.devices} == {"both"}
    assert comparison.notes == ["both results are of the same package"]
    assert comparison.verdict is None
    assert comparison.checks == []
    assert headline(comparison).startswith("0 worse, 0 better of ")
    # Every metric of every device of which anything is known.
    known = sum(figure.value is not None for figure in all_figures(result))
    assert len(comparison.figures()) == known > 50


@pytest.mark.parametrize(("base", "head", "metric", "change", "direction"), [
    (make_result([DEVICE]), make_result([DEVICE], scale=1.4), "peak_memory", 34.3, "worse"),
    (make_result([DEVICE], scale=1.4), make_result([DEVICE]), "peak_memory", -25.5, "better"),
    # A floor: less of it is worse.
    (make_result([DEVICE]), make_result([DEVICE], scale=1.4), "memory_headroom", -1.5, "worse"),
    # The host's median is known to about 1 % on either side.
    (times(1.0), times(1.02), "step_latency", 2.0, "within noise"),
    (times(1.0), times(0.98), "time_to_finish", -2.0, "within noise"),
    (times(1.0), times(1.1), "step_latency", 10.0, "worse"),
    (times(1.0), times(0.8), "time_to_finish", -20.0, "better"),
    # A metric within the interval of the head's, and outside of it.
    (learned(0.95, 0.1, (0.9, 0.97)), learned(0.93, 0.1, (0.91, 0.96)),
     "accuracy_floor", -2.1, "within noise"),
    (learned(0.95, 0.1, (0.94, 0.96)), learned(0.93, 0.1, (0.92, 0.94)),
     "accuracy_floor", -2.1, "worse"),
    (learned(0.9, 0.2, (0.8, 0.95)), learned(0.9, 0.1, (0.8, 0.95)), "final_loss", -50, "better"),
    (learned(0.9, 0.0, (0, 1)), learned(0.9, 0.1, (0, 1)), "final_loss", None, "worse"),
])  # fmt: skip
def test_change_and_direction(
    base, head, metric, change,
    direction,
):  # fmt: skip
    found = figure(compare(base, head), metric)
    assert "floor" not in found.title
    assert found.direction == direction
    assert found.change_percent == (None if change is None else pytest.approx(change, abs=0.06))


def test_times_of_different_hosts_are_not_compared():
    base = make_result([DEVICE])
    base = changed(base, host={"cpu": "Another CPU", "onnxruntime": "1.22.0"})
    comparison = compare(base, times(2.0))
    assert figure(comparison, "step_latency").direction == "not compared"
    assert "another host" in (figure(comparison, "energy").reason or "")
    assert figure(comparison, "peak_memory").direction == "same"
    assert "different hosts" in comparison.notes[0]
    assert "ONNX Runtime: 1.22.0 before, 1.31.1 now" in comparison.notes
    text = render_text(comparison)
    assert text.count("measured on another host") == 1  # said once, not per figure


def test_what_differs_is_noted():
    base = make_result([DEVICE])
    policy = Policy(
        state="background", save_every=10, entitled=True, loop="train", session_options="default"
    )
    head = make_result([DEVICE], policy=policy)
    package = {"optimizer": "sgd", "manifest_sha256": "0" * 64}
    head = changed(head, data={"seed": 8, "batch_size": 32}, package=package)
    assert compare(base, head).notes == [
        "seed: 7 before, 8 now",
        "samples at once: 64 before, 32 now",
        "optimizer: adamw before, sgd now",
        "state: foreground before, background now",
        "steps between saves: none before, 10 now",
        "loop: step before, train now",
        "session options: package before, default now",
        "entitled to more memory: no before, yes now",
    ]


def test_another_learning_rate_is_noted_where_both_results_say_it():
    unsaid = make_result([DEVICE])
    base, head = (changed(unsaid, training={"learning_rate": rate}) for rate in (0.1, 0.001))
    same = "both results are of the same package"
    assert compare(base, head).notes == ["learning rate: 0.1 before, 0.001 now", same]
    assert compare(unsaid, head).notes == [same]


def test_other_data_are_noted():
    base, head = (changed(make_result([DEVICE]), data={"sha256": digit * 64}) for digit in "ab")
    same = "both results are of the same package"
    note = f"SHA-256 of the data: {'a' * 64} before, {'b' * 64} now"
    assert compare(base, head).notes == [note, same]
    assert compare(base, base).notes == [same]


def test_the_headline_counts_what_was_compared():
    base = make_result([DEVICE])
    busy = {"step_ms": None, "p90_ms": None, "first_step_ms": None, "not_judged": "it was busy"}
    comparison = compare(base, on_devices(base, latency=busy))
    total, unknown = len(comparison.figures()), 3
    text = f"0 worse, 0 better of {total - unknown} figures compared, {unknown} unknown now"
    assert headline(comparison) == text


def test_a_narrow_terminal_breaks_no_row():
    comparison = compare(times(1.0), times(1.5))
    wide, narrow = render_text(comparison), render_text(comparison, 60)
    assert max(map(len, wide.splitlines())) > 60 >= max(map(len, narrow.splitlines()))
    assert re.search(r"^Google Pixel 8a \*?: Step latency$", narrow, re.M)
    assert "+50.0 %" in narrow


def test_new_and_removed_devices():
    base, head = make_result([DEVICE, "raspberrypi/pi-4"]), make_result(["apple/iphone-15-pro"])
    comparison = compare(base, head)
    assert [(d.name, d.presence) for d in comparison.devices] == [
        ("apple/iphone-15-pro", "new"), (DEVICE, "removed"), ("raspberrypi/pi-4", "removed"),
    ]  # fmt: skip
    assert all(d.figures == [] for d in comparison.devices)
    for text in (render_text(comparison), render_markdown(comparison)):
        assert "only in the head: Apple iPhone 15 Pro" in text
        assert "only in the base: Google Pixel 8a, Raspberry Pi 4" in text


def test_figures_that_became_known_or_unknown():
    base = make_result([DEVICE])
    head = on_devices(base, campaign=DeviceCampaign())
    assert figure(compare(base, head), "energy").direction == "unknown now"
    assert "no such figure" in (figure(compare(base, head), "energy").reason or "")
    assert figure(compare(head, base), "energy").direction == "known now"
    assert "unknown" in render_text(compare(base, head))


def test_budgets_judge_the_head_against_the_base():
    base, head = make_result(), make_result(scale=1.4)
    budgets = parse_budgets(b'[budgets]\npeak_memory = "+5 %"\npackage_size = "1 GB"')
    comparison = compare(base, head, budgets)
    judged = judge(head, budgets, baseline=base)
    assert comparison.verdict == judged.verdict == "fail"
    assert comparison.over_budget
    failed = [each.check for each in comparison.checks if each.check.metric == "peak_memory"]
    assert len(failed) == len(head.devices)
    assert {check.baseline for check in failed} == {178_485_632}
    assert "package_size" not in {each.check.metric for each in comparison.checks}
    assert not compare(head, base, budgets).over_budget
    text = render_text(comparison)
    assert text.startswith("Over budget: ")
    assert text.count("change first:") == len({c.message for c in failed}) + 1  # and a warning


def test_the_same_inputs_give_the_same_bytes():
    base, head = make_result(), make_result(scale=1.4)
    budgets = parse_budgets(b'[budgets]\npeak_memory = "+5 %"\nstep_latency = "+1 %"')
    first, second = compare(base, head, budgets), compare(base, head, budgets)
    assert first.model_dump_json() == second.model_dump_json()
    for render in (render_text, render_markdown):
        assert render(first) == render(second)
    # What was judged before does not matter, and nothing is changed in place.
    before = head.to_json()
    assert compare(judge(base), judge(head), budgets) == first
    assert head.to_json() == before
    # The numbers survive JSON.
    again = Comparison.model_validate(json.loads(json.dumps(first.model_dump(mode="json"))))
    assert again == first


def test_equal_changes_share_a_row():
    names = [f"raspberrypi/{name}" for name in ("pi-4", "pi-5", "zero-2-w")] + [DEVICE]
    comparison = compare(make_result(names), make_result(names, scale=1.4))
    rows = [row for row in render_text(comparison).splitlines() if "Peak memory" in row]
    assert len(rows) == 1
    assert rows[0].startswith("all 4 devices ")
    assert re.search(r" 178 MB +240 MB +\+34.3 %  ✗ worse$", rows[0])


def test_the_table_of_markdown_is_whole():
    markdown = render_markdown(compare(make_result(), make_result(scale=1.4)))
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len(rows) > 5
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {7}
    assert rows[1] == "|---|---|---:|---:|---:|---|"


def test_hostile_text_stays_text():
    title = "Phone\x1b[2J\n| <img src=x onerror=alert(1)> [a](b) @all `code` " + "x" * 3900
    long = "reason\r\n" + "y" * 3990

    base = make_result([DEVICE])
    head = on_devices(
        base, title=title, training={"outcome": "killed", "steps_done": 1, "detail": long},
        latency={"step_ms": None, "not_judged": long}, campaign=DeviceCampaign(),
    )  # fmt: skip
    head = changed(
        head, host={"cpu": long, "onnxruntime": long},
        interruption={"equal": False, "detail": long}, training={"metric_name": long},
        package={"loss": long, "optimizer": long},
    )  # fmt: skip
    budgets = parse_budgets(
        b'[budgets]\nstep_latency = "+1 %"\nenergy = "1 J"\naccuracy_floor = "-1 %"\n'
        b'final_loss = "+1 %"\npeak_memory = "+0 %"',
        "z" * 5000,
    )
    comparison = compare(base, head, budgets)
    comparison = Comparison.model_validate(comparison.model_dump(mode="json"))
    assert comparison.over_budget
    text = render_text(comparison)
    assert "\x1b" not in text
    assert "\r" not in text
    markdown = render_markdown(comparison)
    assert len(markdown.encode()) <= MAX_COMMENT
    assert "<img" not in markdown.replace("\\<img", "")
    assert "[a](b)" not in markdown
    only_here = compare(changed(base, devices=[]), head)
    for shown in (render_text(only_here), render_markdown(only_here)):
        assert "only in the head" in shown
        assert "\x1b" not in shown


def with_campaign(**figures: float) -> SimulationResult:
    """A result whose device's campaign has these figures."""
    policy = Policy(state="background", sessions_per_day=1)
    campaign = {key: same(number) for key, number in figures.items()}
    return rebuilt(on_devices(make_result([DEVICE], policy=policy), campaign=campaign), figures)


def test_a_change_of_many_times_the_base_is_a_factor():
    text = render_text(compare(with_campaign(sessions=1), with_campaign(sessions=1e6)))
    assert "× 1,000,000" in text
    text = render_text(compare(with_campaign(sessions=1), with_campaign(sessions=10)))
    assert "+900.0 %" in text


@pytest.mark.parametrize(("before", "now", "direction", "change"), [
    (1e-6, 0.9, "same", 0.0),  # in one day, as before
    (0.9999, 1.0001, "within noise", 100.0),  # the last session takes a moment longer
    (1.5, 2.5, "worse", 50.0),
    (2.5, 0.5, "better", -66.7),
])  # fmt: skip
def test_days_are_whole(before, now, direction, change):
    found = figure(compare(with_campaign(days=before), with_campaign(days=now)), "days")
    assert found.direction == direction
    assert found.change_percent == pytest.approx(change, abs=0.06)


@pytest.mark.parametrize("factor", [3.3, 0.3])
def test_times_of_the_same_package_are_never_worse(factor):
    """However busy the machine was when one of them was taken."""
    base = make_result([DEVICE])
    head = changed(times(factor), package=base.package)
    comparison = compare(base, head)
    found = figure(comparison, "step_latency")
    assert found.direction == "within noise"
    assert found.noise_percent == pytest.approx(100 * abs(factor - 1), rel=0.01)
    assert not {f.direction for _, f in comparison.figures()} & {"worse", "better"}
    budgets = parse_budgets(b'[budgets]\nstep_latency = "+5 %"')
    assert not compare(base, head, budgets).over_budget
    other = changed(head, policy=Policy(save_every=7))
    assert figure(compare(base, other), "step_latency").direction in ("worse", "better")


# A comparison of many devices is read in a few rows, and none of them is left out.


def grown(device: DeviceResult, factor: float) -> DeviceResult:
    """The device with a larger peak and longer times."""
    latency, campaign = device.latency, device.campaign
    return changed(
        device,
        memory={"predicted_peak_bytes": int(factor * device.memory.predicted_peak_bytes)},
        latency={
            "step_ms": latency.step_ms.scaled(factor),
            "p90_ms": latency.p90_ms.scaled(factor),
        },
        campaign={"active_s": campaign.active_s.scaled(factor)},
    )


def many(factors: Sequence[float]) -> SimulationResult:
    """A result with as many devices, all with long titles, larger and slower by these factors."""
    result = make_result([DEVICE])
    devices = [
        grown(result.devices[0], factor).model_copy(
            update={"name": f"acme/phone-{index}", "title": f"Acme Phone {index} " + "é|" * 30}
        )
        for index, factor in enumerate(factors)
    ]
    return rebuilt(changed(result, devices=devices), factors)


@pytest.mark.parametrize("limit", [MAX_COMMENT, 3000, 700, 60])
def test_a_comment_is_no_larger_than_allowed(limit):
    """A hundred devices, of which no two changed alike."""
    budgets = parse_budgets(b'[budgets]\npeak_memory = "+5 %"')
    head = many([1.0 + 0.3 * 1.26**index for index in range(100)])
    comparison = compare(many([1.0] * 100), head, budgets)
    assert len(render_markdown(comparison, limit=10**9).encode()) > 1.5 * MAX_COMMENT
    text = render_markdown(comparison, limit=limit)
    assert len(text.encode()) <= limit
    assert text.startswith("### odtpack: Over budget")
    if limit >= 700:
        left = re.search(r"(\d+) more (changes|checks) left out", text)
        assert left
        assert int(left[1]) > 0
        assert "not validated on hardware" in text  # the end is not cut off
    if limit == MAX_COMMENT:  # as much as fits
        assert len(text.encode()) > limit - 500


def test_changes_that_lie_close_together_share_a_row():
    head = many([1.1, 1.115, 1.12, 1.4, 1.42, 3.0])
    (near, far, farthest) = (
        row for row in rows(compare(many([1.0] * 6), head))[0][::-1] if row.title == "Step latency"
    )
    assert (near.change.split(" (")[0], len(near.names.others)) == ("+10.0 to +12.0 %", 2)
    assert near.names.shown.startswith("Acme Phone 2")  # the largest change
    assert far.change.startswith("+40.0 to +42.0 % (noise")
    assert far.names.shown.count("Acme Phone") == 2
    assert farthest.change.startswith("+200.0 % (noise")


def test_a_fold_gives_the_names_of_the_others():
    """Where nothing of it can end the fold, and dropped where the comment is too long for it."""
    comparison = compare(many([1.0] * 5), many([1.1, 1.1, 1.1, 1.5, 2.1]))
    markdown = render_markdown(comparison)
    folded = re.findall(r"<details><summary>and (\d+) others</summary>(.*?)</details>", markdown)
    assert folded
    assert {int(count) for count, _ in folded} == {2}
    assert all(names.count("Acme Phone") == 2 for _, names in folded)
    assert "é\\|é" in folded[0][1]
    short = render_markdown(comparison, limit=len(markdown.encode()) - 1)
    assert "<details>" not in short
    assert "and 2 others" in short
    assert "more changes" not in short
    assert "and 2 others" in render_text(comparison)


def test_twenty_five_devices_are_told_in_a_few_rows():
    """Every figure is in a row once, and each row says how many devices it stands for."""
    base = make_result()
    factors = [1.3 + 0.002 * index for index in range(len(base.devices))]
    devices = [
        grown(device, factor) if device.latency.step_ms is not None else device
        for device, factor in zip(base.devices, factors, strict=True)
    ]
    comparison = compare(base, changed(base, devices=devices))
    found, same = rows(comparison)
    assert len(found) <= 15
    told = 0
    for row in found:
        several = re.match(r"all .*?(\d+) devices", row.names.shown)
        told += (
            int(several[1]) if several else len(row.names.others) + row.names.shown.count(",") + 1
        )
    assert told + same == len(comparison.figures())
    assert len(render_text(comparison).splitlines()) <= 25
    markdown = render_markdown(comparison)
    assert len(markdown.encode()) < 8_000
    assert len(re.sub(r"<details>.*?</details>", "", markdown).splitlines()) <= 30


def test_devices_whose_verdict_changed_come_first():
    """The limit is passed by two of four; the others are much slower too, and stay within it."""
    base = many([1.0] * 4)
    step = base.devices[0].latency.step_ms
    text = f'[budgets]\nstep_latency = "{2 * step.high} ms"\npackage_size = "1 GB"'
    budgets = parse_budgets(text.encode())
    head = many([9.0, 1.5, 1.5, 8.0])
    comparison = compare(base, head, budgets)
    verdicts = [(device.verdict_before, device.verdict) for device in comparison.devices]
    assert verdicts == [("pass", "fail"), ("pass", "pass"), ("pass", "pass"), ("pass", "fail")]
    assert [device.verdict for device in judge(head, budgets).devices] == [v for _, v in verdicts]
    found, _ = rows(comparison)
    marked = [row.verdicts for row in found]
    assert marked == sorted(marked, reverse=True)
    assert set(marked) == {"pass → fail", ""}
    assert {row.names.shown.count("Acme") for row in found if row.verdicts} == {2}
    for shown in (render_text(comparison), render_markdown(comparison)):
        assert shown.index("pass → fail") < shown.index("Step latency")
        assert shown.index("Acme Phone 3") < shown.index("Acme Phone 1")
    # Better again, the other way round; and without budgets by what needs none.
    assert "fail → pass" in render_text(compare(head, base, budgets))
    assert "→" not in render_text(compare(base, head))


def test_the_peak_that_all_share_is_told_once():
    """Though the verdict of some changed, and of one it is unknown now."""
    names = ["google/pixel-8a", "google/pixel-4a", "raspberrypi/pi-4", "raspberrypi/pi-5"]
    base, head = make_result(names), make_result(names, scale=1.4)
    last = changed(head.devices[-1], memory={"outcome": "killed"})
    head = changed(head, devices=[*head.devices[:-1], last])
    budgets = parse_budgets(b'[budgets]\n[class.android]\npeak_memory = "200 MB"')
    found = [r for r in rows(compare(base, head, budgets))[0] if r.title == "Peak memory"]
    assert [(row.names.shown, row.verdicts, row.head) for row in found] == [
        ("Raspberry Pi 5 (8 GB) *", "pass → fail", "unknown"),
        ("all but Raspberry Pi 5 (8 GB) * (3 devices)", "", "240 MB"),
    ]


def test_checks_of_one_metric_are_told_by_the_worst_device():
    budgets = parse_budgets(b'[budgets]\nstep_latency = "1 ms"')
    comparison = compare(many([1.0] * 4), many([1.1, 1.2, 5.0, 1.3]), budgets)
    (line,) = [line for line in check_lines(comparison) if line.title == "Step latency"]
    assert (line.outcome, line.location) == ("fails", "budgets.toml:2")
    assert line.names.shown.startswith("all 4 devices, worst Acme Phone 2")
    assert render_text(comparison).count("Step latency: estimated at") == 1


def test_budgets_of_a_device_that_the_base_lacks():
    budgets = parse_budgets(b'[device."acme/phone-1"]\nsessions = 3')
    comparison = compare(many([1.0]), many([1.0, 1.0]), budgets)
    assert [device.verdict_before for device in comparison.devices] == ["pass", None]
