"""The JSON schema of a record of :mod:`odtpack_runtime.files.records`, from its declaration."""

from __future__ import annotations

import dataclasses
import inspect
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from odtpack_runtime.files.records import Part, default_of, is_required, record_hints

Schema = dict[str, Any]

_PLAIN = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


def record_schema(record: type[Part]) -> Schema:
    """Return the schema of a record, with the records that it holds under ``$defs``."""
    found: dict[str, Schema] = {}
    own = _record(record, found)
    return {"$defs": dict(sorted(found.items())), **own}


def _record(record: type[Part], found: dict[str, Schema]) -> Schema:
    properties, required = {}, []
    hints = record_hints(record)
    for field in dataclasses.fields(record):
        entry = _schema(hints[field.name], found)
        if is_required(field):
            required.append(field.name)
        else:
            default = default_of(field)
            entry["default"] = list(default) if isinstance(default, tuple) else default
        properties[field.name] = entry
    return {
        "additionalProperties": False,
        "description": inspect.getdoc(record),
        "properties": properties,
        **({"required": required} if required else {}),
        "title": record.__name__,
        "type": "object",
    }


def _schema(hint: Any, found: dict[str, Schema]) -> Schema:
    origin, options = get_origin(hint), get_args(hint)
    if origin is Annotated:
        schema = _schema(options[0], found)
        for rule in options[1:]:
            schema |= rule.keywords
        return schema
    if origin is Union or origin is types.UnionType:
        return {"anyOf": [_schema(option, found) for option in options]}
    if origin is Literal:
        plain = _PLAIN[type(options[0])]
        return {"type": plain, **({"enum": [*options]} if options[1:] else {"const": options[0]})}
    if origin is tuple:
        return {"items": _schema(options[0], found), "type": "array"}
    if origin is dict:
        keys = _schema(options[0], found)
        del keys["type"]
        names = {"propertyNames": keys} if keys else {}
        return {"additionalProperties": _schema(options[1], found), **names, "type": "object"}
    if isinstance(hint, type) and issubclass(hint, Part):
        if hint.__name__ not in found:
            found[hint.__name__] = {}  # its place, should it hold itself
            found[hint.__name__] = _record(hint, found)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    return {} if hint is Any else {"type": _PLAIN[hint]}
