"""What may stand in a recipe: the tables and keys of ``recipe.toml``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar, get_origin

from pydantic import AfterValidator, Discriminator, Field, Tag, create_model, model_validator

from odtpack.build_spec import keys_of
from odtpack.choices import Pool
from odtpack.recipe.option_tables import OPTIMIZER_TABLES, LossTable, OptimizerTable
from odtpack.recipe.ranges import Count, PositiveCount, Switch, Table
from odtpack.recipe.update_tables import ClipTable, GroupTable, ScheduleTable
from odtpack_simulator.device.profile import OsClass
from odtpack_simulator.figures.limits import Section, name_limits
from odtpack_simulator.values.schema_errors import TAG_PREFIX

Pattern = Annotated[str, Field(min_length=1)]
_Table = TypeVar("_Table", bound=Table)


def declared(table: str) -> Callable[[type[_Table]], type[_Table]]:
    """Add the keys to a table that :class:`~odtpack.build_spec.BuildSpec` declares for it.

    Args:
        table: Its name in a recipe; empty for what stands above all tables.
    """

    def decorate(kind: type[_Table]) -> type[_Table]:
        fields: dict[str, Any] = {
            key: (_strict(field), Field(field.default, description=field.metadata["option"].doc))
            for key, field in keys_of(table)
        }
        made = create_model(
            kind.__name__, __base__=kind, __module__=kind.__module__, __doc__=kind.__doc__, **fields
        )
        return made

    return decorate


def _strict(field: dataclasses.Field[Any]) -> Any:
    """The type of a field as a recipe takes it: no empty names, no numbers for truth values."""
    if field.type is bool:
        return Switch
    if get_origin(field.type) is tuple:
        return tuple[Pattern, ...]
    check = field.metadata["option"].check
    return field.type if check is None else Annotated[str, AfterValidator(check)] | None


class HeadTable(Table):
    """A classification head for an encoder that has none: pooling and a linear layer.

    Its parameters are `head.weight` and `head.bias`, its output, `logits`, replaces those of the
    encoder.
    """

    pool: Pool
    """Mean over the tokens (those of `attention_mask`), the first token, or none for an output
    `[batch, width]`."""
    classes: PositiveCount
    """Number of classes."""
    seed: Count = 0
    """Seed of the weight."""
    input: Pattern | None = None
    """Output of the encoder that the head reads. Without it, the first that fits."""


@declared("parameters")
class ParametersTable(Table):
    """What is trained and what is frozen.

    A parameter that neither list matches stays a constant in the models; with one list only,
    the other has the rest.
    """


@declared("adapter")
class AdapterTable(Table):
    """A small adapter that is trained in place of the model.

    Its parameters have the names that PEFT gives them, those that `parameters.train` matches are
    trained besides, and all others are frozen.
    """


class BatchTable(Table):
    """How many samples make a step."""

    size: PositiveCount = 32
    """Samples of an optimizer step."""
    micro_batch: PositiveCount | None = None
    """Samples that the model sees at once; gradients of `size / micro_batch` of them are
    accumulated. Without it, `size`."""

    @model_validator(mode="after")
    def _check_division(self) -> BatchTable:
        if self.micro_batch is not None and self.size % self.micro_batch:
            msg = f"size ({self.size}) must be a multiple of micro_batch ({self.micro_batch})"
            raise ValueError(msg)
        return self

    @property
    def at_once(self) -> int:
        """Samples of a training step."""
        return self.micro_batch or self.size

    @property
    def accumulation_steps(self) -> int:
        """Training steps of an optimizer step."""
        return self.size // self.at_once


@declared("privacy")
class PrivacyTable(Table):
    """Private training (DP-SGD): each sample's gradient is clipped, and noise is added.

    Without `clip_norm` training is not private.
    """


@declared("memory")
class MemoryTable(Table):
    """How much memory training may take; what it keeps less of, it computes again."""


@declared("formats")
class FormatsTable(Table):
    """What is written besides the ONNX models."""

    ort: Switch = False
    """Models in ORT format too, and the operators of a reduced build."""
    ort_styles: Annotated[tuple[Literal["fixed", "runtime"], ...], Field(min_length=1)] = ("fixed",)
    """ORT format: optimized once, or with what suits the processor left to the session."""
    ort_platforms: tuple[Literal["arm", "amd64"], ...] = ()
    """ORT format: processors to optimize for. Without them, models that run on all."""


@declared("target")
class _TargetOptions(Table):
    pass


class TargetTable(_TargetOptions):
    """Where the package shall run."""

    platforms: tuple[OsClass, ...] = ()
    """Operating systems: `simulate --recipe` replays on every shipped device that has one."""
    devices: tuple[Pattern, ...] = ()
    """Device profiles that `simulate --recipe` replays on, by name or path."""


class BudgetTables(Section):
    """Limits, as in a budget file."""

    classes: dict[OsClass, Section] = Field(default_factory=dict, alias="class")
    """`[budgets.class.android]`: limits for the devices of an operating system."""
    device: dict[str, Section] = Field(default_factory=dict)
    """`[budgets.device."google/pixel-8a"]`: limits for one device."""


def _kind_of_budgets(value: Any) -> str:
    return f"{TAG_PREFIX}{'path' if isinstance(value, str) else 'tables'}"


BudgetsKey = Annotated[
    Annotated[str, Tag(f"{TAG_PREFIX}path")] | Annotated[BudgetTables, Tag(f"{TAG_PREFIX}tables")],
    Discriminator(_kind_of_budgets),
]


class _Paths(Table):
    model: Annotated[str, Field(min_length=1)]
    """Path of the forward model, from the recipe's folder."""
    package: Annotated[str, Field(min_length=1)] | None = None
    """Folder of the package, from the recipe's folder."""


@declared("")
class _AboveAll(_Paths):
    pass


class RecipeFile(_AboveAll):
    """A recipe: everything that decides a package."""

    head: HeadTable | None = None
    """A classification head for an encoder that has none."""
    loss: LossTable
    """What is made small."""
    parameters: ParametersTable = ParametersTable()
    """What is trained and what is frozen."""
    adapter: AdapterTable = AdapterTable()
    """A small adapter that is trained in place of the model."""
    optimizer: OptimizerTable = OPTIMIZER_TABLES["adamw"](kind="adamw")
    """How parameters are updated."""
    clip: ClipTable | None = None
    """How gradients are clipped."""
    privacy: PrivacyTable = PrivacyTable()
    """How gradients are made private."""
    groups: tuple[GroupTable, ...] = ()
    """Parameters with numbers of their own."""
    schedule: ScheduleTable | None = None
    """How the learning rate changes."""
    batch: BatchTable = BatchTable()
    """How many samples make a step."""
    memory: MemoryTable = MemoryTable()
    """How much memory training may take."""
    formats: FormatsTable = FormatsTable()
    """What is written besides the ONNX models."""
    target: TargetTable = TargetTable()
    """Where the package shall run."""
    budgets: BudgetsKey | None = None
    """Path of a budget file, from the recipe's folder, or limits."""


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a recipe."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "odtpack recipe",
        **name_limits(RecipeFile.model_json_schema()),
    }
