"""Takes the large tensors out of the bytes of a model file, before protobuf copies them.

Parsing a file the ordinary way holds every weight twice: in the file's bytes and in the
message. Here a walk over the wire format finds the ``raw_data`` of each initializer, and
leaves them out of what protobuf is given; where they stand in the file is all that is
remembered. It knows three nested fields and nothing else; a file that it does not
understand is handed to protobuf as it is, which has the last word about what is valid.

Source of the format: protobuf.dev/programming-guides/encoding; field numbers from onnx.proto.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9
_EXTERNAL_DATA, _DATA_LOCATION = 13, 14
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
LEAST = 1024
"""Bytes below which a tensor stays in the message."""


@dataclasses.dataclass(frozen=True)
class Span:
    """Where the bytes of a tensor stand in a file."""

    offset: int
    length: int


class _MalformedError(Exception):
    """The bytes are no protobuf message that this walk understands."""


def detach(data: memoryview) -> tuple[bytes | memoryview, dict[int, Span]]:
    """Leave the large ``raw_data`` of a model's initializers out.

    Args:
        data: Bytes of a serialized ``ModelProto``; they may be anything.

    Returns:
        The message without them, and the place of each by the initializer's index.
    """
    spans: dict[int, Span] = {}
    chunks: list[bytes | memoryview] = []
    count = 0
    try:
        for number, start, body, end in _fields(data, 0, len(data)):
            if number != _GRAPH or body is None:
                chunks.append(data[start:end])
                continue
            graph, count = _graph(data, body, end, spans, count)
            chunks += [_header(_GRAPH, sum(map(len, graph))), *graph]
    except _MalformedError:
        return data, {}
    return (b"".join(chunks), spans) if spans else (data, {})


def _graph(
    data: memoryview, start: int, end: int, spans: dict[int, Span], count: int
) -> tuple[list[bytes | memoryview], int]:
    """The pieces of a graph without its large tensors, and the number of initializers so far."""
    pieces: list[bytes | memoryview] = []
    kept = start  # what lies between two initializers is copied in one piece
    for number, at, body, stop in _fields(data, start, end):
        if number != _INITIALIZER or body is None:
            continue
        raw = _raw_data(data, body, stop)
        if raw is not None:
            tag, raw_end, span = raw
            rest = [data[body:tag], data[raw_end:stop]]
            pieces += [data[kept:at], _header(_INITIALIZER, sum(map(len, rest))), *rest]
            spans[count] = span
            kept = stop
        count += 1
    pieces.append(data[kept:end])
    return pieces, count


def _raw_data(data: memoryview, start: int, end: int) -> tuple[int, int, Span] | None:
    """Start and end of the one large ``raw_data`` field of a tensor, and its bytes."""
    found = None
    for number, at, body, stop in _fields(data, start, end):
        if number in (_EXTERNAL_DATA, _DATA_LOCATION):
            return None
        if number == _RAW_DATA:
            if found is not None or body is None:
                return None
            found = at, stop, Span(body, stop - body)
    return found if found is not None and found[2].length >= LEAST else None


def _fields(data: memoryview, at: int, end: int) -> Iterator[tuple[int, int, int | None, int]]:
    """Yield (number, start, start of a length-delimited body or None, end) of each field."""
    while at < end:
        start = at
        tag, at = _varint(data, at, end)
        number, kind = tag >> 3, tag & 7
        body = None
        if kind == _VARINT:
            _, at = _varint(data, at, end)
        elif kind == _FIXED64:
            at += 8
        elif kind == _FIXED32:
            at += 4
        elif kind == _BYTES:
            length, body = _varint(data, at, end)
            at = body + length
        else:
            raise _MalformedError
        if at > end or number == 0:
            raise _MalformedError
        yield number, start, body, at


def _varint(data: memoryview, at: int, end: int) -> tuple[int, int]:
    """The number at a place, and the place behind it."""
    value = shift = 0
    while at < end and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise _MalformedError


def _header(number: int, length: int) -> bytes:
    """Tag and length of a length-delimited field."""
    out = bytearray([number << 3 | _BYTES])
    while length >= 0x80:
        out.append(length & 0x7F | 0x80)
        length >>= 7
    out.append(length)
    return bytes(out)
