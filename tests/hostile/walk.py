"""Where a checkpoint has its tables, fields, offsets and lengths, by the schema alone."""

import struct
from collections.abc import Iterator
from typing import Literal, NamedTuple

Kind = Literal["vtable offset", "vtable size", "table size", "field", "offset", "length"]


class Place(NamedTuple):
    """A number of a flatbuffer: what it is, of what, where and how many bytes it has."""

    kind: Kind
    path: str
    position: int
    width: int


_TENSOR = {0: "s", 1: "s", 2: "v8", 4: "v1", 5: "vs"}
_PROPERTY = {0: "s"}
_SCHEMA: dict[str, dict[int, object]] = {
    "Checkpoint": {1: "ModuleState", 2: ["OptimizerGroup"], 3: "PropertyBag", 4: "s"},
    "ModuleState": {0: ["Tensor"], 1: ["Tensor"]},
    "OptimizerGroup": {0: "s", 3: ["ParameterOptimizerState"]},
    "ParameterOptimizerState": {0: "s", 1: ["Tensor"]},
    "PropertyBag": {0: ["Int"], 1: ["Float"], 2: ["String"]},
    "Tensor": dict(_TENSOR),
    "Int": dict(_PROPERTY),
    "Float": dict(_PROPERTY),
    "String": {0: "s", 1: "s"},
}


def places(data: bytes) -> Iterator[Place]:
    """Yield every number that leads somewhere else, of a whole checkpoint."""
    yield Place("offset", "root", 0, 4)
    yield from _table(data, struct.unpack_from("<I", data)[0], "Checkpoint", "root")


def _table(data: bytes, at: int, kind: str, path: str) -> Iterator[Place]:
    vtable = at - struct.unpack_from("<i", data, at)[0]
    size = struct.unpack_from("<H", data, vtable)[0]
    yield Place("vtable offset", path, at, 4)
    yield Place("vtable size", path, vtable, 2)
    yield Place("table size", path, vtable + 2, 2)
    for number in range((size - 4) // 2):
        entry = vtable + 4 + 2 * number
        offset = struct.unpack_from("<H", data, entry)[0]
        if not offset:
            continue
        inner = f"{path}.{number}"
        yield Place("field", inner, entry, 2)
        what = _SCHEMA[kind].get(number)
        if what is None:
            continue
        slot = at + offset
        yield Place("offset", inner, slot, 4)
        target = slot + struct.unpack_from("<I", data, slot)[0]
        if isinstance(what, list):
            yield Place("length", inner, target, 4)
            count = struct.unpack_from("<I", data, target)[0]
            for index in range(count):
                each = target + 4 + 4 * index
                yield Place("offset", f"{inner}[{index}]", each, 4)
                to = each + struct.unpack_from("<I", data, each)[0]
                yield from _table(data, to, what[0], f"{inner}[{index}]")
        elif what in _SCHEMA:
            yield from _table(data, target, str(what), inner)
        else:
            yield Place("length", inner, target, 4)


def field_entry(data: bytes, *numbers: int) -> int:
    """Position of the vtable's entry of a field; the way there goes through single tables."""
    at = struct.unpack_from("<I", data)[0]
    for step, number in enumerate(numbers):
        vtable = at - struct.unpack_from("<i", data, at)[0]
        entry = vtable + 4 + 2 * number
        if step == len(numbers) - 1:
            return int(entry)
        slot = at + struct.unpack_from("<H", data, entry)[0]
        at = slot + struct.unpack_from("<I", data, slot)[0]
    raise ValueError(numbers)
