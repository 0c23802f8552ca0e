"""A result whose every name and message tries to break out of the format that shows it."""

from odtpack_simulator.result import NotJudged, SimulationResult
from tests.reports.demo import stored_result
from tests.simulator.changed import changed

HOSTILE = (
    "</style></title>\"'><script>alert(1)</script><img src=x onerror=alert(2)>{{7*7}}\x00\u202e"
    "\r\n::error::x%0A`|*_[a](https://a.example)@user #1 www.a.example \ufffe"
)


def hostile_result() -> SimulationResult:
    """Names, messages, locations and reasons are all :data:`HOSTILE`."""
    result = stored_result()
    device = result.devices[0]
    check = device.checks[0]
    fails = {"status": "fail", "metric": HOSTILE, "message": HOSTILE, "advice": HOSTILE}
    known = {"metric": "memory_limit", "budget_location": f"{HOSTILE}:3"}
    first = changed(
        device, title=HOSTILE, name=HOSTILE,
        checks=[changed(check, **fails), changed(check, **fails | known)],
        latency={"basis": HOSTILE, "not_judged": HOSTILE},
        campaign={"not_judged": [NotJudged(figure=HOSTILE, reason=HOSTILE)]},
        figures=[changed(figure, source=HOSTILE, key=HOSTILE) for figure in device.figures],
    )  # fmt: skip
    last = changed(result.devices[-1], title=HOSTILE)  # it has curves
    memory, costs = result.memory, result.latency_host.by_operator
    return changed(
        result, devices=[first, *result.devices[1:-1], last],
        memory={
            "timeline": [changed(p, node=HOSTILE, op_type=HOSTILE) for p in memory.timeline],
            "tensors_at_peak": [changed(each, name=HOSTILE) for each in memory.tensors_at_peak],
            "phases": [changed(phase, phase=HOSTILE) for phase in memory.phases],
        },
        latency_host={"by_operator": [changed(cost, op_type=HOSTILE) for cost in costs]},
        package=dict.fromkeys(("path", "loss", "optimizer"), HOSTILE),
        host=dict.fromkeys(("cpu", "os", "python", "onnxruntime"), HOSTILE),
        interruption={"detail": HOSTILE}, training={"metric_name": HOSTILE}, tool_version=HOSTILE,
    )  # fmt: skip
