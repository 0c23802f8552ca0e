"""The reference of recipes in docs/recipe.md, made of their schema."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from odtpack.option import BOUNDS
from odtpack.recipe.schema import json_schema
from odtpack.spec import keys_of
from scripts import markdown

_SHOWN_ELSEWHERE = {"budgets"}


def reference() -> str:
    """All tables of a recipe with their keys, what these take, and their defaults."""
    schema, parts = json_schema(), []
    for title, table in _tables(schema):
        parts += [f"### {title}", *filter(None, [_described(table)])]
        above = re.sub(r"[^a-z].*", "", title.strip("`[]"))
        flags = {key: f"`{option.flag.replace('/', '`, `')}`" for key, option in keys_of(above)}
        required = table.get("required", ())
        rows = [
            (f"`{key}`", _value(value, schema), _default(value, key in required),
             flags.get(key, ""), _described(value))
            for key, value in table["properties"].items()
        ]  # fmt: skip
        parts.append(markdown.table(("key", "value", "default", "option", ""), rows))
    return "\n\n".join(parts)


def _described(value: dict[str, Any]) -> str:
    return " ".join(str(value.get("description", "")).split())


def _tables(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Title and schema of each table; the keys above them come first."""
    tables = {
        key: [] if key in _SHOWN_ELSEWHERE else [*_models(value, schema)]
        for key, value in schema["properties"].items()
    }
    above = {key: schema["properties"][key] for key, models in tables.items() if not models}
    yield "Above all tables", {"required": schema["required"], "properties": above}
    for key, models in tables.items():
        is_list = schema["properties"][key].get("type") == "array"
        for model in models:
            kind = model["properties"].get("kind", {}).get("const")
            title = f"`[[{key}]]`" if is_list else f"`[{key}]`"
            yield (f'{title}, `kind = "{kind}"`' if kind else title), model


def _models(value: dict[str, Any], schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The tables that a key may hold."""
    if "$ref" in value:
        found = schema["$defs"][value["$ref"].rpartition("/")[2]]
        if "properties" in found:
            yield found
    inner = [value["items"]] if "items" in value else []
    for part in (*value.get("anyOf", ()), *value.get("oneOf", ()), *inner):
        yield from _models(part, schema)


def _value(value: dict[str, Any], schema: dict[str, Any]) -> str:
    if "const" in value:
        return f'`"{value["const"]}"`'
    if "enum" in value:
        return " or ".join(f'`"{v}"`' if isinstance(v, str) else f"`{v}`" for v in value["enum"])
    parts = [*value.get("anyOf", ()), *value.get("oneOf", ())]
    if parts:
        shown = [_value(part, schema) for part in parts if part.get("type") != "null"]
        return " or ".join(dict.fromkeys(shown))
    if value.get("type") == "array":
        inner = _value(value["items"], schema)
        return f"list of ({inner})" if "," in inner else f"list of {inner}"
    if "$ref" in value:
        return "table"
    bounds = [word.format(value[name]) for _, name, word in BOUNDS if name in value]
    names = {"string": "text", "number": "number", "integer": "whole number",
             "boolean": "`true` or `false`", "object": "table"}  # fmt: skip
    what = names[value["type"]]
    return ", ".join(filter(None, (what, " and ".join(bounds))))


def _default(value: dict[str, Any], required: bool) -> str:
    if required:
        return "required"
    default = value.get("default")
    if default is None or default == []:
        return "none"
    return f"`{str(default).lower()}`" if not isinstance(default, str) else f'`"{default}"`'
