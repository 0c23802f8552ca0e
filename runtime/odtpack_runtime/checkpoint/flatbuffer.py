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

_SHORT = 2**12
_BLOCK = 2**16  # bytes; numbers and what is short are read in windows of a block and _SHORT more
_MOST_WINDOWS = 16
_MOST_VTABLES = 64  # that are kept: writers store equal ones once

_FORMATS: dict[str, struct.Struct] = {code: struct.Struct("<" + code) for code in "HiIqf"}


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
        self.text = 0  # bytes of the strings that were read
        self._windows: dict[int, bytes] = {}
        self._window = b""  # the one that was read last, and where it begins
        self._begin = 0
        self._vtables: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.size = stream.seek(0, 2)
        if limit is not None and self.size > limit:
            self.fail(f"it has {self.size} bytes, and a flatbuffer has {limit} at most")

    def fail(self, reason: str) -> NoReturn:
        """Raise the error that says why the stream cannot be read."""
        what = f"{self.where} is not a readable {self._what}: {reason}."
        raise OdtpackError(f"{self._what}-corrupt", what, where=self.where)

    def check(self, position: int, length: int) -> None:
        """Fail unless ``length`` bytes from ``position`` on lie inside the stream."""
        if position < 0 or length < 0 or position + length > self.size:
            self.fail(f"{length} bytes at {position} lie outside its {self.size} bytes")

    def read(self, position: int, length: int) -> bytes:
        """Return ``length`` bytes from ``position`` on."""
        if length <= _SHORT:
            start = self._start(position, length)
            return self._window[start : start + length]
        self.check(position, length)
        self._stream.seek(position)
        data = self._stream.read(length)
        if len(data) != length:
            self.fail("it became shorter while it was read")
        return data

    def _start(self, position: int, length: int) -> int:
        """Return where ``length`` bytes, few, from ``position`` on begin in the window."""
        start = position - self._begin
        if start >= 0 and 0 <= length <= len(self._window) - start:
            return start
        self.check(position, length)
        index, start = divmod(position, _BLOCK)
        window = self._windows.get(index)
        if window is None:
            if len(self._windows) == _MOST_WINDOWS:
                del self._windows[next(iter(self._windows))]
            self._stream.seek(index * _BLOCK)
            window = self._windows[index] = self._stream.read(_BLOCK + _SHORT)
        if start + length > len(window):
            self.fail("it became shorter while it was read")
        self._window, self._begin = window, index * _BLOCK
        return start

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

    def number(self, code: Literal["H", "i", "I"], position: int) -> int:
        """Return the integer of ``struct`` format ``code`` at ``position``."""
        parser = _FORMATS[code]
        start = self._start(position, parser.size)
        value: int = parser.unpack_from(self._window, start)[0]
        return value

    def vtable(self, position: int) -> tuple[int, tuple[int, ...]]:
        """Return a table's bytes and its fields' offsets, 0 for one that is absent."""
        found = self._vtables.get(position)
        if found is None:
            length, size = self.number("H", position), self.number("H", position + 2)
            if length < 4 or length % 2 or size < 4:
                self.fail(f"the vtable at {position} is malformed")
            self.check(position, length)
            count = min(length // 2 - 2, _MAX_FIELDS)
            found = size, struct.unpack(f"<{count}H", self.read(position + 4, 2 * count))
            if len(self._vtables) == _MOST_VTABLES:
                self._vtables.clear()
            self._vtables[position] = found
        return found

    def root(self, identifier: bytes) -> Table:
        """Return the root table of a flatbuffer whose file identifier is ``identifier``."""
        if self.size < 8:
            self.fail(f"it has {self.size} bytes")
        if self.read(4, 4) != identifier:
            self.fail(f"it does not carry the identifier {identifier.decode()}")
        return self.table(self.number("I", 0))

    def table(self, position: int) -> Table:
        """Return a table that is referred to; no table twice, and all within the stream's size."""
        found = Table(self, position)
        if position in self._tables:
            self.fail(f"its table at {position} is referred to twice")
        self._tables.add(position)
        self._table_bytes += found.size
        if len(self._tables) > MAX_TABLES:
            self.fail(f"it holds more than {MAX_TABLES} tables")
        if self._table_bytes > self.size:
            self.fail("its tables overlap")
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

    __slots__ = ("_data", "_fields", "_position", "_source", "size")

    def __init__(self, source: Source, position: int) -> None:
        self._source = source
        self._position = position
        self.size, self._fields = source.vtable(position - source.number("i", position))
        self._data = source.read(position, self.size)

    def _offset(self, number: int, width: int) -> int:
        """Return where a field of ``width`` bytes begins in the table; 0 if it is absent."""
        offset = self._fields[number] if number < len(self._fields) else 0
        if offset and (offset < 4 or offset + width > self.size):
            self._source.fail(f"a field of the table at {self._position} lies outside the table")
        return offset

    def slot(self, number: int) -> int:
        """Return where a field of four bytes that is there stands."""
        return self._position + self._offset(number, 4)

    def integer(self, number: int, code: Literal["i", "q"], default: int = 0) -> int:
        """Return an int32 (``i``) or int64 (``q``) field."""
        parser = _FORMATS[code]
        offset = self._offset(number, parser.size)
        value: int = parser.unpack_from(self._data, offset)[0] if offset else default
        return value

    def real(self, number: int) -> float:
        """Return a float32 field; 0.0 if it is absent."""
        offset = self._offset(number, 4)
        value: float = _FORMATS["f"].unpack_from(self._data, offset)[0] if offset else 0.0
        return value

    def boolean(self, number: int) -> bool:
        """Return a bool field; False if it is absent."""
        offset = self._offset(number, 1)
        return bool(offset and self._data[offset])

    def _referred(self, number: int) -> int | None:
        """Return the position that a field refers to; None if it is absent."""
        offset = self._offset(number, 4)
        if not offset:
            return None
        relative: int = _FORMATS["I"].unpack_from(self._data, offset)[0]
        return self._position + offset + relative

    def vector(self, number: int, width: int) -> Vector | None:
        """Return where a vector of elements of ``width`` bytes lies; None if it is absent."""
        position = self._referred(number)
        return None if position is None else self._vector(position, width)

    def _vector(self, position: int, width: int) -> Vector:
        count = self._source.number("I", position)
        self._source.check(position + 4, count * width)
        return Vector(position + 4, count)

    def string(self, number: int) -> str:
        """Return a string field; empty if it is absent."""
        position = self._referred(number)
        return "" if position is None else self._text(position)

    def strings(self, number: int) -> Iterator[str]:
        """Yield the strings of a vector; none if it is absent."""
        return map(self._text, self._elements(number))

    def _text(self, position: int) -> str:
        position, length = self._vector(position, 1)
        self._source.text += length
        if self._source.text > self._source.size:
            self._source.fail("its strings overlap")
        text = self._source.read(position, length + 1)
        if text[-1]:
            self._source.fail(f"the text at {position} does not end with a zero byte")
        try:
            return text[:-1].decode()
        except UnicodeDecodeError:
            self._source.fail(f"the text at {position} is not UTF-8")

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
        position = self._referred(number)
        return None if position is None else self._source.table(position)

    def tables(self, number: int) -> Iterator[Table]:
        """Yield the tables of a vector, each when it is asked for; none if it is absent."""
        return map(self._source.table, self._elements(number))

    def _elements(self, number: int) -> Iterator[int]:
        """Yield the positions that a vector's elements refer to; none if it is absent."""
        vector = self.vector(number, 4)
        if vector is not None:
            for slot in range(vector.position, vector.position + 4 * vector.length, 4):
                yield slot + self._source.number("I", slot)

    def count(self, number: int) -> int:
        """Return the length of a vector of tables; 0 if it is absent."""
        vector = self.vector(number, 4)
        return 0 if vector is None else vector.length
