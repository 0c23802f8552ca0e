"""Commands on results that exist: judge them again, compare them, show their history."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, cast

import typer

import odtpack_simulator as sim
from odtpack.cli import _completion, _console, _options
from odtpack.cli._options import Json
from odtpack.cli.device.simulate import fails, read_baseline, say_suggestion

if TYPE_CHECKING:
    from odtpack_simulator.figures.compare import Comparison

# ``odtpack judge``: judge results again, without measuring.

_BADGES: Final = (".svg", ".json")


def judge(
    results: list[Path],
    *,
    budget: Path | None = None,
    baseline: Path | None = None,
    report: Annotated[list[str] | None, ("autocompletion", _completion.reports)] = None,
    badge: list[str] | None = None,
    strict: bool = False,
) -> tuple[Json | list[Json], int]:
    r"""Judge results by budgets without measuring again.

    Of several results, {name} in the path of a report or badge is the name of the result's file,
    and --json prints a list.

    Exit code 0 within budget, 1 if any result is over budget, 2 for bad input. Without a budget,
    only checks that need none are made, and a suggested budget is printed.

    Parameters:
        baseline BASE.json: Earlier result that limits like "+5 %" refer to.
        badge FILE.svg|FILE.json: Badge with the headroom of the tightest budget: a picture, or the
            JSON of an endpoint badge of shields.io. May be repeated.
        json: Print the result as JSON on stdout.

    Examples:
        odtpack judge report.json --budget budgets.toml
        odtpack judge report.json --budget budgets.toml --baseline main.json \
            --report html:report.html
        odtpack judge results/*.json --budget budgets.toml --report html:results/{name}.html
        odtpack judge report.json --budget budgets.toml --badge badge.svg
    """
    from odtpack.cli import _files
    from odtpack_runtime.errors import OdtpackError
    from odtpack_simulator.reports.badge import render_badge
    from odtpack_simulator.reports.console import print_result
    from odtpack_simulator.simulation import judge_again

    read = [sim.load_result(path) for path in results]
    budgets = _budgets(budget, read)
    base = read_baseline(baseline, *budgets)
    for text in badge or ():
        if Path(text).suffix not in _BADGES:
            what = f"--badge {text!r} ends with neither .svg nor .json"
            raise OdtpackError("usage", what, hint="write for example: --badge badge.svg")
    outputs = ("--report", report or ()), ("--badge", badge or ())
    for name, text in ((name, text) for name, texts in outputs for text in texts):
        if len(results) > 1 and "{name}" not in text:
            what = f"{name} {text} would be written once for each of {len(results)} results"
            raise OdtpackError("report-twice", what, hint="put {name} into it, as in {name}.html")
    reports, badges = (
        [[text.replace("{name}", path.stem) for text in texts] for path in results]
        for _, texts in outputs
    )
    single = results[0] if len(results) == 1 else None
    others = [] if single else results
    _files.check_reports(
        chain(*reports),
        inputs=[budget, baseline, *others],
        judged=single,
        badges=map(Path, chain(*badges)),
    )
    found = [
        judge_again(each, partial(sim.judge, budgets=own, baseline=base))
        for each, own in zip(read, budgets, strict=True)
    ]
    _console.results(reports=report)
    for index, judged in enumerate(found):
        if len(found) > 1:
            _console.say(f"{results[index]}:", style="bold")
        print_result(judged, _console.console())
        _files.write_reports(judged, reports[index])
        for path in map(Path, badges[index]):
            form = cast("Literal['svg', 'json']", path.suffix[1:])
            _files.write_file(path, render_badge(judged, form))
    if budget is None and single is not None:
        say_suggestion(found[0], baseline=base is not None)
    shown = [each.model_dump(mode="json") for each in found]
    no = any(fails(each, strict=strict) for each in found)
    return shown[0] if single is not None else shown, no


def _budgets(
    budget: Path | None, results: Sequence[sim.SimulationResult]
) -> Sequence[sim.Budgets | None]:
    """The budgets of a file for each result; None without a file."""
    from odtpack_simulator.figures.judge import for_each

    return [None] * len(results) if budget is None else for_each(sim.read_budgets(budget), results)


# ``odtpack compare``: what changed from one result to another, for a pull request.


Format = Literal["text", "markdown", "json", "html"]


def compare(
    base: Path,
    head: Path,
    *,
    budget: Path | None = None,
    form: Format | None = None,
    out: Path | None = None,
    as_json: bool = False,
) -> None:
    r"""Compare two results of simulate, device by device.

    Devices whose verdict changed come first. Devices with equal changes share a row; JSON lists
    each device. A change of a measured time within its interval is noise, and times of
    different hosts are not compared. Markdown fits in a comment on GitHub.

    Parameters:
        budget budgets.toml: Limits for HEAD; "+5 %" refers to BASE. Exceeding one is exit code 1.
        out FILE: File for the comparison, instead of standard output.

    Examples:
        odtpack compare main.json report.json
        odtpack compare main.json report.json --budget budgets.toml \
            --format markdown --out comment.md
    """
    from odtpack_simulator.figures.compare import compare as compare_results

    before, now = sim.load_result(base), sim.load_result(head)
    budgets = None if budget is None else sim.read_budgets(budget)
    chosen = comparison_form(form, out, [base, head, budget], as_json=as_json)
    comparison = compare_results(before, now, budgets)
    show_comparison(comparison, chosen, out)
    if comparison.over_budget:
        raise typer.Exit(_options.NOT_MET)


def comparison_form(
    form: Format | None, out: Path | None, inputs: list[Path | None], *, as_json: bool
) -> Format:
    """The format that two options name; refuse it, or a destination that cannot be written."""
    from odtpack.cli._files import check_writable
    from odtpack_runtime.errors import OdtpackError

    if as_json and form not in (None, "json"):
        what = f"--json and --format {form} exclude each other"
        raise OdtpackError("option-not-used", what, hint="leave one out")
    if out is not None:
        check_writable(out, "--out", inputs)
    return "json" if as_json else form or "text"


def show_comparison(comparison: Comparison, form: Format, out: Path | None) -> None:
    """Write a comparison to a file, or print it."""
    from odtpack.cli._files import write_text
    from odtpack_simulator.reports.comparison import render_comparison, render_markdown, render_text

    match form:
        case "text" if out is None:
            _console.results()
            console = _console.console()
            _console.lines(render_text(comparison, console.width).removesuffix("\n"))
            return
        case "text":
            text = render_text(comparison)
        case "markdown":
            text = render_markdown(comparison)
        case "json":
            text = _console.json_text(comparison.model_dump(mode="json"))
        case "html":
            text = render_comparison(comparison).decode()
    write_text(text, out)


# ``odtpack history``: one page about many results.


def history(
    results: list[Path], *, budget: Path | None = None, out: Path = Path("history.html")
) -> None:
    """Show the trend of each device and budget on one page.

    Results are ordered by the time at which they were made. Results of another schema version are
    left out, with a warning.

    Parameters:
        budget budgets.toml: Budgets for all of them. [default: those of each result]
        out PAGE.html: Page to write.

    Examples:
        odtpack history results/*.json --budget budgets.toml --out history.html
    """
    from odtpack.cli._files import check_writable, write_file
    from odtpack_runtime.errors import OdtpackError
    from odtpack_simulator.reports.history import render_history

    check_writable(out, "--out", [*results, budget])
    read, other = list[sim.SimulationResult](), None
    for path in results:
        try:
            read.append(sim.load_result(path))
        except OdtpackError as error:
            if error.code != "result-version":
                raise
            other = error
            _console.warn(f"{path} is left out: {error.what}")
    if other is not None and not read:
        raise other
    if budget is not None:
        read = list(map(sim.judge, read, _budgets(budget, read)))
    write_file(out, render_history(read))
