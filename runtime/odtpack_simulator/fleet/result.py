"""The result of a fleet's simulation, its figures and checks, and two federations side by side.

How figures are judged and compared is the business of :mod:`odtpack_simulator.figures`.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final, Literal

from pydantic import Field

from odtpack_simulator.figures.compare import Comparison, DeviceComparison, changes, differences
from odtpack_simulator.figures.judge import NO_BASELINE, limit_checks
from odtpack_simulator.figures.limits import PlacedLimit
from odtpack_simulator.figures.metric import CheckKind, Metric, of_errors, read_figures
from odtpack_simulator.fleet.devices import FleetDevice
from odtpack_simulator.fleet.fleet_file import FleetBudgets
from odtpack_simulator.fleet.round_clock import NO_LOSS
from odtpack_simulator.result import Bytes, Count, Loss, NonNegative, Origin, read_record
from odtpack_simulator.values.figure import (
    Basis,
    Check,
    Figure,
    FigureKind,
    Text,
    Verdict,
    shortened,
    verdict_of,
)
from odtpack_simulator.values.part import Part
from odtpack_simulator.values.text import last_part
from odtpack_simulator.values.units import format_percent

SCHEMA_VERSION: Final = 1
MAX_RESULT_BYTES: Final = 256 * 1024 * 1024
_SHA256: Final = "^[0-9a-f]{64}$"


class FleetPackage(Part):
    """What was trained. ``payload_bytes`` cross in each direction, before compression."""

    path: Text
    manifest_sha256: str = Field(pattern=_SHA256)
    loss: Text
    optimizer: Text
    crossing_parameters: Count
    payload_bytes: Bytes

    @property
    def name(self) -> str:
        """The last part of the path: what the package is called wherever it lies."""
        return last_part(self.path)


class FleetPlan(Part):
    """The fleet file, as far as a report shows it; ``buffer`` is null for synchronous rounds."""

    digest: str = Field(pattern=_SHA256)
    data_digest: str = Field(pattern=_SHA256)
    seed: Count
    clients: Count
    per_round: Count
    buffer: Count | None = None
    most_staleness: Count | None = None
    over_selection: NonNegative
    minimum: Count
    deadline_s: NonNegative
    rounds: Count
    days: NonNegative
    state: Literal["foreground", "background"]
    requires: list[Text]
    times: Literal["fast", "typical", "slow"]
    batch_size: Count
    epochs: Count
    learning_rate: NonNegative
    proximal: NonNegative
    train_samples: Count
    held_out_samples: Count


class RoundRecord(Part):
    """One round. ``ends`` counts what became of the chosen clients; null was not evaluated.

    ``loss`` and ``accuracy`` are those of the model after the round, on the held-out samples. In
    asynchronous rounds ``staleness`` counts the averaged answers by how often the model had changed
    since their clients began: none, once, and so on.
    """

    number: Count
    start_s: NonNegative
    duration_s: NonNegative
    looked_at: Count
    absent: dict[str, Count]
    ends: dict[str, Count]
    training_loss: Loss = None
    loss: Loss = None
    accuracy: float | None = Field(default=None, ge=0, le=1)
    refused: list[Text] = Field(default_factory=list)
    staleness: list[Count] = Field(default_factory=list)

    @property
    def end_day(self) -> float:
        """Simulated days from the first midnight to its end."""
        return (self.start_s + self.duration_s) / 86_400


class DeviceOutcome(Part):
    """What became of the clients with one model of device, over all rounds.

    Attributes:
        device: The model, with the costs of a round.
        clients: Clients that have it, by its share.
        took_part: Those of them with an answer averaged at least once.
        ends: What became of those that were chosen, counted once per round.
        energy_j: Energy of all rounds; null if unknown.
        traffic_bytes: Bytes up and down in all rounds.
        round_s: Seconds from a round's start to the answer, for the clients that answered: the
            10th, 50th and 90th percentile; null without answers.
    """

    device: FleetDevice
    clients: Count
    took_part: Count
    ends: dict[str, Count]
    energy_j: NonNegative | None
    traffic_bytes: Bytes
    round_s: tuple[NonNegative, NonNegative, NonNegative] | None = None


class PerDevice(Part):
    """A cost of the devices that were chosen at least once, over the whole federation."""

    mean: NonNegative
    most: NonNegative


class Fairness(Part):
    """How differently the last model does for clients, by their shares of the classes.

    Attributes:
        clients: Clients that this is from.
        mean: Mean of their accuracies.
        worst_tenth: Mean over the tenth for whom it does worst.
        deciles: Accuracy at the 0th, 10th, ... 100th percentile.
    """

    clients: Count
    mean: NonNegative
    worst_tenth: NonNegative
    deciles: list[NonNegative]


class SeedPoint(Part):
    """The model after a round: the simulated day on which it ended, and what evaluation found."""

    round: Count
    day: NonNegative
    loss: Loss
    accuracy: float | None = Field(default=None, ge=0, le=1)


class SeedRun(Part):
    """The federation as one seed has it. Traffic and energy are means over the chosen devices.

    Attributes:
        seed: The seed.
        loss_before: Held-out loss before the first round.
        accuracy_before: Accuracy then.
        points: The model after each round that was evaluated.
        worst_tenth: Mean accuracy of the tenth of the clients for whom it does worst.
        took_part: Share of the population with an answer averaged at least once.
        traffic_bytes: Bytes up and down.
        energy_j: Energy; null if unknown.
    """

    seed: Count
    loss_before: Loss
    accuracy_before: float | None
    points: list[SeedPoint]
    worst_tenth: NonNegative | None
    took_part: NonNegative
    traffic_bytes: NonNegative
    energy_j: NonNegative | None

    @property
    def accuracy(self) -> float | None:
        """Accuracy after the last round."""
        return self.points[-1].accuracy if self.points else self.accuracy_before

    def reached(self, accuracy: float) -> SeedPoint | None:
        """The first point with this accuracy; the model before the first round is one too."""
        start = self.accuracy_before
        if start is not None and start >= accuracy:
            return SeedPoint(round=0, day=0.0, loss=self.loss_before, accuracy=start)
        return next(
            (p for p in self.points if p.accuracy is not None and p.accuracy >= accuracy), None
        )


class FleetResult(Part):
    """One federation, simulated. ``unknown`` says what was counted as nothing, and why.

    ``seeds`` has the federation as each seed has it, from the second on in figures alone; the
    checks are those of the seed that keeps each worst. It is empty where only one was played.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    tool_version: Text
    origin: Origin = Origin()
    package: FleetPackage
    plan: FleetPlan
    loss_before: Loss
    accuracy_before: float | None
    rounds: list[RoundRecord]
    devices: list[DeviceOutcome]
    took_part: Count
    chosen: Count
    traffic_bytes: PerDevice
    energy_j: PerDevice | None
    fairness: Fairness | None
    seeds: list[SeedRun] = Field(default_factory=list)
    unknown: list[Text] = Field(default_factory=list)
    checks: list[Check] = Field(default_factory=list)
    verdict: Verdict = "not judged"

    @property
    def over_budget(self) -> bool:
        """Whether a check failed: exit code 1."""
        return self.verdict == "fail"

    @property
    def disturbed(self) -> str | None:
        """What disturbed the measurement of the devices' times; None for nothing."""
        return next((d.device.disturbed for d in self.devices if d.device.disturbed), None)

    @property
    def last_evaluation(self) -> RoundRecord | None:
        """The last round after which the model was evaluated."""
        return next((each for each in reversed(self.rounds) if each.loss is not None), None)

    @property
    def days(self) -> float:
        """Simulated days from the first midnight to the end of the last round."""
        return self.rounds[-1].end_day if self.rounds else 0.0

    def ends(self) -> dict[str, int]:
        """What became of the chosen clients in all rounds."""
        total: dict[str, int] = {}
        for each in self.rounds:
            for end, count in each.ends.items():
                total[end] = total.get(end, 0) + count
        return total

    def staleness(self) -> list[int]:
        """Averaged answers of all rounds by their staleness, as in each round."""
        rows = itertools.zip_longest(*(each.staleness for each in self.rounds), fillvalue=0)
        return [sum(row) for row in rows]


