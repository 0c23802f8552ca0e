"""``odtpack fleet compare``: what changed from one simulated federation to another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from odtpack.cli._options import (
    AS_JSON,
    BASE_RESULT,
    COMPARISON_FILE,
    COMPARISON_FORM,
    HEAD_RESULT,
    option,
)
from odtpack.cli.device.compare import Format, check_comparison_file, show_comparison


def compare(
    base: Annotated[Path, BASE_RESULT],
    head: Annotated[Path, HEAD_RESULT],
    accuracy: Annotated[
        float | None,
        option(
            "Target accuracy for counting rounds and days.  [default: from HEAD's budgets, else"
            " the lower final accuracy]",
            "SHARE",
            min=0.0,
            max=1.0,
        ),
    ] = None,
    form: Annotated[Format, COMPARISON_FORM] = Format.TEXT,
    out: Annotated[Path | None, COMPARISON_FILE] = None,
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Compare two results of fleet run: two packages, or two ways to run the rounds.

    With three or more seeds on either side, a difference within the spread of the seeds is
    neither better nor worse.
    """
    from odtpack_simulator.fleet.figures import compare_fleets
    from odtpack_simulator.fleet.result import load_fleet_result

    before, now = load_fleet_result(base), load_fleet_result(head)
    check_comparison_file(out, [base, head])
    form = Format.JSON if as_json else form
    show_comparison(compare_fleets(before, now, accuracy), form, out)
