"""``odtpack fleet compare``: what changed from one simulated federation to another."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from odtpack.cli._options import BASE_RESULT, COMPARISON_FILE, HEAD_RESULT


class Format(StrEnum):
    """How the comparison is shown."""

    TEXT = "text"
    MARKDOWN = "markdown"
    JSON = "json"


def compare(
    base: Annotated[Path, BASE_RESULT],
    head: Annotated[Path, HEAD_RESULT],
    accuracy: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            metavar="SHARE",
            help="Accuracy that rounds and days are counted until.  [default: that of HEAD's "
            "budgets, else the lower of those that both end with]",
        ),
    ] = None,
    form: Annotated[
        Format, typer.Option("--format", help="Text on stderr; Markdown or JSON on stdout.")
    ] = Format.TEXT,
    out: Annotated[Path | None, COMPARISON_FILE] = None,
) -> None:
    """Compare two results of fleet run: two packages, or two ways to run the rounds.

    With three seeds or more on either side, a difference that they leave open is within their
    spread, and neither better nor worse.
    """
    from odtpack.cli._files import check_not_input, check_writable, write_text
    from odtpack_simulator.fleet.outcome.compare import compare_fleets
    from odtpack_simulator.fleet.outcome.result import load_fleet_result
    from odtpack_simulator.reports.fleet.comparison import render_markdown, render_text

    before, now = load_fleet_result(base), load_fleet_result(head)
    if out is not None:
        check_writable(out, "--out")
        check_not_input(out, "--out", [base, head])
    comparison = compare_fleets(before, now, accuracy)
    match form:
        case Format.TEXT:
            text = render_text(comparison)
        case Format.MARKDOWN:
            text = render_markdown(comparison)
        case Format.JSON:
            text = json.dumps(comparison.model_dump(mode="json"), indent=2, allow_nan=False) + "\n"
    write_text(text, out, for_people=form is Format.TEXT)
