"""What may vary: all that the recipe and the options leave open.

A key that stands in the recipe is fixed. To add a dimension, such as another way to save
memory, give :class:`~odtpack.fit.space.Candidate` an attribute, set it in
``package_settings``, and enumerate its values in :meth:`Space.candidates`.
"""

from __future__ import annotations

import dataclasses
import glob
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Final

import onnx_ir as ir

from odtpack.choices import STORAGES, Storage
from odtpack.errors import OdtpackError
from odtpack.fit.study import Value
from odtpack.graph.graphs import reads
from odtpack.model.exporters import known_names, matching
from odtpack.optimizers import OPTIMIZERS
from odtpack.package.candidates import candidates
from odtpack.package.parameters import is_weight
from odtpack.recipe import BuildSpec, Recipe
from odtpack.spec import Group
from odtpack_runtime.training.schedules import ScheduleSpec

_MATRIX_RANK = 2

MOST_FREEZES = 4
"""Depths that are tried, with that of freezing nothing."""


@dataclasses.dataclass(frozen=True)
class Freeze:
    """A choice of what to freeze besides what the recipe freezes."""

    title: str  # what it freezes, for people
    patterns: tuple[str, ...]  # for `freeze` in a recipe; empty for nothing more
    names: tuple[Sequence[str], ...]  # what the parameters are called that are still trained
    trained: int  # number of their elements
    storable: bool  # whether a frozen weight is large enough for another storage


def layers(model: ir.Model, names: Collection[str]) -> list[tuple[str, ...]]:
    """The parameters by layer, that nearest to the inputs first."""
    graph = model.graph
    wanted = {graph.initializers[name] for name in names}
    constants = set(graph.initializers.values())
    # What a value is computed of if no data enter it: a weight may be transposed before use.
    carried: dict[ir.Value, frozenset[ir.Value]] = {
        value: frozenset({value} if value in wanted else ()) for value in constants
    }
    depth: dict[ir.Value, int] = dict.fromkeys(
        (value for value in graph.inputs if value not in constants), 0
    )
    found: dict[ir.Value, int] = {}
    for node in graph:
        operands = list(reads(node))
        parameters = frozenset().union(*(carried.get(value, ()) for value in operands))
        if not any(value in depth for value in operands):
            carried.update(dict.fromkeys(node.outputs, parameters))
            continue
        begins = any(v.shape is not None and v.shape.rank() >= _MATRIX_RANK for v in parameters)
        here = max(depth.get(value, 0) for value in operands) + begins
        depth.update(dict.fromkeys(node.outputs, here))
        for value in parameters:
            found[value] = min(here, found.get(value, here))
    # A vector in front of the first matrix, such as a normalization of the input.
    levels = [(max(1, found.get(value, 1)), value) for value in graph.initializers.values()]
    return [
        tuple(str(value.name) for at, value in levels if at == level and value in wanted)
        for level in sorted({at for at, value in levels if value in wanted})
    ]


def freezes(model: ir.Model, trained: Sequence[str], frozen: Sequence[str]) -> list[Freeze]:
    """Nothing, the first layers in a few steps, and all but the last."""
    found = layers(model, trained)
    count = len(found)
    steps = sorted({0, *(round((count - 1) * i / (MOST_FREEZES - 1)) for i in range(MOST_FREEZES))})
    choices, known = [], known_names(model.graph)
    for step in steps if count > 1 else [0]:
        chosen = [name for layer in found[:step] for name in layer]
        rest = [name for layer in found[step:] for name in layer]
        tensors = [model.graph.initializers[name].const_value for name in rest]
        values = (model.graph.initializers[name] for name in (*chosen, *frozen))
        title = "all but the head" if step == count - 1 else f"first {step} of {count} layers"
        choices.append(
            Freeze(
                title if step else "nothing",
                patterns(model, chosen),
                tuple((name, *known.get(name, ())) for name in rest),
                sum(tensor.size for tensor in tensors if tensor is not None),
                any(is_weight(value) for value in values),
            )
        )
    return choices