def load_fleet_result(path: str | os.PathLike[str]) -> FleetResult:
    """Read a result that :meth:`FleetResult.to_json` wrote."""
    return read_record(path, FleetResult, MAX_RESULT_BYTES, SCHEMA_VERSION)


_MOST_REFUSED: Final = 0.01  # Share of the answers whose refusal is no reason to warn
ENOUGH_SEEDS: Final = 3  # Seeds on either side from which on their spread says what is chance
_ERRORS: Final = 2.0  # Standard errors of a difference within which it is taken for chance
_MOST_PLACES: Final = 250  # An outline has two points at each: so many a drawing shows


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


def _until(played: Played, read: Callable[[SeedPoint], float]) -> Figure:
    """Rounds or days until the accuracy; a seed that never reaches it has no number of them."""
    target = played.accuracy
    if target is None:
        return Figure(value=None, reason="no accuracy is asked for")

    def of(run: SeedRun) -> float | None:
        point = run.reached(target)
        return None if point is None else read(point)

    shown = format_percent(target)
    return _mean(played, of, f"{shown} is never reached", "predicted", shown)


def _most_energy(played: Played) -> Figure:
    """Where the power of some devices is unknown, that of the others is a lower bound."""
    energy = played.result.energy_j
    names = [each.device.title for each in played.result.devices if each.energy_j is None]
    unknown = ", ".join(names[:3])
    if energy is None or len(played.result.seeds) > 1:
        return Figure(value=None, reason=f"the power of {unknown} is unknown")
    if not names:
        return Figure(value=energy.most, kind="predicted")
    why = f"without {unknown}, whose power is unknown"
    return Figure(value=energy.most, low=energy.most, kind="predicted", reason=why)


