"""The result of a search as a page: what each candidate reaches, against what it takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePath

from markupsafe import Markup

from odtpack.fit.outcome import FitResult, Solution
from odtpack_simulator.reports.charts import ScatterPoint, scatter_chart
from odtpack_simulator.reports.html_report import render_page
from odtpack_simulator.values.text import counted


def render_fit(result: FitResult) -> bytes:
    """The page as UTF-8 HTML. The same result gives the same bytes."""
    kinds = (
        (result.pareto, "pass", "on the Pareto set"),
        (result.beaten, "warn", "within the budgets, and beaten"),
        (result.over_budget, "fail", "over a budget"),
    )
    rows = [
        _row(result, each, state, kind)
        for group, state, kind in kinds
        for each in group
    ]  # fmt: skip
    return render_page(
        "fit.html.j2",
        result=result,
        model=PurePath(result.model).name,
        headline=_headline(result),
        quality=_quality_name(result).capitalize(),
        charts=_charts(result),
        rows=rows,
        recipe=result.pareto[0].recipe if result.pareto else "",
    )


def _headline(result: FitResult) -> str:
    on = counted(len(result.devices), "device")
    if not result.found:
        return f"No candidate keeps every budget on {on}"
    count = len(result.pareto)
    verb, end = "recipes keep", ", and none of them beats another"
    if count == 1:
        verb, end = "recipe keeps", ""
    every = "every budget" if result.judged else "every budget that could be judged"
    return f"{count} {verb} {every} on {on}{end}"


def _quality_name(result: FitResult) -> str:
    return "accuracy" if [each.name for each in result.objectives[:1]] == ["accuracy"] else "loss"


def _quality(result: FitResult, each: Solution) -> float | None:
    if _quality_name(result) == "loss":
        return each.loss
    return None if each.metric is None else 100 * each.metric


def _charts(result: FitResult) -> list[tuple[str, Markup]]:
    """Quality against memory, time and energy, where two candidates have both."""
    name = "Accuracy, %" if _quality_name(result) == "accuracy" else "Loss"
    axes: tuple[tuple[str, Callable[[Solution], float | None]], ...] = (
        ("peak memory, MB", lambda each: each.peak_bytes / 1e6),
        ("time of the training, s", lambda each: each.time_s),
        ("energy of the training, J", lambda each: each.energy_j),
    )
    drawn = []
    for title, pick in axes:
        points = [
            ScatterPoint(str(each.number), x, y, filled=each in result.pareto)
            for each in (*result.pareto, *result.beaten, *result.over_budget)
            if (x := pick(each)) is not None and (y := _quality(result, each)) is not None
        ]
        if len(points) > 1:
            what = f"{name} against {title}"
            drawn.append((what, scatter_chart(points, what)))
    return drawn


def _row(result: FitResult, each: Solution, state: str, kind: str) -> dict[str, object]:
    """A candidate that was trained to the end, for the template."""
    choice = each.choice
    quality, peak, time, energy = each.figures(_quality_name(result))
    cut = choice.micro_batch != choice.batch_size
    stored = "" if choice.frozen_dtype == "float32" else f" as {choice.frozen_dtype}"
    again = f", computing again to fit {choice.memory_budget}" if choice.memory_budget else ""
    batch = f"batch {choice.batch_size}" + (f" in {choice.micro_batch}s" if cut else "")
    if each.unjudged and state != "fail":
        state, kind = "not judged", f"{kind}, not judged by every budget"
    what = f"{choice.optimizer} at {choice.learning_rate:g}, {batch}, frozen: {choice.frozen}"
    return {
        "number": each.number,
        "state": state,
        "kind": kind,
        "quality": quality,
        "peak": peak,
        "time": time,
        "energy": energy,
        "choice": f"{what}{stored}{again}",
        "failed": "; ".join(
            dict.fromkeys(
                [check.message for _, check in each.errors]
                + [f"not judged: {check.message}" for _, check in each.unjudged]
            )
        ),
    }
