"""The figures of a simulated federation, its checks, what to change first, and how two compare.

How figures are judged is the business of :mod:`odtpack_simulator.figures`.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final

from odtpack_simulator.figures.compare import (
    Compared,
    Comparison,
    changes,
    compared_devices,
    differences,
)
from odtpack_simulator.figures.judge import NO_BASELINE, learns_check, limit_checks
from odtpack_simulator.figures.limits import Limit
from odtpack_simulator.figures.metric import CheckKind, Metric, of_errors, read_figures, worst
from odtpack_simulator.figures.simulated import ALWAYS
from odtpack_simulator.fleet.fleet_file import FleetBudgets
from odtpack_simulator.fleet.result import (
    DeviceOutcome,
    FleetResult,
    SeedPoint,
    SeedRun,
    seed_run,
    seed_runs,
)
from odtpack_simulator.fleet.round_clock import NO_LOSS
from odtpack_simulator.values.figure import (
    WORST_FIRST,
    Basis,
    Check,
    CheckLevel,
    Figure,
    FigureKind,
    Verdict,
    shortened,
    verdict_of,
)
from odtpack_simulator.values.units import format_percent

_MOST_REFUSED: Final = 0.01  # Share of the answers whose refusal is no reason to warn
_TOO_MANY_REFUSED: Final = 0.5  # Share from which on the fleet does not learn from its clients
ENOUGH_SEEDS: Final = 3  # Seeds on both sides from which on their spread says what is chance
_ERRORS: Final = 2.0  # Standard errors of a difference within which it is taken for chance


@dataclass(frozen=True, slots=True)
class Played:
    """What a figure is read from: a result with all its seeds, and one of its models of device."""

    result: FleetResult
    accuracy: float | None = None  # What rounds and days are counted until
    device: DeviceOutcome | None = None


def _mean(
    played: Played, read: Callable[[SeedRun], float | None], unknown: str,
    kind: FigureKind = "measured", how: str = "",
) -> Figure:  # fmt: skip
    """The mean over the seeds, and twice its standard error; unknown where it is for a seed."""
    values = [read(run) for run in seed_runs(played.result)]
    known = [value for value in values if value is not None]
    basis = Basis(how=how)
    if not known or len(known) < len(values):
        return Figure(value=None, kind=kind, basis=basis, reason=unknown)
    mean, noise = statistics.fmean(known), None
    if len(known) >= ENOUGH_SEEDS:
        error = _ERRORS * math.sqrt(statistics.variance(known) / len(known))
        noise = (mean - error, mean, mean + error)
    return Figure(value=mean, kind=kind, basis=basis, noise=noise)


def _not_evaluated(result: FleetResult) -> str | None:
    """Why no model could be evaluated; None where one was, or no round took place."""
    held, size = result.plan.held_out_samples, result.plan.batch_size
    if not result.rounds or result.last_evaluation is not None or held >= size:
        return None
    return f"{held} held-out samples are fewer than a batch of {size}"


def _of_model(
    played: Played, read: Callable[[SeedRun], float | None], unknown: str,
    kind: FigureKind = "measured", how: str = "", *, never: bool = False,
) -> Figure:  # fmt: skip
    """A figure of the model; unknown if it was never evaluated."""
    why = _not_evaluated(played.result)
    found = _mean(played, read, why or unknown, kind, how)
    return found.model_copy(update={"never": never and why is None})


def _until(played: Played, read: Callable[[SeedPoint], float]) -> Figure:
    """Rounds or days until the accuracy; a seed that never reaches it has no number of them."""
    target = played.accuracy
    if target is None:
        return Figure(value=None, reason="no accuracy is asked for")

    def of(run: SeedRun) -> float | None:
        point = run.reached(target)
        return None if point is None else read(point)

    shown = format_percent(target)
    return _of_model(played, of, f"{shown} is never reached", "predicted", shown, never=True)


def _most_energy(played: Played) -> Figure:
    """Where the power of some devices is unknown, that of the others is a lower bound."""
    energy = played.result.energy_j
    if len(played.result.seeds) > 1:
        return Figure(value=None, reason=_SEVERAL)
    names = [each.device.title for each in played.result.devices if each.energy_j is None]
    unknown = ", ".join(names[:3])
    if energy is None:
        why = f"the power of {unknown} is unknown" if names else "no device was chosen"
        return Figure(value=None, reason=why)
    if not names:
        return Figure(value=energy.most, kind="predicted")
    why = f"without {unknown}, whose power is unknown"
    return Figure(value=energy.most, low=energy.most, kind="predicted", reason=why)


def _took_part(played: Played) -> Figure:
    share = None if played.device is None else played.device.participation
    reason = "there are no clients with this device" if share is None else ""
    return Figure(value=share, reason=reason)


def _sooner(played: Played, _limit: float) -> str:
    every = played.result.settings.get("federation.every")
    shorter = "; or start rounds sooner: a shorter federation.every" if every else ""
    return first_change(played.result, _MORE_AT_ONCE + shorter)


def _send_less(played: Played, _limit: float) -> str:
    plan = played.result.plan
    lower = " a lower over_selection," if plan.buffer is None and plan.over_selection > 1 else ""
    return (
        f"send less: fewer rounds, fewer clients in each,{lower} or fewer trained parameters: "
        "odtpack build --adapter lora"
    )


_LESS: Final = (
    "compute less: fewer epochs, fewer rounds, fewer clients in each, or fewer trained layers"
)
_LONGER: Final = "train longer: more rounds, more clients a round, or more epochs in each"
_MORE_AT_ONCE: Final = "learn more in each round: more clients in it, or more epochs"
_MORE_CLIENTS: Final = "choose more clients: more rounds, or more clients in each"
_SEVERAL: Final = "several seeds were played"
_NO_CLASSES: Final = "the package does not classify"
_whole = partial(Metric, scope="package")
_ALL: Final[tuple[Metric[Played], ...]] = (
    _whole(
        key="accuracy", title="Accuracy", unit="share", topic="Metric", better="higher",
        words="the accuracy is {}", example="0.9", chance=of_errors,
        advise=lambda played, _: _to_learn(played.result),
        meaning="Accuracy on the held-out samples at the end.",
        read=lambda played: _of_model(played, lambda run: run.accuracy, _NO_CLASSES),
    ),
    _whole(
        key="worst_tenth", title="Accuracy of the worst tenth", unit="share", topic="Metric",
        better="higher", words="the accuracy of the worst tenth is {}", example="0.8",
        meaning="Mean accuracy of the tenth of the clients for whom the model does worst.",
        chance=of_errors, advise=lambda played, _: _to_learn(played.result),
        read=lambda played: _of_model(played, lambda run: run.worst_tenth, _NO_CLASSES),
    ),
    _whole(
        key="final_loss", title="Final loss", unit="1", topic="Metric",
        words="the loss on held-out samples is {}", example="0.5", chance=of_errors,
        meaning="Loss on the held-out samples at the end.",
        read=lambda played: _of_model(
            played, lambda run: run.loss, "the loss is not finite", never=True
        ),
        advise=lambda played, _: _to_learn(played.result),
    ),
    _whole(
        key="participation", title="Participation", unit="share", topic="Sessions",
        better="higher", words="{} of the population took part", example="80 %", chance=of_errors,
        advise=lambda played, _: first_change(played.result, _MORE_CLIENTS),
        meaning="Share of the population with an answer averaged at least once.",
        read=lambda played: _mean(played, lambda run: run.took_part, "", "counted"),
    ),
    _whole(
        key="traffic_per_device", title="Traffic of a device", unit="B", topic="Sessions",
        words="a device sends and receives up to {}", example="20 MB",
        advise=_send_less,
        meaning="Bytes, up and down, of any device that took part.",
        read=lambda played: Figure(value=played.result.traffic_bytes.most)
        if len(played.result.seeds) <= 1
        else Figure(value=None, reason=_SEVERAL),
    ),
    _whole(
        key="energy_per_device", title="Energy of a device", unit="J", topic="Energy",
        words="a device takes up to {}", example="50 J", read=_most_energy,
        advise=lambda *_: _LESS,
        meaning="Energy of any device that took part.",
    ),
    _whole(
        key="rounds", title="Rounds until the accuracy", unit="1", topic="Finish",
        words="{how} takes {}", noun=" rounds", example="20", chance=of_errors,
        meaning="Rounds until `accuracy` is reached.",
        advise=lambda played, _: first_change(played.result, _MORE_AT_ONCE),
        read=partial(_until, read=lambda point: float(point.round)),
    ),
    _whole(
        key="days", title="Time until the accuracy", unit="days", topic="Finish",
        words="{how} takes {}", example="5", chance=of_errors,
        meaning="Simulated days until `accuracy` is reached.", advise=_sooner,
        read=partial(_until, read=lambda point: point.day),
    ),
    _whole(
        key="traffic", title="Traffic of a device, mean", unit="B", topic="Sessions",
        words="a device sends and receives {}", example="20 MB", chance=of_errors,
        meaning="Bytes, up and down, of a device that was chosen.", advise=_send_less,
        read=lambda played: _mean(played, lambda run: run.traffic_bytes, "", "counted"),
    ),
    _whole(
        key="energy", title="Energy of a device, mean", unit="J", topic="Energy",
        words="a device takes {}", example="50 J", chance=of_errors,
        meaning="Energy of a device that was chosen.", advise=lambda *_: _LESS,
        read=lambda played: _mean(
            played, lambda run: run.energy_j, "the power is unknown", "predicted"
        ),
    ),
    Metric(
        key="took_part", title="Participation", unit="share", scope="device",
        topic="Sessions", better="higher", words="{} of its clients took part", example="80 %",
        meaning="Share of a device's clients with an answer averaged at least once.",
        read=_took_part, advise=lambda played, _: first_change(played.result, _MORE_CLIENTS),
    ),
)  # fmt: skip

METRICS: Final = MappingProxyType({metric.key: metric for metric in _ALL})
"""Key -> metric of a federation; the first are those of ``[budgets]`` in a fleet file."""
CHECKS: Final = MappingProxyType(
    {
        "answers": CheckKind(title="Rounds with enough answers", topic="Sessions", better="higher"),
        "refused": CheckKind(title="Answers refused", topic="Sessions"),
        "finite_loss": ALWAYS["finite_loss"],
        "learns": ALWAYS["learns"],
        **METRICS,
    }
)
"""All that is judged of a federation."""


def fleet_figures(
    result: FleetResult, accuracy: float | None = None, device: DeviceOutcome | None = None
) -> list[Figure]:
    """The figures of a federation, means over its seeds, or of one of its models of device."""
    name = None if device is None else device.device.name
    return read_figures(METRICS, Played(result, accuracy, device), name)


def judge_fleet(
    result: FleetResult,
    budgets: FleetBudgets,
    places: Mapping[str, str] = MappingProxyType({}),
) -> FleetResult:
    """The same result with all checks and its verdict filled in."""
    # `places`: Where the budgets stand, such as `fleet.toml:12`.
    limits = {
        key: [Limit(float(limit), location=places.get(key, ""))]
        for key, limit in budgets
        if key in METRICS and limit is not None
    }
    figures = fleet_figures(result, budgets.accuracy)
    checks = limit_checks(METRICS, figures, limits, NO_BASELINE, Played(result, budgets.accuracy))
    always = [_answers(result), *_refused(result), *_learning(result, learns=budgets.learns)]
    checks = _as_times_allow(result, [*always, *checks])
    return result.model_copy(update={"checks": checks, "verdict": verdict_of(checks)})


_TIMED: Final = frozenset({"days", "energy_per_device"})
_BY_TIME: Final = frozenset(
    {"window ended", "battery low", "left", "unfinished", "late", "stale", "given up", "surplus"}
)
"""Ends that a client might not have come to, had it been faster."""
_WHATEVER_TIMES: Final = frozenset({"refused", "finite_loss"})


def _as_times_allow(result: FleetResult, checks: list[Check]) -> list[Check]:
    """Judge nothing by times that were measured on a disturbed machine."""
    # It was too slow, if anything: where no client came too late, all else is as it would be.
    why = result.disturbed
    if why is None:
        return checks
    ends = result.ends()
    missed = any(ends.get(end) for end in _BY_TIME)
    return [
        check.model_copy(
            update={
                "status": "not judged",
                "message": shortened(f"{check.message}; {why}"),
                "advice": None,
            }
        )
        if check.metric in _TIMED
        or (missed and check.metric in METRICS)
        or (missed and check.status == "fail" and check.metric not in _WHATEVER_TIMES)
        else check
        for check in checks
    ]


def _answers(result: FleetResult) -> Check:
    """Without any budget: at least one round must have changed the model."""
    good = sum(1 for each in result.rounds if each.ends.get("averaged"))
    refused = sum(
        1 for each in result.rounds if each.ends.get("refused") and not each.ends.get("averaged")
    )
    text = f"{good} of {len(result.rounds)} rounds had enough answers before the deadline"
    if refused:
        text = f"{good} of {len(result.rounds)} rounds changed the model; in {refused} all answers "
        last = result.last_evaluation
        finite = last is None or last.loss is not None
        text += "were refused" if finite else "were refused, and the model is not finite"
    if not result.rounds:
        text = "no round started: too few clients were ever available at once"
    return Check(
        metric="answers",
        limit=1,
        actual=good,
        status="pass" if good else "fail",
        message=text,
        advice=None if good else first_change(result),
    )


def _refused(result: FleetResult) -> list[Check]:
    ends = result.ends()
    count = ends.get("refused", 0)
    if not count:
        return []
    share = count / (count + ends.get("averaged", 0))
    example = next(reason for each in result.rounds for reason in each.refused)
    hint = "lower training.learning_rate, or look at the data of these clients"
    level: CheckLevel = "error" if share > _TOO_MANY_REFUSED else "warn"
    answers = f"{count} of {count + ends.get('averaged', 0)} answers were refused"
    return [
        Check(
            metric="refused",
            limit=_TOO_MANY_REFUSED if level == "error" else _MOST_REFUSED,
            actual=share,
            unit="share",
            level=level,
            status="pass" if share <= _MOST_REFUSED else "fail",
            message=f"{answers}; the first: {example}",
            advice=None if share <= _MOST_REFUSED else hint,
        )
    ]


def _learning(result: FleetResult, *, learns: bool) -> list[Check]:
    """Finite losses on the held-out samples, and a loss that falls, where a round was evaluated."""
    why = _not_evaluated(result)
    if why is not None:
        keys = ("finite_loss", "learns") if learns else ("finite_loss",)
        return [Check(metric=key, status="not judged", message=why) for key in keys]
    evaluated = [each for each in result.rounds if each.evaluated]
    if not evaluated:
        return []
    bad = sum(each.loss is None for each in evaluated)
    text = f"after {len(evaluated) - bad} of {len(evaluated)} evaluated rounds "
    text += "the loss on held-out samples is finite"
    finite = Check(
        metric="finite_loss",
        limit=0,
        actual=bad,
        status="fail" if bad else "pass",
        message=text,
        advice=_to_be_finite(result) if bad else None,
    )
    losses = result.loss_before, evaluated[-1].loss
    if not learns or losses[1] is None:
        return [finite]
    held = result.plan.held_out_samples
    return [finite, learns_check(result.held_out_fall, losses, held, partial(_to_learn, result))]


def _to_be_finite(result: FleetResult) -> str:
    """What to change first where a loss is not finite."""
    if result.loss_before is None:
        return "look at the held-out samples: the loss before the first round is not finite"
    plain = result.settings.get("federation.strategy", "fedavg") == "fedavg"
    return "lower training.learning_rate" + ("" if plain else " or server_learning_rate")


def _to_learn(result: FleetResult) -> str:
    """What to change first where the loss does not fall as it should."""
    last = result.last_evaluation
    before, after = result.loss_before, None if last is None else last.loss
    if before is None or (last is not None and (after is None or after > before)):
        return _to_be_finite(result)
    if not result.plan.learning_rate:
        return "raise training.learning_rate"
    return first_change(result, f"{_LONGER}; or raise training.learning_rate")


def first_change(result: FleetResult, otherwise: str = _LONGER) -> str:
    """What to change first: what most of the chosen clients that were not averaged came to."""
    # `otherwise`: What to change where few of them were lost: then the rounds work.
    if not result.rounds:
        return "let more clients be available: a smaller population.requires, or a lower minimum"
    losses = {end: count for end, count in result.ends().items() if end not in NO_LOSS}
    most = max(losses, key=lambda end: losses[end], default=None)
    chosen = sum(result.ends().values())
    if most is None or losses[most] < chosen / 20:
        return otherwise
    enough, more = "minimum", "over_selection"
    if result.plan.buffer is not None:
        enough, more = "buffer", "clients"
    share = f"{losses[most]} of {chosen} chosen clients"
    advice = {
        "over memory": "are over memory: lower training.batch_size, or build the package with a "
        "smaller batch or fewer trained layers",
        "no data": "have too few samples for a batch: raise population.data.samples, or export the "
        "model with a smaller or a free batch size",
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
    return f"{share} {advice[most]}"


_STATES: Final[Mapping[Verdict, tuple[str, str]]] = {
    "fail": ("fails", "fail"),
    "warn": ("warns", "warn"),
    "not judged": ("is not judged", "are not judged"),
    "pass": ("passes", "pass"),
}


def join_seeds(results: Sequence[FleetResult]) -> FleetResult:
    """The first of several judged results, with the figures of all and the checks of the worst."""
    first, count = results[0], len(results)
    if count == 1:
        return first
    checks = []
    for metric in dict.fromkeys(check.metric for each in results for check in each.checks):
        found = [
            (each.plan.seed, check)
            for each in results
            for check in each.checks
            if check.metric == metric
        ]
        seed, check = worst(found, CHECKS, WORST_FIRST)
        alike = sum(other.state == check.state for _, other in found)
        who = f"all {count}" if alike == count else f"{alike}"
        said = f"seed {seed}; {who} {_STATES[check.state][alike > 1]}"
        message = f"{shortened(check.message)} (worst of {count} seeds: {said})"
        checks.append(check.model_copy(update={"message": message}))
    runs = [seed_run(each) for each in results]
    return first.model_copy(update={"seeds": runs, "checks": checks, "verdict": verdict_of(checks)})


# Two federations side by side.


def compare_fleets(
    base: FleetResult, head: FleetResult, accuracy: float | None = None
) -> Comparison:
    """Compare two results of ``odtpack fleet run``, the baseline and the new one."""
    # `accuracy`, from 0 to 1, is what rounds and days are counted until; by default what the head's
    # budgets ask, else the lower of both that are reached in the end.
    target = accuracy if accuracy is not None else _asked(base, head)
    before, now = (
        {
            each.device.name: Compared(
                each.device.title, each.device.validated, fleet_figures(result, device=each)
            )
            for each in result.devices
        }
        for result in (base, head)
    )
    notes = _notes(base, head)
    starts = [run.accuracy_before or 0.0 for run in (*seed_runs(base), *seed_runs(head))]
    if target is not None and max(starts) >= target:
        what = "the untrained model already has that accuracy"
        notes.append(f"rounds and time until {format_percent(target)} say nothing: {what}")
    return Comparison(
        of="fleet",
        tool_version=head.tool_version,
        notes=notes,
        accuracy=target,
        package=changes(METRICS, fleet_figures(base, target), fleet_figures(head, target)),
        devices=compared_devices(METRICS, before, now),
        verdict_before=base.verdict,
        verdict=head.verdict,
    )


def _asked(base: FleetResult, head: FleetResult) -> float | None:
    for check in head.checks:
        if check.metric == "accuracy" and check.limit is not None:
            return min(1.0, check.limit)
    ends = [run.accuracy for run in (*seed_runs(base), *seed_runs(head))]
    known = [value for value in ends if value is not None]
    return min(known) if known and len(known) == len(ends) else None


def _notes(base: FleetResult, head: FleetResult) -> list[str]:
    """What else differs; a note that data differ goes first."""
    notes = []
    if base.plan.data_digest != head.plan.data_digest:
        notes.append("the data differ: accuracies are of different samples")
    notes += differences(
        (name, base.settings.get(name), head.settings.get(name))
        for name in {**base.settings, **head.settings}
    )
    rows: tuple[tuple[str, Callable[[FleetResult], object]], ...] = (
        ("train samples", lambda r: r.plan.train_samples),
        ("held out samples", lambda r: r.plan.held_out_samples),
        ("loss", lambda r: r.package.loss),
        ("optimizer", lambda r: r.package.optimizer),
        ("parameters that cross", lambda r: r.package.crossing_parameters),
        ("bytes that cross", lambda r: r.package.payload_bytes),
    )
    notes += differences((name, read(base), read(head)) for name, read in rows)
    notes += [
        f"days and energy of the {which} are unreliable: {each.disturbed}"
        for which, each in (("baseline", base), ("new result", head))
        if each.disturbed is not None
    ]
    if base.package.manifest_sha256 == head.package.manifest_sha256:
        notes.append("both results are of the same package")
    seeds = [len(seed_runs(each)) for each in (base, head)]
    if min(seeds) >= ENOUGH_SEEDS:
        notes.append(f"figures are means over {seeds[0]} and {seeds[1]} seeds")
    else:
        notes.append(
            f"seeds: {seeds[0]} and {seeds[1]}; what is chance shows from {ENOUGH_SEEDS} on: "
            f"odtpack fleet run --seeds {ENOUGH_SEEDS}"
        )
    return notes
