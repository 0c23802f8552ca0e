"""The JUnit report: a suite per device, a case per check, for the test page of a CI system.

Only a failure that fails the build is a ``failure``: JUnit has no warnings, so a
failed check at level ``warn`` is a case that passes and says so in its output,
and a check that could not be judged is skipped, with the reason.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final
from xml.etree import ElementTree as ET

from odtpack_simulator.reports import report_of
from odtpack_simulator.reports.report import AnyResult, Report, ReportFormat, Suite
from odtpack_simulator.values.figure import Check
from odtpack_simulator.values.text import clean
from odtpack_simulator.values.units import format_limit, format_value


def render_junit(result: AnyResult) -> bytes:
    """The report as UTF-8 XML. The same result gives the same bytes."""
    report = report_of(result)
    counts = _counts([check for _, check in report.checks()])
    del counts["skipped"]  # the common schema knows none on the root
    name = clean(f"{report.of} of {result.package.path}")
    root = ET.Element("testsuites", {"name": name, **counts})
    root.extend(_suite(report, suite) for suite in report.suites)
    ET.indent(root)
    text = ET.tostring(root, encoding="unicode", short_empty_elements=True)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'.encode()


def _suite(report: Report, suite: Suite) -> ET.Element:
    element = ET.Element("testsuite", {"name": clean(suite.title), **_counts(suite.checks)})
    if suite.properties:
        holder = ET.SubElement(element, "properties")
        for key, value in suite.properties:
            ET.SubElement(holder, "property", name=key, value=clean(value))
    used = Counter[str]()
    for check in suite.checks:
        name = clean(report.title(check.metric))
        used[name] += 1
        if used[name] > 1:  # a CI system takes equal names for one case
            name = f"{name} ({used[name]})"
        classname = f"odtpack.{clean(suite.name)}"
        case = ET.SubElement(element, "testcase", name=name, classname=classname)
        _outcome(case, check, f"the device profile is {suite.note}" if suite.note else "")
    return element


def _counts(checks: Sequence[Check]) -> dict[str, str]:
    states = [check.state for check in checks]
    failures, skipped = states.count("fail"), states.count("not judged")
    counts = {"tests": len(states), "failures": failures, "errors": 0, "skipped": skipped}
    return {key: str(count) for key, count in counts.items()}


def _outcome(case: ET.Element, check: Check, note: str) -> None:
    message = clean(check.message)
    if check.state == "fail":
        failure = ET.SubElement(case, "failure", message=message, type=clean(check.metric))
        failure.text = _details(check, note)
    elif check.state == "not judged":
        ET.SubElement(case, "skipped", message=f"not judged: {message}")
    elif check.state == "warn":
        ET.SubElement(case, "system-out").text = f"warning: {message}\n{_details(check, note)}"
    else:
        ET.SubElement(case, "system-out").text = message


def _details(check: Check, note: str) -> str:
    figures = (
        ("actual", check.actual, format_value),
        ("limit", check.limit, format_limit),
        ("baseline", check.baseline, format_value),
    )
    lines = [f"{name}: {of(x, check.unit)}" for name, x, of in figures if x is not None]
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