def patterns(model: ir.Model, chosen: Iterable[str]) -> tuple[str, ...]:
    """The shortest list of patterns that match these parameters and no other one."""
    # A module of which all is chosen becomes `module.*`, in the names of the module that the model
    # was exported from.
    known = known_names(model.graph)
    wanted = set(chosen)
    names = candidates(model)
    found: list[str] = []
    for name in (name for name in names if name in wanted):
        shown = next(iter(known.get(name, ())), name)
        if any(matching(each, [name], known) for each in found):
            continue
        parts = shown.split(".")
        prefixes = (".".join(parts[:count]) for count in range(1, len(parts)))
        globs = (*(f"{glob.escape(prefix)}.*" for prefix in prefixes), glob.escape(shown))
        fitting = (each for each in globs if wanted.issuperset(matching(each, names, known)))
        found.append(next(fitting, glob.escape(name)))
    return tuple(found)


Options = tuple[tuple[str, object], ...]


@dataclasses.dataclass(frozen=True)
class MemoryBudget:
    """How much memory a candidate may take, which would take more: it computes again."""

    size: str  # the budget as a recipe has it, `"60 MB"`
    sizes: tuple[str, ...] = ()  # sizes of open axes that it is for, `"tokens=128"`


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One choice of everything that may vary."""

    number: int  # its place among all candidates of the space, from 1
    batch_size: int  # samples of an optimizer step
    micro_batch: int  # samples that the model sees at once; a divisor of `batch_size`
    freeze: Freeze  # what is frozen besides what the recipe freezes
    optimizer: str  # name of the optimizer
    optimizer_options: Options  # its settings that are not the defaults
    learning_rate: float  # what a constant rate is, or the recipe's schedule starts from
    storage: Storage | None  # how large frozen weights are stored; None for float32
    # the budget that it is built for, where it would not fit without; else None
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
            next((g for g in base.groups if any(fnmatchcase(n, g[0]) for n in names)), None)
            for names in self.freeze.names
        )
        return any(first is group for first in firsts)

    def settings(self, base: BuildSpec) -> BuildSpec:
        """Its package with the learning rate, as the recipe to paste has it."""
        schedule = base.schedule or ScheduleSpec("constant", {})
        schedule = dataclasses.replace(schedule, learning_rate=self.learning_rate)
        return dataclasses.replace(self.package_settings(base), schedule=schedule)

    def aspects(self) -> dict[str, Value]:
        """What it chose in each dimension, for the search."""
        return {
            "batch size": self.batch_size,
            f"micro-batch of {self.batch_size}": self.micro_batch,
            "frozen": self.freeze.title,
            "optimizer": self.optimizer,
            f"learning rate of {self.optimizer}": self.learning_rate,
            "storage of frozen weights": self.storage or "float32",
        }

    @property
    def family(self) -> tuple[object, ...]:
        """Equal for candidates whose losses are worth comparing before the end."""
        return (self.freeze.title, self.optimizer)


_TRIED: Final[dict[str, Options]] = {
    "adamw": (),
    "sgd": (("momentum", 0.9),),
    "lion": (),
    "adafactor": (),
}
"""Optimizers that are tried where none is named, with settings; the usual one stands first.

