"""Searches how a federation is run: clients a round, local epochs, learning rate."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal

from pydantic import Field

from odtpack.errors import OdtpackError
from odtpack.fit.finalists import TIME_TOLERANCE
from odtpack.fit.outcome import Point, beats, choose, on_grid, ranked
from odtpack.fit.space import SearchConstraints
from odtpack.fit.study import GROUP, Study, Value, optuna
from odtpack_runtime.files.scratch import scratch_folder
from odtpack_runtime.package.package import Package
from odtpack_simulator.fleet.devices import FleetDevice
from odtpack_simulator.fleet.federation import Federation
from odtpack_simulator.fleet.fleet_file import FleetBudgets, FleetFile
from odtpack_simulator.fleet.judge import fleet_figures, join_seeds, judge_fleet
from odtpack_simulator.fleet.result import FleetResult, seed_runs
from odtpack_simulator.replay.executor import LocalExecutor
from odtpack_simulator.result import Count, Loss, NonNegative, tool_version
from odtpack_simulator.values.figure import Text
from odtpack_simulator.values.part import Part
from odtpack_simulator.values.text import counted


@dataclasses.dataclass(frozen=True)
class FleetSettings:
    """One way to run a federation."""

    number: int  # its number in the space, from 1
    clients: int  # answers that a round waits for; with a buffer, clients at a time
    epochs: int  # passes of a client over its samples
    learning_rate: float  # of a client's steps

    def aspects(self) -> dict[str, Value]:
        """What it chose in each dimension, for the search."""
        return {"clients": self.clients, "epochs": self.epochs, "learning rate": self.learning_rate}

    def of(self, fleet: FleetFile) -> FleetFile:
        """A fleet run this way. ``minimum`` and ``buffer`` keep their share of the clients."""
        table = fleet.federation

        def shared(count: int) -> int:
            return max(1, round(count * self.clients / table.clients))

        federation = {
            "clients": self.clients,
            "minimum": shared(table.minimum) if table.buffer is None else table.minimum,
            "buffer": None if table.buffer is None else shared(table.buffer),
        }
        training = {"epochs": self.epochs, "learning_rate": self.learning_rate}
        return fleet.model_copy(
            update={
                "federation": table.model_copy(update=federation),
                "training": fleet.training.model_copy(update=training),
            }
        )


def fleet_space(
    fleet: FleetFile,
    clients: Sequence[int] = (),
    epochs: Sequence[int] = (),
    learning_rates: Sequence[float] = (),
) -> list[FleetSettings]:
    """Every combination; what the fleet file says stands first where nothing else is asked for."""
    # Without others, clients and epochs are those of the file, twice and half as many, and rates
    # that of the file, three times it and a third.
    SearchConstraints(learning_rates=tuple(learning_rates))
    there = fleet.population.clients
    if any(count > there for count in clients):
        what = f"{max(clients)} clients a round are more than the {there} of the population"
        raise OdtpackError("bad-fleet-settings", what)
    usual, passes = fleet.federation.clients, fleet.training.epochs
    rate = fleet.training.learning_rate
    near = [count for count in (usual, 2 * usual, usual // 2) if 1 <= count <= there]
    return [
        FleetSettings(number, *chosen)
        for number, chosen in enumerate(
            itertools.product(
                dict.fromkeys(clients or near or [usual]),
                dict.fromkeys(epochs or (passes, 2 * passes, max(1, passes // 2))),
                dict.fromkeys(learning_rates or (rate, _digits(3 * rate), _digits(rate / 3))),
            ),
            1,
        )
    ]


def _digits(value: float) -> float:
    """A number that people would write."""
    return float(f"{value:.2g}")


_SHA256: Final = "^[0-9a-f]{64}$"


class Figures(Part):
    """What a federation came to; means over its seeds, traffic and energy over devices as well.

    Attributes:
        accuracy: On the held-out samples; null for a package that does not classify.
        loss: On the held-out samples; null if not finite.
        days: Simulated days until the accuracy of the budgets, else of all rounds; null for never.
        took_part: Share of the population with an answer averaged at least once.
        traffic_bytes: Up and down, of a device that was chosen.
        energy_j: Of a device that was chosen; null if unknown.
    """

    accuracy: float | None
    loss: Loss
    days: NonNegative | None
    took_part: NonNegative
    traffic_bytes: NonNegative
    energy_j: NonNegative | None

    def costs(self) -> Point:
        """Error or loss, days, traffic and energy, each on its grid; what is unknown is worst."""
        # A model whose loss is not finite has an accuracy as well, by chance.
        quality = self.loss if self.loss is None or self.accuracy is None else 1.0 - self.accuracy
        others = (self.days, self.traffic_bytes, self.energy_j)
        return (
            math.inf if quality is None else quality,
            *(math.inf if each is None else on_grid(each, TIME_TOLERANCE) for each in others),
        )


class Tried(Part):
    """One way to run the federation, and what it came to in so many rounds.

    Attributes:
        number: Its number in the space.
        clients: Answers that a round waits for; with a buffer, clients at a time.
        epochs: Passes of a client over its samples.
        learning_rate: Of a client's steps.
        minimum: Fewest answers of a round that counts; null with a buffer.
        buffer: Answers that change the model; null without a buffer.
        rounds: Rounds that were simulated.
        figures: What it came to.
        failed: The budgets that it exceeds, as sentences.
        not_judged: Those that could not be judged.
        reason: Why it did not go on to all rounds.
        beaten_by: Numbers of those that are nowhere worse, and somewhere better.
    """

    number: Count
    clients: Count
    epochs: Count
    learning_rate: NonNegative
    minimum: Count | None = None
    buffer: Count | None = None
    rounds: Count
    figures: Figures
    failed: list[Text] = Field(default_factory=list)
    not_judged: list[Text] = Field(default_factory=list)
    reason: Text | None = None
    beaten_by: list[Count] = Field(default_factory=list)


class FleetRung(Part):
    """How many settings were simulated for how many rounds, and how many were kept."""

    rounds: Count
    played: Count
    kept: Count


class FleetFitResult(Part):
    """What was found. ``best`` keep every budget that could be judged, and none such beats them.

    Attributes:
        manifest_sha256: Of the package.
        fleet_digest: Of the fleet file.
        candidates: Settings in the space.
        seeds: Seeds of those that were simulated to the end.
        rungs: How the others were dropped.
        best: The best accuracy first.
        beaten: Within the budgets too, but beaten.
        over_budget: Played to the end, and over a budget.
        left: Not simulated to the end.
    """

    schema_version: Literal[1] = 1
    tool_version: Text
    manifest_sha256: str = Field(pattern=_SHA256)
    fleet_digest: str = Field(pattern=_SHA256)
    candidates: Count
    seeds: Count
    rungs: list[FleetRung]
    best: list[Tried]
    beaten: list[Tried]
    over_budget: list[Tried]
    left: list[Tried]

    @property
    def judged(self) -> bool:
        """Whether any of the best was judged by every budget."""
        return any(not each.not_judged for each in self.best)


def figures_of(result: FleetResult, budgets: FleetBudgets) -> Figures:
    """The figures of a federation, as far as it was simulated."""
    found = {each.metric: each.value for each in fleet_figures(result, budgets.accuracy)}
    runs = seed_runs(result)
    days = found["days"]
    if budgets.accuracy is None:
        days = statistics.fmean(run.points[-1].day if run.points else 0.0 for run in runs)
    return Figures(
        accuracy=found["accuracy"],
        loss=found["final_loss"],
        days=days,
        took_part=found["participation"] or 0.0,
        traffic_bytes=found["traffic"] or 0.0,
        energy_j=found["energy"],
    )


_COSTS: Final = 4
"""Error or loss, days, traffic and energy."""

_FIRST_PART: Final = 3
"""Settings are compared after this part of the rounds, and continued if they are good."""

_GROWING: Final = frozenset({"traffic_per_device", "energy_per_device"})
"""Checks that can only get worse with more rounds."""

OnFleetFit = Callable[[str, int, int], None]
"""Called with what is being done, how many of it are done, and how many there are."""


@dataclasses.dataclass(frozen=True)
class FleetFitRequest:
    """What to search."""

    package: Path  # folder of the package
    data: Path  # `.npz` file that the clients' samples are drawn from
    fleet: FleetFile  # with the budgets to keep
    space: Sequence[FleetSettings]  # what to try; the first one is tried in any case
    devices: Sequence[FleetDevice] = ()  # the models of device, as for a federation
    trials: int = 12  # candidates to simulate
    finalists: int = 4  # how many of these to play to the end
    seeds: int = 1  # with so many seeds each, from that of the fleet file on


@dataclasses.dataclass(frozen=True)
class _Trial:
    """A federation to play, or to continue, up to a round."""

    request: FleetFitRequest
    fleet: FleetFile  # as its settings are
    state: Path
    until: int


@dataclasses.dataclass(frozen=True)
class _Played:
    """Settings in the race, and what they have come to."""

    settings: FleetSettings
    rounds: int
    result: FleetResult


def fit_fleet(
    request: FleetFitRequest,
    *,
    jobs: int = 1,
    progress: OnFleetFit = lambda title, done, count: None,
) -> FleetFitResult:
    """Search the settings of a federation that keep its budgets."""
    # The result is a function of the request, whatever the number of processes. `jobs`: federations
    # to play at a time, each in a process of its own. `progress`: called as federations end.
    optuna()
    with scratch_folder("fleet-fit") as folder:
        return _Search(request, Path(folder), LocalExecutor(jobs), progress).run()


@dataclasses.dataclass
class _Search:
    request: FleetFitRequest
    folder: Path
    executor: LocalExecutor
    progress: OnFleetFit
    left: list[Tried] = dataclasses.field(default_factory=list)

    def run(self) -> FleetFitResult:
        request, rounds = self.request, self.request.fleet.federation.rounds
        study = Study(request.space, _COSTS, request.fleet.seed)
        made = []
        if min(request.trials, len(request.space)) > request.finalists:
            level = max(1, rounds // _FIRST_PART)
            race = list[_Played]()
            while group := study.ask(min(GROUP, request.trials - len(race))):
                for played in self._play(group, level):
                    study.tell(played.settings, self._costs(played))
                    race.append(played)
            runners, others = self._cut(race)
            made = [FleetRung(rounds=level, played=len(race), kept=len(runners))]
        else:
            runners, others = study.ask(request.trials), []
        finished = [self._tried(each) for each in self._play(runners, rounds, request.seeds)]
        while others and all(each.failed for each in finished):
            # That nothing keeps the budgets rests on all rounds.
            more, others = others[: request.finalists], others[request.finalists :]
            again = self._play([each.settings for each in more], rounds, request.seeds)
            finished += [self._tried(each) for each in again]
        ended = {each.number for each in finished}
        self.left = [each for each in self.left if each.number not in ended]
        kept = [each for each in finished if not each.failed]
        best, beaten = ranked(kept, [each.figures.costs() for each in kept])
        return FleetFitResult(
            tool_version=tool_version(),
            manifest_sha256=Package.open(request.package).manifest_sha256,
            fleet_digest=request.fleet.digest,
            candidates=len(request.space),
            seeds=request.seeds,
            rungs=made,
            best=best,
            beaten=beaten,
            over_budget=[each for each in finished if each.failed],
            left=sorted(self.left, key=lambda each: each.number),
        )

    def _play(self, runners: Sequence[FleetSettings], rounds: int, seeds: int = 1) -> list[_Played]:
        request = self.request
        first = request.fleet.seed
        trials = [
            _Trial(
                request,
                runner.of(request.fleet.model_copy(update={"seed": seed})),
                self.folder / f"{runner.number}-{seed}.npz",
                rounds,
            )
            for runner in runners
            for seed in range(first, first + seeds)
        ]
        title = f"play {rounds} of {request.fleet.federation.rounds} rounds"
        self.progress(title, 0, len(trials))
        results = self.executor.map(
            _play, trials, on_done=lambda done, count: self.progress(title, done, count)
        )
        return [
            _Played(runner, rounds, join_seeds(results[at * seeds : (at + 1) * seeds]))
            for at, runner in enumerate(runners)
        ]

    def _costs(self, played: _Played) -> Point:
        return figures_of(played.result, self.request.fleet.budgets).costs()

    def _cut(self, race: Sequence[_Played]) -> tuple[list[FleetSettings], list[_Played]]:
        """What goes on, and what may still: not what is over a budget already."""
        over = [self._already_over(played) for played in race]
        hopeless = all(over)
        if hopeless:  # so that there is an answer to how far off they are
            over = [""] * len(race)
        good = [played for played, reason in zip(race, over, strict=True) if not reason]
        self.left += [
            self._tried(played, reason) for played, reason in zip(race, over, strict=True) if reason
        ]
        points = [self._costs(each) for each in good]
        chosen = choose(points, self.request.finalists)
        others = []
        for index in sorted(set(range(len(good))) - {*chosen}, key=lambda i: points[i]):
            by = [good[i].settings.number for i in chosen if beats(points[i], points[index])]
            reason = f"after {_rounds(good[index])} others did better"
            self.left.append(self._tried(good[index], reason, sorted(by)))
            others.append(good[index])
        return [good[index].settings for index in chosen], [] if hopeless else others

    @staticmethod
    def _already_over(played: _Played) -> str:
        return "; ".join(
            f"after {_rounds(played)}: {check.message}"
            for check in played.result.checks
            if check.metric in _GROWING and check.status == "fail"
        )

    @staticmethod
    def _told(played: _Played, status: str) -> list[str]:
        checks = (each for each in played.result.checks if each.level == "error")
        return [check.message for check in checks if check.status == status]

    def _tried(self, played: _Played, reason: str | None = None, by: Sequence[int] = ()) -> Tried:
        table = played.settings.of(self.request.fleet).federation
        return Tried(
            **dataclasses.asdict(played.settings),
            minimum=table.minimum if table.buffer is None else None,
            buffer=table.buffer,
            rounds=played.rounds,
            figures=figures_of(played.result, self.request.fleet.budgets),
            failed=self._told(played, "fail"),
            not_judged=self._told(played, "not judged"),
            reason=reason,
            beaten_by=list(by),
        )


def _rounds(played: _Played) -> str:
    return counted(played.rounds, "round")


def _play(trial: _Trial) -> FleetResult:
    request = trial.request
    federation = Federation(request.package, request.data, trial.fleet, request.devices)
    result, _ = federation.simulate(
        state_path=trial.state, resume=trial.state.is_file(), until=trial.until
    )
    return judge_fleet(result, trial.fleet.budgets)
