"""The keys of a fleet file as Markdown tables, from the declarations that it is checked by."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from odtpack_simulator.fleet.fleet_file import FleetFile, Quantity
from odtpack_simulator.values.units import format_limit
from scripts import markdown


def fleet_keys() -> str:
    """A table for each table of the file."""
    parts: list[str] = []
    for title, model, meaning in _tables(FleetFile, ""):
        rows = [
            (f"`{field.alias or name}`", _value(field), _default(field), _described(field))
            for name, field in model.model_fields.items() if not _table_of(field)
        ]  # fmt: skip
        if rows:
            parts += [f"### {title}", *filter(None, [meaning])]
            parts.append(markdown.table(("key", "value", "default", ""), rows))
    return "\n\n".join(parts)


def _described(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def _tables(
    model: type[BaseModel], path: str, meaning: str = ""
) -> Iterator[tuple[str, type[BaseModel], str]]:
    """Title, declaration and meaning of a table and those below it."""
    yield (f"`[{path}]`" if path else "Above all tables"), model, meaning
    for name, field in model.model_fields.items():
        if inner := _table_of(field):
            key = f"{path}.{field.alias or name}".lstrip(".")
            text = re.sub(r"^`\[.*?`: ", "", _described(field))
            is_list = get_origin(field.annotation) is tuple
            yield from _tables(inner, f"[{key}]" if is_list else key, text[:1].upper() + text[1:])


def _table_of(field: FieldInfo) -> type[BaseModel] | None:
    """The declaration of a key that holds a table, or a list of them."""
    kinds = (field.annotation, *get_args(field.annotation))
    tables = (each for each in kinds if isinstance(each, type) and issubclass(each, BaseModel))
    return next(tables, None)


def _quantity(kind: Any, metadata: Any = ()) -> Quantity | None:
    """How a number with a unit is read, where the key takes one."""
    readers = (getattr(each, "func", None) for each in metadata)
    inner = (_quantity(part, getattr(part, "__metadata__", ())) for part in get_args(kind))
    return next((each for each in (*readers, *inner) if isinstance(each, Quantity)), None)


def _value(field: FieldInfo) -> str:
    """What a key takes."""
    kind: Any = field.annotation
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    origin, inner = get_origin(kind), get_args(kind)
    pair = " or a pair" if origin is tuple and Ellipsis not in inner else ""
    if measured := _quantity(field.annotation, field.metadata):
        return f'`"{measured.example}"`{pair}'
    if origin is Literal:
        return " or ".join(f'`"{each}"`' for each in inner)
    if origin is tuple and get_origin(inner[0]) is Literal:
        return "list of " + ", ".join(f'`"{each}"`' for each in get_args(inner[0]))
    if origin is tuple:
        return f"whole number{pair}" if pair else "24 numbers from 0 to 1"
    if kind is bool:
        return "`true` or `false`"
    return {int: "whole number", float: "number", str: "text"}.get(kind, str(kind))


def _default(field: FieldInfo) -> str:
    """What holds where a key is absent."""
    if field.is_required():
        return "required"
    what = field.get_default(call_default_factory=False)
    if what is None:
        return "none"
    if measured := _quantity(field.annotation, field.metadata):
        number = what[0] if isinstance(what, tuple) else what
        is_time = measured.dimension == "duration"
        return f'`"{format_limit(number, "s" if is_time else "B")}{"" if is_time else "/s"}"`'
    if isinstance(what, tuple):
        if len(set(what)) == 1:
            return f"`{what[0]}`"
        return "`[" + ", ".join(f'"{each}"' for each in what) + "]`"
    if isinstance(what, bool):
        return f"`{what}`".lower()
    return f'`"{what}"`' if isinstance(what, str) else f"`{what:g}`"
