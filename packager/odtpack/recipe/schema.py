"""``recipe.toml``: the tables and keys that may stand in it, and how it is read.

Tables are made of what :class:`~odtpack.spec.BuildSpec`, losses and optimizers declare.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias, TypeVar, get_args

from pydantic import (
    AfterValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    StrictBool,
    Tag,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from odtpack.errors import OdtpackError
from odtpack.losses import LOSSES
from odtpack.optimizers import OPTIMIZERS
from odtpack.option import BOUNDS, REQUIRED, Bounds, Option, options_of
from odtpack.spec import BuildSpec, Head, TextSpec, keys_of
from odtpack_simulator.device.profile import OsClass
from odtpack_simulator.figures.limits import (
    Budgets,
    Section,
    make_budgets,
    name_limits,
    read_budgets,
)
from odtpack_simulator.values.part import TAG_PREFIX, Part, wrong_file
from odtpack_simulator.values.text import key_lines, parse_toml, read_bounded


class Table(Part):
    """The base of all tables of a recipe: no other keys, no other types."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class Range(Bounds):
    """The numbers that a key takes, for pydantic and in the schema."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Check a value before pydantic converts it."""
        return core_schema.no_info_before_validator_function(self._read, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """The range, as JSON Schema names it."""
        found = ((name, getattr(self, ours)) for ours, name, *_ in BOUNDS)
        return {**handler(schema), **{name: bound for name, bound in found if bound is not None}}

    def _read(self, value: Any) -> Any:
        if not self.hold(value):
            msg = f"must be {self}, found {str(value)[:40]!r}"
            raise ValueError(msg)
        return value


Count = Annotated[int, Range(whole=True, least=0)]
PositiveCount = Annotated[int, Range(whole=True, least=1)]
Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(least=0)]
Text = Annotated[str, Field(min_length=1)]

_Any = TypeVar("_Any", bound=Table)


def _field(option: Option) -> tuple[Any, Any]:
    """Type and declaration of a key, for pydantic: no empty names, no numbers for truth values."""
    found: Any = StrictBool if option.type is bool else option.type
    if option.axes is not None or option.is_number:
        bounds = Range(**dataclasses.asdict(option.bounds))
        found = Annotated[int if option.type is int else float, bounds]
    elif option.many:
        found = tuple[Text, ...]
    elif option.check is not None:
        found = Annotated[str, AfterValidator(option.check)]
    elif option.type is str:
        found = Text
    if option.axes is not None:
        numbers = Annotated[tuple[found, ...], Field(min_length=1)]
        found = numbers if option.axes == 1 else numbers | found
    default = ... if option.default is REQUIRED else option.default
    found = found | None if option.default is None else found
    return found, Field(default=default, description=option.meaning)


def _made(base: type[_Any], name: str, doc: str | None, fields: Mapping[str, Any]) -> type[_Any]:
    made = create_model(name, __base__=base, __module__=__name__, __doc__=doc, **fields)
    return made


def declared(table: str | type) -> Callable[[type[_Any]], type[_Any]]:
    """Add the keys to a table that a class declares for it."""

    def decorate(kind: type[_Any]) -> type[_Any]:
        if isinstance(table, str):
            keys = keys_of(table)
        else:
            keys = [(option.name, option) for option in options_of(table)]
        fields = {key: _field(option) for key, option in keys}
        return _made(kind, kind.__name__, kind.__doc__, fields)

    return decorate


def by_kind(value: Any) -> str | None:
    """The tag of a table whose ``kind`` says which keys it has; None if there is none."""
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return f"{TAG_PREFIX}{kind}" if isinstance(kind, str) else None


def _union(*tables: type[Table]) -> Any:
    kinds = (get_args(table.model_fields["kind"].annotation)[0] for table in tables)
    tagged = (Annotated[t, Tag(f"{TAG_PREFIX}{k}")] for t, k in zip(tables, kinds, strict=True))
    return Annotated[reduce(or_, tagged), Discriminator(by_kind)]


