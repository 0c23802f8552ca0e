"""A comparison of many devices is read in a few rows, and none of them is left out."""

import re
from collections.abc import Sequence

import pytest

from odtpack_simulator.figures.compare import compare
from odtpack_simulator.figures.judge import judge
from odtpack_simulator.figures.limits import parse_budgets
from odtpack_simulator.reports.comparison import (
    MAX_COMMENT,
    check_lines,
    render_markdown,
    render_text,
    rows,
)
from odtpack_simulator.result.result import DeviceResult, SimulationResult
from tests.simulator.factory import make_result, rebuilt

DEVICE = "google/pixel-8a"


def grown(device: DeviceResult, factor: float) -> DeviceResult:
    """The device with a larger peak and longer times."""
    latency, campaign = device.latency, device.campaign
    assert latency.step_ms is not None
    assert latency.p90_ms is not None
    assert campaign is not None
    assert campaign.active_s is not None
    peak = int(factor * device.memory.predicted_peak_bytes)
    times = {"step_ms": latency.step_ms.scaled(factor), "p90_ms": latency.p90_ms.scaled(factor)}
    work = {"active_s": campaign.active_s.scaled(factor)}
    return device.model_copy(
        update={
            "memory": device.memory.model_copy(update={"predicted_peak_bytes": peak}),
            "latency": latency.model_copy(update=times),
            "campaign": campaign.model_copy(update=work),
        }
    )


def many(factors: Sequence[float]) -> SimulationResult:
    """A result with as many devices, all with long titles, larger and slower by these factors."""
    result = make_result([DEVICE])
    devices = [
        grown(result.devices[0], factor).model_copy(
            update={
                "name": f"acme/phone-{index}",
                "title": f"Acme Phone {index} " + "é|" * 30,
            }
        )
        for index, factor in enumerate(factors)
    ]
    return rebuilt(result.model_copy(update={"devices": devices}), factors)


@pytest.mark.parametrize("limit", [MAX_COMMENT, 3000, 700, 60])
def test_a_comment_is_no_larger_than_allowed(limit: int) -> None:
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


def test_changes_that_lie_close_together_share_a_row() -> None:
    head = many([1.1, 1.115, 1.12, 1.4, 1.42, 3.0])
    (near, far, farthest) = (
        row for row in rows(compare(many([1.0] * 6), head))[0][::-1] if row.title == "Step latency"
    )
    assert (near.change.split(" (")[0], len(near.names.others)) == ("+10.0 to +12.0 %", 2)
    assert near.names.shown.startswith("Acme Phone 2")  # the largest change
    assert far.change.startswith("+40.0 to +42.0 % (noise")
    assert far.names.shown.count("Acme Phone") == 2
    assert farthest.change.startswith("+200.0 % (noise")


def test_a_fold_gives_the_names_of_the_others() -> None:
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


def test_twenty_five_devices_are_told_in_a_few_rows() -> None:
    """Every figure is in a row once, and each row says how many devices it stands for."""
    base = make_result()
    factors = [1.3 + 0.002 * index for index in range(len(base.devices))]
    devices = [
        grown(device, factor) if device.latency.step_ms is not None else device
        for device, factor in zip(base.devices, factors, strict=True)
    ]
    head = base.model_copy(update={"devices": devices})
    comparison = compare(base, head)
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
    visible = re.sub(r"<details>.*?</details>", "", markdown)
    assert len(visible.splitlines()) <= 30


def test_devices_whose_verdict_changed_come_first() -> None:
    """The limit is passed by two of four; the others are much slower too, and stay within it."""
    base = many([1.0] * 4)
    step = base.devices[0].latency.step_ms
    assert step is not None
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


def test_the_peak_that_all_share_is_told_once() -> None:
    """Though the verdict of some changed, and of one it is unknown now."""
    names = ["google/pixel-8a", "google/pixel-4a", "raspberrypi/pi-4", "raspberrypi/pi-5"]
    base, head = make_result(names), make_result(names, scale=1.4)
    last = head.devices[-1]
    memory = last.memory.model_copy(update={"outcome": "killed"})
    head = head.model_copy(
        update={"devices": [*head.devices[:-1], last.model_copy(update={"memory": memory})]}
    )
    budgets = parse_budgets(b'[budgets]\n[class.android]\npeak_memory = "200 MB"')
    found = [r for r in rows(compare(base, head, budgets))[0] if r.title == "Peak memory"]
    assert [(row.names.shown, row.verdicts, row.head) for row in found] == [
        ("Raspberry Pi 5 (8 GB) *", "pass → fail", "unknown"),
        ("all but Raspberry Pi 5 (8 GB) * (3 devices)", "", "240 MB"),
    ]


def test_checks_of_one_metric_are_told_by_the_worst_device() -> None:
    budgets = parse_budgets(b'[budgets]\nstep_latency = "1 ms"')
    comparison = compare(many([1.0] * 4), many([1.1, 1.2, 5.0, 1.3]), budgets)
    (line,) = [line for line in check_lines(comparison) if line.title == "Step latency"]
    assert (line.outcome, line.location) == ("fails", "budgets.toml:2")
    assert line.names.shown.startswith("all 4 devices, worst Acme Phone 2")
    assert render_text(comparison).count("Step latency: estimated at") == 1


def test_budgets_of_a_device_that_the_base_lacks() -> None:
    budgets = parse_budgets(b'[device."acme/phone-1"]\nsessions = 3')
    comparison = compare(many([1.0]), many([1.0, 1.0]), budgets)
    assert [device.verdict_before for device in comparison.devices] == ["pass", None]
