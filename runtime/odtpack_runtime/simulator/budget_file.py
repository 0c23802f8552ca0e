"""``budgets.toml``: limits that a result must keep, with units, levels and overrides.

``[budgets]`` holds for every device, ``[class.android]`` for the devices of an
operating system, ``[device."google/pixel-8a"]`` for one; the narrower wins key
by key. ``docs/formats/budgets.md`` specifies the format.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    InstanceOf,
    Tag,
    ValidationError,
    WithJsonSchema,
    create_model,
)

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.simulator.metric import Metric
from odtpack_runtime.simulator.metrics import METRICS
from odtpack_runtime.simulator.profile import OsClass
from odtpack_runtime.simulator.result import CheckUnit
from odtpack_runtime.simulator.schema_errors import TAG_PREFIX, first_problem, near_name
from odtpack_runtime.simulator.textfile import key_lines, parse_toml, read_bounded
from odtpack_runtime.simulator.units import parse_quantity

MAX_BUDGET_BYTES: Final = 64 * 1024
MAX_LIMITS: Final = 8
"""Most limits in the list of one key."""

Level = Literal["error", "warn"]
Kind = Literal["absolute", "percent", "difference"]

_DIMENSIONS: Final[dict[CheckUnit, tuple[str, float]]] = {
    "B": ("bytes", 1.0),
    "ms": ("duration", 1e3),
    "s": ("duration", 1.0),
    "J": ("energy", 1.0),
    "%": ("ratio", 100.0),
}
"""Unit of a metric -> dimension of its units in the file, and the metric's units per base unit."""

_SIGNED = re.compile(r"\s*([+-])\s*(\S.*)")


@dataclass(frozen=True, slots=True)
class Bound:
    """The value of a limit, in the unit of its metric.

    ``figure`` is the limit itself (``absolute``), or how far a figure may be above, or
    below zero under, that of a baseline: in percent of it (``percent``), or in the
    metric's unit (``difference``).
    """

    figure: float
    kind: Kind = "absolute"


