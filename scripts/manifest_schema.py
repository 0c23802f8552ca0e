"""The JSON schema of a package's manifest, with the losses and optimizers that there are.

It follows from the declarations of :mod:`odtpack_runtime.files.records`. The runtime takes any name
of a loss or an optimizer: it needs to know none. What odtpack writes is one of those that are
declared, with the options of its declaration.
"""

import dataclasses
import inspect
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from odtpack.losses import LOSSES
from odtpack.optimizers import OPTIMIZERS
from odtpack.option import Option, options_of
from odtpack_runtime.files.records import Part, default_of, is_required, record_hints
from odtpack_runtime.package.manifest import Manifest

Schema = dict[str, Any]

_PLAIN = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


def manifest_schema() -> Schema:
    """The schema of :class:`~odtpack_runtime.package.manifest.Manifest`."""
    found: dict[str, Schema] = {}
    schema = _record(Manifest, found)
    schema["properties"]["loss"] = {"enum": [*LOSSES, "none", "custom"], "type": "string"}
    del found["OptimizerInfo"]
    optimizers = {
        declared.kind: (
            f"{declared.__name__}Info", f"Hyperparameters: {declared.summary}",
            {each.name: _setting(each) for each in options_of(declared)},
        )
        for declared in OPTIMIZERS.values()
    }  # fmt: skip
    described = "An optimizer that is described by its model only."
    optimizers["custom"] = ("CustomOptimizerInfo", described, {})
    for kind, (name, meaning, settings) in optimizers.items():
        own = {"kind": {"const": kind, "type": "string"}, **settings}
        found[name] = _object(name, meaning, own, ["kind"])
    kinds = {kind: f"#/$defs/{name}" for kind, (name, *_) in optimizers.items()}
    schema["properties"]["optimizer"] = {
        "discriminator": {"mapping": kinds, "propertyName": "kind"},
        "oneOf": [{"$ref": reference} for reference in kinds.values()],
    }
    return {"$defs": dict(sorted(found.items())), **schema}


def _record(record: type[Part], found: dict[str, Schema]) -> Schema:
    """The schema of a record; those that it holds are added to ``found``."""
    properties, required = {}, []
    hints = record_hints(record)
    for field in dataclasses.fields(record):
        properties[field.name] = entry = _schema(hints[field.name], found)
        if is_required(field):
            required.append(field.name)
        else:
            default = default_of(field)
            entry["default"] = list(default) if isinstance(default, tuple) else default
    return _object(record.__name__, inspect.getdoc(record), properties, required)


def _object(
    title: str, meaning: str | None, properties: dict[str, Schema], required: list[str]
) -> Schema:
    needed = {"required": required} if required else {}
    return {"additionalProperties": False, "description": meaning, "properties": properties,
            **needed, "title": title, "type": "object"}  # fmt: skip


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


def _setting(option: Option) -> Schema:
    if option.choices and option.type is not bool:
        return {"default": option.default, "enum": [*option.choices], "type": "string"}
    return {"default": option.default, "type": _PLAIN[option.type]}
