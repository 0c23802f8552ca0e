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
    for title, model, meaning in tables(FleetFile, ""):
        rows = [
            (f"`{field.alias or name}`", value(field), default(field), described(field))
            for name, field in model.model_fields.items() if not table_of(field)
        ]  # fmt: skip
        parts += [f"### {title}", *filter(None, [meaning])]
        parts.append(markdown.table(("key", "value", "default", ""), rows))
    return "\n\n".join(parts)


def described(field: FieldInfo) -> str:
    """The meaning of a key on one line."""
    return " ".join((field.description or "").split())


def tables(
    model: type[BaseModel], path: str, meaning: str = ""
) -> Iterator[tuple[str, type[BaseModel], str]]:
    """Title, declaration and meaning of a table and those below it."""
    title = f"`[{path}]`" if path else "Above all tables"
    if any(not table_of(field) for field in model.model_fields.values()):
        yield title, model, meaning
    for name, field in model.model_fields.items():
        inner = table_of(field)
        if inner:
            key = f"{path}.{field.alias or name}".lstrip(".")
            text = re.sub(r"^`\[.*?`: ", "", described(field))
            text = text[:1].upper() + text[1:]
            yield from tables(inner, f"[{key}]" if listed(field) else key, text)


def table_of(field: FieldInfo) -> type[BaseModel] | None:
    """The declaration of a key that holds a table, or a list of them."""
    kind = field.annotation
    for each in (kind, *get_args(kind)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None


def listed(field: FieldInfo) -> bool:
    """Whether a key holds a list of tables."""
    return get_origin(field.annotation) is tuple


def quantity(kind: Any, metadata: Any = ()) -> Quantity | None:
    """How a number with a unit is read, where the key takes one."""
    for each in metadata:
        reader = getattr(each, "func", None)
        if isinstance(reader, Quantity):
            return reader
    for part in get_args(kind):
        found = quantity(part, getattr(part, "__metadata__", ()))
        if found:
            return found
    return None


def value(field: FieldInfo) -> str:
    """What a key takes."""
    measured = quantity(field.annotation, field.metadata)
    pair = get_origin(field.annotation) is tuple and len(get_args(field.annotation)) == 2
    if measured:
        words = f'`"{measured.example}"`'
        return f"{words} or a pair" if pair else words
    kind = field.annotation
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        return " or ".join(f'`"{each}"`' for each in get_args(kind))
    if get_origin(kind) is tuple:
        if pair and Ellipsis not in get_args(kind):
            return "whole number or a pair"
        inner = get_args(kind)[0]
        if get_origin(inner) is Literal:
            return "list of " + ", ".join(f'`"{each}"`' for each in get_args(inner))
        return "24 numbers from 0 to 1"
    if kind is bool:
        return "`true` or `false`"
    return {int: "whole number", float: "number", str: "text"}.get(kind, str(kind))


def default(field: FieldInfo) -> str:
    """What holds where a key is absent."""
    if field.is_required():
        return "required"
    what = field.get_default(call_default_factory=False)
    if what is None:
        return "none"
    measured = quantity(field.annotation, field.metadata)
    if measured:
        number = what[0] if isinstance(what, tuple) else what
        if measured.dimension == "duration":
            return f'`"{format_limit(number, "s")}"`'
        return f'`"{format_limit(number, "B")}/s"`'
    if isinstance(what, tuple):
        if len(set(what)) == 1:
            return f"`{what[0]}`"
        return "`[" + ", ".join(f'"{each}"' for each in what) + "]`"
    if isinstance(what, bool):
        return f"`{what}`".lower()
    return f'`"{what}"`' if isinstance(what, str) else f"`{what:g}`"
