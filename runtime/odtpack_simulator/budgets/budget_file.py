"""``budgets.toml``: limits that a result must keep, with units, levels and overrides.

``[budgets]`` holds for every device, ``[class.android]`` for the devices of an
operating system, ``[device."google/pixel-8a"]`` for one; the narrower wins key
by key. ``docs/formats/budgets.md`` specifies the format.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import ConfigDict, Field, ValidationError

from odtpack_runtime.errors import OdtpackError
from odtpack_simulator.budgets.budget_values import Kind, Level, Limit, Section, name_limits
from odtpack_simulator.budgets.metrics import METRICS
from odtpack_simulator.device.app_footprint import AppFootprint, default_footprint
from odtpack_simulator.device.profile import DeviceProfile, OsClass
from odtpack_simulator.values.part import Part
from odtpack_simulator.values.schema_errors import first_problem, near_name
from odtpack_simulator.values.textfile import key_lines, parse_toml, read_bounded

MAX_BUDGET_BYTES: Final = 64 * 1024


class _Overall(Section):
    """The limits of the package and every device. An absent key sets no limit."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    learns: bool = True
    """Whether the loss on held-out samples must fall beyond its noise."""


class _File(Part):
    """Limits that a simulation result must keep; the narrower table wins, key by key."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    budgets: _Overall = Field(default_factory=_Overall)
    """For the package and every device."""
    classes: dict[OsClass, Section] = Field(default_factory=dict, alias="class")
    """`[class.android]`: for the devices of an operating system."""
    device: dict[str, Section] = Field(default_factory=dict)
    """`[device."google/pixel-8a"]`: for one device."""


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
    defaults: _Overall = field(default_factory=_Overall)
    classes: Mapping[str, Section] = field(default_factory=dict)
    devices: Mapping[str, Section] = field(default_factory=dict)
    lines: Mapping[tuple[str, ...], int] = field(default_factory=dict)

    @property
    def learns(self) -> bool:
        """Whether the loss on held-out samples must fall."""
        return self.defaults.learns

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

    def footprint(self, device: str, os_class: OsClass) -> AppFootprint | None:
        """What the app holds on a device by the narrowest table that says so; None without."""
        found = None
        for table, section in (
            (("budgets",), self.defaults),
            (("class", os_class), self.classes.get(os_class)),
            (("device", device), self.devices.get(device)),
        ):
            if section is not None and section.app_footprint is not None:
                where = self._location((*table, "app_footprint"))
                found = AppFootprint(int(section.app_footprint), None, where)
        return found

    def footprint_of(self, profile: DeviceProfile) -> AppFootprint:
        """The same, or what is taken for an app of the device's system."""
        return self.footprint(profile.name, profile.os) or default_footprint(profile)

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
        line = _line_of(self.lines, path)
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
        line = _line_of(lines, _path_of(error))
        raise OdtpackError(
            "budgets-invalid",
            f"the budget file is wrong at {key}: {problem}",
            where=f"{source}:{line}" if line else source,
        ) from error
    classes = {str(name): section for name, section in file.classes.items()}
    return Budgets(source, file.budgets, classes, file.device, lines)


def budget_schema() -> dict[str, Any]:
    """The JSON Schema of a budget file, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **name_limits(_File.model_json_schema()),
        "title": "odtpack budgets",
    }


def read_budgets(path: str | os.PathLike[str]) -> Budgets:
    """Read a budget file.

    Raises:
        OdtpackError: Absent, larger than 64 KiB, or as :func:`parse_budgets`.
    """
    file = Path(path)
    data = read_bounded(file, limit=MAX_BUDGET_BYTES, code="budgets", what="budget file")
    return parse_budgets(data, str(file))


def _line_of(lines: Mapping[tuple[str, ...], int], path: tuple[str, ...]) -> int | None:
    """Line of a key, or of what it stands in, such as ``"acme/one" = { sessions = 3 }``."""
    found = (lines.get(path[:depth]) for depth in range(len(path), 0, -1))
    return next((line for line in found if line), None)


def _path_of(error: ValidationError) -> tuple[str, ...]:
    problems = error.errors(include_url=False)
    problems.sort(key=lambda problem: problem["type"] != "extra_forbidden")
    depth = 2 if problems[0]["loc"][:1] == ("budgets",) else 3
    return tuple(str(part) for part in problems[0]["loc"][:depth])
