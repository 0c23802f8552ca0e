"""What the judge says of a result."""

from odtpack_simulator.figures.judge import judge
from odtpack_simulator.figures.limits import parse_budgets
from odtpack_simulator.result import SimulationResult
from odtpack_simulator.values.figure import Check


def judged(
    result: SimulationResult, text: str = "", baseline: SimulationResult | None = None
) -> SimulationResult:
    """The result by the budgets of a text."""
    return judge(result, parse_budgets(text.encode()), baseline=baseline)


def check(result: SimulationResult, metric: str) -> Check:
    """The only one of a metric, of the package or of a device."""
    (found,) = [check for _, check in result.all_checks() if check.metric == metric]
    return found
