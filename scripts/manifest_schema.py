"""The JSON schema of a package's manifest, with the losses and optimizers that there are.

The runtime takes any name of a loss or an optimizer: it needs to know none. What odtpack writes
is one of those that are declared here, with the options of its declaration.
"""

from __future__ import annotations

from odtpack.losses import LOSSES
from odtpack.optimizers import OPTIMIZERS, Optimizer
from odtpack.option import Option, options_of
from odtpack_runtime.package.manifest import Manifest
from scripts.record_schema import Schema, record_schema

_TYPES = {bool: "boolean", int: "integer", float: "number"}


def manifest_schema() -> Schema:
    """The schema of :class:`~odtpack_runtime.package.manifest.Manifest`."""
    schema = record_schema(Manifest)
    schema["properties"]["loss"] = {"enum": [*LOSSES, "none", "custom"], "type": "string"}
    records = {f"{declared.__name__}Info": declared for declared in OPTIMIZERS.values()}
    kinds = {declared.kind: f"#/$defs/{name}" for name, declared in records.items()}
    kinds["custom"] = "#/$defs/CustomOptimizerInfo"
    definitions = {
        **schema["$defs"],
        **{name: _optimizer(name, declared) for name, declared in records.items()},
        "CustomOptimizerInfo": _record(
            "CustomOptimizerInfo", "An optimizer that is described by its model only.", "custom", {}
        ),
    }
    del definitions["OptimizerInfo"]
    schema["properties"]["optimizer"] = {
        "discriminator": {"mapping": kinds, "propertyName": "kind"},
        "oneOf": [{"$ref": reference} for reference in kinds.values()],
    }
    return {**schema, "$defs": dict(sorted(definitions.items()))}


def _optimizer(name: str, declared: type[Optimizer]) -> Schema:
    settings = {each.name: _setting(each) for each in options_of(declared)}
    return _record(name, f"Hyperparameters: {declared.summary}", declared.kind, settings)


def _record(name: str, meaning: str, kind: str, properties: dict[str, Schema]) -> Schema:
    return {
        "additionalProperties": False,
        "description": meaning,
        "properties": {"kind": {"const": kind, "type": "string"}, **properties},
        "required": ["kind"],
        "title": name,
        "type": "object",
    }


def _setting(option: Option) -> Schema:
    if option.choices and option.type is not bool:
        return {"default": option.default, "enum": [*option.choices], "type": "string"}
    return {"default": option.default, "type": _TYPES[option.type]}
