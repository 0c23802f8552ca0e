import io
import json
import re
import subprocess
from pathlib import Path
from typing import get_args
from urllib.parse import unquote

import numpy as np
import pytest
from rich.console import Console

from odtpack.build import build_package
from odtpack.fit.page import render_fit
from odtpack_runtime.errors import OdtpackError, UnknownNameError
from odtpack_simulator import reports
from odtpack_simulator.figures.compare import compare
from odtpack_simulator.figures.judge import judge
from odtpack_simulator.figures.limits import parse_budgets
from odtpack_simulator.figures.metric import Topic
from odtpack_simulator.figures.simulated import ALWAYS, METRICS
from odtpack_simulator.reports import (
    parse_destination,
    render_report,
    report_format,
    report_formats,
    report_of,
    write_report,
)
from odtpack_simulator.reports.comparison import render_comparison
from odtpack_simulator.reports.console import print_result
from odtpack_simulator.reports.html_report import render_html
from odtpack_simulator.reports.markdown_report import render_markdown
from odtpack_simulator.reports.report import first_fixes, not_judged
from odtpack_simulator.reports.simulation import TOPICS, cells, key_figures
from odtpack_simulator.reports.simulation_page import parts_of_step
from odtpack_simulator.result import (
    NotJudged,
    Origin,
    Policy,
    SimulationResult,
    TimelinePoint,
    find_origin,
    load_result,
)
from odtpack_simulator.simulation import simulate
from odtpack_simulator.values.figure import Check
from odtpack_simulator.values.units import format_bytes, format_interval
from tests.fit.made import SOLUTION, made_fit
from tests.model_text import drawn, parsed
from tests.programs import ran
from tests.reports.demo import stored_result
from tests.reports.page import Page
from tests.simulator.changed import changed, on_devices
from tests.simulator.factory import make_result

FORMATS = sorted(
    path.name.removesuffix("_report.py") for path in Path(reports.__path__[0]).glob("*_report.py")
)


@pytest.fixture(scope="module")
def result() -> SimulationResult:
    budgets = parse_budgets(b'[budgets]\nstep_latency = "100 ms"')
    return judge(make_result(scale=2.0), budgets)


def test_every_format_is_written_whole(result, tmp_path):
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


def test_destinations():
    assert parse_destination("html:a/b.html") == ("html", Path("a/b.html"))
    assert parse_destination("json:C:\\report.json")[1] == Path("C:\\report.json")
    for text in ("pdf:x", "x", "", ":x", "HTML:x"):
        with pytest.raises(UnknownNameError, match=f"known formats: {', '.join(FORMATS)}"):
            parse_destination(text)
    for text in ("html", "html:"):
        with pytest.raises(OdtpackError, match="needs a path"):
            parse_destination(text)


def test_a_dash_is_standard_output_for_text(result, capfdbinary):
    for name in report_formats():
        if not report_format(name).to_stdout:
            with pytest.raises(OdtpackError, match="cannot be written to standard output"):
                parse_destination(f"{name}:-")
            continue
        assert write_report(result, f"{name}:-") == Path("-")
        assert capfdbinary.readouterr().out == render_report(result, name)


