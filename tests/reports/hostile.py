"""A result whose every name and message tries to break out of the format that shows it."""

from __future__ import annotations

from odtpack_simulator.result import NotJudged, SimulationResult
from tests.reports.demo import stored_result

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
    checks = [check.model_copy(update=fails), check.model_copy(update=fails | known)]
    latency = device.latency.model_copy(update={"basis": HOSTILE, "not_judged": HOSTILE})
    assert device.campaign is not None
    campaign = device.campaign.model_copy(
        update={"not_judged": [NotJudged(figure=HOSTILE, reason=HOSTILE)]}
    )
    figures = [f.model_copy(update={"source": HOSTILE, "key": HOSTILE}) for f in device.figures]
    changed = device.model_copy(
        update={
            "title": HOSTILE,
            "name": HOSTILE,
            "checks": checks,
            "latency": latency,
            "campaign": campaign,
            "figures": figures,
        }
    )
    last = result.devices[-1].model_copy(update={"title": HOSTILE})  # it has curves
    memory = result.memory
    memory = memory.model_copy(
        update={
            "timeline": [
                point.model_copy(update={"node": HOSTILE, "op_type": HOSTILE})
                for point in memory.timeline
            ],
            "tensors_at_peak": [
                tensor.model_copy(update={"name": HOSTILE}) for tensor in memory.tensors_at_peak
            ],
            "phases": [phase.model_copy(update={"phase": HOSTILE}) for phase in memory.phases],
        }
    )
    host = result.latency_host
    costs = [cost.model_copy(update={"op_type": HOSTILE}) for cost in host.by_operator]
    assert result.interruption is not None
    return result.model_copy(
        update={
            "devices": [changed, *result.devices[1:-1], last],
            "memory": memory,
            "latency_host": host.model_copy(update={"by_operator": costs}),
            "package": result.package.model_copy(
                update=dict.fromkeys(("path", "loss", "optimizer"), HOSTILE)
            ),
            "host": result.host.model_copy(
                update=dict.fromkeys(("cpu", "os", "python", "onnxruntime"), HOSTILE)
            ),
            "interruption": result.interruption.model_copy(update={"detail": HOSTILE}),
            "training": result.training.model_copy(update={"metric_name": HOSTILE}),
            "tool_version": HOSTILE,
        }
    )
