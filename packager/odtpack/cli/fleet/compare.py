"""``odtpack fleet compare``: what changed from one simulated federation to another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from odtpack.cli._options import BASE_RESULT, COMPARISON_FILE, HEAD_RESULT, flag, option
from odtpack.cli.device.compare import Format, check_comparison_file, show_comparison


def compare(
    base: Annotated[Path, BASE_RESULT],
    head: Annotated[Path, HEAD_RESULT],
    accuracy: Annotated[
        float | None,
        option(
            "Accuracy that rounds and days are counted until.  [default: that of HEAD's "
            "budgets, else the lower of those that both end with]",
            "SHARE",
            min=0.0,
            max=1.0,
        ),
    ] = None,
    form: Annotated[
        Format, flag("--format", "Text on stderr; Markdown, JSON or a page on stdout.")
    ] = Format.TEXT,
    out: Annotated[Path | None, COMPARISON_FILE] = None,
) -> None:
    """Compare two results of fleet run: two packages, or two ways to run the rounds.

    With three seeds or more on either side, a difference that they leave open is within their
    spread, and neither better nor worse.
    """
    from odtpack_simulator.fleet.figures import compare_fleets
    from odtpack_simulator.fleet.result import load_fleet_result

    before, now = load_fleet_result(base), load_fleet_result(head)
    check_comparison_file(out, [base, head])
    show_comparison(compare_fleets(before, now, accuracy), form, out)
