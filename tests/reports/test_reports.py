import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from odtpack_runtime.errors import OdtpackError, UnknownNameError
from odtpack_simulator import reports
from odtpack_simulator.figures.judge import judge
from odtpack_simulator.figures.limits import parse_budgets
from odtpack_simulator.reports import (
    parse_destination,
    render_report,
    report_format,
    report_formats,
    write_report,
)
from odtpack_simulator.reports.console import print_result
from odtpack_simulator.reports.report import first_fixes, not_judged, report_of
from odtpack_simulator.reports.simulation import TOPICS
from odtpack_simulator.result.result import NotJudged, Policy, SimulationResult, load_result
from tests.reports.demo import stored_result
from tests.simulator.factory import make_result

FORMATS = sorted(
    path.name.removesuffix("_report.py") for path in Path(reports.__path__[0]).glob("*_report.py")
)


@pytest.fixture(scope="module")
def result() -> SimulationResult:
    budgets = parse_budgets(b'[budgets]\nstep_latency = "100 ms"')
    return judge(make_result(scale=2.0), budgets)


def test_every_format_is_written_whole(result: SimulationResult, tmp_path: Path) -> None:
    assert report_formats() == FORMATS
    assert {"github", "html", "json", "junit", "markdown"} <= set(FORMATS)
    for name in report_formats():
        path = tmp_path / f"report.{name}"
        path.write_text("old", "utf-8")
        assert write_report(result, f"{name}:{path}") == path
    assert load_result(tmp_path / "report.json") == result
    assert (tmp_path / "report.html").read_bytes().startswith(b"<!doctype html>")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        f"report.{name}" for name in report_formats()
    ]
    assert json.loads((tmp_path / "report.json").read_bytes())["verdict"] == "fail"


def test_destinations() -> None:
    assert parse_destination("html:a/b.html") == ("html", Path("a/b.html"))
    assert parse_destination("json:C:\\report.json")[1] == Path("C:\\report.json")
    for text in ("pdf:x", "x", "", ":x", "HTML:x"):
        with pytest.raises(UnknownNameError, match=f"known formats: {', '.join(FORMATS)}"):
            parse_destination(text)
    for text in ("html", "html:"):
        with pytest.raises(OdtpackError, match="needs a path"):
            parse_destination(text)


