"""What may stand in a recipe: the tables and keys of ``recipe.toml``."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from odtpack.recipe.option_tables import OPTIMIZER_TABLES, LossTable, OptimizerTable
from odtpack.recipe.ranges import PositiveCount, Switch, Table
from odtpack.recipe.update_tables import ClipTable, GroupTable, ScheduleTable
from odtpack_simulator.budgets.budget_values import Section, name_limits
from odtpack_simulator.device.profile import OsClass
from odtpack_simulator.values.schema_errors import TAG_PREFIX

Pattern = Annotated[str, Field(min_length=1)]


def _version(text: str) -> str:
    if not re.fullmatch(r"\d{1,4}\.\d{1,4}(\.\d{1,4})?", text):
        msg = f'must be a version such as "1.20", found {text[:40]!r}'
        raise ValueError(msg)
    return text


class ParametersTable(Table):
    """What is trained and what is frozen.

    A parameter that neither list matches stays a constant in the models; with one list only,
    the other has the rest.
    """

    train: tuple[Pattern, ...] = ()
    """Patterns of the parameters to train."""
    freeze: tuple[Pattern, ...] = ()
    """Patterns of the parameters to freeze."""
    untie: tuple[Pattern, ...] = ()
    """Patterns of tensors that several places read, to give each place its own."""


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


class FormatsTable(Table):
    """What is written besides the ONNX models."""

    ort: Switch = False
    """Models in ORT format too, and the operators of a reduced build."""
    ort_styles: Annotated[tuple[Literal["fixed", "runtime"], ...], Field(min_length=1)] = ("fixed",)
    """ORT format: optimized once, or with what suits the processor left to the session."""
    ort_platforms: tuple[Literal["arm", "amd64"], ...] = ()
    """ORT format: processors to optimize for. Without them, models that run on all."""
    frozen_dtype: Literal["float16", "int8"] | None = None
    """Store large frozen weights in fewer bytes; the models compute in float32."""
    nominal: Switch = False
    """A checkpoint without values too."""
    self_check: Switch = True
    """Run the first steps, and note their losses for devices to compare theirs with."""


class TargetTable(Table):
    """Where the package shall run."""

    onnxruntime: Annotated[str, AfterValidator(_version)] | None = None
    """Oldest version of ONNX Runtime that must load the package, `"1.20"`. Without it, the
    oldest that has the kernels of the models; the manifest names it."""
    runtime: Literal["onnxruntime", "ort-training"] = "onnxruntime"
    """What runs the package: ONNX Runtime as it is, or onnxruntime-training 1.19."""
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


class RecipeFile(Table):
    """A recipe: everything that decides a package."""

    model: Annotated[str, Field(min_length=1)]
    """Path of the forward model, from the recipe's folder."""
    package: Annotated[str, Field(min_length=1)] | None = None
    """Folder of the package, from the recipe's folder."""
    outputs: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Further values that the training and evaluation models return."""
    prediction: bool = True
    """Whether the evaluation model returns what the loss compares with labels: for accuracy."""
    loss: LossTable
    """What is made small."""
    parameters: ParametersTable = ParametersTable()
    """What is trained and what is frozen."""
    optimizer: OptimizerTable = OPTIMIZER_TABLES["adamw"](kind="adamw")
    """How parameters are updated."""
    clip: ClipTable | None = None
    """How gradients are clipped."""
    groups: tuple[GroupTable, ...] = ()
    """Parameters with numbers of their own."""
    schedule: ScheduleTable | None = None
    """How the learning rate changes."""
    batch: BatchTable = BatchTable()
    """How many samples make a step."""
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
