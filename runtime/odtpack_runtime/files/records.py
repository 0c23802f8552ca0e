"""Records that come from outside as JSON: declared as dataclasses, checked strictly, no library.

A record is a frozen dataclass that inherits :class:`Part`. Its annotations say what each key
may hold: ``bool``, ``int``, ``float``, ``str``, ``None``, ``Literal``, ``tuple[T, ...]``,
``dict[str, T]``, other records, unions of these, ``Any`` for whatever JSON holds, and
``Annotated[T, Rule(...)]`` for bounds, in the words of JSON Schema. A number in quotes is not a
number, and true is not 1. A whole number may stand for a fraction, and 4.0 and 4e0 are whole, as
in JSON Schema; whole numbers lie within ±(2^53 - 1), beyond which readers in other languages
disagree. Records in a union are distinguished by their key ``kind``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin, get_type_hints

KeyPath = tuple[str | int, ...]

WHOLE_MAX = 2**53 - 1
"""Largest whole number; float64 holds every one up to it."""

MAX_DEPTH = 64
MAX_VALUES = 200_000
"""Per text, with lists and objects: the memory that it takes is proportional."""

_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_NOT_SIGNS = bytes(set(range(256)) - set(b"[]{},"))

_HINTS: dict[type[Part], dict[str, Any]] = {}
"""Annotations of the records that were asked for: to evaluate them takes longer than to check."""


class InvalidRecordError(ValueError):
    """Content that does not follow its declaration."""

    # `problem`: what is wrong.
    # `path`: keys and indices that lead to it.

    def __init__(self, problem: str, path: KeyPath = ()) -> None:
        super().__init__(problem)
        self.problem = problem
        self.path = path

    def __str__(self) -> str:
        place = ""
        for part in self.path:
            place += f"[{part}]" if isinstance(part, int) else f"{'.' if place else ''}{part}"
        return f"{place}: {self.problem}" if place else self.problem


class Rule:
    """Bounds of a value, in keywords of JSON Schema."""

    def __init__(self, **keywords: Any) -> None:
        self.keywords = keywords

    def check_count(self, value: Any, path: KeyPath) -> None:
        """Check how many entries a list has, before they are looked at."""
        most = self.keywords.get("maxItems")
        if most is not None and isinstance(value, list) and len(value) > most:
            raise InvalidRecordError(f"it must have {most} entries or fewer", path)

    def check(self, value: Any, path: KeyPath) -> None:
        """Check a value of the right type."""
        for keyword, bound in self.keywords.items():
            good, words = _RULES[keyword]
            if not good(value, bound):
                raise InvalidRecordError(f"it must {words.format(bound)}", path)


_RULES: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "minimum": (lambda value, bound: value >= bound, "be {} or more"),
    "maximum": (lambda value, bound: value <= bound, "be {} or less"),
    "minLength": (lambda value, bound: len(value) >= bound, "not be empty"),
    "pattern": (lambda value, bound: bool(re.fullmatch(bound, value, re.ASCII)), "match {}"),
    "exclusiveMinimum": (lambda value, bound: value > bound, "be above {}"),
    "maxItems": (lambda value, bound: len(value) <= bound, "have {} entries or fewer"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """The base of all records: no unknown keys or other types, finite numbers, never changed."""

    @classmethod
    def read(cls, content: object, path: KeyPath = ()) -> Self:
        """Check what a JSON text held, and return it as a record."""
        if not isinstance(content, dict):
            raise InvalidRecordError("it must be an object", path)
        hints = record_hints(cls)
        values = {}
        for field in dataclasses.fields(cls):
            if field.name in content:
                hint = hints[field.name]
                values[field.name] = read_value(hint, content[field.name], (*path, field.name))
            elif is_required(field):
                raise InvalidRecordError("this key is missing", (*path, field.name))
        for key in content:
            if key not in hints:
                raise InvalidRecordError("there is no such key", (*path, key))
        record = cls(**values)
        record.check(path)
        return record

    def check(self, path: KeyPath) -> None:
        """Check what the annotations do not say."""

    def as_dict(self, *, defaults: bool = True) -> dict[str, Any]:
        """Return the content as JSON has it: lists for tuples, dictionaries for records."""
        return {
            field.name: _plain(value, defaults)
            for field in dataclasses.fields(self)
            for value in (getattr(self, field.name),)
            if defaults or is_required(field) or value != default_of(field)
        }


def record_hints(record: type[Part]) -> dict[str, Any]:
    """Return the annotation of each key."""
    if record not in _HINTS:
        _HINTS[record] = get_type_hints(record, include_extras=True)
    return _HINTS[record]


def is_required(field: dataclasses.Field[Any]) -> bool:
    """Whether a key has no default."""
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a key that has one."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def parse_json(data: bytes) -> Any:
    """Parse JSON in UTF-8: no key twice, no NaN, no number beyond the range of float64."""
    _check_counts(data)
    try:
        return json.loads(
            data.decode(), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant
        )
    except InvalidRecordError:
        raise
    except (ValueError, RecursionError) as error:  # also what is not UTF-8
        reason = "it nests too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidRecordError(f"it is not JSON in UTF-8: {reason}") from error


def _check_counts(data: bytes) -> None:
    """Count what a text will become before it does."""
    quotes = data.count(b'"') - data.count(b'\\"')
    if quotes > 4 * MAX_VALUES:  # two of a value's text, and two of its key
        raise InvalidRecordError(f"it holds more than {MAX_VALUES} values")
    signs = _TEXT.sub(b"", data).translate(None, _NOT_SIGNS)
    if sum(map(signs.count, (b"[", b"{", b","))) > MAX_VALUES:
        raise InvalidRecordError(f"it holds more than {MAX_VALUES} values")
    depth = 0
    for sign in signs.replace(b",", b""):
        depth += 1 if sign in b"[{" else -1
        if depth > MAX_DEPTH:
            raise InvalidRecordError("it nests too deeply")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):  # readers differ in which of two equal keys they take
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise InvalidRecordError(f"the key {key!r} occurs twice in one object")
    return found


def _refuse_constant(name: str) -> Any:
    raise InvalidRecordError(f"{name} is not a number of JSON")


def read_value(hint: Any, value: Any, path: KeyPath) -> Any:
    """Check a value against an annotation, and return it."""
    origin, options = get_origin(hint), get_args(hint)
    if origin is Annotated:
        for rule in options[1:]:  # before anything is made of them
            rule.check_count(value, path)
        found = read_value(options[0], value, path)
        for rule in options[1:]:
            rule.check(found, path)
        return found
    if origin is Union or origin is types.UnionType:
        return _read_union(options, value, path)
    if origin is Literal:
        value = _whole(value)
        if not any(type(value) is type(option) and value == option for option in options):
            raise InvalidRecordError(f"it must be {_words(map(repr, options))}", path)
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise InvalidRecordError("it must be a list", path)
        return tuple(read_value(options[0], item, (*path, i)) for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise InvalidRecordError("it must be an object", path)
        return {
            read_value(options[0], key, path): read_value(options[1], item, (*path, key))
            for key, item in value.items()
        }
    if isinstance(hint, type) and issubclass(hint, Part):
        return hint.read(value, path)
    return _read_plain(hint, value, path)


def _read_union(options: tuple[Any, ...], value: Any, path: KeyPath) -> Any:
    if value is None and type(None) in options:
        return None
    options = tuple(option for option in options if option is not type(None))
    if len(options) == 1:
        return read_value(options[0], value, path)
    if all(isinstance(option, type) and issubclass(option, Part) for option in options):
        kinds = {get_args(record_hints(option)["kind"])[0]: option for option in options}
        kind = value.get("kind") if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind not in kinds:
            raise InvalidRecordError(f"its kind must be {_words(map(repr, kinds))}", path)
        return kinds[kind].read(value, path)
    if type(value) in options:  # 0.5 and 4.0 are not taken for whole numbers where both may stand
        return read_value(type(value), value, path)
    problems: list[str] = []
    for option in options:
        try:
            return read_value(option, value, path)
        except InvalidRecordError as error:
            problems.append(error.problem)
    raise InvalidRecordError(", or ".join(dict.fromkeys(problems)), path)


def _read_plain(hint: Any, value: Any, path: KeyPath) -> Any:
    if hint is Any:
        _check_json(value, path)
        return value
    if hint is float and type(value) in (int, float):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise InvalidRecordError("it must be a finite number", path)
        return number
    if hint is int:
        value = _whole(value)
        if type(value) is int and not -WHOLE_MAX <= value <= WHOLE_MAX:
            raise InvalidRecordError("it must be a whole number within 2^53", path)
    if type(value) is not hint:
        names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
        raise InvalidRecordError(f"it must be {names[hint]}", path)
    if hint is str:
        _check_text(value, path)
    return value


def _whole(value: Any) -> Any:
    """4.0 as 4; what is not whole as it is."""
    return int(value) if type(value) is float and value.is_integer() else value


def _check_json(value: Any, path: KeyPath) -> None:
    if isinstance(value, str):
        _check_text(value, path)
    elif isinstance(value, float) and not math.isfinite(value):
        raise InvalidRecordError("it must be a finite number", path)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_json(item, (*path, index))
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_text(key, path)
            _check_json(item, (*path, key))


def _check_text(value: str, path: KeyPath) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a pair of surrogates, which JSON can write
        raise InvalidRecordError("it holds characters that do not exist", path) from None


def _plain(value: Any, defaults: bool) -> Any:
    if isinstance(value, Part):
        return value.as_dict(defaults=defaults)
    if isinstance(value, list | tuple):
        return [_plain(item, defaults) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item, defaults) for key, item in value.items()}
    return value


def _words(options: Any) -> str:
    *first, last = options
    return f"{', '.join(first)} or {last}" if first else last
