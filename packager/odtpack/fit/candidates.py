"""One choice of everything that may vary, and a spread of choices over all of them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from odtpack.choices import STORAGES
from odtpack.fit.depth import Freeze
from odtpack_runtime.training.schedules import ScheduleSpec

if TYPE_CHECKING:
    from odtpack.choices import Storage
    from odtpack.recipe import BuildSpec
    from odtpack.spec import Group

Options = tuple[tuple[str, object], ...]


@dataclasses.dataclass(frozen=True)
class MemoryBudget:
    """How much memory a candidate may take, which would take more: it computes again.

    Attributes:
        size: The budget as a recipe has it, ``"60 MB"``.
        sizes: Sizes of open axes that it is for, ``"tokens=128"``.
    """

    size: str
    sizes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One choice of everything that may vary.

    Attributes:
        number: Its place among all candidates of the space, from 1.
        batch_size: Samples of an optimizer step.
        micro_batch: Samples that the model sees at once; a divisor of ``batch_size``.
        freeze: What is frozen besides what the recipe freezes.
        optimizer: Name of the optimizer.
        optimizer_options: Its settings that are not the defaults.
        learning_rate: What a constant rate is, or the recipe's schedule starts from.
        storage: How large frozen weights are stored; None for float32.
        memory: The budget that it is built for, where it would not fit without; else None.
    """

    number: int
    batch_size: int
    micro_batch: int
    freeze: Freeze
    optimizer: str
    optimizer_options: Options
    learning_rate: float
    storage: Storage | None
    memory: MemoryBudget | None = None

    @property
    def accumulation_steps(self) -> int:
        """Training steps of an optimizer step."""
        return self.batch_size // self.micro_batch

    def package_settings(self, base: BuildSpec) -> BuildSpec:
        """Everything that decides how its package computes; the learning rate does not."""
        settings = dataclasses.replace(
            base,
            freeze=(*base.freeze, *self.freeze.patterns),
            groups=tuple(group for group in base.groups if self._has(group, base)),
            optimizer=self.optimizer,
            optimizer_options=dict(self.optimizer_options),
            accumulation_steps=self.accumulation_steps,
            frozen_storage=self.storage,
        )
        if self.memory is None:
            return settings
        return dataclasses.replace(
            settings,
            memory_budget=self.memory.size,
            memory_batch=self.micro_batch,
            memory_sizes=self.memory.sizes,
        )

    def _has(self, group: Group, base: BuildSpec) -> bool:
        """Whether a parameter group still has parameters, of which the first pattern decides."""
        if not self.freeze.patterns:
            return True  # a group that has none without freezing more is a mistake to be reported
        firsts = (
            next((each for each in base.groups if fnmatchcase(name, each[0])), None)
            for name in self.freeze.names
        )
        return any(first is group for first in firsts)

    def settings(self, base: BuildSpec) -> BuildSpec:
        """Its package with the learning rate, as the recipe to paste has it."""
        schedule = base.schedule or ScheduleSpec("constant", {})
        schedule = dataclasses.replace(schedule, learning_rate=self.learning_rate)
        return dataclasses.replace(self.package_settings(base), schedule=schedule)

    def cost_key(self, base: BuildSpec) -> str:
        """What decides its memory and time: equal for candidates that differ in the rate only."""
        text = self.package_settings(base).canonical_json()
        content = json.dumps([text, self.batch_size, self.micro_batch])
        return hashlib.sha256(content.encode()).hexdigest()

    def aspects(self) -> tuple[object, ...]:
        """What it chose in each dimension, for spreading candidates evenly."""
        return (
            self.batch_size,
            self.accumulation_steps,
            self.freeze.title,
            self.optimizer,
            self.learning_rate,
            self.storage,
        )


def storages(base: BuildSpec, *, fixed: bool) -> tuple[Storage | None, ...]:
    """How frozen weights may be stored: as asked for, if that is fixed."""
    return (base.frozen_storage,) if fixed else (None, *STORAGES)


class Choice(Protocol):
    """One point of a space that is searched."""

    def aspects(self) -> tuple[object, ...]:
        """What it chose in each dimension."""
        ...


C = TypeVar("C", bound=Choice)


def spread(candidates: Sequence[C], first: C | None, seed: int) -> Iterator[C]:
    """All candidates, each next one such that what was chosen rarely comes up.

    The order is that of a shuffle by the seed in which, again and again, the candidate comes
    first whose choices occurred least so far, summed over the dimensions: however few are
    taken, every value of every dimension is among them about equally often.

    Args:
        candidates: The space.
        first: The one to begin with, of ``candidates``; None for no matter which.
        seed: Seed of the shuffle.
    """
    order = np.random.default_rng([seed, 2]).permutation(len(candidates))
    waiting = [candidates[index] for index in order]
    if first is not None:
        waiting.remove(first)
        waiting.insert(0, first)
    counts: Counter[tuple[int, object]] = Counter()
    while waiting:
        # min() takes the first of equals, so that the shuffle breaks ties.
        chosen = min(waiting, key=lambda each: sum(counts[a] for a in enumerate(each.aspects())))
        if not counts:
            chosen = waiting[0]
        counts.update(enumerate(chosen.aspects()))
        waiting.remove(chosen)
        yield chosen
