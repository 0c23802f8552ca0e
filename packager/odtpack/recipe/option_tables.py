"""``[loss]`` and ``[optimizer]`` of a recipe: a table for each loss and each optimizer.

The keys are the options that their classes declare, with meaning, range and default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import Discriminator, Field, Tag, create_model, model_validator

from odtpack.errors import OdtpackError
from odtpack.losses import LOSSES
from odtpack.optimizers import OPTIMIZERS
from odtpack.option import Option, options_of
from odtpack.recipe.ranges import Range, Switch, Table
from odtpack.recipe.variants import by_kind
from odtpack_simulator.values.schema_errors import TAG_PREFIX

T = TypeVar("T", bound=Table)


class _Loss(Table, use_attribute_docstrings=False):
    kind: str
    inputs: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(),
        description="Values that the loss reads, in its order; further ones take the place of its "
        "targets. Without it, the first outputs.",
    )
    reduction: Literal["mean", "sum"] = Field(
        default="mean", description="How the terms become one number."
    )


class _Optimizer(Table, use_attribute_docstrings=False):
    kind: str
    decay_vectors: Switch = Field(
        default=True,
        description="Whether biases, scales of normalizations and other vectors decay too.",
    )

    @model_validator(mode="after")
    def _check_together(self) -> _Optimizer:
        """What the options must be together, the optimizer says itself."""
        try:
            OPTIMIZERS[self.kind](**self.model_dump(exclude={"kind", "decay_vectors"}))
        except OdtpackError as error:
            raise ValueError(error.what) from error
        return self


class NoneTable(Table):
    """The first output is the loss."""

    kind: Literal["none"]


def _table(kind: str, base: type[T], declared: type) -> type[T]:
    """The table of a class, whose options are keys besides those of the base."""
    fields: dict[str, Any] = {"kind": (Literal[kind], ...)}
    fields |= {
        each.name: (_annotation(each), Field(default=each.default, description=each.meaning))
        for each in options_of(declared)
        if each.name not in base.model_fields
    }
    summary: str = declared.summary  # type: ignore[attr-defined]
    return create_model(
        f"{declared.__name__}Table",
        __base__=base,
        __module__=__name__,
        __doc__=summary,
        **fields,
    )


def _annotation(option: Option) -> Any:
    """What a key takes, for pydantic."""
    found: Any = Switch if option.type is bool else option.type
    if option.axes is not None or option.type in (int, float):
        bounds = dataclasses.asdict(option.bounds)
        found = Annotated[int if option.type is int else float, Range(**bounds)]
    if option.axes is not None:
        numbers = Annotated[tuple[found, ...], Field(min_length=1)]
        found = numbers if option.axes == 1 else numbers | found
    return found | None if option.default is None else found


def _union(tables: Iterable[tuple[str, type[Table]]]) -> Any:
    tagged = (Annotated[table, Tag(f"{TAG_PREFIX}{kind}")] for kind, table in tables)
    return Annotated[reduce(or_, tagged), Discriminator(by_kind)]


LOSS_TABLES: Mapping[str, type[_Loss]] = {
    kind: _table(kind, _Loss, declared) for kind, declared in LOSSES.items()
}
OPTIMIZER_TABLES: Mapping[str, type[_Optimizer]] = {
    kind: _table(kind, _Optimizer, declared) for kind, declared in OPTIMIZERS.items()
}

if TYPE_CHECKING:  # which cannot follow what is found when this is imported
    LossTable: TypeAlias = _Loss
    OptimizerTable: TypeAlias = _Optimizer
else:
    LossTable = _union([("none", NoneTable), *LOSS_TABLES.items()])
    OptimizerTable = _union(OPTIMIZER_TABLES.items())
