"""Judge a fleet's result by the budgets of its file. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from odtpack_simulator.fleet.fleet_file import FleetBudgets
from odtpack_simulator.fleet.outcome.result import FleetResult
from odtpack_simulator.fleet.round_clock import NO_LOSS
from odtpack_simulator.result.result import Check, CheckStatus, CheckUnit, Verdict
from odtpack_simulator.values.units import format_limit, format_value

_MOST_REFUSED = 0.01
"""Share of the answers whose refusal is no reason to warn."""

TITLES = {
    "accuracy": "Accuracy",
    "worst_tenth": "Accuracy of the worst tenth",
    "rounds": "Rounds until the accuracy",
    "days": "Days until the accuracy",
    "participation": "Participation",
    "traffic_per_device": "Traffic of a device",
    "energy_per_device": "Energy of a device",
    "answers": "Rounds with enough answers",
    "refused": "Answers refused",
}
"""Names of the checks for people."""


def judge_fleet(result: FleetResult, budgets: FleetBudgets) -> FleetResult:
    """The same result with all checks and its verdict filled in."""
    checks = [_answers(result), *_refused(result), *_limits(result, budgets)]
    return result.model_copy(update={"checks": checks, "verdict": verdict_of(checks)})


def verdict_of(checks: Sequence[Check]) -> Verdict:
    """The verdict that follows from all checks."""
    failed = any(check.status == "fail" and check.level == "error" for check in checks)
    verdict: Verdict = "fail" if failed else "pass"
    if not failed and any(check.status == "not judged" for check in checks):
        verdict = "not judged"
    elif not failed and any(check.status == "fail" for check in checks):
        verdict = "warn"
    return verdict


def _answers(result: FleetResult) -> Check:
    """Without any budget: at least one round must have changed the model."""
    good = sum(1 for each in result.rounds if each.ends.get("averaged"))
    count = len(result.rounds)
    text = f"{good} of {count} rounds had enough answers before the deadline"
    if not count:
        text = "no round started: too few clients were ever available at once"
    return Check(
        metric="answers",
        limit=1,
        actual=good,
        unit="1",
        level="error",
        status="pass" if good else "fail",
        message=text,
        advice=None if good else first_change(result),
    )


def _refused(result: FleetResult) -> list[Check]:
    ends = result.ends()
    count = ends.get("refused", 0)
    if not count:
        return []
    few = count <= _MOST_REFUSED * (count + ends.get("averaged", 0))
    example = next(reason for each in result.rounds for reason in each.refused)
    return [
        Check(
            metric="refused",
            limit=100 * _MOST_REFUSED,
            actual=100 * count / (count + ends.get("averaged", 0)),
            unit="%",
            level="warn",
            status="pass" if few else "fail",
            message=f"{count} refused; the first: {example}",
            advice=None
            if few
            else "lower training.learning_rate, or look at the data of these clients",
        )
    ]


def _limits(result: FleetResult, budgets: FleetBudgets) -> list[Check]:
    last = result.last_evaluation
    accuracy = result.accuracy_before if last is None else last.accuracy
    population = result.plan.clients
    figures: list[tuple[str, float | None, float | None, CheckUnit, bool, str]] = []

    def judged(
        key: str, limit: float | None, actual: float | None, unit: CheckUnit, why: str = "",
        *, at_least: bool = False,
    ) -> None:  # fmt: skip
        figures.append((key, limit, actual, unit, at_least, why))

    without = "the package does not classify"
    judged("accuracy", percent(budgets.accuracy), percent(accuracy), "%", without, at_least=True)
    fair = None if result.fairness is None else result.fairness.worst_tenth
    judged(
        "worst_tenth", percent(budgets.worst_tenth), percent(fair), "%", without, at_least=True
    )  # fmt: skip
    judged(
        "participation",
        percent(budgets.participation),
        percent(result.took_part / population),
        "%",
        at_least=True,
    )
    judged("traffic_per_device", budgets.traffic_per_device, result.traffic_bytes.most, "B")
    limit, energy = budgets.energy_per_device, result.energy_j
    most = None if energy is None else energy.most
    unknown = [d.device.title for d in result.devices if d.energy_j is None]
    if unknown and limit is not None and most is not None and most <= limit:
        most = None  # those that are known keep it: of the others that is not known
    why = f"the power of {', '.join(unknown[:3])} is unknown"
    judged("energy_per_device", limit, most, "J", why)
    checks = [
        _check(result, *each[:5], why=each[5]) for each in figures if each[1] is not None
    ]  # fmt: skip
    return checks + _until(result, budgets)


def _check(
    result: FleetResult,
    key: str,
    limit: float | None,
    actual: float | None,
    unit: CheckUnit,
    at_least: bool,
    *,
    why: str,
) -> Check:
    status: CheckStatus = "not judged"
    text = why
    if actual is not None and limit is not None:
        status = "pass" if (actual >= limit if at_least else actual <= limit) else "fail"
        relation = "at least" if at_least else "at most"
        allowed = format_limit(limit, unit)
        text = f"{TITLES[key]}: {format_value(actual, unit)}, allowed is {relation} {allowed}"
    return Check(
        metric=key,
        limit=limit,
        actual=actual,
        unit=unit,
        level="error",
        status=status,
        message=text,
        advice=first_change(result) if status == "fail" else None,
    )


def _until(result: FleetResult, budgets: FleetBudgets) -> list[Check]:
    """Rounds and days until the accuracy that is asked for."""
    if budgets.accuracy is None:
        return []
    reached = result.reached(budgets.accuracy)
    checks = []
    for key, limit in (("rounds", budgets.rounds), ("days", budgets.days)):
        if limit is None:
            continue
        actual = None
        if reached is not None:
            end = (reached.start_s + reached.duration_s) / 86_400
            actual = float(reached.number) if key == "rounds" else end
        status: CheckStatus = "pass" if actual is not None and actual <= limit else "fail"
        text = (
            f"{budgets.accuracy:.1%} is never reached"
            if actual is None
            else f"{budgets.accuracy:.1%} takes {actual:.3g} {key}, allowed are {limit:g}"
        )
        checks.append(
            Check(
                metric=key,
                limit=limit,
                actual=actual,
                unit="1",
                level="error",
                status=status,
                message=text,
                advice=first_change(result) if status == "fail" else None,
            )
        )
    return checks


def first_change(result: FleetResult) -> str:
    """What to change first: what most of the chosen clients that were not averaged came to."""
    if not result.rounds:
        return "let more clients be available: a smaller population.requires, or a lower minimum"
    losses = {end: count for end, count in result.ends().items() if end not in NO_LOSS}
    worst = max(losses, key=lambda end: losses[end], default=None)
    chosen = sum(result.ends().values())
    if worst is None or losses[worst] < chosen / 20:
        # The rounds work: what is left is to learn more in each of them, or in more of them.
        return "train longer: more rounds, more clients a round, or more epochs in each"
    enough, more = "minimum", "over_selection"
    if result.plan.buffer is not None:
        enough, more = "buffer", "clients"
    share = f"{losses[worst]} of {chosen} chosen clients"
    advice = {
        "over memory": "are over memory: build the package with a smaller batch or fewer trained "
        "layers",
        "no data": "have too few samples for a batch: lower training.batch_size",
        "window ended": "do not finish in the window that the system grants: train fewer epochs, "
        "or less of the model",
        "battery low": "have too little battery: require charging",
        "left": "leave before they are done: train fewer epochs, or run rounds at night",
        "lost": f"fall silent: choose more of them by a higher {more}",
        "late": "answer after the deadline: extend federation.deadline, or train fewer epochs",
        "stale": "answer when the model has changed too often: raise federation.most_staleness or "
        "buffer",
        "given up": f"answered in rounds with too few answers: lower federation.{enough}, or raise "
        f"{more}",
        "refused": "were refused: lower training.learning_rate",
    }
    return f"{share} {advice[worst]}"


def percent(share: float | None) -> float | None:
    """A share in percent; None of None."""
    return None if share is None else 100 * share