def test_a_dash_is_standard_output_for_text(
    result: SimulationResult, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    for name in report_formats():
        if not report_format(name).to_stdout:
            with pytest.raises(OdtpackError, match="not text for a terminal"):
                parse_destination(f"{name}:-")
            continue
        assert write_report(result, f"{name}:-") == Path("-")
        assert capfdbinary.readouterr().out == render_report(result, name)


def test_standard_output_without_bytes(
    result: SimulationResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stdout", stream)
    write_report(result, "markdown:-")
    assert stream.getvalue().encode() == render_report(result, "markdown")


def test_unwritable_place(result: SimulationResult, tmp_path: Path) -> None:
    with pytest.raises(OdtpackError):
        write_report(result, f"html:{tmp_path}/absent/report.html")
    with pytest.raises(OdtpackError):
        write_report(result, f"json:{tmp_path}")
    assert list(tmp_path.iterdir()) == []


def printed(result: SimulationResult, width: int = 100) -> str:
    stream = io.StringIO()
    print_result(result, Console(file=stream, width=width))
    return stream.getvalue()


def test_console_names_devices_verdicts_and_fixes(result: SimulationResult) -> None:
    text = printed(result, 160)
    assert text.startswith("✗ ")
    for device in result.devices:
        assert device.title in text
    assert "change first:" in text
    assert "the profile gives no matrix rate" in text
    assert "not validated on hardware" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_console_keeps_to_its_width(result: SimulationResult, width: int) -> None:
    assert max(map(len, printed(result, width).splitlines())) <= width


def test_console_defuses_control_characters(result: SimulationResult) -> None:
    device = result.devices[0].model_copy(update={"title": "\x1b[2J[red]evil[/red]\u202e"})
    text = printed(result.model_copy(update={"devices": [device]}))
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "[red]evil" in text


def test_console_shows_the_campaign_where_there_is_room() -> None:
    result = stored_result()
    wide, narrow = printed(result, 160), printed(result, 60)
    for topic in TOPICS:
        assert topic in wide
    heads = narrow.split("Device", 1)[1].splitlines()[0]
    assert sum(topic in heads for topic in TOPICS) == 2
    assert "657 J" in wide
    assert "over 250 J" in wide


def test_console_drops_what_passes_first() -> None:
    """At 60 columns there is room for two topics: those that fail."""
    result = stored_result(["google/pixel-8a", "raspberrypi/pi-4"])
    heads = printed(result, 60).split("Device", 1)[1].splitlines()[0].split()
    assert heads == ["Step", "Finish"]


def test_console_goes_to_stderr(
    result: SimulationResult, capsys: pytest.CaptureFixture[str]
) -> None:
    print_result(result)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "devices pass" in captured.err


def test_console_without_devices() -> None:
    assert "The package passes" in printed(judge(make_result([])))


def test_console_says_why_something_was_not_judged() -> None:
    """One line per reason: a run with open checks must tell what to do about it."""
    policy = Policy(state="background")
    names = ["google/pixel-8a", "apple/iphone-16-pro", "samsung/galaxy-a12", "raspberrypi/pi-5"]
    result = make_result(names, policy=policy)
    devices = []
    for device in result.devices:
        unknown = {"limit_bytes": None, "limit_state": "background", "outcome": "not judged"}
        memory = device.memory.model_copy(update=unknown)
        devices.append(device.model_copy(update={"memory": memory}))
    budgets = parse_budgets(b'[budgets]\npeak_memory = "+5 %"\nenergy = "1 MJ"')
    open_result = judge(result.model_copy(update={"devices": devices}), budgets)
    lines = " ".join(printed(open_result, 160).split())
    first = "Google Pixel 8a, Apple iPhone 16 Pro, Samsung Galaxy A12 (3 GB) and 1 more"
    limit = "the device's limit in the background is unknown: a peak_memory limit in the budgets"
    assert f"? Device memory limit on {first}: {limit} would stand in for it" in lines
    assert f"? Peak memory on {first}: no baseline was given: odtpack judge" in lines
    assert lines.count("the profile gives no power under load") == 1


def test_console_says_why_a_finish_is_missing() -> None:
    """A step that is known without an end that is: the background window has no figure."""
    device = make_result(["google/pixel-8a"]).devices[0]
    assert device.campaign is not None
    reason = NotJudged(figure="active_s", reason="the window is not published")
    campaign = device.campaign.model_copy(update={"active_s": None, "not_judged": [reason]})
    device = device.model_copy(update={"campaign": campaign})
    result = make_result(["google/pixel-8a"]).model_copy(update={"devices": [device]})
    lines = " ".join(printed(judge(result), 160).split())
    assert "? finish of Google Pixel 8a: the window is not published" in lines
    assert "? finish" not in printed(judge(make_result(["google/pixel-8a"])), 160)


def test_a_reason_is_told_whole() -> None:
    """What a profile says of a figure may have a semicolon, and is no figure before a reason."""
    result = judge(make_result(["google/pixel-8a"]))
    check = (
        result.devices[0]
        .checks[0]
        .model_copy(
            update={"status": "not judged", "actual": None, "message": "one thing; another"}
        )
    )
    device = result.devices[0].model_copy(update={"checks": [check]})
    found = not_judged(report_of(result.model_copy(update={"devices": [device]})))
    assert [entry.reason for entry in found] == ["one thing; another"]


def test_the_advice_is_that_of_the_killed_device_with_the_least_room() -> None:
    """What is enough for the roomier one would be false of the other."""
    result = make_result(["google/pixel-8a", "raspberrypi/zero-2-w"])
    devices = []
    for device, limit in zip(result.devices, (150_000_000, 60_000_000), strict=True):
        killed = {"limit_bytes": limit, "outcome": "killed"}
        memory = device.memory.model_copy(update=killed)
        devices.append(device.model_copy(update={"memory": memory}))
    judged = judge(result.model_copy(update={"devices": devices}))
    fix = next(f for f in first_fixes(report_of(judged)) if f.title == "Device memory limit")
    assert fix.devices.startswith("Raspberry Pi Zero 2 W")
    checks = [c for d in judged.devices for c in d.checks if c.metric == "memory_limit"]
    assert checks[0].advice != checks[1].advice == fix.advice
