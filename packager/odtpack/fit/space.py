"""What may vary: all that the recipe and the options leave open.

A key that stands in the recipe is fixed. To add a dimension, such as another way to save
memory, give :class:`~odtpack.fit.candidates.Candidate` an attribute, set it in
``package_settings``, and enumerate its values in :meth:`Space.candidates`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from odtpack.errors import OdtpackError
from odtpack.fit.candidates import Candidate, Options, storages
from odtpack.fit.depth import Freeze
from odtpack.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from odtpack.choices import Storage
    from odtpack.recipe import BuildSpec, Recipe

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
    """What the options fix; empty where they leave things open.

    Attributes:
        batch_sizes: Samples of an optimizer step.
        optimizers: Names of optimizers.
        learning_rates: Learning rates.
    """

    batch_sizes: tuple[int, ...] = ()
    optimizers: tuple[str, ...] = ()
    learning_rates: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for rate in self.learning_rates:
            if not 0 < rate < math.inf:
                raise OdtpackError(
                    "bad-learning-rate",
                    f"a learning rate is {rate:g}; it must be above 0 and finite",
                    hint="write for example: --lr 0.001",
                )
        for size in self.batch_sizes:
            if not 1 <= size < 2**31:
                raise OdtpackError(
                    "bad-batch-size", f"a batch size is {size}; it must be 1 or more"
                )


@dataclasses.dataclass(frozen=True)
class Space:
    """The values of every dimension; the usual value stands first.

    Attributes:
        batch_sizes: Samples of an optimizer step.
        micro_batches: For each of these, samples that the model sees at once.
        freezes: What is frozen.
        optimizers: Name, settings and learning rates.
        storages: How frozen weights are stored.
    """

    batch_sizes: tuple[int, ...]
    micro_batches: dict[int, tuple[int, ...]]
    freezes: tuple[Freeze, ...]
    optimizers: tuple[tuple[str, Options, tuple[float, ...]], ...]
    storages: tuple[Storage | None, ...]

    def candidates(self) -> list[Candidate]:
        """Every candidate; the one that is nearest to what the recipe says stands first.

        Raises:
            OdtpackError: There is none, or there are more than 20,000.
        """
        found = list(itertools.islice(self._all(), _MOST_CANDIDATES + 1))
        if len(found) > _MOST_CANDIDATES:
            raise OdtpackError(
                "space-too-large",
                f"there are more than {_MOST_CANDIDATES} combinations of what may vary",
            )
        if not found:
            raise OdtpackError(
                "nothing-to-vary",
                "the recipe stores frozen weights in fewer bytes, and no choice of what to freeze "
                "has a weight that is large enough",
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
    """What the recipe and the options leave open.

    Args:
        base: What the recipe and the options say.
        recipe: The recipe, if there is one.
        wishes: What the options fix.
        freezes: Choices of what to freeze, see :func:`odtpack.fit.depth.freezes`.
        train_samples: Samples to train on: no larger batch is tried.
        fixed_batch: Size of every batch if the model fixes it.

    Raises:
        OdtpackError: An asked-for batch size is not a multiple of the model's.
    """
    said = set() if recipe is None else recipe.table.model_fields_set
    formats = set() if recipe is None else recipe.table.formats.model_fields_set
    sizes, micro_batches = _batches(recipe, wishes, train_samples, fixed_batch)
    # Segments map frozen weights as they are.
    stored = storages(base, fixed="frozen_dtype" in formats or base.segments)
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
    return Space(sizes, micro_batches, tuple(freezes), tuple(optimizers), stored)


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
                f"a step of {size} samples cannot be made of batches of {at_once}, the only size "
                "that the model takes",
                hint=f"pass a multiple of it: --batch-size {at_once}",
            )
    return sizes, dict.fromkeys(sizes, (at_once,))
