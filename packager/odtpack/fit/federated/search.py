"""Successive halving over federations: many settings for a few rounds, the better ones for more.

As :mod:`odtpack.fit.halving` does it for packages. A federation that goes on does so from its state
after its last round, so that no round is played twice.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from odtpack.fit.candidates import spread
from odtpack.fit.federated.outcome import FleetFitResult, FleetRung, Tried, figures_of
from odtpack.fit.federated.settings import FleetSettings
from odtpack.fit.halving import REDUCTION, rungs
from odtpack.fit.pareto import beaten_by, beats, keep
from odtpack_runtime.files.atomic import scratch_folder
from odtpack_runtime.package.package import Package
from odtpack_simulator.fleet.devices import FleetDevice
from odtpack_simulator.fleet.federation import Federation
from odtpack_simulator.fleet.figures import join_seeds, judge_fleet
from odtpack_simulator.fleet.fleet_file import FleetFile
from odtpack_simulator.fleet.result import FleetResult
from odtpack_simulator.host_result import tool_version
from odtpack_simulator.replay.executor import LocalExecutor

_GROWING: Final = frozenset({"traffic_per_device", "energy_per_device"})
"""Checks that can only get worse with more rounds."""

OnFleetFit = Callable[[str, int, int], None]
"""Called with what is being done, how many of it are done, and how many there are."""


@dataclasses.dataclass(frozen=True)
class FleetFitRequest:
    """What to search.

    Attributes:
        package: Folder of the package.
        data: ``.npz`` file that the clients' samples are drawn from.
        fleet: The fleet file, with the budgets to keep.
        space: What to try; the first one is tried in any case.
        devices: The models of device, as for a federation.
        trials: Settings to play.
        finalists: How many of these to play to the end.
        seeds: With so many seeds each, from that of the fleet file on.
    """

    package: Path
    data: Path
    fleet: FleetFile
    space: Sequence[FleetSettings]
    devices: Sequence[FleetDevice] = ()
    trials: int = 12
    finalists: int = 4
    seeds: int = 1


@dataclasses.dataclass(frozen=True)
class _Trial:
    """A federation to play, or to go on with, up to a round."""

    package: Path
    data: Path
    fleet: FleetFile
    devices: Sequence[FleetDevice]
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
    """Search the settings of a federation that keep its budgets.

    The result is a function of the request, whatever the number of processes.

    Args:
        request: What to search.
        jobs: Federations to play at a time, each in a process of its own.
        progress: Called as federations end.

    Raises:
        OdtpackError: The package, the data or the fleet file are wrong.
    """
    order = spread(request.space, request.space[0], request.fleet.seed)
    runners = list(itertools.islice(order, request.trials))
    with scratch_folder("fleet-fit") as folder:
        return _Search(request, Path(folder), LocalExecutor(jobs), progress).run(runners)


@dataclasses.dataclass
class _Search:
    request: FleetFitRequest
    folder: Path
    executor: LocalExecutor
    progress: OnFleetFit
    left: list[Tried] = dataclasses.field(default_factory=list)

    def run(self, runners: Sequence[FleetSettings]) -> FleetFitResult:
        request, rounds = self.request, self.request.fleet.federation.rounds
        made = []
        if len(runners) > request.finalists:
            levels = rungs(len(runners), rounds, request.finalists)
            for level in levels:
                begun = len(runners)
                runners = self._cut(self._play(runners, level), last=level == levels[-1])
                made.append(FleetRung(rounds=level, played=begun, kept=len(runners)))
        finished = [self._tried(played) for played in self._play(runners, rounds, request.seeds)]
        kept = [each for each in finished if not each.failed]
        beating = beaten_by([each.figures.costs() for each in kept])
        ranked = [
            each.model_copy(update={"beaten_by": sorted(kept[i].number for i in by)})
            for each, by in zip(kept, beating, strict=True)
        ]
        ranked.sort(key=lambda each: (each.figures.costs(), each.number))
        return FleetFitResult(
            tool_version=tool_version(),
            manifest_sha256=Package.open(request.package).manifest_sha256,
            fleet_digest=request.fleet.digest,
            candidates=len(request.space),
            seeds=request.seeds,
            rungs=made,
            best=[each for each in ranked if not each.beaten_by],
            beaten=[each for each in ranked if each.beaten_by],
            over_budget=[each for each in finished if each.failed],
            left=sorted(self.left, key=lambda each: each.number),
        )

    def _play(self, runners: Sequence[FleetSettings], rounds: int, seeds: int = 1) -> list[_Played]:
        request = self.request
        first = request.fleet.seed
        trials = [
            _Trial(
                request.package,
                request.data,
                runner.of(request.fleet.model_copy(update={"seed": seed})),
                request.devices,
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

    def _cut(self, race: Sequence[_Played], *, last: bool) -> list[FleetSettings]:
        """Drop what is over a budget already, and what others are better than."""
        over = [self._already_over(played) for played in race]
        if all(over):  # so that there is an answer to how far off they are
            over = [""] * len(race)
        good = [played for played, reason in zip(race, over, strict=True) if not reason]
        self.left += [
            self._tried(played, reason) for played, reason in zip(race, over, strict=True) if reason
        ]
        points = [figures_of(each.result, self.request.fleet.budgets).costs() for each in good]
        fewest = self.request.finalists
        wanted = fewest if last else max(fewest, math.ceil(len(race) / REDUCTION))
        chosen = keep(points, min(wanted, len(good)))
        for index, played in enumerate(good):
            if index not in chosen:
                by = [good[i].settings.number for i in chosen if beats(points[i], points[index])]
                reason = f"after {played.rounds} rounds others did better"
                self.left.append(self._tried(played, reason, sorted(by)))
        return [good[index].settings for index in chosen]

    @staticmethod
    def _already_over(played: _Played) -> str:
        return "; ".join(
            f"after {played.rounds} rounds: {check.message}"
            for check in played.result.checks
            if check.metric in _GROWING and check.status == "fail"
        )

    def _tried(self, played: _Played, reason: str | None = None, by: Sequence[int] = ()) -> Tried:
        settings = played.settings
        return Tried(
            number=settings.number,
            clients=settings.clients,
            epochs=settings.epochs,
            learning_rate=settings.learning_rate,
            rounds=played.rounds,
            figures=figures_of(played.result, self.request.fleet.budgets),
            failed=[
                check.message
                for check in played.result.checks
                if check.status == "fail" and check.level == "error"
            ],
            reason=reason,
            beaten_by=list(by),
        )


def _play(trial: _Trial) -> FleetResult:
    federation = Federation(trial.package, trial.data, trial.fleet, trial.devices)
    result, _ = federation.simulate(
        state_path=trial.state, resume=trial.state.is_file(), until=trial.until
    )
    return judge_fleet(result, trial.fleet.budgets)
