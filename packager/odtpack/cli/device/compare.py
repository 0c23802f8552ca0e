"""``odtpack compare``: what changed from one result to another, for a pull request."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from odtpack.cli._options import BASE_RESULT, COMPARISON_FILE, HEAD_RESULT, flag, option
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
    form: Annotated[
        Format, flag("--format", "Text on stderr; Markdown, JSON or a page on stdout.")
    ] = Format.TEXT,
    out: Annotated[Path | None, COMPARISON_FILE] = None,
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
    show_comparison(comparison, form, out)
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
            text = json.dumps(comparison.model_dump(mode="json"), indent=2, allow_nan=False) + "\n"
        case Format.HTML:
            text = render_comparison(comparison).decode()
    write_text(text, out, for_people=form is Format.TEXT)
