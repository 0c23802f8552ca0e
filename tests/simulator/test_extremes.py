"""Results that are valid and absurd: they are judged and compared without an exception."""

from __future__ import annotations

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from odtpack_simulator.figures.compare import Comparison, compare
from odtpack_simulator.figures.judge import judge
from odtpack_simulator.figures.limits import parse_budgets
from odtpack_simulator.figures.simulated import METRICS
from odtpack_simulator.figures.suggest import suggest_budget
from odtpack_simulator.reports.comparison import render_markdown, render_text
from odtpack_simulator.result.result import (
    EvaluationPoint,
    MemoryBreakdown,
    Policy,
    PredictedMemory,
    SimulationResult,
)
from odtpack_simulator.values.units import Interval
from tests.simulator.factory import make_result

BASE = make_result(["google/pixel-8a"])
LARGEST = 1.7e308
AMOUNTS = st.sampled_from([0.0, 5e-324, 1e-9, 1.0, 1e6, 1e300, LARGEST])
SIGNED = st.sampled_from([-LARGEST, -1.0, -5e-324, 0.0, 5e-324, 0.5, 1.0, LARGEST])
COUNTS = st.sampled_from([0, 1, 2, 7, 64, 2**62])
_UNITS = {"B": "B", "ms": "ms", "s": "s", "J": "J", "%": "%"}


def _value(key: str, absolute: bool) -> str:
    metric = METRICS[key]
    sign = "-" if metric.better == "higher" else "+"
    if not absolute:
        return f'{key} = "{sign}1e300 %"'
    zero = "0" if metric.unit == "1" else f'"0 {_UNITS[metric.unit]}"'
    return f'{key} = ["{sign}1 %", {zero}]'


BUDGETS = "\n".join(
    [
        "[budgets]",
        *(_value(key, True) for key in METRICS),
        "[class.android]",
        *(_value(key, False) for key in list(METRICS)[::2]),
    ]
)


@st.composite
def results(draw: st.DrawFn) -> SimulationResult:
    def interval() -> Interval | None:
        if draw(st.booleans()):
            return None
        low, typical, high = sorted(draw(st.tuples(AMOUNTS, AMOUNTS, AMOUNTS)))
        return Interval(low=low, typical=typical, high=high)

    device = BASE.devices[0]
    assert device.campaign is not None
    latency = {key: interval() for key in ("step_ms", "p90_ms", "first_step_ms")}
    whole = {
        key: interval()
        for key in type(device.campaign).model_fields
        if isinstance(getattr(device.campaign, key), Interval)
    }
    size = draw(COUNTS)
    memory = {
        "limit_bytes": draw(st.one_of(st.none(), COUNTS)),
        "measured_peak_bytes": draw(st.one_of(st.none(), COUNTS)),
        "warning_bytes": draw(st.one_of(st.none(), COUNTS)),
        "entitled_limit_bytes": draw(st.one_of(st.none(), COUNTS)),
        "outcome": draw(st.sampled_from(["killed", "not judged"])),
    }
    parts = MemoryBreakdown(
        parameters=size // 8, gradients=size // 8, optimizer_state=size // 8,
        inputs=size // 8, activations=size // 8, session=size // 8,
    )  # fmt: skip
    metric, loss = draw(SIGNED), draw(SIGNED)
    training = {
        "metric_after": metric,
        "metric_before": draw(SIGNED),
        "metric_interval": tuple(sorted((metric, draw(SIGNED)))),
        "eval_loss_after": loss,
        "curve": [EvaluationPoint(step=i, loss=draw(SIGNED), metric=metric) for i in range(3)],
    }
    data = {key: draw(COUNTS) for key in ("steps", "batch_size", "epochs", "held_out_samples")}
    package = {
        key: draw(COUNTS)
        for key in ("trainable_parameters", "total_parameters", "parameter_bytes", "package_bytes")
    }
    update = {
        "latency": device.latency.model_copy(update={**latency, "not_judged": "unknown"}),
        "campaign": device.campaign.model_copy(
            update={**whole, "endless": draw(st.sampled_from([None, "typical", "worst case"]))}
        ),
        "memory": device.memory.model_copy(update=memory),
    }
    predicted = PredictedMemory(peak_bytes=parts.total, breakdown=parts)
    result = BASE.model_copy(
        update={
            "package": BASE.package.model_copy(update=package),
            "data": BASE.data.model_copy(update=data),
            "policy": Policy(
                state=draw(st.sampled_from(["foreground", "background"])),
                save_every=draw(st.sampled_from([None, 1, 2**31])),
                sessions_per_day=draw(st.sampled_from([5e-324, 1.0, 1440.0])),
            ),
            "training": BASE.training.model_copy(update=training),
            "latency_host": BASE.latency_host.model_copy(
                update={"p50_ms": interval(), "p90_ms": interval()}
            ),
            "memory": BASE.memory.model_copy(update={"predicted": predicted}),
            "devices": [device.model_copy(update=update)],
        }
    )
    return SimulationResult.model_validate_json(result.to_json())  # as a file brings it


@given(st.data())
@settings(max_examples=100, phases=[Phase.generate], deadline=None, derandomize=True)
def test_nothing_that_a_file_can_hold_is_an_exception(data: st.DataObject) -> None:
    base, head = data.draw(_hidden(results())), data.draw(_hidden(results()))
    budgets = parse_budgets(BUDGETS.encode())
    judged = judge(head.result, budgets, baseline=base.result)
    assert SimulationResult.model_validate_json(judged.to_json()) == judged
    comparison = compare(base.result, head.result, budgets)
    assert Comparison.model_validate_json(comparison.model_dump_json()) == comparison
    assert render_text(comparison)
    assert render_markdown(comparison)
    parse_budgets(suggest_budget(head.result).encode())


class _Hidden:
    """A result that is not printed whole when it is drawn."""

    def __init__(self, result: SimulationResult) -> None:
        self.result = result

    def __repr__(self) -> str:
        device = self.result.devices[0]
        return f"{device.latency!r:.500} {device.memory!r:.500}"


def _hidden(strategy: st.SearchStrategy[SimulationResult]) -> st.SearchStrategy[_Hidden]:
    return strategy.map(_Hidden)
