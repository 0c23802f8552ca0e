"""Workflow commands read by the rules of GitHub's runner (its ActionCommand.TryParseV2)."""

import re
from dataclasses import dataclass
from xml.etree import ElementTree as ET

import pytest

from odtpack_simulator.figures.judge import judge
from odtpack_simulator.reports.github_report import MOST_MESSAGE, MOST_OF_A_LEVEL, render_github
from odtpack_simulator.reports.junit_report import render_junit
from odtpack_simulator.result import SimulationResult
from tests.reports.demo import stored_result
from tests.reports.hostile import HOSTILE, hostile_result
from tests.simulator.changed import changed, on_devices
from tests.simulator.factory import make_result


@dataclass(frozen=True)
class Command:
    name: str
    properties: dict[str, str]
    data: str


def unescaped(text: str, pairs: list[tuple[str, str]]) -> str:
    for escaped, plain in pairs:
        text = text.replace(escaped, plain)
    return text


DATA = [("%0D", "\r"), ("%0A", "\n"), ("%25", "%")]
PROPERTY = [("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")]


def parse(line: str) -> Command:
    """As the runner does: ``::name key=value,key=value::data``."""
    assert line.startswith("::")
    end = line.index("::", 2)
    head, data = line[2:end], line[end + 2 :]
    name, _, rest = head.partition(" ")
    properties = {}
    for pair in filter(None, rest.split(",")):
        key, _, value = pair.partition("=")
        properties[key] = unescaped(value, PROPERTY)
    return Command(name, properties, unescaped(data, DATA))


def commands(result: SimulationResult) -> list[Command]:
    text = render_github(result).decode("utf-8")
    assert text.endswith("\n")
    return [parse(line) for line in text.split("\n")[:-1]]


@pytest.fixture(scope="module")
def result() -> SimulationResult:
    return stored_result()


def test_levels_places_and_advice(result):
    found = commands(result)
    assert {command.name for command in found} == {"error", "warning", "notice"}
    names = [command.name for command in found]
    assert names == sorted(names, key=["error", "warning", "notice"].index)
    step = next(c for c in found if c.name == "error" and c.properties["title"].startswith("Step"))
    assert step.properties["file"] == "budgets.toml"
    assert step.properties["line"] == "10"
    assert "Raspberry Pi Zero 2 W (not validated on hardware): estimated at" in step.data
    assert "Change first: a batch of about 17 instead of 64 takes 150 ms" in step.data
    assert "2 of 6 devices pass" in [c.properties["title"] for c in found if c.name == "notice"]


@pytest.mark.parametrize("workspace", [True, False])
def test_paths_are_those_from_the_root_of_the_repository(result, tmp_path, monkeypatch, workspace):
    """Also where the job runs in a folder below, which the budgets are beside or under."""
    (tmp_path / "app" / "ml").mkdir(parents=True)
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    if workspace:
        monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    else:
        (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path / "app" / "ml")
    for given, shown in {
        "budgets.toml": "app/ml/budgets.toml",
        "../budgets.toml": "app/budgets.toml",
        str(tmp_path / "b.toml"): "b.toml",
        "/elsewhere/b.toml": "/elsewhere/b.toml",
    }.items():
        device = result.devices[0]
        check = changed(device.checks[0], status="fail", budget_location=f"{given}:3")
        found = commands(changed(result, devices=[changed(device, checks=[check])], checks=[]))
        assert [c.properties["file"] for c in found if "file" in c.properties] == [shown]


def test_every_check_that_does_not_pass_is_in_one_annotation(result):
    found = commands(result)
    levels = {"error": "error", "warn": "warning"}
    for device, check in result.all_checks():
        if check.status == "pass":
            continue
        level = "notice" if check.status == "not judged" else levels[check.level]
        where = f"{device.title} (not validated on hardware): " if device else ""
        held = [c for c in found if c.name == level and f"{where}{check.message}" in c.data]
        assert held, (device and device.title, check.metric)


def test_the_limits_of_github_are_kept_and_the_rest_is_counted(result):
    device = result.devices[0]
    check = device.checks[0]
    checks = [
        changed(check, metric=f"metric_{i:03}", status="fail", level=level, message="m")
        for level in ("error", "warn")
        for i in range(37)
    ]
    found = commands(changed(result, devices=[changed(device, checks=checks)], checks=[]))
    for level in ("error", "warning"):
        of_level = [command for command in found if command.name == level]
        assert len(of_level) == MOST_OF_A_LEVEL == 10
        assert of_level[-1].properties["title"].startswith("28 more")
        told = "\n".join(c.properties["title"] + c.data for c in of_level)
        assert all(f"Metric {i:03}" in told for i in range(37))


def test_long_messages_are_cut(result):
    device = result.devices[0]
    check = changed(device.checks[0], status="fail", message="x" * 4000)
    found = commands(changed(result, devices=[changed(device, checks=[check])] * 300, checks=[]))
    assert max(len(command.data) for command in found) <= MOST_MESSAGE
    assert max(len(command.properties["title"]) for command in found) <= 255


