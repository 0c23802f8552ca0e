"""The report on a federation as a page: one self-contained file without scripts."""

from __future__ import annotations

from markupsafe import Markup

from odtpack_simulator.fleet.outcome.result import FleetResult, RoundRecord
from odtpack_simulator.fleet.outcome.seeds import band
from odtpack_simulator.reports.drawing.axes import Axis
from odtpack_simulator.reports.drawing.charts import curve_chart
from odtpack_simulator.reports.drawing.plot import rectangle, row
from odtpack_simulator.reports.drawing.row_charts import Bar, share_bar
from odtpack_simulator.reports.fleet import view
from odtpack_simulator.reports.html_report import template_environment
from odtpack_simulator.reports.view.view import VERDICT_WORDS
from odtpack_simulator.values.units import format_bytes, format_duration, format_percent


def render_page(result: FleetResult) -> bytes:
    """The page as UTF-8 HTML. The same result gives the same bytes."""
    page = (
        template_environment()
        .get_template("fleet.html.j2")
        .render(
            result=result,
            words=VERDICT_WORDS,
            headline=view.headline(result),
            key_figures=view.key_figures(result),
            advice=view.advice(result),
            checks=view.check_rows(result),
            curves=_curves(result),
            stages=view.stages(result),
            devices=view.device_rows(result),
            participation=_participation(result),
            times=_times(result),
            deciles=_deciles(result),
            refused=[text for each in result.rounds for text in each.refused][:10],
            any_open=any(not each.device.validated for each in result.devices),
            format_bytes=format_bytes,
            format_duration=format_duration,
        )
    )
    return page.encode("utf-8")


def _curves(result: FleetResult) -> list[tuple[str, str, Markup]]:
    """Accuracy, or the loss, by round and by simulated day: title, name of the axis, drawing."""
    evaluated = [each for each in result.rounds if each.loss is not None]
    if not evaluated:
        return []
    by_accuracy = result.accuracy_before is not None
    name = "Accuracy, %" if by_accuracy else "Loss"

    def value(accuracy: float | None, loss: float | None) -> float:
        return 100 * (accuracy or 0.0) if by_accuracy else loss or 0.0

    def spread(*, by_day: bool) -> list[tuple[float, float, float]]:
        scale = 100 if by_accuracy else 1
        found = band(result.seeds, by_day=by_day, by_accuracy=by_accuracy)
        return [(place, scale * low, scale * high) for place, low, high in found]

    first = value(result.accuracy_before, result.loss_before)
    by_round = [(0.0, first)]
    by_round += [(float(each.number), value(each.accuracy, each.loss)) for each in evaluated]
    curves = [
        (
            "by round",
            "rounds",
            curve_chart(by_round, f"{name} by round", whole=True, band=spread(by_day=False)),
        ),
    ]
    if result.days > 0.01:
        by_day = [(0.0, first)]
        by_day += [(_end(each), value(each.accuracy, each.loss)) for each in evaluated]
        drawing = curve_chart(by_day, f"{name} by day", band=spread(by_day=True))
        curves.append(("by simulated day", "days", drawing))
    return [(f"{name} {title}", axis, drawing) for title, axis, drawing in curves]


def _end(each: RoundRecord) -> float:
    return (each.start_s + each.duration_s) / 86_400


def _participation(result: FleetResult) -> list[Bar]:
    """For each model of device the share of its clients that took part."""
    bars = []
    for each in result.devices:
        share = min(1.0, each.took_part / each.clients) if each.clients else 0.0
        chosen = sum(each.ends.values())
        averaged = each.ends.get("averaged", 0)
        remark = f"{averaged:,} of {chosen:,} invitations averaged"
        bars.append(
            Bar(
                each.device.title,
                remark,
                share_bar(share),
                format_percent(share),
                f"{each.took_part:,} of {each.clients:,}",
            )
        )
    return bars


def _times(result: FleetResult) -> list[Bar]:
    """For each model the time from a round's start to the answer: 10th, 50th, 90th percentile."""
    most = max((each.round_s[2] for each in result.devices if each.round_s), default=0.0)
    if not most:
        return []
    axis = Axis(0.0, most, ())
    bars = []
    for each in result.devices:
        if each.round_s is None:
            continue
        low, middle, high = (axis.position(value) for value in each.round_s)
        drawing = row(
            rectangle(low, max(0.004, high - low), "track wide", 6, 8),
            rectangle(max(0.0, middle - 0.004), 0.008, "bar", 3, 14),
        )
        ends = f"{format_duration(each.round_s[0])} to {format_duration(each.round_s[2])}"
        bars.append(Bar(each.device.title, "", drawing, format_duration(each.round_s[1]), ends))
    return bars


def _deciles(result: FleetResult) -> list[Bar]:
    if result.fairness is None:
        return []
    names = ("worst", "10 %", "20 %", "30 %", "40 %", "half", "60 %", "70 %", "80 %", "90 %")
    return [
        Bar(name, "", share_bar(value), format_percent(value), "")
        for name, value in zip((*names, "best"), result.fairness.deciles, strict=True)
    ]
