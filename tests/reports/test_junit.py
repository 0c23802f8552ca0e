"""JUnit XML against the rules of the schema that CI systems share (Jenkins' junit-10.xsd)."""

import re
from xml.etree import ElementTree as ET

import pytest

from odtpack_simulator.reports.junit_report import render_junit
from odtpack_simulator.result.result import SimulationResult
from tests.reports.demo import stored_result
from tests.reports.hostile import HOSTILE, hostile_result
from tests.simulator.factory import make_result

# Element -> attributes, the required ones, children.
SCHEMA: dict[str, tuple[set[str], set[str], set[str]]] = {
    "testsuites": (
        {"name", "time", "tests", "failures", "disabled", "errors"},
        set(),
        {"testsuite"},
    ),
    "testsuite": (
        {"name", "tests", "failures", "errors", "group", "time", "disabled", "skipped",
         "timestamp", "hostname", "id", "package", "file", "log", "url", "version"},
        {"name"},
        {"testsuite", "properties", "testcase", "system-out", "system-err"},
    ),
    "properties": (set(), set(), {"property"}),
    "property": ({"name", "value"}, {"name", "value"}, set()),
    "testcase": (
        {"name", "time", "classname", "group"},
        {"name", "classname"},
        {"skipped", "error", "failure", "system-out", "system-err"},
    ),
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


@pytest.fixture(scope="module")
def result() -> SimulationResult:
    return stored_result()


def test_it_is_valid_and_counts_right(result: SimulationResult) -> None:
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


def test_each_check_is_a_case_of_its_device(result: SimulationResult) -> None:
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


def test_a_warning_never_fails_the_build(result: SimulationResult) -> None:
    warned = [check for _, check in result.all_checks() if check.state == "warn"]
    failed = [check for _, check in result.all_checks() if check.state == "fail"]
    root = parsed(render_junit(result))
    assert warned
    assert len(root.findall(".//failure")) == len(failed) > 0


def test_hostile_names_stay_text() -> None:
    data = render_junit(hostile_result())
    root = parsed(data)
    check_element(root)
    text = data.decode("utf-8")
    assert "<script" not in text
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\u202e\ufffe\uffff]", text)
    shown = "".join(root.itertext()) + "".join(v for e in root.iter() for v in e.attrib.values())
    assert shown.count("<script>alert(1)</script>") > 3
    assert HOSTILE not in shown


def test_equal_names_of_checks_are_told_apart() -> None:
    result = stored_result(["google/pixel-8a"])
    device = result.devices[0]
    twice = device.model_copy(update={"checks": [*device.checks, device.checks[0]]})
    root = parsed(render_junit(result.model_copy(update={"devices": [twice]})))
    names = [case.attrib["name"] for case in root[1].findall("testcase")]
    assert names[-1] == f"{names[0]} (2)"


def test_without_devices_and_deterministic() -> None:
    root = parsed(render_junit(make_result([])))
    check_element(root)
    assert root.attrib["tests"] == "0"
    assert render_junit(stored_result()) == render_junit(stored_result())
