"""``odtpack judge``: judge a result again, without measuring."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from odtpack.cli import _console
from odtpack.cli._options import RESULT_AS_JSON, argument, option
from odtpack.cli.device.simulate import BUDGET, REPORT, STRICT, end, say_suggestion


def judge(
    result: Annotated[Path, argument("RESULT.json", "Result of simulate --report json:PATH.")],
    budget: Annotated[Path | None, BUDGET] = None,
    baseline: Annotated[
        Path | None, option('Earlier result that limits like "+5 %" refer to.', "BASE.json")
    ] = None,
    report: Annotated[list[str] | None, REPORT] = None,
    strict: Annotated[bool, STRICT] = False,
    as_json: Annotated[bool, RESULT_AS_JSON] = False,
) -> None:
    """Judge a result by budgets without measuring again.

    Exit code 0 within budget, 1 over budget, 2 for bad input. Without a budget, only checks
    that need none are made, and a suggested budget is printed.
    """
    from odtpack.cli._files import check_reports, write_reports
    from odtpack_simulator.figures.judge import judge as judge_result
    from odtpack_simulator.figures.limits import read_budgets
    from odtpack_simulator.reports.console import print_result
    from odtpack_simulator.result.result import load_result
    from odtpack_simulator.simulation import judge_again

    measured = load_result(result)
    budgets = None if budget is None else read_budgets(budget)
    base = None if baseline is None else load_result(baseline)
    check_reports(report or [], inputs=[budget, baseline], judged=result, as_json=as_json)
    judged = judge_again(measured, lambda each: judge_result(each, budgets, baseline=base))
    _console.results(as_json=as_json, reports=report)
    print_result(judged, _console.console())
    write_reports(judged, report or [])
    if budgets is None:
        say_suggestion(judged)
    _console.json_result(as_json, judged.model_dump(mode="json"))
    end(judged, strict=strict)
