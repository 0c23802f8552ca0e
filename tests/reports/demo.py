"""A made-up result with everything that a report can show, judged; the same on every call.

The pictures in the documentation show it as it is stored.
"""

from collections.abc import Sequence
from pathlib import Path

from odtpack_simulator.figures.judge import judge
from odtpack_simulator.figures.limits import parse_budgets
from odtpack_simulator.result import Policy, SimulationResult, load_result
from tests.simulator.changed import changed
from tests.simulator.factory import STEPS, make_result

BUDGETS = b"""
[budgets]
package_size = "6 MB"
peak_memory = "500 MB"
step_latency = { limit = "100 ms", level = "warn" }
time_to_finish = "1 min"
accuracy_floor = 0.95
energy = { limit = "250 J", level = "warn" }
sessions = { limit = 3, level = "warn" }

[class.linux]
step_latency = "150 ms"
"""
STORED = Path(__file__).with_name("demo.json")
PER_STEP_FLOPS = {"Conv": 1.62e9, "MatMul": 1.31e9, "ConvTranspose": 0.71e9, "Mul": 2.1e7,
                  "Where": 1.4e7, "Add": 1.1e7, "ReduceSum": 1.3e7}  # fmt: skip
PER_STEP_BYTES = {"Conv": 2.1e8, "MatMul": 9.4e7, "ConvTranspose": 8.2e7, "Mul": 5.1e7,
                  "Where": 4.2e7, "Slice": 3.3e7, "Pad": 2.4e7, "Add": 1.7e7, "ReduceSum": 1.2e7,
                  "MaxPool": 6.1e6, "Transpose": 7.0e6, "Softmax": 8.2e4}  # fmt: skip


def stored_result(names: Sequence[str] | None = None) -> SimulationResult:
    """The made-up result of six devices as it is stored, so that tests of reports depend on
    reports alone, and not on what profiles say or the judge finds today.

    Args:
        names: Devices to keep, all by default.
    """
    result = load_result(STORED)
    if names is None:
        return result
    return changed(result, devices=[device for device in result.devices if device.name in names])


def demo_result(names: Sequence[str]) -> SimulationResult:
    """That of the factory for apps in the background, with rates of operators, judged."""
    policy = Policy(state="background", save_every=20)
    result = make_result(names, scale=2.0, policy=policy, app=True)
    costs = [
        changed(
            cost, flops=_of_steps(PER_STEP_FLOPS.get(cost.op_type)),
            moved_bytes=_of_steps(PER_STEP_BYTES.get(cost.op_type)),
        ) for cost in result.latency_host.by_operator
    ]  # fmt: skip
    return judge(changed(result, latency_host={"by_operator": costs}), parse_budgets(BUDGETS))


def _of_steps(per_step: float | None) -> float | None:
    return None if per_step is None else per_step * STEPS
