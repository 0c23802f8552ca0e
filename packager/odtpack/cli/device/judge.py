"""``odtpack judge``: judge results again, without measuring."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal, cast

import typer

from odtpack.cli import _console
from odtpack.cli._options import RESULT_AS_JSON, argument, option
from odtpack.cli.device.simulate import BUDGET, OVER_BUDGET, REPORT, STRICT, fails, say_suggestion

_BADGES: Final = (".svg", ".json")


def judge(
    results: Annotated[
        list[Path], argument("RESULT.json...", "Results of simulate --report json:PATH.")
    ],
    budget: Annotated[Path | None, BUDGET] = None,
    baseline: Annotated[
        Path | None, option('Earlier result that limits like "+5 %" refer to.', "BASE.json")
    ] = None,
    report: Annotated[list[str] | None, REPORT] = None,
    badge: Annotated[
        Path | None,
        option(
            "Badge with the headroom of the tightest budget: a picture, or the JSON of an "
            "endpoint badge of shields.io.",
            "FILE.svg|FILE.json",
        ),
    ] = None,
    strict: Annotated[bool, STRICT] = False,
    as_json: Annotated[bool, RESULT_AS_JSON] = False,
) -> None:
    """Judge results by budgets without measuring again.

    Of several results, {name} in the path of a report or badge is the name of the result's file,
    and --json prints a list.

    Exit code 0 within budget, 1 if any result is over budget, 2 for bad input. Without a budget,
    only checks that need none are made, and a suggested budget is printed.
    """
    from odtpack.cli._files import check_not_input, check_reports, check_writable, write_reports
    from odtpack_runtime.errors import OdtpackError
    from odtpack_runtime.files.atomic import atomic_write
    from odtpack_simulator.figures.judge import judge as judge_result
    from odtpack_simulator.figures.limits import read_budgets
    from odtpack_simulator.reports.badge import render_badge
    from odtpack_simulator.reports.console import print_result
    from odtpack_simulator.result.result import load_result
    from odtpack_simulator.simulation import judge_again

    read = [load_result(path) for path in results]
    budgets = None if budget is None else read_budgets(budget)
    base = None if baseline is None else load_result(baseline)
    if badge is not None and badge.suffix not in _BADGES:
        what = f"--badge {str(badge)!r} ends with neither .svg nor .json"
        raise OdtpackError("usage", what, hint="write for example: --badge badge.svg")
    named = [[text.replace("{name}", path.stem) for text in report or []] for path in results]
    badges = [Path(str(badge).replace("{name}", path.stem)) for path in results if badge]
    single = results[0] if len(results) == 1 else None
    others = [] if single else results
    check_reports(
        [text for texts in named for text in texts],
        inputs=[budget, baseline, *others],
        judged=single,
        as_json=as_json,
    )
    for index, path in enumerate(badges):
        check_writable(path, "--badge")
        check_not_input(path, "--badge", [budget, baseline, *results, *badges[:index]])
    found = [
        judge_again(each, lambda result: judge_result(result, budgets, baseline=base))
        for each in read
    ]
    _console.results(as_json=as_json, reports=report)
    for index, judged in enumerate(found):
        if len(found) > 1:
            _console.say(f"{results[index]}:", style="bold")
        print_result(judged, _console.console())
        write_reports(judged, named[index])
        if badges:
            form = cast("Literal['svg', 'json']", badges[index].suffix[1:])
            with atomic_write(badges[index]) as stream:
                stream.write(render_badge(judged, form))
            _console.wrote(badges[index])
    if budgets is None and single is not None:
        say_suggestion(found[0])
    shown = [each.model_dump(mode="json") for each in found]
    _console.json_result(as_json, shown[0] if single is not None else shown)
    if any(fails(each, strict=strict) for each in found):
        raise typer.Exit(OVER_BUDGET)