@declared("loss")
class _Loss(Table, use_attribute_docstrings=False):
    kind: str
    reduction: Literal["mean", "sum"] = Field(
        default="mean", description="How the terms become one number."
    )


@declared("optimizer")
class _Optimizer(Table, use_attribute_docstrings=False):
    kind: str

    @model_validator(mode="after")
    def _check_together(self) -> _Optimizer:
        """Let the optimizer check what the options must be together."""
        try:
            OPTIMIZERS[self.kind](**self.model_dump(exclude={"kind", "decay_vectors"}))
        except OdtpackError as error:
            raise ValueError(error.what) from error
        return self


class NoneTable(Table):
    """The first output is the loss."""

    kind: Literal["none"]


def _table(kind: str, base: type[_Any], declared: Any) -> type[_Any]:
    """The table of a loss or an optimizer, whose options are keys besides those of the base."""
    fields: dict[str, Any] = {"kind": (Literal[kind], ...)}
    own = (each for each in options_of(declared) if each.name not in base.model_fields)
    fields |= {each.name: _field(each) for each in own}
    return _made(base, f"{declared.__name__}Table", declared.summary, fields)


LOSS_TABLES: Mapping[str, type[_Loss]] = {
    kind: _table(kind, _Loss, each) for kind, each in LOSSES.items()
}
OPTIMIZER_TABLES: Mapping[str, type[_Optimizer]] = {
    kind: _table(kind, _Optimizer, each) for kind, each in OPTIMIZERS.items()
}


@declared("clip")
class ClipTable(Table):
    """How gradients are clipped; one of the two."""

    @model_validator(mode="after")
    def _check_one(self) -> ClipTable:
        given = [key for key, _ in keys_of("clip") if getattr(self, key) is not None]
        if len(given) != 1:
            msg = "needs one of norm and value, not both"
            raise ValueError(msg)
        return self


class GroupTable(Table):
    """Trained parameters with numbers of their own; the first pattern that matches counts."""

    parameters: Text
    """Pattern of their names."""
    learning_rate_scale: Positive = 1.0
    """Factor of the learning rate."""
    weight_decay: NotNegative | None = None
    """Weight decay in place of the optimizer's."""


class LossPartTable(Table):
    """One of several losses, whose weighted sum is trained."""

    name: Text
    """Its name: the models return it as `loss.NAME`, and `accuracy.NAME` for classes."""
    kind: Literal[*LOSSES]  # type: ignore[valid-type]
    """Name of the loss."""
    weight: Positive = 1.0
    """Its factor in the sum."""
    inputs: tuple[Text, ...] = Field(
        default=(), description=BuildSpec.__dataclass_fields__["loss_inputs"].metadata["meaning"]
    )
    options: dict[Text, Any] = Field(default_factory=dict)
    """Its options."""


class _Schedule(Table):
    warmup_steps: Count = 0
    """Steps over which the rate rises from 0."""
    learning_rate: Positive | None = None
    """Base learning rate of the schedule. Default: the learning rate of the training."""


class _Ending(_Schedule):
    total_steps: PositiveCount | None = None
    """Step at which it ends; without it, at the end of the training."""

    @model_validator(mode="after")
    def _check_end(self) -> _Ending:
        if self.total_steps is not None and self.total_steps < self.warmup_steps:
            msg = f"total_steps must be warmup_steps ({self.warmup_steps}) or more"
            raise ValueError(msg)
        return self


class ConstantTable(_Schedule):
    """One rate after the warm-up."""

    kind: Literal["constant"]


class LinearTable(_Ending):
    """A straight line to 0."""

    kind: Literal["linear"]


class CosineTable(_Ending):
    """Half a cosine wave."""

    kind: Literal["cosine"]
    floor: Annotated[float, Range(least=0, most=1)] = 0.0
    """Factor at the end."""


_Gamma = Annotated[float, Range(above=0, most=1)]


