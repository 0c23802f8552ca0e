"""Read flatbuffers that have not been verified.

The flatbuffers package for Python reads whatever the offsets say and has no
verifier; generated bindings inherit that. This module reads tables, vectors and
strings from a seekable stream and checks every offset and length against the
stream's size before it uses it, so that a damaged or hostile file ends in an
:class:`OdtpackError` and never in a wild read, an endless loop, or an
allocation larger than the file. No table may be referred to twice, and tables
and strings together are no larger than the file: parsing it takes time
and memory in proportion.

The format, as far as it is needed here (https://flatbuffers.dev/internals/),
all little-endian: a table starts with an int32 that leads back to its vtable;
the vtable is uint16s (its own size, the table's size, then one offset within
the table per field, 0 where the field is absent); strings, vectors and tables
are referred to by a uint32 relative to where that uint32 stands; vectors and
strings start with a uint32 count.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import BinaryIO, Literal, NamedTuple, NoReturn

from odtpack_runtime.errors import OdtpackError

MAX_SIZE = 2**31 - 1
"""Bytes; offsets are 32-bit and the reference verifier accepts no larger buffer."""

MAX_TABLES = 1_000_000
"""The limit of the reference verifier."""

_MAX_FIELDS = 32  # of a table; more exist only in files that are made to be slow to read

_BLOCK = 2**16  # bytes that are read at once, for numbers and short texts
_MOST_BLOCKS = 16
_SHORT = 2**12

_FORMATS: dict[str, struct.Struct] = {code: struct.Struct("<" + code) for code in "Hi?Iqf"}


class Vector(NamedTuple):
    """A vector inside a stream: position of its first element, number of elements."""

    position: int
    length: int


class Source:
    """A seekable binary stream that holds one flatbuffer."""

    # `where`: name of the file.
    # `size`: its bytes.
    # `stream`: the stream; its whole length is the flatbuffer.
    # `limit`: largest size in bytes; None for a file beside the flatbuffer.

    def __init__(
        self, stream: BinaryIO, what: str, where: str, limit: int | None = MAX_SIZE
    ) -> None:
        self._stream = stream
        self._what = what
        self.where = where
        self._tables: set[int] = set()
        self._table_bytes = 0
        self._text = 0
        self._blocks: dict[int, bytes] = {}
        self.size = stream.seek(0, 2)
        if limit is not None and self.size > limit:
            self.fail(f"it has {self.size} bytes, and a flatbuffer has {limit} at most")

    def fail(self, reason: str) -> NoReturn:
        """Raise the error that says why the stream cannot be read."""
        raise OdtpackError(
            f"{self._what}-corrupt",
            f"{self.where} is not a readable {self._what}: {reason}.",
            where=self.where,
        )

    def count_table(self, position: int, size: int) -> None:
        """Count a table that is referred to; no table twice, and all within the stream's size."""
        if position in self._tables:
            self.fail(f"its table at {position} is referred to twice")
        self._tables.add(position)
        self._table_bytes += size
        if len(self._tables) > MAX_TABLES:
            self.fail(f"it holds more than {MAX_TABLES} tables")
        if self._table_bytes > self.size:
            self.fail("its tables overlap")

    def count_text(self, length: int) -> None:
        """Count the bytes of one string; all together may not exceed the stream's size."""
        self._text += length
        if self._text > self.size:
            self.fail("its strings overlap")

    def check(self, position: int, length: int) -> None:
        """Fail unless ``length`` bytes from ``position`` on lie inside the stream."""
        if position < 0 or length < 0 or position + length > self.size:
            self.fail(f"{length} bytes at {position} lie outside its {self.size} bytes")

    def read(self, position: int, length: int) -> bytes:
        """Return ``length`` bytes from ``position`` on."""
        self.check(position, length)
        if length <= _SHORT:
            block, start = self._around(position, length)
            return block[start : start + length]
        self._stream.seek(position)
        data = self._stream.read(length)
        if len(data) != length:
            self.fail("it became shorter while it was read")
        return data

    def _around(self, position: int, length: int) -> tuple[bytes, int]:
        """Return bytes that hold those from ``position`` on, and where these begin."""
        index, start = divmod(position, _BLOCK)
        block = self._blocks.get(index)
        if block is None:
            if len(self._blocks) == _MOST_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            self._stream.seek(index * _BLOCK)
            block = self._blocks[index] = self._stream.read(_BLOCK)
        if start + length <= len(block):
            return block, start
        self._stream.seek(position)
        data = self._stream.read(length)
        if len(data) != length:
            self.fail("it became shorter while it was read")
        return data, 0

    def read_into(self, position: int, target: memoryview) -> None:
        """Fill ``target``, a view of bytes, from ``position`` on."""
        self.check(position, len(target))
        self._stream.seek(position)
        done = 0
        while done < len(target):
            count = self._stream.readinto(target[done:])  # type: ignore[attr-defined]
            if not count:
                self.fail("it became shorter while it was read")
            done += count

    def number(self, code: Literal["H", "i", "?", "I", "q", "f"], position: int) -> int | float:
        """Return the number of ``struct`` format ``code`` at ``position``."""
        parser = _FORMATS[code]
        self.check(position, parser.size)
        value: int | float = parser.unpack_from(*self._around(position, parser.size))[0]
        return value

    def integer(self, code: Literal["H", "i", "I", "q"], position: int) -> int:
        """Return the integer of ``struct`` format ``code`` at ``position``."""
        return int(self.number(code, position))

    def root(self, identifier: bytes) -> Table:
        """Return the root table of a flatbuffer whose file identifier is ``identifier``."""
        if self.size < 8:
            self.fail(f"it has {self.size} bytes")
        if self.read(4, 4) != identifier:
            self.fail(f"it does not carry the identifier {identifier.decode()}")
        return self.table(self.integer("I", 0))

    def table(self, position: int) -> Table:
        """Return a table that is referred to for the first time."""
        found = Table(self, position)
        self.count_table(position, found.size)
        return found

    def count(self, pattern: bytes, most: int) -> int:
        """Return how often a regular expression, of ``most`` bytes at most, is found."""
        found, kept = 0, b""
        self._stream.seek(0)
        while piece := self._stream.read(2**20):
            ends = [match.end() for match in re.finditer(pattern, kept + piece)]
            found += len(ends)
            kept = (kept + piece)[max(ends[-1] if ends else 0, len(kept + piece) - most + 1) :]
        return found


