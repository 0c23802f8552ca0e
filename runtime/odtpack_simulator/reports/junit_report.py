"""The JUnit report: a suite per device, a case per check, for the test page of a CI system.

Only a failure that fails the build is a ``failure``: JUnit has no warnings, so a
failed check at level ``warn`` is a case that passes and says so in its output,
and a check that could not be judged is skipped, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final
from xml.etree import ElementTree as ET

from odtpack_simulator.reports.formats import ReportFormat
from odtpack_simulator.reports.view import view
from odtpack_simulator.result.result import Check, SimulationResult
from odtpack_simulator.values.plain_text import clean
from odtpack_simulator.values.units import format_limit, format_value

_CLASS: Final = "odtpack"


def render_junit(result: SimulationResult) -> bytes:
    """The report as UTF-8 XML. The same result gives the same bytes."""
    suites = [junit_suite("Package", "package", [], result.checks, note="")]
    for device in result.devices:
        note = "" if device.validated else f"the device profile is {view.NOT_VALIDATED}"
        properties = [
            ("device", device.name),
            ("profile_sha256", device.profile_digest),
            ("validated", "yes" if device.validated else view.NOT_VALIDATED),
        ]
        suites.append(junit_suite(device.title, device.name, properties, device.checks, note=note))
    return junit_document(f"odtpack simulation of {result.package.path}", suites)


def junit_document(name: str, suites: Iterable[ET.Element]) -> bytes:
    """Suites as the UTF-8 XML of a file.

    Args:
        name: What they are of.
        suites: From :func:`junit_suite`.
    """
    root = ET.Element("testsuites", name=clean(name))
    total = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in suites:
        root.append(suite)
        for key in total:
            total[key] += int(suite.attrib[key])
    # The common schema knows no "skipped" on the root.
    root.attrib.update({key: str(total[key]) for key in ("tests", "failures", "errors")})
    ET.indent(root)
    text = ET.tostring(root, encoding="unicode", short_empty_elements=True)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'.encode()


def junit_suite(
    title: str,
    name: str,
    properties: Iterable[tuple[str, str]],
    checks: Iterable[Check],
    *,
    note: str,
    titles: Mapping[str, str] | None = None,
) -> ET.Element:
    """A suite with a case per check.

    Args:
        title: What it is of, for people.
        name: The same for classes of cases.
        properties: Names and values.
        checks: The checks.
        note: A remark for those that fail.
        titles: Names of metrics for people, where they are not those of a simulation.
    """
    suite = ET.Element("testsuite", name=clean(title))
    listed = [(key, clean(value)) for key, value in properties]
    if listed:
        holder = ET.SubElement(suite, "properties")
        for key, value in listed:
            ET.SubElement(holder, "property", name=key, value=value)
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    used: dict[str, int] = {}
    for check in checks:
        case_name = clean((titles or {}).get(check.metric) or view.metric_title(check.metric))
        used[case_name] = used.get(case_name, 0) + 1
        if used[case_name] > 1:  # a CI system takes equal names for one case
            case_name = f"{case_name} ({used[case_name]})"
        case = ET.SubElement(suite, "testcase", name=case_name, classname=f"{_CLASS}.{clean(name)}")
        _outcome(case, check, note)
        counts["tests"] += 1
        counts["failures"] += case.find("failure") is not None
        counts["skipped"] += case.find("skipped") is not None
    suite.attrib.update({key: str(value) for key, value in counts.items()})
    return suite


def _outcome(case: ET.Element, check: Check, note: str) -> None:
    state = view.check_state(check)
    message = clean(check.message)
    if state == "fail":
        failure = ET.SubElement(case, "failure", message=message, type=clean(check.metric))
        failure.text = _details(check, note)
    elif state == "not judged":
        ET.SubElement(case, "skipped", message=f"not judged: {message}")
    elif state == "warn":
        ET.SubElement(case, "system-out").text = f"warning: {message}\n{_details(check, note)}"
    else:
        ET.SubElement(case, "system-out").text = message


def _details(check: Check, note: str) -> str:
    lines = []
    if check.actual is not None:
        lines.append(f"actual: {format_value(check.actual, check.unit)}")
    if check.limit is not None:
        lines.append(f"limit: {format_limit(check.limit, check.unit)}")
    if check.baseline is not None:
        lines.append(f"baseline: {format_value(check.baseline, check.unit)}")
    if check.advice:
        lines.append(f"change first: {clean(check.advice)}")
    if check.budget_location:
        lines.append(f"budget: {clean(check.budget_location)}")
    return "\n".join([*lines, *([note] if note else [])])


FORMAT: Final = ReportFormat(
    render=render_junit,
    suffix="xml",
    audience="the test page of a CI system",
    written_as="JUnit XML",
)
