"""The keys of recipes and of fleet files as Markdown tables, made of the schemas of both."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from odtpack.option import BOUNDS
from odtpack.recipe.schema import json_schema
from odtpack.spec import keys_of
from odtpack_simulator.fleet.fleet_file import HOURS, FleetFile, Quantity
from odtpack_simulator.values.units import format_limit
from scripts.harness import table as markdown_table

Schema = dict[str, Any]
_SHOWN_ELSEWHERE = {"budgets"}
_ABOVE = "Above all tables"


def recipe_keys() -> str:
    """All tables of a recipe with their keys, what these take, their defaults and options."""
    parts, schema = [], json_schema()
    for title, table in _recipe_tables(schema):
        above = re.sub(r"[^a-z].*", "", title.strip("`[]"))
        flags = {key: f"`{option.flag.replace('/', '`, `')}`" for key, option in keys_of(above)}
        parts += _part(title, _described(table), table, schema, flags)
    return "\n\n".join(parts)


def fleet_keys() -> str:
    """A table for each table of a fleet file."""
    schema = FleetFile.model_json_schema(schema_generator=_WithQuantities)
    parts = (_part(*found, schema) for found in _fleet_tables(schema, schema, ""))
    return "\n\n".join(line for part in parts for line in part)


class _WithQuantities(GenerateJsonSchema):
    """Tells the numbers that are written with a unit, and no bounds."""

    def int_schema(self, schema: Any) -> Schema:
        return {"type": "integer"}

    def float_schema(self, schema: Any) -> Schema:
        return {"type": "number"}

    def function_before_schema(self, schema: Any) -> Schema:
        reader, found = schema["function"]["function"], super().function_before_schema(schema)
        return {"quantity": reader} if isinstance(reader, Quantity) else found

    def encode_default(self, dft: Any) -> Any:
        return int(dft) if isinstance(dft, float) and dft.is_integer() else dft


def _part(
    title: str, meaning: str, table: Schema, schema: Schema, flags: Mapping[str, str] | None = None
) -> list[str]:
    """The heading of a table, what it is for, and its keys."""
    required, titles = table.get("required", ()), ("key", "value", "default", "option", "")
    rows = [
        (f"`{key}`", _value(value, schema), _default(value, key in required),
         *([] if flags is None else [flags.get(key, "")]), _described(value))
        for key, value in table["properties"].items()
    ]  # fmt: skip
    if not rows:
        return []
    shown = markdown_table([each for each in titles if each != "option" or flags is not None], rows)
    return [f"### {title}", *filter(None, [meaning]), shown]


def _described(value: Schema) -> str:
    return " ".join(str(value.get("description", "")).split())


def _recipe_tables(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Title and schema of each table; the keys above them come first."""
    tables = {
        key: [] if key in _SHOWN_ELSEWHERE else [*_models(value, schema)]
        for key, value in schema["properties"].items()
    }
    above = {key: schema["properties"][key] for key, models in tables.items() if not models}
    yield _ABOVE, {"required": schema["required"], "properties": above}
    for key, models in tables.items():
        is_list = schema["properties"][key].get("type") == "array"
        for model in models:
            kind = model["properties"].get("kind", {}).get("const")
            title = f"`[[{key}]]`" if is_list else f"`[{key}]`"
            yield (f'{title}, `kind = "{kind}"`' if kind else title), model


def _fleet_tables(
    table: Schema, schema: Schema, path: str, meaning: str = ""
) -> Iterator[tuple[str, str, Schema]]:
    """Title, meaning and schema of a table without those below it, and of these."""
    below = {key: [*_models(value, schema)] for key, value in table["properties"].items()}
    own = {key: value for key, value in table["properties"].items() if not below[key]}
    yield (f"`[{path}]`" if path else _ABOVE), meaning, {**table, "properties": own}
    for key, inner in ((key, inner) for key, models in below.items() for inner in models):
        value, name = table["properties"][key], f"{path}.{key}".lstrip(".")
        text = re.sub(r"^`\[.*?`: ", "", _described(value) or _described(inner))
        name = f"[{name}]" if "items" in value else name
        yield from _fleet_tables(inner, schema, name, text[:1].upper() + text[1:])


def _models(value: Schema, schema: Schema) -> Iterator[Schema]:
    """The tables that a key may hold."""
    if "$ref" in value:
        found = schema["$defs"][value["$ref"].rpartition("/")[2]]
        if "properties" in found:
            yield found
    inner = [value["items"]] if "items" in value else []
    for part in (*value.get("anyOf", ()), *value.get("oneOf", ()), *inner):
        yield from _models(part, schema)


def _value(value: Schema, schema: Schema) -> str:
    if "quantity" in value:
        return f'`"{value["quantity"].example}"`'
    if "const" in value:
        return f'`"{value["const"]}"`'
    if "enum" in value:
        return " or ".join(f'`"{v}"`' if isinstance(v, str) else f"`{v}`" for v in value["enum"])
    parts = [*value.get("anyOf", ()), *value.get("oneOf", ())]
    if parts:
        shown = [_value(part, schema) for part in parts if part.get("type") != "null"]
        return " or ".join(dict.fromkeys(shown))
    if "prefixItems" in value:
        return f"{_value(value['prefixItems'][0], schema)} or a pair"
    if value.get("minItems") == HOURS:
        return f"{HOURS} numbers from 0 to 1"
    if value.get("type") == "array":
        return f"list of {_value(value['items'], schema)}"
    if "$ref" in value:
        return "table"
    bounds = [word.format(value[name]) for _, name, word in BOUNDS if name in value]
    names = {"string": "text", "number": "number", "integer": "whole number",
             "boolean": "`true` or `false`", "object": "table"}  # fmt: skip
    what = names[value["type"]]
    return ", ".join(filter(None, (what, " and ".join(bounds))))


def _default(value: Schema, required: bool) -> str:
    default = value.get("default")
    if required:
        return "required"
    if default is None or default == []:
        return "none"
    if "prefixItems" in value:
        value, default = value["prefixItems"][0], default[0]
    if measured := value.get("quantity"):
        is_time = measured.dimension == "duration"
        default = format_limit(default, "s" if is_time else "B") + ("" if is_time else "/s")
    return f"`{json.dumps(default)}`"