class StepTable(_Schedule):
    """A factor after every period."""

    kind: Literal["step"]
    period: PositiveCount
    """Steps of a period."""
    gamma: _Gamma = 0.1
    """The factor."""


class MultiStepTable(_Schedule):
    """A factor at every milestone."""

    kind: Literal["multistep"]
    milestones: Annotated[tuple[Count, ...], Field(min_length=1)]
    """Steps at which the rate changes, rising."""
    gamma: _Gamma = 0.1
    """The factor."""

    @model_validator(mode="after")
    def _check_order(self) -> MultiStepTable:
        if list(self.milestones) != sorted(self.milestones):
            msg = "milestones must rise"
            raise ValueError(msg)
        return self


if TYPE_CHECKING:  # which cannot follow what is found when this is imported
    LossTable: TypeAlias = _Loss
    OptimizerTable: TypeAlias = _Optimizer
    ScheduleTable: TypeAlias = _Schedule
else:
    LossTable = _union(NoneTable, *LOSS_TABLES.values())
    OptimizerTable = _union(*OPTIMIZER_TABLES.values())
    ScheduleTable = _union(ConstantTable, LinearTable, CosineTable, StepTable, MultiStepTable)


@declared(Head)
class HeadTable(Table):
    """A classification head for an encoder that has none: pooling and a linear layer.

    Its parameters are `head.weight` and `head.bias`, its output, `logits`, replaces those of the
    encoder.
    """


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


@declared(TextSpec)
class DataTable(Table):
    """How texts become samples of a language model, for `--data TEXTS.jsonl`.

    Files are named from the recipe's folder.
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
    """How much memory training may take; activations are recomputed to stay within it."""


@declared("formats")
class FormatsTable(Table):
    """What is written besides the ONNX models."""

    ort: StrictBool = False
    """Models in ORT format too, and the operators of a reduced build."""
    ort_styles: Annotated[tuple[Literal["fixed", "runtime"], ...], Field(min_length=1)] = ("fixed",)
    """ORT format: optimized once, or with what suits the processor left to the session."""
    ort_platforms: tuple[Literal["arm", "amd64"], ...] = ()
    """ORT format: processors to optimize for. Without them, models that run on all."""


@declared("target")
class _TargetOptions(Table):
    pass


class TargetTable(_TargetOptions):
    """Runtime and devices of the package."""

    platforms: tuple[OsClass, ...] = ()
    """Operating systems: `simulate --recipe` replays on every shipped device that has one."""
    devices: tuple[Text, ...] = ()
    """Device profiles that `simulate --recipe` replays on, by name or path."""


class BudgetTables(Section):
    """Limits, as in a budget file."""

    classes: dict[OsClass, Section] = Field(default_factory=dict, alias="class")
    """`[budgets.class.android]`: limits for the devices of an operating system."""
    device: dict[str, Section] = Field(default_factory=dict)
    """`[budgets.device."google/pixel-8a"]`: limits for one device."""


BudgetsKey = Annotated[
    Annotated[str, Tag(f"{TAG_PREFIX}path")] | Annotated[BudgetTables, Tag(f"{TAG_PREFIX}tables")],
    Discriminator(lambda value: f"{TAG_PREFIX}{'path' if isinstance(value, str) else 'tables'}"),
]


class _Paths(Table):
    model: Text
    """Path of the forward model, from the recipe's folder."""
    package: Text | None = None
    """Folder of the package, from the recipe's folder."""


@declared("")
class _AboveAll(_Paths):
    pass