def _took_part(played: Played) -> Figure:
    each = played.device
    if each is None or not each.clients:
        return Figure(value=None, reason="there are no clients with this device")
    return Figure(value=min(1.0, each.took_part / each.clients))


def _advise(played: Played, _limit: float) -> str:
    return first_change(played.result)


_NOT: Final = "the package does not classify"
_whole = partial(Metric, scope="package", advise=_advise)
_ALL: Final[tuple[Metric[Played], ...]] = (
    _whole(
        key="accuracy", title="Accuracy", unit="share", topic="Metric", better="higher",
        words="the accuracy is {}", example="0.9", chance=of_errors,
        meaning="Accuracy on the held-out samples at the end.",
        read=lambda played: _mean(played, lambda run: run.accuracy, _NOT),
    ),
    _whole(
        key="worst_tenth", title="Accuracy of the worst tenth", unit="share", topic="Metric",
        better="higher", words="the accuracy of the worst tenth is {}", example="0.8",
        meaning="Mean accuracy of the tenth of the clients for whom the model does worst.",
        chance=of_errors,
        read=lambda played: _mean(played, lambda run: run.worst_tenth, _NOT),
    ),
    _whole(
        key="participation", title="Participation", unit="share", topic="Sessions",
        better="higher", words="{} of the population took part", example="80 %", chance=of_errors,
        meaning="Share of the population with an answer averaged at least once.",
        read=lambda played: _mean(played, lambda run: run.took_part, "", "counted"),
    ),
    _whole(
        key="traffic_per_device", title="Traffic of a device", unit="B", topic="Sessions",
        words="a device sends and receives up to {}", example="20 MB",
        meaning="Bytes, up and down, of any device that took part.",
        read=lambda played: Figure(value=played.result.traffic_bytes.most)
        if len(played.result.seeds) <= 1
        else Figure(value=None, reason="several seeds were played"),
    ),
    _whole(
        key="energy_per_device", title="Energy of a device", unit="J", topic="Energy",
        words="a device takes up to {}", example="50 J", read=_most_energy,
        meaning="Energy of any device that took part.",
    ),
    _whole(
        key="rounds", title="Rounds until the accuracy", unit="1", topic="Finish",
        words="{how} takes {}", noun=" rounds", never=True, example="20", chance=of_errors,
        meaning="Rounds until `accuracy` is reached.",
        read=partial(_until, read=lambda point: float(point.round)),
    ),
    _whole(
        key="days", title="Time until the accuracy", unit="days", topic="Finish",
        words="{how} takes {}", never=True, example="5", chance=of_errors,
        meaning="Simulated days until `accuracy` is reached.",
        read=partial(_until, read=lambda point: point.day),
    ),
    _whole(
        key="traffic", title="Traffic of a device, mean", unit="B", topic="Sessions",
        words="a device sends and receives {}", example="20 MB", chance=of_errors,
        meaning="Bytes, up and down, of a device that was chosen.",
        read=lambda played: _mean(played, lambda run: run.traffic_bytes, "", "counted"),
    ),
    _whole(
        key="energy", title="Energy of a device, mean", unit="J", topic="Energy",
        words="a device takes {}", example="50 J", chance=of_errors,
        meaning="Energy of a device that was chosen.",
        read=lambda played: _mean(
            played, lambda run: run.energy_j, "the power is unknown", "predicted"
        ),
    ),
    Metric(
        key="took_part", title="Participation", unit="share", scope="device",
        topic="Sessions", better="higher", words="{} of its clients took part", example="80 %",
        meaning="Share of a device's clients with an answer averaged at least once.",
        read=_took_part, advise=_advise,
    ),
)  # fmt: skip

