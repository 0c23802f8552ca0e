"""The search from a model to the Pareto set: docs/adr/0006-how-fit-searches.md says why."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from odtpack.errors import OdtpackError
from odtpack.fit import finalists, package_cache, search_context
from odtpack.fit.finalists import summarize
from odtpack.fit.outcome import Dropped, FitResult, Point, Stage, beats, choice, choose
from odtpack.fit.space import Candidate, MemoryBudget, open_space
from odtpack.fit.study import GROUP, Study, optuna
from odtpack_runtime.files.atomic import file_sha256
from odtpack_runtime.files.scratch import scratch_folder
from odtpack_simulator.device.app import with_margin
from odtpack_simulator.device.kits import kit_of
from odtpack_simulator.replay.executor import Executor, LocalExecutor
from odtpack_simulator.replay.job import SamplePlan
from odtpack_simulator.result import SimulationResult

_COSTS: Final = 3
"""Loss or error rate, memory, and work."""

_LOOKS: Final = 4
"""So many times the wanted trials are planned at most, in search of ones that may fit."""


@dataclasses.dataclass(frozen=True)
class FitProgress:
    """How far a search is.

    Attributes:
        title: What is being done.
        done: Candidates done.
        count: Candidates to do.
    """

    title: str
    done: int = 0
    count: int = 0


def fit(
    request: search_context.FitRequest,
    *,
    executor: Executor | None = None,
    jobs: int = 1,
    progress: Callable[[FitProgress], None] = lambda now: None,
) -> FitResult:
    """Search what a recipe leaves open.

    Args:
        request: What to search.
        executor: What runs the short trainings; ``jobs`` processes of this machine if None.
        jobs: Processes at a time. Finalists are timed one at a time whatever the number.
        progress: Called as the search proceeds.

    Raises:
        OdtpackError: The model, the data, the recipe or an option is wrong. A candidate that
            fails by itself is a result.
    """
    optuna()
    with scratch_folder("fit") as name:
        folder = Path(name)
        progress(FitProgress("build the recipe as it is"))
        ground = search_context.make_search_context(
            *(request.settings, request.data, folder, request.seed),
            evaluation=request.evaluation,
            holdout=request.holdout,
        )
        local = LocalExecutor(jobs)
        return _Search(request, ground, folder, local, executor or local, progress).run()


@dataclasses.dataclass(frozen=True)
class Runner:
    """A candidate, and what is known of it."""

    candidate: Candidate
    planned: package_cache.Planned
    excess: float = 0.0  # shares by which it is over the limits on memory and size
    reason: str = ""  # which limit that is; empty within them
    trained: search_context.Trained | None = None  # how its training went; None if it did not
    stopped_by: tuple[int, ...] = ()  # those that did better when its training was stopped

    @property
    def finished(self) -> search_context.Trained | None:
        """How its training went, if it came to the end."""
        there = self.trained
        return None if there is None or there.stopped_after or there.problem else there

    def left(self, stage: Stage, reason: str, epochs: int = 0, by: Sequence[int] = ()) -> Dropped:
        """The record of a candidate that does not go on."""
        trained = self.trained or search_context.Trained()
        return Dropped(
            number=self.candidate.number,
            choice=choice(self.candidate),
            stage=stage,
            reason=reason[:4000],
            epochs=epochs,
            metric=trained.metric,
            loss=trained.loss,
            predicted_peak_bytes=self.planned.peak_bytes,
            measured_peak_bytes=trained.peak_bytes,
            beaten_by=sorted(by),
        )

    def record(self) -> dict[str, Any]:
        """What the file of a study keeps of it."""
        return {
            "memory": self.candidate.memory and dataclasses.asdict(self.candidate.memory),
            "planned": dataclasses.asdict(self.planned),
            "trained": self.trained and dataclasses.asdict(self.trained),
            "excess": [min(self.excess, 1e30), self.reason],
            "stopped_by": self.stopped_by,
        }

    @classmethod
    def recorded(cls, candidate: Candidate, record: dict[str, Any]) -> Runner:
        """The runner that :meth:`record` describes."""
        memory, trained = record["memory"], record["trained"]
        if memory:
            memory = MemoryBudget(memory["size"], tuple(memory["sizes"]))
        if trained:
            trained = search_context.Trained(**trained | {"curve": tuple(trained["curve"])})
        candidate = dataclasses.replace(candidate, memory=memory)
        planned, by = package_cache.Planned(**record["planned"]), tuple(record["stopped_by"])
        excess, reason = record["excess"]
        return cls(candidate, planned, excess, reason, trained, by)


@dataclasses.dataclass
class _Search:
    """One search: what its parts share."""

    request: search_context.FitRequest
    ground: search_context.SearchContext
    folder: Path
    local: LocalExecutor
    executor: Executor
    progress: Callable[[FitProgress], None]
    left: list[Dropped] = dataclasses.field(default_factory=list)

    def run(self) -> FitResult:
        request, ground = self.request, self.ground
        space = open_space(
            ground.base,
            request.recipe,
            request.wishes,
            ground.freezes,
            train_samples=ground.whole.train_samples,
            fixed_batch=ground.fixed_batch,
        )
        candidates = self._fitting(space.candidates())
        race = self.tried(candidates)
        ahead = self.finalists(race)
        return summarize(
            self._simulate(ahead),
            request,
            ground,
            space,
            candidates=len(candidates),
            looked_at=len(race),
            trained=sum(each.trained is not None for each in race.values()),
            left=self.left,
        )

    def _fitting(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those whose training is as long as the recipe's schedule of the learning rate asks."""
        schedule, fitting = self.ground.base.schedule, list[Candidate]()
        if schedule is None:
            return list(candidates)
        problem: OdtpackError | None = None
        for each in candidates:
            steps = self._schedule(each).steps
            try:
                schedule.schedule(steps)
            except OdtpackError as error:
                error.hint = f"the training makes {steps} steps: pass more --epochs"
                problem = problem or error
            else:
                fitting.append(each)
        if problem is not None and not fitting:
            raise problem
        return fitting

    def _schedule(self, candidate: Candidate) -> SamplePlan:
        cut = candidate.micro_batch, candidate.accumulation_steps
        return self.ground.schedule(*cut, self.request.epochs)

    def tried(self, candidates: Sequence[Candidate]) -> dict[int, Runner]:
        """The candidates that Optuna asks for: planned, and trained if they may fit."""
        request = self.request
        purpose = "" if request.study is None else self._purpose(candidates)
        study = Study(candidates, _COSTS, request.seed, request.study, purpose)
        found = {c.number: Runner.recorded(c, record) for c, record in study.told()}
        while True:
            trained = sum(each.trained is not None for each in found.values())
            room = min(request.trials - trained, _LOOKS * request.trials - len(found))
            group = study.ask(min(room, max(GROUP, self.local.jobs)))
            if not group:
                return found
            planned = [Runner(c, plan, *self._excess(plan)) for c, plan in self._plan(group)]
            fit = [each for each in planned if not each.planned.problem and each.excess <= 0]
            done = {each.candidate.number: each for each in planned}
            done |= self._trained(fit, [*found.values()])
            for asked in group:
                runner = found[asked.number] = done[asked.number]
                costs = self.point(runner) if runner.finished else None
                study.tell(asked, costs, excess=self.short(runner), record=runner.record())

    def _purpose(self, candidates: Sequence[Candidate]) -> str:
        """A digest of what is searched, and how."""
        request = self.request
        content = (
            self.ground.base.canonical_json(),
            *(
                None if path is None else file_sha256(path)
                for path in (request.settings.model, request.data, request.evaluation)
            ),
            [profile.digest for profile in request.profiles],
            repr(request.budgets),
            (request.epochs, request.seed, request.holdout),
            [each.aspects() for each in candidates],
        )
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def point(self, runner: Runner) -> Point:
        """Loss or error rate, memory, and work of an epoch: all repeat exactly."""
        quality = math.inf if runner.trained is None else runner.trained.cost
        steps = self._schedule(runner.candidate).steps_per_epoch
        return (quality, float(runner.planned.peak_bytes), runner.planned.work * steps)

    def short(self, runner: Runner) -> float:
        """Shares by which it misses the limits that can be judged before it is simulated."""
        done, missed = runner.finished or search_context.Trained(), max(0.0, runner.excess)
        for key, value, worse in ("final_loss", done.loss, 1), ("accuracy_floor", done.metric, -1):
            if value is not None:
                missed += max(
                    (
                        max(0.0, worse * (value - limit)) / (abs(limit) or 1.0)
                        for profile in self.request.profiles
                        for limit, _ in package_cache.error_limits(
                            profile, self.request.budgets, key
                        )
                    ),
                    default=0.0,
                )
        return missed

    def finalists(self, race: dict[int, Runner]) -> list[Runner]:
        """Those to simulate: the Pareto set of what keeps the budgets, or what is nearest to it."""
        if not any(each.trained for each in race.values()):  # so that there is a measured answer
            built = (each for each in race.values() if not each.planned.problem)
            near = min(built, key=lambda each: (each.excess, each.candidate.number), default=None)
            if near is None:
                problem = next(iter(race.values())).planned.problem
                what = f"none of {len(race)} candidates can be built; {problem}"
                raise OdtpackError("nothing-builds", what)
            race |= self._trained([near], [])
        if not any(each.finished and not self.short(each) for each in race.values()):
            # That nothing keeps the budgets rests on whole trainings.
            stopped = [r for r in race.values() if r.trained and r.trained.stopped_after]
            race |= self._trained(stopped, [])
        done = [each for each in race.values() if each.finished]
        good = [each for each in done if not self.short(each)]
        if good:
            ahead = [good[i] for i in choose([*map(self.point, good)], self.request.finalists)]
        else:
            done.sort(key=lambda each: (self.short(each), self.point(each)))
            ahead = done[: self.request.finalists]
        self.left += [self._dropped(each, ahead) for each in race.values() if each not in ahead]
        return ahead

    def _dropped(self, runner: Runner, ahead: Sequence[Runner]) -> Dropped:
        """Why a candidate is not simulated."""
        trained, epochs = runner.trained, self.request.epochs
        if runner.planned.problem is not None:
            return runner.left("build", runner.planned.problem)
        if trained is None:
            return runner.left("plan", runner.reason)
        if trained.problem is not None:
            return runner.left("training", trained.problem, epochs)
        if trained.stopped_after:
            at = trained.stopped_after
            reason = (
                f"after {at} of {epochs} epochs most of its family that cost no more were better"
            )
            return runner.left("training", reason, at, runner.stopped_by)
        point = self.point(runner)
        by = [each.candidate.number for each in ahead if beats(self.point(each), point)]
        reason = "others have a better metric, less memory or less work"
        if self.short(runner):
            reason = "it misses a budget, and others miss by less"
        return runner.left("beaten", reason, epochs, by)

    def _trained(self, runners: Sequence[Runner], before: Sequence[Runner]) -> dict[int, Runner]:
        """Train candidates; those that the median of their family beats are stopped early."""
        # Only what is finished before a group of trainings begins can stop one of them, so that the
        # number of processes decides nothing; and only what costs no more, so that what takes the
        # least memory always comes to the end.
        rivals = [
            [
                other
                for other in before
                if other.finished
                and other.candidate.family == runner.candidate.family
                and all(
                    a <= b
                    for a, b in zip(self.point(other)[1:], self.point(runner)[1:], strict=True)
                )
            ]
            for runner in runners
        ]
        built = self._packages.plan([runner.candidate for runner in runners], self.local)
        trials = [
            search_context.Trial(
                planned.folder,
                self.ground.files,
                self._schedule(runner.candidate),
                runner.candidate.learning_rate,
                tuple(other.finished.curve for other in others if other.finished),
            )
            for runner, planned, others in zip(runners, built, rivals, strict=True)
        ]
        started = sum(each.trained is not None for each in before)
        most = max(self.request.trials, started + len(trials))
        done = self.executor.map(
            search_context.train,
            trials,
            files=[self.folder / "packages", self.folder / "data"],
            on_done=lambda done, _: self.progress(FitProgress("train", started + done, most)),
        )
        found = {}
        for runner, others, trained in zip(runners, rivals, done, strict=True):
            at = len(trained.curve) - 1
            by = [
                each.candidate.number
                for each in others
                if trained.stopped_after
                and each.finished
                and each.finished.curve[at] < trained.curve[at]
            ]
            after = dataclasses.replace(runner, trained=trained, stopped_by=tuple(by))
            found[runner.candidate.number] = after
        return found

    @functools.cached_property
    def _packages(self) -> package_cache.PackageCache:
        return package_cache.PackageCache(
            self.ground.base,
            self.folder / "packages",
            self.ground.shapes,
            self.ground.whole.train_samples,
            self.ground.whole.evaluated_samples,
            tuple({kit_of(profile.os): None for profile in self.request.profiles}),
        )

    def _plan(self, batch: Sequence[Candidate]) -> list[tuple[Candidate, package_cache.Planned]]:
        """Build and plan candidates; those that take too much memory recompute, if that helps."""
        # A package that is built for a memory budget takes the place of the one without. Segments
        # compute again as it is.
        packages = self._packages
        plans = packages.plan(batch, self.local, on_done=self._reporter("build and plan"))
        found = dict(zip(batch, plans, strict=True))
        ceiling = self._memory_ceiling
        base = self.ground.base
        if ceiling is None or base.memory_budget is not None or base.segments:
            return [*found.items()]
        limit = ceiling.limit  # rounded down, as a recipe has it: "61.35 MB"
        text = f"{math.floor(limit / 1e4) / 100:g} MB" if limit >= 1e6 else f"{int(limit)} B"
        budget = MemoryBudget(text, self.ground.open_sizes())
        large = {
            candidate: dataclasses.replace(candidate, memory=budget)
            for candidate, planned in found.items()
            if planned.problem is None and ceiling.excess(self._peak(planned)) > 0
        }
        report = self._reporter("build for the memory that there is")
        smaller = packages.plan([*large.values()], self.local, on_done=report)
        fits = {
            candidate: planned
            for candidate, planned in zip(large, smaller, strict=True)
            if planned.problem is None and self._excess(planned)[0] <= 0
        }
        return [(large[c], fits[c]) if c in fits else (c, planned) for c, planned in found.items()]

    def _peak(self, planned: package_cache.Planned) -> int:
        """The peak that must not be over a limit: with its margin, unless too close only warns."""
        warns = self.request.budgets.defaults.too_close == "warn"
        return planned.peak_bytes if warns else with_margin(planned.peak_bytes)

    @functools.cached_property
    def _memory_ceiling(self) -> package_cache.Ceiling | None:
        return package_cache.memory_ceiling(self.request.profiles, self.request.budgets)

    @functools.cached_property
    def _size_ceiling(self) -> package_cache.Ceiling | None:
        return package_cache.size_ceiling(self.request.profiles, self.request.budgets)

    def _excess(self, planned: package_cache.Planned) -> tuple[float, str]:
        """By which share of a limit a plan is over it, and how to say so."""
        excess, reason = 0.0, ""
        for ceiling, what, count in (
            (self._memory_ceiling, "the planned peak with its margin", self._peak(planned)),
            (self._size_ceiling, "the package", planned.package_bytes),
        ):
            if ceiling is not None and ceiling.excess(count) > excess:
                excess, reason = ceiling.excess(count), ceiling.describe(what, count)
        return excess, reason

    def _simulate(self, runners: Sequence[Runner]) -> list[tuple[Candidate, SimulationResult]]:
        """Train the finalists to the end and time them, one at a time."""
        request = self.request
        report = self._reporter("train to the end, and time")
        found = []
        for index, runner in enumerate(runners):
            report(index, len(runners))
            folder = self.folder / f"finalist-{runner.candidate.number}"
            try:
                result = finalists.run(runner.candidate, request, folder)
            except OdtpackError as error:
                reason = f"{error.code}: {error.what}"
                self.left.append(runner.left("training", reason, request.epochs))
            else:
                found.append((runner.candidate, result))
        return found

    def _reporter(self, title: str) -> Callable[[int, int], None]:
        return lambda done, count: self.progress(FitProgress(title, done, count))
