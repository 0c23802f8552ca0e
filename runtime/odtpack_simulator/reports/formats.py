"""What a report format declares: one object, in the file that renders it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from odtpack_simulator.reports.report import AnyResult


@dataclass(frozen=True, kw_only=True)
class ReportFormat:
    """A report format; its name is that of its file, ``<name>_report.py``.

    Attributes:
        render: From a result to the bytes of the file.
        suffix: Ending of the file in examples, without the dot.
        to_stdout: Whether it may go to standard output.
        audience: Whom it is for, in Markdown, for the documentation.
        written_as: What is written, likewise.
    """

    render: Callable[[AnyResult], bytes]
    suffix: str
    to_stdout: bool = True
    audience: str
    written_as: str
