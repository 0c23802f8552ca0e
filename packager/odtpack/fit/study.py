"""Optuna: which candidates to try next, when a training is stopped, and the file to go on from."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

import numpy as np

from odtpack.errors import OdtpackError

GROUP: Final = 8
"""So many candidates are asked for at a time, whatever the number of processes."""

RIVALS: Final = 2
"""Finished trainings that another one is compared with, at least."""

_RANDOM: Final = 10  # candidates that are drawn before the sampler has something to learn from
_LARGEST: Final = 1e30  # what an infinite cost counts as
_NAME: Final = "odtpack fit"

Value = str | int | float | None


class Choice(Protocol):
    """One point of a space that is searched."""

    @property
    def number(self) -> int:
        """Its place in the space."""
        ...

    def aspects(self) -> Mapping[str, Value]:
        """What it chose in each dimension; what stands in front decides which keys follow."""
        ...


C = TypeVar("C", bound=Choice)


def optuna() -> Any:
    """The library that searches."""
    try:
        return importlib.import_module("optuna")
    except ImportError as error:
        raise OdtpackError("optuna-missing", "The search needs Optuna: install it.") from error


class Study(Generic[C]):
    """A search in a space: the same seed and answers give the same questions."""

    # `costs`: number of costs of a candidate, each the smaller the better.
    # `file`: where all is kept, to go on from; None to keep nothing. `purpose`: a digest of what is
    # searched: a file of another search is refused.

    def __init__(
        self,
        candidates: Sequence[C],
        costs: int,
        seed: int,
        file: Path | None = None,
        purpose: str = "",
    ) -> None:
        self._optuna = optuna()
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        self._seed = seed
        self._space = {each.number: (each, dict(each.aspects())) for each in candidates}
        self._choices: dict[str, dict[Value, None]] = {}
        for _, aspects in self._space.values():
            for name, value in aspects.items():
                self._choices.setdefault(name, {})[value] = None
        self._left = dict.fromkeys(self._space)
        self._open: dict[int, Any] = {}
        self._study = self._stored(costs, file, purpose)
        if not self._study.trials:
            self._study.enqueue_trial(self._space[candidates[0].number][1])

    def _stored(self, costs: int, file: Path | None, purpose: str) -> Any:
        storage, failed = None, self._optuna.trial.TrialState.FAIL
        try:
            if file is not None:
                journal = self._optuna.storages.journal
                lock = journal.JournalFileOpenLock(str(file))
                backend = journal.JournalFileBackend(str(file), lock_obj=lock)
                storage = self._optuna.storages.JournalStorage(backend)
            study = self._optuna.create_study(
                storage=storage,
                study_name=_NAME,
                directions=["minimize"] * costs,
                load_if_exists=True,
            )
            if study.user_attrs.get("search", purpose) != purpose:
                raise OdtpackError(
                    "study-of-another-search",
                    "The file holds another search: the model, the data, the recipe, the budgets, "
                    "the devices or an option differ.",
                    where=str(file),
                )
            study.set_user_attr("search", purpose)
            for trial in study.get_trials(deepcopy=False):
                if not trial.state.is_finished():  # it was under way when the search was ended
                    study.tell(trial.number, state=failed)
                elif "record" in trial.user_attrs:
                    del self._left[trial.user_attrs["candidate"]]
        except OdtpackError:
            raise
        except Exception as error:  # whatever Optuna makes of a file that is not its own
            what = f"The search in the file cannot be continued: {type(error).__name__}."
            raise OdtpackError("study-invalid", what, where=str(file)) from error
        return study

    def told(self) -> Iterator[tuple[C, dict[str, Any]]]:
        """What the file holds: candidates, and what was recorded of each."""
        for trial in self._study.get_trials(deepcopy=False):
            if "record" in trial.user_attrs:
                yield self._space[trial.user_attrs["candidate"]][0], trial.user_attrs["record"]

    def ask(self, count: int) -> list[C]:
        """So many candidates that were not tried; fewer only where no more are left."""
        done = len(self._space) - len(self._left)
        seeds = np.random.SeedSequence([self._seed, done])
        self._study.sampler = self._optuna.samplers.TPESampler(
            n_startup_trials=_RANDOM, seed=int(seeds.generate_state(1)[0])
        )
        random = np.random.default_rng(seeds)
        asked: list[C] = []
        while self._left and len(asked) < count:
            trial = self._study.ask()
            number = self._suggested(trial)
            if number is None:  # tried before, or not in the space: one is drawn in its place
                self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
                drawn = [*self._left][random.integers(len(self._left))]
                self._study.enqueue_trial(self._space[drawn][1])
                trial = self._study.ask()
                number = self._suggested(trial)
                assert number == drawn  # noqa: S101 - it was enqueued
            del self._left[number]
            trial.set_user_attr("candidate", number)
            self._open[number] = trial
            asked.append(self._space[number][0])
        return asked

    def _suggested(self, trial: Any) -> int | None:
        """The candidate that Optuna suggests, if it was not tried."""
        found = dict(self._space)
        while found:
            given = trial.params
            name = next((n for _, a in found.values() for n in a if n not in given), None)
            if name is None:
                return next((number for number in found if number in self._left), None)
            value = trial.suggest_categorical(name, [*self._choices[name]])
            found = {n: each for n, each in found.items() if each[1].get(name, ...) == value}
        return None

    def tell(
        self,
        candidate: C,
        costs: Sequence[float] | None,
        *,
        excess: float = 0.0,
        record: Mapping[str, Any] | None = None,
    ) -> None:
        """What a candidate came to."""
        # `costs`: None if it was dropped before the end. `excess`: shares by which it is over
        # limits; 0 within them. `record`: what `told` gives back.
        trial = self._open.pop(candidate.number)
        trial.set_constraint("excess", min(excess, _LARGEST))
        trial.set_user_attr("record", dict(record or {}))
        if costs is None:
            self._study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)
        else:
            self._study.tell(trial, [min(cost, _LARGEST) for cost in costs])


def stopper(rivals: Sequence[Sequence[float]]) -> Callable[[int, float], bool]:
    """Whether to stop a training that has come to a loss after so many passes."""
    # `rivals`: the losses of finished trainings of the same family, pass by pass. Worse than their
    # median is stopped.
    if len(rivals) < RIVALS:
        return lambda passes, loss: False
    library = optuna()
    study = library.create_study(
        pruner=library.pruners.MedianPruner(n_startup_trials=RIVALS, n_min_trials=RIVALS)
    )
    study.add_trials(
        library.trial.create_trial(value=losses[-1], intermediate_values=dict(enumerate(losses)))
        for losses in rivals
    )
    trial = study.ask()

    def stop(passes: int, loss: float) -> bool:
        trial.report(loss if math.isfinite(loss) else _LARGEST, passes)
        return bool(trial.should_prune())

    return stop
