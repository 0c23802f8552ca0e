"""The JSON report: the result itself, as ``odtpack simulate`` stores it."""

from typing import Final

from odtpack_simulator.reports.report import AnyResult, ReportFormat


def render_json(result: AnyResult) -> bytes:
    """The result as UTF-8 JSON with ``schema_version``, in the order of the schema's fields."""
    return result.to_json().encode("utf-8")


FORMAT: Final = ReportFormat(
    render=render_json,
    suffix="json",
    audience="programs, and judging or comparing later",
    written_as="the whole result",
)