METRICS: Final = MappingProxyType({metric.key: metric for metric in _ALL})
"""Key -> metric of a federation; the first are those of ``[budgets]`` in a fleet file."""
CHECKS: Final = MappingProxyType(
    {
        "answers": CheckKind(title="Rounds with enough answers", topic="Sessions"),
        "refused": CheckKind(title="Answers refused", topic="Sessions"),
        **METRICS,
    }
)
"""All that is judged of a federation."""


def fleet_figures(result: FleetResult, accuracy: float | None = None) -> list[Figure]:
    """The figures of a federation, means over its seeds, in the order of reports."""
    return read_figures(METRICS, Played(result, accuracy))


def _device_figures(result: FleetResult, device: DeviceOutcome) -> list[Figure]:
    return read_figures(METRICS, Played(result, device=device), device.device.name)


def judge_fleet(result: FleetResult, budgets: FleetBudgets) -> FleetResult:
    """The same result with all checks and its verdict filled in."""
    limits = {
        key: [PlacedLimit(float(limit), "error", "")] for key, limit in budgets if limit is not None
    }
    figures = fleet_figures(result, budgets.accuracy)
    checks = limit_checks(METRICS, figures, limits, NO_BASELINE, Played(result, budgets.accuracy))
    checks = _as_times_allow(result, [_answers(result), *_refused(result), *checks])
    return result.model_copy(update={"checks": checks, "verdict": verdict_of(checks)})


_TIMED: Final = frozenset({"days", "energy_per_device"})
_BY_TIME: Final = frozenset(
    {"window ended", "battery low", "left", "unfinished", "late", "stale", "given up", "surplus"}
)
"""Ends that a client might not have come to, had it been faster."""


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
            update={"status": "not judged", "message": shortened(f"{check.message}; {why}")}
        )
        if check.metric in _TIMED
        or (missed and (check.metric in METRICS or check.status == "fail"))
        else check
        for check in checks
    ]


def _answers(result: FleetResult) -> Check:
    """Without any budget: at least one round must have changed the model."""
    good = sum(1 for each in result.rounds if each.ends.get("averaged"))
    text = f"{good} of {len(result.rounds)} rounds had enough answers before the deadline"
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
    return [
        Check(
            metric="refused",
            limit=_MOST_REFUSED,
            actual=share,
            unit="share",
            level="warn",
            status="pass" if share <= _MOST_REFUSED else "fail",
            message=f"{count} refused; the first: {example}",
            advice=None if share <= _MOST_REFUSED else hint,
        )
    ]


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