class Limit(BaseModel):
    """One limit of one metric, and what exceeding it means."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    limit: InstanceOf[Bound]
    level: Level = "error"


def _read(value: object, metric: Metric) -> Bound:
    """Read the value of a key: absolute, or with a sign against a baseline."""
    signed = _SIGNED.fullmatch(value) if isinstance(value, str) else None
    if signed is None:
        bound = Bound(_absolute(value, metric))
    else:
        sign, text = signed.groups()
        allowed = "-" if metric.better == "higher" else "+"
        if sign != allowed:
            may = "fall" if metric.better == "higher" else "grow"
            msg = f"says by how much it may {may}: write {allowed}{text[:40]}, found {value!r:.60}"
            raise ValueError(msg)
        factor = -1.0 if sign == "-" else 1.0
        if text.rstrip().endswith("%"):
            bound = Bound(factor * 100.0 * parse_quantity(text, "ratio"), "percent")
        else:
            bound = Bound(factor * _difference(text, metric), "difference")
    if not math.isfinite(bound.figure):
        msg = f"{value!r:.60} is not a finite number"
        raise ValueError(msg)
    return bound


def _absolute(value: object, metric: Metric) -> float:
    if metric.unit == "1":
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(float(value)):  # type: ignore[arg-type]
            shown = str(value)[:40]
            msg = f"needs a finite number without quotes, such as {metric.example}, found {shown!r}"
            raise ValueError(msg)
        return float(value)  # type: ignore[arg-type]
    if not isinstance(value, str):
        what = "a percentage" if metric.unit == "%" else "a number with a unit"
        msg = f'needs {what} in quotes, such as "{metric.example}", found {value!r:.60}'
        raise ValueError(msg)
    dimension, per_base = _DIMENSIONS[metric.unit]
    figure = parse_quantity(value, dimension) * per_base
    if metric.below is not None and figure >= metric.below:
        msg = f"must be below {metric.below:g} {metric.unit}, found {value!r:.60}"
        raise ValueError(msg)
    return figure


def _difference(text: str, metric: Metric) -> float:
    """How much a figure may change, in its unit, from the text behind the sign."""
    if metric.unit == "1":
        if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text.strip()) is None:
            msg = f'{text[:40]!r} is neither a percentage nor a number, such as "2 %" or "0.01"'
            raise ValueError(msg)
        return float(text)
    dimension, per_base = _DIMENSIONS[metric.unit]
    if dimension == "ratio":
        msg = f'needs a percentage of the baseline, such as "5 %", found {text[:40]!r}'
        raise ValueError(msg)
    return parse_quantity(text, dimension) * per_base


def _one_limit(metric: Metric) -> Any:
    """The type of one limit: a value, or a table with it and its level."""

    def build(value: object) -> object:
        if not isinstance(value, dict):
            return {"limit": _read(value, metric)}
        if "limit" not in value:
            return value
        return {**value, "limit": _read(value["limit"], metric)}

    return Annotated[Limit, BeforeValidator(build)]


def _few(value: object) -> object:
    if isinstance(value, list) and not 1 <= len(value) <= MAX_LIMITS:
        msg = f"must be a list of 1 to {MAX_LIMITS} limits, found {len(value)}"
        raise ValueError(msg)
    return value


def _variant(value: object) -> str:
    return f"{TAG_PREFIX}{'several' if isinstance(value, list | tuple) else 'one'}"


def _schema(metric: Metric) -> dict[str, Any]:
    """What stands in the file: a value, a table with it and its level, or a list of these."""
    sign = "-" if metric.better == "higher" else "+"
    relative = {"type": "string", "examples": [f"{sign}5 %"]}
    if metric.unit == "1":
        value: dict[str, Any] = {"anyOf": [{"type": "number"}, relative]}
    else:
        value = {"type": "string", "examples": [metric.example, f"{sign}5 %"]}
    table = {
        "type": "object",
        "properties": {"limit": value, "level": {"enum": ["error", "warn"]}},
        "required": ["limit"],
        "additionalProperties": False,
    }
    one = [*value.get("anyOf", [value]), table]
    several = {
        "type": "array",
        "items": {"anyOf": one},
        "minItems": 1,
        "maxItems": MAX_LIMITS,
    }
    return {"anyOf": [*one, several]}


def _field(metric: Metric) -> Any:
    one = _one_limit(metric)
    several = tuple[one, ...]  # type: ignore[valid-type]
    return (
        Annotated[
            Annotated[one, Tag(f"{TAG_PREFIX}one")]
            | Annotated[several, BeforeValidator(_few), Tag(f"{TAG_PREFIX}several")],
            Discriminator(_variant),
            WithJsonSchema(_schema(metric)),
        ],
        Field(default=None, description=metric.meaning),
    )  # fmt: skip


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


if TYPE_CHECKING:

    class Section(_Strict):
        """The limits of one table. An absent key sets no limit."""
else:
    Section = create_model(
        "Section",
        __base__=_Strict,
        __doc__="The limits of one table. An absent key sets no limit.",
        __module__=__name__,
        **{metric.key: _field(metric) for metric in METRICS.values()},
    )


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    budgets: Section = Field(default_factory=Section)
    classes: dict[OsClass, Section] = Field(default_factory=dict, alias="class")
    device: dict[str, Section] = Field(default_factory=dict)


@dataclass(frozen=True)
class PlacedLimit:
    """A limit that applies, with the line of the budget file that set it."""

    limit: float
    level: Level
    location: str
    section: str
    kind: Kind = "absolute"


@dataclass(frozen=True)
class Budgets:
    """A budget file that was read. Without a file: no limits."""

    source: str = "budgets.toml"
    defaults: Section = field(default_factory=Section)
    classes: Mapping[str, Section] = field(default_factory=dict)
    devices: Mapping[str, Section] = field(default_factory=dict)
    lines: Mapping[tuple[str, ...], int] = field(default_factory=dict)

    def overall(self) -> dict[str, tuple[PlacedLimit, ...]]:
        """Limits of ``[budgets]`` by key."""
        return self._placed(("budgets",), self.defaults)

    def narrowed(self, device: str, os_class: str) -> dict[str, tuple[PlacedLimit, ...]]:
        """Only what the class and the device override, by key; the device wins."""
        placed: dict[str, tuple[PlacedLimit, ...]] = {}
        if os_class in self.classes:
            placed |= self._placed(("class", os_class), self.classes[os_class])
        if device in self.devices:
            placed |= self._placed(("device", device), self.devices[device])
        return placed

    def for_device(self, device: str, os_class: str) -> dict[str, tuple[PlacedLimit, ...]]:
        """All limits that hold for a device by key."""
        return self.overall() | self.narrowed(device, os_class)

    def check_devices(self, known: list[str]) -> None:
        """Refuse a device table that names no known device: it would never be applied.

        Raises:
            OdtpackError: With the file, the line and the near name.
        """
        for name in self.devices:
            if name not in known:
                near = near_name(name, known)
                mean = f", did you mean {near!r}?" if near else ""
                raise OdtpackError(
                    "budgets-unknown-device",
                    f"the budgets name a device {name[:100]!r} that does not exist{mean}",
                    where=self._location(("device", name)),
                    hint="run `odtpack devices list`",
                )

    def _placed(
        self, table: tuple[str, ...], section: Section
    ) -> dict[str, tuple[PlacedLimit, ...]]:
        title = ".".join(table)
        placed = {}
        for key in METRICS:
            found = getattr(section, key)
            if found is not None:
                where = self._location((*table, key))
                placed[key] = tuple(
                    PlacedLimit(each.limit.figure, each.level, where, title, each.limit.kind)
                    for each in ([found] if isinstance(found, Limit) else found)
                )
        return placed

    def _location(self, path: tuple[str, ...]) -> str:
        line = self.lines.get(path)
        return f"{self.source}:{line}" if line else f"{self.source} ({'.'.join(path)})"


def parse_budgets(data: bytes, source: str = "budgets.toml") -> Budgets:
    """Read budgets from the bytes of a TOML file.

    Args:
        data: Content of the file.
        source: Its name, for messages and for the location of each check.

    Raises:
        OdtpackError: Not TOML, an unknown key, or a value without the unit it needs.
    """
    content = parse_toml(data, code="budgets", what="budget file", where=source)
    return make_budgets(content, source, key_lines(data.decode("utf-8")))


def make_budgets(
    content: Mapping[str, Any], source: str, lines: Mapping[tuple[str, ...], int]
) -> Budgets:
    """Read budgets from the tables of a TOML file.

    Args:
        content: The tables ``budgets``, ``class`` and ``device``.
        source: Name of the file, for messages and for the location of each check.
        lines: Line of each table and key, by path.

    Raises:
        OdtpackError: An unknown key, or a value without the unit it needs.
    """
    try:
        file = _File.model_validate(content)
    except ValidationError as error:
        key, problem = first_problem(error, _File)
        line = lines.get(_path_of(error))
        raise OdtpackError(
            "budgets-invalid",
            f"the budget file is wrong at {key}: {problem}",
            where=f"{source}:{line}" if line else source,
            hint='write for example: [budgets] peak_memory = "200 MB"',
        ) from error
    classes = {str(name): section for name, section in file.classes.items()}
    return Budgets(source, file.budgets, classes, file.device, lines)


def read_budgets(path: str | os.PathLike[str]) -> Budgets:
    """Read a budget file.

    Raises:
        OdtpackError: Absent, larger than 64 KiB, or as :func:`parse_budgets`.
    """
    file = Path(path)
    data = read_bounded(file, limit=MAX_BUDGET_BYTES, code="budgets", what="budget file")
    return parse_budgets(data, str(file))


def _path_of(error: ValidationError) -> tuple[str, ...]:
    problems = error.errors(include_url=False)
    problems.sort(key=lambda problem: problem["type"] != "extra_forbidden")
    depth = 2 if problems[0]["loc"][:1] == ("budgets",) else 3
    return tuple(str(part) for part in problems[0]["loc"][:depth])