class RecipeFile(_AboveAll):
    """A recipe: everything that decides a package."""

    head: HeadTable | None = None
    """A classification head for an encoder that has none."""
    inputs: dict[Text, Text | int | float | tuple[float, ...]] = Field(
        default_factory=dict,
        description=BuildSpec.__dataclass_fields__["inputs"].metadata["meaning"],
    )
    loss: LossTable
    """The loss to minimize; `losses` may stand in its place."""
    losses: tuple[LossPartTable, ...] = ()
    """Several losses, whose weighted sum is minimized."""
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
    data: DataTable | None = None
    """How texts become samples of a language model."""
    memory: MemoryTable = MemoryTable()
    """How much memory training may take."""
    formats: FormatsTable = FormatsTable()
    """What is written besides the ONNX models."""
    target: TargetTable = TargetTable()
    """Runtime and devices of the package."""
    budgets: BudgetsKey | None = None
    """Path of a budget file, from the recipe's folder, or limits."""

    @model_validator(mode="before")
    @classmethod
    def _several(cls, content: Any) -> Any:
        """Let several losses stand in the place of one."""
        if isinstance(content, dict) and content.get("losses") and "loss" not in content:
            return {**content, "loss": {"kind": "none"}}
        return content


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a recipe."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "odtpack recipe",
        **name_limits(RecipeFile.model_json_schema()),
    }


MAX_RECIPE_BYTES: Final = 256 * 1024


@dataclass(frozen=True)
class Recipe:
    """A recipe that was read.

    Attributes:
        path: The file.
        table: What stands in it.
        content: The same, as TOML has it.
        lines: Line of each key, by path.
    """

    path: Path
    table: RecipeFile
    content: Mapping[str, Any]
    lines: Mapping[tuple[str, ...], int]

    @property
    def model(self) -> Path:
        """Path of the forward model."""
        return self.path.parent / self.table.model

    @property
    def package(self) -> Path | None:
        """Folder of the package, if the recipe names it."""
        return None if self.table.package is None else self.path.parent / self.table.package

    def texts(self) -> TextSpec | None:
        """How texts become samples, if the recipe says so."""
        if self.table.data is None:
            return None
        given = self.table.data.model_dump()
        given["tokenizer"] = str(self.path.parent / given["tokenizer"])
        if Path(given["template"]).suffix:  # a name has none
            given["template"] = str(self.path.parent / given["template"])
        return TextSpec(**given)

    def budgets(self) -> Budgets | None:
        """The limits, from the recipe or the file that it names."""
        given = self.content.get("budgets")
        if given is None:
            return None
        if isinstance(given, str):
            return read_budgets(self.path.parent / given)
        limits = {key: value for key, value in given.items() if key not in ("class", "device")}
        tables = {"budgets": limits, **{key: given[key] for key in given if key not in limits}}
        lines = {}
        for path, line in self.lines.items():
            if path[0] == "budgets":
                lines[path[1:] if path[1:2] in (("class",), ("device",)) else path] = line
        return make_budgets(tables, str(self.path), lines)

    def devices(self) -> list[str]:
        """Names of the devices to replay on: those named, and those of the platforms."""
        from odtpack_simulator.device.profile import list_profiles, load_profile

        target = self.table.target
        named = [
            str(self.path.parent / name) if name.endswith(".toml") else name
            for name in target.devices
        ]
        if target.platforms:
            shipped = (load_profile(name) for name in list_profiles())
            named += [each.name for each in shipped if each.os in target.platforms]
        return list(dict.fromkeys(named))


def read_recipe(path: str | os.PathLike[str]) -> Recipe:
    """Read and check a recipe.

    Raises:
        OdtpackError: ``recipe-missing``, ``recipe-malformed``, or ``recipe-invalid`` for an
            unknown key or a value that is not allowed, with its line.
    """
    file = Path(path)
    data = read_bounded(file, limit=MAX_RECIPE_BYTES, code="recipe", what="recipe")
    content = parse_toml(data, code="recipe", what="recipe", where=str(file))
    lines = key_lines(data.decode("utf-8"))
    try:
        table = RecipeFile.model_validate(content)
    except ValidationError as error:
        says = "the recipe is invalid"
        raise wrong_file(error, RecipeFile, "recipe-invalid", says, str(file), lines) from error
    return Recipe(file, table, content, lines)
