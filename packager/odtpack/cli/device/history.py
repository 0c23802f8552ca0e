"""``odtpack history``: one page about many results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from odtpack.cli._options import argument, destination, option


def history(
    results: Annotated[
        list[Path], argument("RESULT.json...", "Results of simulate --report json:PATH.")
    ],
    budget: Annotated[
        Path | None,
        option("Budgets for all of them.  [default: those of each result]", "budgets.toml"),
    ] = None,
    out: Annotated[Path, destination("PAGE.html", "Page to write.")] = Path("history.html"),
) -> None:
    """Show the trend of each device and budget on one page.

    Results are ordered by the time at which they were made.
    """
    from odtpack.cli import _console
    from odtpack.cli._files import check_not_input, check_writable
    from odtpack_runtime.files.atomic import atomic_write
    from odtpack_simulator.figures.judge import judge
    from odtpack_simulator.figures.limits import read_budgets
    from odtpack_simulator.reports.history import render_history
    from odtpack_simulator.result.result import load_result

    check_writable(out, "--out")
    check_not_input(out, "--out", [*results, budget])
    budgets = None if budget is None else read_budgets(budget)
    read = [load_result(path) for path in results]
    if budgets is not None:
        read = [judge(each, budgets) for each in read]
    with atomic_write(out) as stream:
        stream.write(render_history(read))
    _console.wrote(out)
