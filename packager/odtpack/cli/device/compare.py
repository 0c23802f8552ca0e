"""``odtpack compare``: what changed from one result to another, for a pull request."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from odtpack.cli import _console
from odtpack.cli._options import (
    AS_JSON,
    BASE_RESULT,
    COMPARISON_FILE,
    COMPARISON_FORM,
    HEAD_RESULT,
    option,
)
from odtpack.cli.device.simulate import OVER_BUDGET

if TYPE_CHECKING:
    from odtpack_simulator.figures.compare import Comparison


class Format(StrEnum):
    """How the comparison is shown."""

    TEXT = "text"
    MARKDOWN = "markdown"
    JSON = "json"
    HTML = "html"


def compare(
    base: Annotated[Path, BASE_RESULT],
    head: Annotated[Path, HEAD_RESULT],
    budget: Annotated[
        Path | None,
        option(
            'Limits for HEAD; "+5 %" refers to BASE. Exceeding one is exit code 1.', "budgets.toml"
        ),
    ] = None,
    form: Annotated[Format, COMPARISON_FORM] = Format.TEXT,
    out: Annotated[Path | None, COMPARISON_FILE] = None,
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Compare two results of simulate, and show regressions by device.

    Devices whose verdict changed come first. Devices with equal changes share a row; JSON lists
    each device. A change of a measured time within its interval is noise, and times of
    different hosts are not compared. Markdown fits in a comment on GitHub.
    """
    from odtpack_simulator.figures.compare import compare as compare_results
    from odtpack_simulator.figures.limits import read_budgets
    from odtpack_simulator.result.result import load_result

    before, now = load_result(base), load_result(head)
    budgets = None if budget is None else read_budgets(budget)
    check_comparison_file(out, [base, head, budget])
    comparison = compare_results(before, now, budgets)
    show_comparison(comparison, Format.JSON if as_json else form, out)
    if comparison.over_budget:
        raise typer.Exit(OVER_BUDGET)


def check_comparison_file(out: Path | None, inputs: list[Path | None]) -> None:
    """Refuse a destination that cannot be written, or is read by the same command."""
    from odtpack.cli._files import check_not_input, check_writable

    if out is not None:
        check_writable(out, "--out")
        check_not_input(out, "--out", inputs)


def show_comparison(comparison: Comparison, form: Format, out: Path | None) -> None:
    """Write a comparison to a file, or print it."""
    from odtpack.cli._files import write_text
    from odtpack_simulator.reports.comparison import render_comparison, render_markdown, render_text

    match form:
        case Format.TEXT:
            text = render_text(comparison)
        case Format.MARKDOWN:
            text = render_markdown(comparison)
        case Format.JSON:
            text = _console.json_text(comparison.model_dump(mode="json"))
        case Format.HTML:
            text = render_comparison(comparison).decode()
    if form is Format.TEXT and out is None:
        _console.results()
        _console.lines(text.removesuffix("\n"))
    else:
        write_text(text, out)