def compare_fleets(
    base: FleetResult, head: FleetResult, accuracy: float | None = None
) -> Comparison:
    """Compare two results of ``odtpack fleet run``, the baseline and the new one."""
    # `accuracy`, from 0 to 1, is what rounds and days are counted until; by default what the head's
    # budgets ask, else the lower of both that are reached in the end.
    target = accuracy if accuracy is not None else _asked(base, head)
    before = {each.device.name: each for each in base.devices}
    now = {each.device.name: each for each in head.devices}
    devices = []
    for name, each in {**now, **{k: v for k, v in before.items() if k not in now}}.items():
        both = name in before and name in now
        devices.append(
            DeviceComparison(
                name=name,
                title=each.device.title,
                validated=each.device.validated,
                presence="both" if both else "new" if name in now else "removed",
                figures=changes(
                    METRICS, _device_figures(base, before[name]), _device_figures(head, now[name])
                )
                if both
                else [],
            )
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
        devices=devices,
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
    plans = [each.plan.model_dump(exclude={"digest", "data_digest"}) for each in (base, head)]
    notes += differences(
        (name.replace("_", " "), plans[0][name], plans[1][name]) for name in plans[0]
    )
    notes += differences(
        (
            ("loss", base.package.loss, head.package.loss),
            ("optimizer", base.package.optimizer, head.package.optimizer),
            (
                "parameters that cross",
                base.package.crossing_parameters,
                head.package.crossing_parameters,
            ),
            ("bytes that cross", base.package.payload_bytes, head.package.payload_bytes),
        )
    )
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


def seed_run(result: FleetResult) -> SeedRun:
    """A result's figures, as they stand beside those of other seeds."""
    return SeedRun(
        seed=result.plan.seed,
        loss_before=result.loss_before,
        accuracy_before=result.accuracy_before,
        points=[
            SeedPoint(round=each.number, day=each.end_day, loss=each.loss, accuracy=each.accuracy)
            for each in result.rounds
            if each.loss is not None
        ],
        worst_tenth=None if result.fairness is None else result.fairness.worst_tenth,
        took_part=result.took_part / result.plan.clients,
        traffic_bytes=result.traffic_bytes.mean,
        energy_j=None if result.energy_j is None else result.energy_j.mean,
    )


def seed_runs(result: FleetResult) -> list[SeedRun]:
    """The figures of every seed that was played."""
    return result.seeds or [seed_run(result)]


def join_seeds(results: Sequence[FleetResult]) -> FleetResult:
    """The first of several judged results, with the figures of all and the checks of the worst."""
    first = results[0]
    if len(results) == 1:
        return first
    checks = []
    for metric in dict.fromkeys(check.metric for each in results for check in each.checks):
        found = [
            (check, each.plan.seed)
            for each in results
            for check in each.checks
            if check.metric == metric
        ]
        order = ("fail", "not judged", "pass")
        check, seed = min(found, key=lambda pair: order.index(pair[0].status))
        bad = sum(other.status == check.status for other, _ in found)
        of = "all seeds" if bad == len(results) else f"{bad} of {len(results)} seeds"
        message = f"{check.message} (with seed {seed}, and so {of})"
        checks.append(check.model_copy(update={"message": message}))
    runs = [seed_run(each) for each in results]
    update = {"seeds": runs, "checks": checks, "verdict": verdict_of(checks)}
    return first.model_copy(update=update)


def band(
    runs: Iterable[SeedRun], *, by_day: bool, by_accuracy: bool
) -> list[tuple[float, float, float]]:
    """Between which values the seeds' curves lie: place, lowest and highest."""
    # A seed's value at a place is that of its last evaluation until then, so that its rounds need
    # not end when those of another do. Of many places those beside each other are taken together.
    steps = []
    for run in runs:
        before = run.accuracy_before if by_accuracy else run.loss_before
        steps.append(
            [(0.0, before)]
            + [
                (p.day if by_day else float(p.round), p.accuracy if by_accuracy else p.loss)
                for p in run.points
            ]
        )
    found = []
    for place in sorted({x for curve in steps for x, _ in curve}):
        values = [[y for x, y in curve if x <= place][-1] for curve in steps]
        known = [value for value in values if value is not None]
        if known:
            found.append((place, min(known), max(known)))
    width = -(-len(found) // _MOST_PLACES)
    parts = [found[at : at + width] for at in range(0, len(found), width or 1)]
    return [(part[-1][0], min(p[1] for p in part), max(p[2] for p in part)) for part in parts]
