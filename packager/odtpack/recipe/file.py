"""Reads ``recipe.toml``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from odtpack.recipe.schema import RecipeFile
from odtpack.spec import TextSpec
from odtpack_simulator.figures.limits import Budgets, make_budgets, read_budgets
from odtpack_simulator.values.part import wrong_file
from odtpack_simulator.values.textfile import key_lines, parse_toml, read_bounded

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
        for key in ("tokenizer", "template"):
            if key == "tokenizer" or Path(given[key]).suffix:  # a name has none
                given[key] = str(self.path.parent / given[key])
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