class Table:
    """A table of a :class:`Source`; fields are addressed by their number in the schema."""

    # `size`: its bytes.

    __slots__ = ("_fields", "_position", "_source", "size")

    def __init__(self, source: Source, position: int) -> None:
        self._source = source
        self._position = position
        vtable = position - source.integer("i", position)
        vtable_size = source.integer("H", vtable)
        self.size = source.integer("H", vtable + 2)
        if vtable_size < 4 or vtable_size % 2 or self.size < 4:
            source.fail(f"the table at {position} has a malformed vtable")
        source.check(position, self.size)
        source.check(vtable, vtable_size)
        count = min(vtable_size // 2 - 2, _MAX_FIELDS)
        self._fields = struct.unpack(f"<{count}H", source.read(vtable + 4, 2 * count))

    def field(self, number: int, width: int) -> int | None:
        """Return the position of a field of ``width`` bytes; None if it is absent."""
        offset = self._fields[number] if number < len(self._fields) else 0
        if offset == 0:
            return None
        if offset < 4 or offset + width > self.size:
            self._source.fail(f"a field of the table at {self._position} lies outside the table")
        return self._position + int(offset)

    def integer(self, number: int, code: Literal["i", "q"], default: int = 0) -> int:
        """Return an int32 (``i``) or int64 (``q``) field."""
        position = self.field(number, _FORMATS[code].size)
        return default if position is None else self._source.integer(code, position)

    def real(self, number: int) -> float:
        """Return a float32 field; 0.0 if it is absent."""
        position = self.field(number, 4)
        return 0.0 if position is None else float(self._source.number("f", position))

    def boolean(self, number: int) -> bool:
        """Return a bool field; False if it is absent."""
        position = self.field(number, 1)
        return position is not None and bool(self._source.number("?", position))

    def vector(self, number: int, width: int) -> Vector | None:
        """Return where a vector of elements of ``width`` bytes lies; None if it is absent."""
        slot = self.field(number, 4)
        return None if slot is None else self._vector(slot, width)

    def _vector(self, slot: int, width: int) -> Vector:
        position = slot + self._source.integer("I", slot)
        count = self._source.integer("I", position)
        self._source.check(position + 4, count * width)
        return Vector(position + 4, count)

    def string(self, number: int) -> str:
        """Return a string field; empty if it is absent."""
        slot = self.field(number, 4)
        return "" if slot is None else self._text(slot)

    def strings(self, number: int) -> Iterator[str]:
        """Yield the strings of a vector; none if it is absent."""
        vector = self.vector(number, 4)
        if vector is not None:
            for index in range(vector.length):
                yield self._text(vector.position + 4 * index)

    def _text(self, slot: int) -> str:
        vector = self._vector(slot, 1)
        self._source.count_text(vector.length)
        text = self._source.read(vector.position, vector.length + 1)
        if text[-1]:
            self._source.fail(f"the text at {vector.position} does not end with a zero byte")
        try:
            return text[:-1].decode()
        except UnicodeDecodeError:
            self._source.fail(f"the text at {vector.position} is not UTF-8")

    def integers(self, number: int, limit: int) -> tuple[int, ...]:
        """Return a vector of int64; empty if it is absent. Fails above ``limit`` elements."""
        vector = self.vector(number, 8)
        if vector is None:
            return ()
        if vector.length > limit:
            self._source.fail(f"the vector at {vector.position} has more than {limit} elements")
        data = self._source.read(vector.position, vector.length * 8)
        return struct.unpack(f"<{vector.length}q", data)

    def table(self, number: int) -> Table | None:
        """Return the table that a field refers to; None if it is absent."""
        slot = self.field(number, 4)
        return None if slot is None else self._follow(slot)

    def tables(self, number: int) -> Iterator[Table]:
        """Yield the tables of a vector, each when it is asked for; none if it is absent."""
        vector = self.vector(number, 4)
        if vector is not None:
            for index in range(vector.length):
                yield self._follow(vector.position + 4 * index)

    def count(self, number: int) -> int:
        """Return the length of a vector of tables; 0 if it is absent."""
        vector = self.vector(number, 4)
        return 0 if vector is None else vector.length

    def _follow(self, slot: int) -> Table:
        return self._source.table(slot + self._source.integer("I", slot))