def test_hostile_names_cannot_start_a_command():
    text = render_github(hostile_result()).decode("utf-8")
    lines = text.split("\n")[:-1]
    assert "\r" not in text
    for line in lines:
        command = parse(line)
        assert command.name in {"error", "warning", "notice"}
        assert set(command.properties) <= {"file", "line", "title"}
    errors = [parse(line) for line in lines if line.startswith("::error")]
    assert any("\N{REPLACEMENT CHARACTER}:error::x%0A" in command.data for command in errors)
    assert any(command.properties.get("line") == "3" for command in errors)


def test_a_passing_result_is_one_notice():
    passing = judge(make_result(["google/pixel-8a"]))
    assert passing.verdict == "pass"
    assert [command.name for command in commands(passing)] == ["notice"]
    assert commands(make_result([]))[0].name == "notice"


# JUnit XML against the rules of the schema that CI systems share (Jenkins' junit-10.xsd).

# Element -> attributes, the required ones, children.
SCHEMA: dict[str, tuple[set[str], set[str], set[str]]] = {
    "testsuites": (
        {"name", "time", "tests", "failures", "disabled", "errors"}, set(), {"testsuite"},
    ),
    "testsuite": (
        {"name", "tests", "failures", "errors", "group", "time", "disabled", "skipped",
         "timestamp", "hostname", "id", "package", "file", "log", "url", "version"},
        {"name"},
        {"testsuite", "properties", "testcase", "system-out", "system-err"},
    ),
    "properties": (set(), set(), {"property"}),
    "property": ({"name", "value"}, {"name", "value"}, set()),
    "testcase": ({"name", "time", "classname", "group"}, {"name", "classname"},
                 {"skipped", "error", "failure", "system-out", "system-err"}),
    "skipped": ({"type", "message"}, set(), set()),
    "failure": ({"type", "message"}, set(), set()),
    "system-out": (set(), set(), set()),
}  # fmt: skip
COUNTS = {"tests", "failures", "errors", "skipped"}


def parsed(data: bytes) -> ET.Element:
    return ET.fromstring(data)  # noqa: S314 -- what was just rendered


def check_element(element: ET.Element) -> None:
    allowed, required, children = SCHEMA[element.tag]
    assert required <= set(element.attrib) <= allowed, element.tag
    assert {child.tag for child in element} <= children, element.tag
    for name in COUNTS & set(element.attrib):
        assert re.fullmatch("[0-9]+", element.attrib[name])
    for child in element:
        check_element(child)


def test_it_is_valid_and_counts_right(result):
    root = parsed(render_junit(result))
    check_element(root)
    for suite in root:
        cases = suite.findall("testcase")
        assert int(suite.attrib["tests"]) == len(cases)
        assert int(suite.attrib["failures"]) == len(suite.findall("testcase/failure"))
        assert int(suite.attrib["skipped"]) == len(suite.findall("testcase/skipped"))
        names = [case.attrib["name"] for case in cases]
        assert len(names) == len(set(names))
    assert int(root.attrib["tests"]) == len(root.findall(".//testcase"))
    assert int(root.attrib["failures"]) == len(root.findall(".//failure"))


def test_each_check_is_a_case_of_its_device(result):
    root = parsed(render_junit(result))
    suites = {suite.attrib["name"]: suite for suite in root}
    assert list(suites) == ["Package", *(device.title for device in result.devices)]
    for device in result.devices:
        cases = suites[device.title].findall("testcase")
        for check, case in zip(device.checks, cases, strict=True):
            state = check.state
            outcome = next(iter(case)).tag
            expected = {"fail": "failure", "not judged": "skipped"}.get(state, "system-out")
            assert outcome == expected
            told = (case[0].attrib.get("message") or "") + (case[0].text or "")
            assert check.message in told
            assert ("warning: " in told) == (state == "warn")
            if state == "fail":
                assert "not validated on hardware" in told
                assert check.advice is None or f"change first: {check.advice}" in told


def test_a_warning_never_fails_the_build(result):
    warned = [check for _, check in result.all_checks() if check.state == "warn"]
    failed = [check for _, check in result.all_checks() if check.state == "fail"]
    root = parsed(render_junit(result))
    assert warned
    assert len(root.findall(".//failure")) == len(failed) > 0


def test_hostile_names_stay_text():
    data = render_junit(hostile_result())
    root = parsed(data)
    check_element(root)
    text = data.decode("utf-8")
    assert "<script" not in text
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\u202e\ufffe\uffff]", text)
    shown = "".join(root.itertext()) + "".join(v for e in root.iter() for v in e.attrib.values())
    assert shown.count("<script>alert(1)</script>") > 3
    assert HOSTILE not in shown


def test_equal_names_of_checks_are_told_apart():
    result = stored_result(["google/pixel-8a"])
    checks = result.devices[0].checks
    root = parsed(render_junit(on_devices(result, checks=[*checks, checks[0]])))
    names = [case.attrib["name"] for case in root[1].findall("testcase")]
    assert names[-1] == f"{names[0]} (2)"


def test_without_devices_and_deterministic():
    root = parsed(render_junit(make_result([])))
    check_element(root)
    assert root.attrib["tests"] == "0"
    assert render_junit(stored_result()) == render_junit(stored_result())
