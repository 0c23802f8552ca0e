"""The base of all that pydantic checks, and its errors as one line a person can act on."""

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Tag, ValidationError

from odtpack_runtime.errors import OdtpackError
from odtpack_simulator.values.text import counted, nearest_line


class Part(BaseModel):
    """A record: no unknown keys, finite numbers, never changed in place."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def to_json(self) -> str:
        """The record as JSON text in the order of the fields; the same record, the same bytes."""
        content = self.model_dump(mode="json")
        return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _number(value: object) -> object:
    if isinstance(value, bool):  # Python takes true for 1
        raise ValueError(f"must be a whole number, found {shown_value(value)}")
    return value


VersionOne = Annotated[Literal[1], BeforeValidator(_number)]


# Turn a pydantic ``ValidationError`` into one line a person can act on.
#
# Pydantic reports every deviation with its internal path. A person who wrote a
# TOML file needs the first one: the key as it stands in the file, what was found
# there, and what would be allowed.

TAG_PREFIX = "variant:"
"""Tags of discriminated unions start with this, so that they can be left out of a key."""

_BOUNDS = {
    "greater_than": ("greater than ", "gt"),
    "greater_than_equal": ("at least ", "ge"),
    "less_than": ("less than ", "lt"),
    "less_than_equal": ("at most ", "le"),
}
"""Words for pydantic's types of error, and where it keeps the bound."""

_KINDS = {
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    "bool_type": "true or false",
    "string_type": "a string",
    "finite_number": "a finite number",
}
"""What each of pydantic's types of error asks for."""

_Loc = tuple[int | str, ...]


def first_problem(error: ValidationError, model: type[BaseModel]) -> tuple[str, str]:
    """The first deviation as (key, sentence without the key)."""
    found = all_problems(error, model)
    key, text = found[0]
    if len(found) > 1:
        text += f" (and {len(found) - 1} more)"
    return key, text


def all_problems(error: ValidationError, model: type[BaseModel]) -> list[tuple[str, str]]:
    """Every deviation as (key, sentence without the key), unknown keys first."""
    # An unknown key is most often a misspelt one whose absence is reported too.
    found = unknown_first(error)
    return [(_key(each["loc"]), _sentence(each, each["loc"], model)) for each in found]


def wrong_file(
    error: ValidationError,
    model: type[BaseModel],
    code: str,
    says: str,  # Beginning of the sentence, such as `the recipe is invalid`
    source: str,
    lines: Mapping[tuple[str, ...], int],
) -> OdtpackError:
    """The error for a TOML file: its first deviation, and the line of the key or of its table."""
    key, problem = first_problem(error, model)
    parts = map(str, unknown_first(error)[0]["loc"])
    path = (part for part in parts if part != "[key]" and not part.startswith(TAG_PREFIX))
    line = nearest_line(lines, tuple(path))
    where = f"{source}:{line}" if line else source
    return OdtpackError(code, f"{says} at {key}: {problem}", where=where)


def unknown_first(error: ValidationError) -> list[dict[str, Any]]:
    """What pydantic found, unknown keys first."""
    found = [dict(each) for each in error.errors(include_url=False)]
    return sorted(found, key=lambda problem: problem["type"] != "extra_forbidden")


def meant(name: str, known: Iterable[str]) -> str:
    """The end of a sentence that asks for the known name closest to a misspelt one, if any is."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f", did you mean {close[0]!r}?" if close else ""


def _key(loc: _Loc) -> str:
    text = ""
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part != "[key]" and not part.startswith(TAG_PREFIX):
            name = part if part.replace("_", "").replace("-", "").isalnum() else f'"{part[:80]}"'
            text += f".{name}" if text else name
    return text or "(top level)"


def shown_value(value: object) -> str:
    """A value of a file in an error: a boolean as TOML and JSON write it."""
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _sentence(problem: Mapping[str, Any], loc: _Loc, model: type[BaseModel]) -> str:
    shown = shown_value(problem.get("input"))
    match problem["type"]:
        case "extra_forbidden":
            allowed = _allowed_keys(loc[:-1], model)
            mean = meant(str(loc[-1]), allowed).removesuffix("?")
            return f"unknown key{mean}; allowed here: {', '.join(allowed)}"
        case "union_tag_invalid":
            tags = re.findall(rf"'{TAG_PREFIX}([^']*)'", str(problem["ctx"]["expected_tags"]))
            tag = str(problem["ctx"]["tag"]).removeprefix(TAG_PREFIX)
            return f"the kind {tag[:40]!r} is not one of {', '.join(tags)}{meant(tag, tags)}"
        case "union_tag_not_found":
            return f"must be a table that names its kind, found {shown}"
        case "missing":
            return "is missing"
        case "literal_error":
            expected = str(problem["ctx"]["expected"])
            mean = meant(str(problem["input"]), re.findall(r"'([^']*)'", expected))
            return f"{shown} is not one of {expected}{mean}"
        case "model_type" | "dict_type" | "model_attributes_type":
            allowed = _allowed_keys(loc, model)
            keys = f" with the keys {', '.join(allowed)}" if allowed else ""
            return f"must be a table{keys}, found {shown}"
        case kind if kind in _KINDS:
            return f"must be {_KINDS[kind]}, found {shown}"
        case "value_error":
            return str(problem["msg"]).removeprefix("Value error, ")
        case kind if kind in _BOUNDS:
            words, bound = _BOUNDS[kind]
            return f"must be {words}{problem['ctx'][bound]:.10g}, found {shown}"
        case "tuple_type" | "list_type":
            # Below a list that holds tables, other keys are allowed than beside it.
            holds_tables = _allowed_keys(loc, model) != _allowed_keys(loc[:-1], model)
            tables = ""
            if holds_tables and isinstance(problem["input"], Mapping):
                tables = f" of tables, each under [[{_key(loc)}]]"
            return f"must be a list{tables}, found {shown}"
        case "too_short" | "too_long":
            has, short = problem["ctx"], problem["type"] == "too_short"
            count = has["min_length" if short else "max_length"]
            words = f"at {'least' if short else 'most'} {counted(count, 'value')}"
            return f"must have {words}, found {has['actual_length']}"
        case _:
            message = str(problem["msg"])
            return f"{message[:1].lower()}{message[1:]}, found {shown}"


def _allowed_keys(loc: _Loc, model: type[BaseModel]) -> list[str]:
    """Names of the fields of the models that may stand at ``loc``."""
    candidates: list[tuple[type[BaseModel], str]] = [(model, "")]
    for part in loc:
        if isinstance(part, str) and part.startswith(TAG_PREFIX):
            candidates = [each for each in candidates if each[1] == part] or candidates
            continue
        inner = [
            found
            for candidate, _ in candidates
            for name, field in candidate.model_fields.items()
            if part in (name, field.alias)
            for found in _models_in(field.annotation)
        ]
        candidates = inner or candidates
    names: list[str] = []
    for candidate, _ in candidates:
        for name, field in candidate.model_fields.items():
            if (field.alias or name) not in names:
                names.append(field.alias or name)
    return names


def _models_in(annotation: Any, tag: str = "") -> list[tuple[type[BaseModel], str]]:
    """Every model in an annotation such as ``dict[str, Annotated[A | B, ...]]``, with its tag."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [(annotation, tag)]
    parts = get_args(annotation)
    tag = next((part.tag for part in parts if isinstance(part, Tag)), tag)
    return [found for part in parts for found in _models_in(part, tag)]