Each says which learning rates to try. Lion's are a third of AdamW's, as its authors advise (Chen
et al. 2023, https://arxiv.org/abs/2302.06675, section 5). Adafactor's are relative to the size of
the parameters (Shazeer and Stern 2018, https://arxiv.org/abs/1804.04235, section 8).
"""

DEFAULT_BATCH: Final = 32
_PARTS: Final = (1, 2, 4, 8, 16)
_MOST_CANDIDATES: Final = 20_000


@dataclasses.dataclass(frozen=True)
class SearchConstraints:
    """What the options fix; empty where they leave things open."""

    batch_sizes: tuple[int, ...] = ()  # samples of an optimizer step
    optimizers: tuple[str, ...] = ()  # names of optimizers
    learning_rates: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for rate in self.learning_rates:
            if not 0 < rate < math.inf:
                what = f"a learning rate is {rate:g}; it must be above 0 and finite"
                raise OdtpackError("bad-learning-rate", what, hint="write for example: --lr 0.001")
        for size in self.batch_sizes:
            if not 1 <= size < 2**31:
                what = f"a batch size is {size}; it must be 1 or more"
                raise OdtpackError("bad-batch-size", what)


@dataclasses.dataclass(frozen=True)
class Space:
    """The values of every dimension; the usual value stands first."""

    batch_sizes: tuple[int, ...]  # samples of an optimizer step
    # for each of these, samples that the model sees at once
    micro_batches: dict[int, tuple[int, ...]]
    freezes: tuple[Freeze, ...]  # what is frozen
    # name, settings and learning rates
    optimizers: tuple[tuple[str, Options, tuple[float, ...]], ...]
    storages: tuple[Storage | None, ...]  # how frozen weights are stored

    def candidates(self) -> list[Candidate]:
        """Every candidate; the one that is nearest to what the recipe says stands first."""
        found = list(itertools.islice(self._all(), _MOST_CANDIDATES + 1))
        if len(found) > _MOST_CANDIDATES:
            what = f"there are more than {_MOST_CANDIDATES} combinations of what may vary"
            raise OdtpackError("space-too-large", what)
        if not found:
            raise OdtpackError(
                "nothing-to-vary",
                "the recipe sets frozen_dtype, but no choice of frozen layers has a weight that is "
                "large enough",
            )
        return found

    def _all(self) -> Iterator[Candidate]:
        number = 0
        for size in self.batch_sizes:
            for micro, freeze, (kind, options, rates), storage in itertools.product(
                self.micro_batches[size], self.freezes, self.optimizers, self.storages
            ):
                if storage is not None and not freeze.storable:
                    continue
                for rate in rates:
                    number += 1
                    yield Candidate(number, size, micro, freeze, kind, options, rate, storage)


def open_space(
    base: BuildSpec,
    recipe: Recipe | None,
    wishes: SearchConstraints,
    freezes: Sequence[Freeze],
    *,
    train_samples: int,
    fixed_batch: int | None,
) -> Space:
    """What the recipe and the options leave open."""
    # `train_samples`: samples to train on: no larger batch is tried.
    said = set() if recipe is None else recipe.table.model_fields_set
    formats = set() if recipe is None else recipe.table.formats.model_fields_set
    sizes, micro_batches = _batches(recipe, wishes, train_samples, fixed_batch)
    # Segments map frozen weights as they are.
    fixed = "frozen_dtype" in formats or base.segments
    storages = (base.frozen_storage,) if fixed else (None, *STORAGES)
    rates = wishes.learning_rates
    if not rates and base.schedule is not None and base.schedule.learning_rate is not None:
        rates = (base.schedule.learning_rate,)
    own = tuple(sorted(base.optimizer_options.items()))
    if wishes.optimizers:
        kinds = dict.fromkeys(wishes.optimizers)
    else:
        kinds = dict.fromkeys([base.optimizer] if "optimizer" in said else _TRIED)
    optimizers = []
    for kind in kinds:
        kept = "optimizer" in said and kind == base.optimizer
        options = own if kept else _TRIED.get(kind, ())
        tried = rates or OPTIMIZERS[kind].learning_rates
        optimizers.append((kind, options, tuple(dict.fromkeys(tried))))
    return Space(sizes, micro_batches, tuple(freezes), tuple(optimizers), storages)


def _batches(
    recipe: Recipe | None, wishes: SearchConstraints, train_samples: int, fixed: int | None
) -> tuple[tuple[int, ...], dict[int, tuple[int, ...]]]:
    """Sizes of a step, and how each may be cut."""
    table = recipe.table.batch if recipe and "batch" in recipe.table.model_fields_set else None
    if wishes.batch_sizes:
        sizes: tuple[int, ...] = tuple(dict.fromkeys(wishes.batch_sizes))
    elif table is not None:
        sizes = (table.size,)
    else:
        usual = fixed or DEFAULT_BATCH
        wanted = (usual, 2 * usual, *(() if fixed else (usual // 2,)))
        sizes = tuple(size for size in wanted if size <= train_samples) or (usual,)
    at_once = fixed
    if at_once is None and table is not None and not wishes.batch_sizes:
        at_once = table.micro_batch
    if at_once is None:
        cut = {size: tuple(size // k for k in _PARTS if size % k == 0) for size in sizes}
        return sizes, cut
    for size in sizes:
        if size % at_once:
            raise OdtpackError(
                "bad-batch-size",
                f"a step of {size} samples cannot be split into batches of {at_once}, the only "
                "size that the model takes",
                hint=f"pass a multiple of it: --batch-size {at_once}",
            )
    return sizes, dict.fromkeys(sizes, (at_once,))
