"""``budgets.toml``: limits that a result must keep, with units, levels and overrides.

``[budgets]`` holds for every device, ``[class.android]`` for the devices of an
operating system, ``[device."google/pixel-8a"]`` for one; the narrower wins key
by key. ``docs/formats/budgets.md`` specifies the format.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
)

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.simulator.profile import OsClass
from odtpack_runtime.simulator.schema_errors import first_problem, near_name
from odtpack_runtime.simulator.textfile import key_lines, parse_toml, read_bounded
from odtpack_runtime.simulator.units import parse_quantity

MAX_BUDGET_BYTES: Final = 64 * 1024

Level = Literal["error", "warn"]


class Limit(BaseModel):
    """One limit: the figure in the unit of its metric and what exceeding it means."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    limit: float
    level: Level = "error"


def _quantity(dimension: str, per_base: float) -> Callable[[object], float]:
    def read(value: object) -> float:
        if not isinstance(value, str):
            msg = f'needs a number with a unit in quotes, such as "20 MB", found {value!r}'
            if dimension == "duration":
                msg = msg.replace("20 MB", "50 ms")
            raise ValueError(msg)
        return parse_quantity(value, dimension) * per_base

    return read


def _percentage(value: object) -> float:
    if not isinstance(value, str):
        msg = f'needs a percentage in quotes, such as "20 %", found {value!r}'
        raise ValueError(msg)
    percent = parse_quantity(value, "ratio") * 100.0
    if percent >= 100.0:
        msg = f"must be below 100 %, found {value!r}"
        raise ValueError(msg)
    return percent


def _plain(value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(float(value)):  # type: ignore[arg-type]
        msg = f"needs a finite number without quotes, such as 0.5, found {str(value)[:40]!r}"
        raise ValueError(msg)
    return float(value)  # type: ignore[arg-type]


def _limit(read: Callable[[object], float]) -> BeforeValidator:
    """Accept a plain value or ``{ limit = ..., level = ... }``; leave other keys to the model."""

    def build(value: object) -> object:
        if not isinstance(value, dict):
            return {"limit": read(value)}
        if "limit" not in value:
            return value
        return {**value, "limit": read(value["limit"])}

    return BeforeValidator(build)


def _schema(value: dict[str, Any]) -> WithJsonSchema:
    """What stands in the file: the value, or a table with it and its level."""
    table = {
        "type": "object",
        "properties": {"limit": value, "level": {"enum": ["error", "warn"]}},
        "required": ["limit"],
        "additionalProperties": False,
    }
    return WithJsonSchema({"anyOf": [value, table]})


def _text(example: str) -> WithJsonSchema:
    return _schema({"type": "string", "examples": [example]})


_Size = Annotated[Limit | None, _limit(_quantity("bytes", 1.0)), _text("20 MB")]
_Milliseconds = Annotated[Limit | None, _limit(_quantity("duration", 1e3)), _text("50 ms")]
_Seconds = Annotated[Limit | None, _limit(_quantity("duration", 1.0)), _text("10 min")]
_Percent = Annotated[Limit | None, _limit(_percentage), _text("20 %")]
_Number = Annotated[Limit | None, _limit(_plain), _schema({"type": "number"})]


class Section(BaseModel):
    """The limits of one table. An absent key sets no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    package_size: _Size = None
    """Bytes of all files of the package together."""
    peak_memory: _Size = None
    """Bytes of the replay's peak above the process before it."""
    memory_headroom: _Percent = None
    """Share of the device's memory limit that must stay free."""
    step_latency: _Milliseconds = None
    """Time of one training step on the device."""
    time_to_finish: _Seconds = None
    """Time of the whole training on the device."""
    final_loss: _Number = None
    """Largest loss at the end: on the held-out samples where there are any."""
    metric_floor: _Number = None
    """Smallest metric on the held-out samples at the end."""


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


@dataclass(frozen=True)
class Budgets:
    """A budget file that was read. Without a file: no limits."""

    source: str = "budgets.toml"
    defaults: Section = field(default_factory=Section)
    classes: Mapping[str, Section] = field(default_factory=dict)
    devices: Mapping[str, Section] = field(default_factory=dict)
    lines: Mapping[tuple[str, ...], int] = field(default_factory=dict)

    def overall(self) -> dict[str, PlacedLimit]:
        """Limits of ``[budgets]`` by key."""
        return self._placed(("budgets",), self.defaults)

    def narrowed(self, device: str, os_class: str) -> dict[str, PlacedLimit]:
        """Only what the class and the device override, by key; the device wins."""
        placed: dict[str, PlacedLimit] = {}
        if os_class in self.classes:
            placed |= self._placed(("class", os_class), self.classes[os_class])
        if device in self.devices:
            placed |= self._placed(("device", device), self.devices[device])
        return placed

    def for_device(self, device: str, os_class: str) -> dict[str, PlacedLimit]:
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

    def _placed(self, table: tuple[str, ...], section: Section) -> dict[str, PlacedLimit]:
        title = ".".join(table)
        return {
            key: PlacedLimit(limit.limit, limit.level, self._location((*table, key)), title)
            for key in Section.model_fields
            if isinstance(limit := getattr(section, key), Limit)
        }

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
