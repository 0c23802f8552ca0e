"""The search from a model to the Pareto set: docs/adr/0006-how-fit-searches.md says why."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from odtpack.errors import OdtpackError
from odtpack.fit import finalists
from odtpack.fit.finalists import summarize
from odtpack.fit.halving import Runner, halve, rungs
from odtpack.fit.outcome import Dropped, FitResult
from odtpack.fit.package_cache import (
    Ceiling,
    PackageCache,
    Planned,
    memory_ceiling,
    size_ceiling,
)
from odtpack.fit.search_context import (
    FitRequest,
    SearchContext,
    Trained,
    Trial,
    make_search_context,
    train,
)
from odtpack.fit.space import Candidate, MemoryBudget, open_space, spread
from odtpack_runtime.files.scratch import scratch_folder
from odtpack_simulator.device.kits import kit_of
from odtpack_simulator.replay.executor import Executor, LocalExecutor
from odtpack_simulator.replay.job import SamplePlan
from odtpack_simulator.result.result import SimulationResult
from odtpack_simulator.values.memory_fit import with_margin

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
    request: FitRequest,
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
    with scratch_folder("fit") as name:
        folder = Path(name)
        progress(FitProgress("build the recipe as it is"))
        ground = make_search_context(request.settings, request.data, folder, request.seed)
        local = LocalExecutor(jobs)
        return _Search(request, ground, folder, local, executor or local, progress).run()


@dataclasses.dataclass
class _Search:
    """One search: what its parts share."""

    request: FitRequest
    ground: SearchContext
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
        runners, looked_at = self._screen(candidates)
        levels = [
            epochs
            for epochs in rungs(len(runners), request.epochs, request.finalists)
            if not any(self._problem(runner.candidate, epochs) for runner in runners)
        ] or [request.epochs]
        ahead, dropped, made = halve(runners, levels, request.finalists, self._train)
        self.left += dropped
        return summarize(
            self._simulate(ahead),
            request,
            ground,
            space,
            candidates=len(candidates),
            looked_at=looked_at,
            rungs=made,
            left=self.left,
        )

    def _fitting(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those whose training is as long as the recipe's schedule of the learning rate asks."""
        fitting = [each for each in candidates if not self._problem(each, self.request.epochs)]
        if fitting:
            return fitting
        problem = self._problem(candidates[0], self.request.epochs)
        assert problem is not None  # noqa: S101 - nothing would have been left out
        steps = self._schedule(candidates[0], self.request.epochs).steps
        problem.hint = f"the training makes {steps} steps: pass more --epochs"
        raise problem

    def _problem(self, candidate: Candidate, epochs: int) -> OdtpackError | None:
        """Why the recipe's schedule does not fit in so many epochs of a candidate."""
        schedule = self.ground.base.schedule
        if schedule is None:
            return None
        try:
            schedule.schedule(self._schedule(candidate, epochs).steps)
        except OdtpackError as error:
            return error
        return None

    def _schedule(self, candidate: Candidate, epochs: int) -> SamplePlan:
        return self.ground.schedule(candidate.micro_batch, candidate.accumulation_steps, epochs)

    def _screen(self, candidates: Sequence[Candidate]) -> tuple[list[Runner], int]:
        """Candidates whose plan may fit, as many as are wanted, spread over the space."""
        request = self.request
        workshop = PackageCache(
            self.ground.base,
            self.folder / "packages",
            self.ground.shapes,
            self.ground.whole.train_samples,
            tuple({kit_of(profile.os): None for profile in request.profiles}),
        )
        order = spread(candidates, candidates[0], request.seed)
        good, over = list[Runner](), list[tuple[float, Runner, str]]()
        looked_at, most = 0, _LOOKS * request.trials
        while True:
            wanted = min(request.trials - len(good), most - looked_at)
            batch = list(itertools.islice(order, max(0, wanted)))
            if not batch:
                break
            looked_at += len(batch)
            for candidate, planned in self._plan(batch, workshop):
                steps = self._schedule(candidate, 1).steps_per_epoch
                runner = Runner(candidate, planned, candidate.cost_key(self.ground.base), steps)
                excess, reason = self._excess(planned)
                if planned.problem is not None:
                    self.left.append(runner.left("build", planned.problem))
                elif excess > 0:
                    over.append((excess, runner, reason))
                else:
                    good.append(runner)
        over.sort(key=lambda each: (each[0], each[1].candidate.number))
        if over and not good:  # so that there is a measured answer to how far off it is
            good.append(over.pop(0)[1])
        self.left += [runner.left("plan", reason) for _, runner, reason in over]
        if not good:
            raise OdtpackError(
                "nothing-builds",
                f"none of {looked_at} candidates can be built; {self.left[0].reason}",
            )
        return good, looked_at

    def _plan(
        self, batch: Sequence[Candidate], packages: PackageCache
    ) -> list[tuple[Candidate, Planned]]:
        """Build and plan candidates; those that take too much memory recompute, if that helps."""
        # A package that is built for a memory budget takes the place of the one without. Segments
        # compute again as it is.
        plans = packages.plan(batch, self.local, on_done=self._reporter("build and plan"))
        found = dict(zip(batch, plans, strict=True))
        ceiling = self._memory_ceiling
        base = self.ground.base
        if ceiling is None or base.memory_budget is not None or base.segments:
            return [*found.items()]
        budget = MemoryBudget(_megabytes(ceiling.limit), self.ground.open_sizes())
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

    def _peak(self, planned: Planned) -> int:
        """The peak that must not be over a limit: with its margin, unless too close only warns."""
        warns = self.request.budgets.defaults.too_close == "warn"
        return planned.peak_bytes if warns else with_margin(planned.peak_bytes)

    @functools.cached_property
    def _memory_ceiling(self) -> Ceiling | None:
        return memory_ceiling(self.request.profiles, self.request.budgets)

    @functools.cached_property
    def _size_ceiling(self) -> Ceiling | None:
        return size_ceiling(self.request.profiles, self.request.budgets)

    def _excess(self, planned: Planned) -> tuple[float, str]:
        """By which share of a limit a plan is over it, and how to say so."""
        excess, reason = 0.0, ""
        for ceiling, what, count in (
            (self._memory_ceiling, "the planned peak with its margin", self._peak(planned)),
            (self._size_ceiling, "the package", planned.package_bytes),
        ):
            if ceiling is not None and ceiling.excess(count) > excess:
                excess, reason = ceiling.excess(count), ceiling.describe(what, count)
        return excess, reason

    def _train(self, runners: Sequence[Runner], epochs: int) -> list[Trained]:
        trials = [
            Trial(
                runner.planned.folder,
                self.ground.files,
                self._schedule(runner.candidate, epochs),
                runner.candidate.learning_rate,
            )
            for runner in runners
        ]
        return self.executor.map(
            train,
            trials,
            files=[self.folder / "packages", self.folder / "data"],
            on_done=self._reporter(f"train for {epochs} of {self.request.epochs} epochs"),
        )

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


def _megabytes(count: float) -> str:
    """A number of bytes as a recipe has it, rounded down: ``"61.35 MB"``."""
    return f"{math.floor(count / 1e4) / 100:g} MB" if count >= 1e6 else f"{int(count)} B"