def test_standard_output_without_bytes(result, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr("sys.stdout", stream)
    write_report(result, "markdown:-")
    assert stream.getvalue().encode() == render_report(result, "markdown")


def test_unwritable_place(result, tmp_path):
    with pytest.raises(OdtpackError):
        write_report(result, f"html:{tmp_path}/absent/report.html")
    with pytest.raises(OdtpackError):
        write_report(result, f"json:{tmp_path}")
    assert list(tmp_path.iterdir()) == []


def printed(result: SimulationResult, width: int = 100) -> str:
    stream = io.StringIO()
    print_result(result, Console(file=stream, width=width))
    return stream.getvalue()


def test_console_names_devices_verdicts_and_fixes(result):
    text = printed(result, 160)
    assert text.startswith("✗ ")
    for device in result.devices:
        assert device.title in text
    assert "change first:" in text
    assert "the profile gives no matrix rate" in text
    assert "not validated on hardware" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_console_keeps_to_its_width(result, width):
    assert max(map(len, printed(result, width).splitlines())) <= width


def test_console_defuses_control_characters(result):
    device = changed(result.devices[0], title="\x1b[2J[red]evil[/red]\u202e")
    text = printed(changed(result, devices=[device]))
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "[red]evil" in text


def test_console_shows_the_campaign_where_there_is_room():
    result = stored_result()
    wide, narrow = printed(result, 160), printed(result, 60)
    for topic in TOPICS:
        assert topic in wide
    heads = narrow.split("Device", 1)[1].splitlines()[0]
    assert sum(topic in heads for topic in TOPICS) == 2
    assert "657 J" in wide
    assert "over 250 J" in wide


def test_console_drops_what_passes_first():
    """At 60 columns there is room for two topics: what fails, and memory before warnings."""
    result = stored_result(["google/pixel-8a", "raspberrypi/pi-4"])
    heads = printed(result, 60).split("Device", 1)[1].splitlines()[0].split()
    assert heads == ["Memory", "Step"]
    assert "Not shown at this width: Finish, Energy, Sessions, Metric" in printed(result, 60)
    assert "Not shown" not in printed(result, 160)


def test_console_goes_to_stderr(result, capsys):
    print_result(result)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "devices pass" in captured.err


def test_console_without_devices():
    assert "The package passes" in printed(judge(make_result([])))


def test_console_says_why_something_was_not_judged():
    """One line per reason: a run with open checks must tell what to do about it."""
    policy = Policy(state="background")
    names = ["google/pixel-8a", "apple/iphone-16-pro", "samsung/galaxy-a12", "raspberrypi/pi-5"]
    result = make_result(names, policy=policy)
    unknown = {"limit_bytes": None, "limit_state": "background", "outcome": "not judged"}
    budgets = parse_budgets(b'[budgets]\npeak_memory = "+5 %"\nenergy = "1 MJ"')
    open_result = judge(on_devices(result, memory=unknown), budgets)
    lines = " ".join(printed(open_result, 160).split())
    first = "Google Pixel 8a, Apple iPhone 16 Pro, Samsung Galaxy A12 (3 GB) and 1 more"
    limit = "the device's limit in the background is unknown: a peak_memory limit in the budgets"
    assert f"? Device memory limit on {first}: {limit} would stand in for it" in lines
    assert f"? Peak memory on {first}: no baseline was given: odtpack judge" in lines
    assert lines.count("the profile gives no power under load") == 1


def test_console_says_why_a_finish_is_missing():
    """A step that is known without an end that is: the background window has no figure."""
    known = make_result(["google/pixel-8a"])
    reason = NotJudged(figure="active_s", reason="the window is not published")
    result = on_devices(known, campaign={"active_s": None, "not_judged": [reason]})
    lines = " ".join(printed(judge(result), 160).split())
    assert "? finish of Google Pixel 8a: the window is not published" in lines
    assert "? finish" not in printed(judge(known), 160)


def test_a_reason_is_told_whole():
    """What a profile says of a figure may have a semicolon, and is no figure before a reason."""
    result = judge(make_result(["google/pixel-8a"]))
    unknown = {"status": "not judged", "actual": None, "message": "one thing; another"}
    check = changed(result.devices[0].checks[0], **unknown)
    found = not_judged(report_of(on_devices(result, checks=[check])))
    assert [entry.reason for entry in found] == ["one thing; another"]


def test_the_advice_is_that_of_the_killed_device_with_the_least_room():
    """What is enough for the roomier one would be false of the other."""
    result = make_result(["google/pixel-8a", "raspberrypi/zero-2-w"])
    devices = [
        changed(device, memory={"limit_bytes": limit, "outcome": "killed"})
        for device, limit in zip(result.devices, (150_000_000, 60_000_000), strict=True)
    ]
    judged = judge(changed(result, devices=devices))
    fix = next(f for f in first_fixes(report_of(judged)) if f.title == "Device memory limit")
    assert fix.devices.startswith("Raspberry Pi Zero 2 W")
    checks = [c for d in judged.devices for c in d.checks if c.metric == "memory_limit"]
    assert checks[0].advice != checks[1].advice == fix.advice


# What a reader must be able to see in a report, whatever its format.

NAMES = ["samsung/galaxy-a12", "apple/iphone-16-pro", "raspberrypi/zero-2-w"]


def test_the_package_is_named_and_not_where_it_lies():
    origin = Origin(commit="0123456789abcdef", date="2026-11-22T08:30+00:00")
    package = {"path": "/home/ada/secret/digits-cnn/"}
    result = judge(changed(make_result(NAMES), package=package, origin=origin))
    for text in (Page(render_html(result).decode()).text, render_markdown(result).decode()):
        assert "digits-cnn" in text
        assert "secret" not in text
        assert "commit 0123456789ab, 2026-11-22 08" in text.replace("\N{ZERO WIDTH SPACE}", "")
    assert changed(result.package, path="C:\\build\\digits").name == "digits"


def test_the_commit_is_that_of_the_repository(tmp_path, monkeypatch):
    for name in ("GITHUB_SHA", "CI_COMMIT_SHA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    assert find_origin(tmp_path) == Origin(commit=None, date="1970-01-01T00:00+00:00")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    head = ran("git", "-C", tmp_path, "rev-parse", "HEAD")
    assert find_origin(tmp_path).commit == head.stdout.strip()
    monkeypatch.setenv("GITHUB_SHA", "ab" * 20)
    assert find_origin(tmp_path).commit == "ab" * 20


def test_the_figures_on_top_are_those_of_the_worst_device():
    result = make_result(NAMES)
    figures = {name: (figure, remark) for name, figure, remark in key_figures(result)}
    limits = {d.memory.limit_bytes: d for d in result.devices if d.memory.limit_bytes}
    least = limits[min(limits)]
    assert "GPU memory" not in figures
    shown = key_figures(changed(result, memory={"gpu_bytes": 3_000_000}))
    assert ("GPU memory", format_bytes(3_000_000), "planned, WebGPU's buffers") in shown
    share, remark = figures["Peak memory, worst device"]
    assert float(share.rstrip(" %")) == pytest.approx(
        100 * result.memory.predicted.peak_bytes / min(limits), abs=0.05
    )
    assert least.title in remark
    timed = [d for d in result.devices if d.latency.step_ms]
    slowest = max(timed, key=lambda d: d.latency.step_ms.typical if d.latency.step_ms else 0)
    assert slowest.title in figures["Step, slowest device"][1]
    assert "this machine" in figures["Step, slowest device"][1]
    assert figures["Accuracy"][0] == "9.4 → 96.6 %"


def test_accuracy_is_a_percentage_everywhere():
    result = judge(make_result(NAMES), parse_budgets(b"[budgets]\naccuracy_floor = 0.99\n"))
    for text in (Page(render_html(result).decode()).text, render_markdown(result).decode()):
        assert "96.6 %" in text
        assert "99 %" in text
        assert not re.search(r"0\.9659|0\.966\b|0\.99\b", text)


def test_the_interval_stands_beside_each_step():
    result = judge(make_result(NAMES))
    rendered = Page(render_html(result).decode()).text
    for device in result.devices:
        step = device.latency.step_ms
        if step is not None:
            assert format_interval(step, "ms") in rendered


def test_a_step_is_marked_where_its_parts_begin():
    def timeline(parts: str) -> list[TimelinePoint]:
        names = {"f": "forward", "b": "backward", "u": "update"}
        return [
            TimelinePoint.model_validate(
                {"index": i, "node": "n", "op_type": "Add", "live_bytes": 1, "part": names[part]}
            )
            for i, part in enumerate(parts)
        ]

    assert parts_of_step(timeline("fffbbbuu")) == [("forward", 0), ("backward", 3), ("update", 6)]
    # A node of the gradient that reads nothing may come first, and the loss itself last.
    assert parts_of_step(timeline("bffffbbbbfuu"))[1:] == [("backward", 5), ("update", 10)]
    assert parts_of_step(timeline("ff")) == [("forward", 0)]
    page = render_html(judge(make_result(NAMES))).decode()
    assert ">backward</text>" in page
    assert "backward from node 62" in page


def test_nodes_and_tensors_are_called_by_the_module_and_not_by_the_exporter(tmp_path):
    """The older exporter of PyTorch transposes weights, and calls them by a number."""
    random = np.random.default_rng(0)
    weights = drawn(random, **{"onnx::MatMul_836": (8, 8), "onnx::MatMul_837": (8, 8)})
    model = parsed("""(float[batch, 8] x) => (float[batch, 8] y) {
        "/encoder/query/MatMul_output_0" = MatMul (x, "onnx::MatMul_836")
        y = MatMul ("/encoder/query/MatMul_output_0", "onnx::MatMul_837")
    }""", **weights)  # fmt: skip
    model.producer_name = "pytorch"
    for node, layer in zip(model.graph.node, ("query", "key"), strict=True):
        node.name = f"/encoder/{layer}/MatMul"
    build_package(model, tmp_path / "package", loss="cross_entropy")
    data = {"x": random.normal(size=(40, 8)).astype(np.float32), "labels": np.arange(40) % 8}
    np.savez(tmp_path / "data.npz", allow_pickle=False, **data)
    result = simulate(
        tmp_path / "package", tmp_path / "data.npz", [], batch_size=8, epochs=1, seed=0
    )
    shown = [point.node for point in result.memory.timeline]
    shown += [tensor.name for tensor in result.memory.tensors_at_peak]
    assert not [name for name in shown if "onnx::" in name]
    assert "encoder.query/MatMul" in shown
    assert "encoder.query.weight" in shown
    assert "gradient of encoder.key.weight" in shown


def test_a_comparison_is_drawn():
    base, head = make_result(NAMES), make_result(NAMES, scale=1.5)
    page = Page(render_comparison(compare(base, head)).decode())
    assert "Peak memory" in page.text
    assert "worse" in page.text
    bars = [a for tag, a in page.tags if tag == "rect" and a.get("class") == "bar over"]
    assert len(bars) >= len(NAMES)
    assert "No figure changed." in Page(render_comparison(compare(base, base)).decode()).text


def test_a_search_is_drawn():
    best = SOLUTION | {"number": 7, "metric": 0.9, "peak_bytes": 10**6}
    beaten = SOLUTION | {"number": 8, "metric": 0.8, "peak_bytes": 2 * 10**6}
    objectives = [{"name": "accuracy", "better": "larger", "tolerance": 0.0}]
    more = {"pareto": [best], "beaten": [beaten], "objectives": objectives}
    result = made_fit(model="<m>.onnx", **more)
    page = Page(render_fit(result).decode())
    (chart,) = [d["aria-label"] for d in page.drawings if "against" in d.get("aria-label", "")]
    assert chart == "Accuracy, % against peak memory, MB; 7: 90 at 1; 8: 80 at 2"
    assert "90.0 %" in page.text
    assert "<m>.onnx" in page.text
    assert "1 recipe keeps every budget on 1 device" in page.text
    assert "none of them beats another" not in page.text


# Every metric that is judged is shown: none fails in silence.

CHECKS = {**ALWAYS, **METRICS}


def failing(metric: str, scope: str) -> SimulationResult:
    """A result in which the check of one metric fails, and there is no other."""
    check = Check(
        metric=metric, limit=1.0, actual=2.0, unit="1", level="error", status="fail",
        message="2 is over 1",
    )  # fmt: skip
    result = make_result(["google/pixel-8a"])
    if scope == "package":
        return changed(result, checks=[check], verdict="fail")
    return changed(on_devices(result, checks=[check], verdict="fail"), verdict="fail")


def scopes(metric: str) -> tuple[str, ...]:
    return (METRICS[metric].scope,) if metric in METRICS else ("package", "device")


@pytest.mark.parametrize(
    ("metric", "scope"), [(metric, scope) for metric in CHECKS for scope in scopes(metric)]
)
def test_a_failure_is_shown_in_every_format(metric, scope):
    result, title = failing(metric, scope), CHECKS[metric].title
    for name in report_formats():
        shown = render_report(result, name).decode()
        shown = unquote(shown) if name == "github" else shown  # workflow commands escape commas
        assert (metric if report_format(name).suffix == "json" else title) in shown, name
        assert "2 is over 1" in shown, name


@pytest.mark.parametrize("metric", CHECKS)
def test_it_is_shown_under_its_topic_and_no_other(metric):
    result, topic = failing(metric, "device"), CHECKS[metric].topic
    found = dict(zip(TOPICS, cells(result, result.devices[0]), strict=True))
    failed = [name for name, cell in found.items() if cell.state == "fail"]
    assert failed == ([topic] if topic in TOPICS else [])


def test_there_is_no_topic_without_a_metric_and_none_unknown():
    assert {check.topic for check in CHECKS.values()} == set(get_args(Topic))
    assert set(get_args(Topic)) - set(TOPICS) == {"Package", "Interruptions"}
    for topic in TOPICS:
        assert any(kind.headline for kind in CHECKS.values() if kind.topic == topic), topic
