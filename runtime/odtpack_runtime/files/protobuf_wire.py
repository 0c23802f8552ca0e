"""Protobuf messages as bytes: read field by field, written piece by piece.

To cut an ONNX model, to rename a value or to append a tensor, it is enough to know the numbers
of a few fields; everything else is copied as it stands. Large tensors are never copied more
than once, and no protobuf library is needed.

Source of the format: https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5

Piece = bytes | memoryview
Buffer = memoryview | mmap.mmap


class MalformedError(ValueError):
    """The bytes are not a protobuf message that this walk understands."""


class Field(NamedTuple):
    """A field of a message."""

    number: int
    kind: int  # its wire type
    start: int  # where its tag stands
    body: int  # where its content begins; the same as `start` for no content of its own length
    end: int  # where it ends
    value: int  # the number that a varint holds, or 0


def fields(data: Buffer, at: int = 0, end: int | None = None) -> Iterator[Field]:
    """Yield the fields of a message in order."""
    # `data`: bytes that hold the message; they may be anything.
    end = len(data) if end is None else end
    while at < end:
        start = at
        tag, at = varint(data, at, end)
        number, kind = tag >> 3, tag & 7
        body, value = at, 0
        if kind == VARINT:
            value, at = varint(data, at, end)
        elif kind == FIXED64:
            at += 8
        elif kind == FIXED32:
            at += 4
        elif kind == BYTES:
            length, body = varint(data, at, end)
            at = body + length
        else:
            raise MalformedError("a field is of an unknown kind")
        if at > end or number == 0:
            raise MalformedError("a field reaches beyond its message")
        yield Field(number, kind, start, body, at, value)


def varint(data: Buffer, at: int, end: int) -> tuple[int, int]:
    """Return the number at a place, and the place after it."""
    value = shift = 0
    while at < end and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise MalformedError("a number is cut off")


def text(data: memoryview, found: Field) -> str:
    """Return the text of a field."""
    if found.kind != BYTES:
        raise MalformedError("a field that should be a text is a number")
    try:
        return bytes(data[found.body : found.end]).decode()
    except UnicodeDecodeError as error:
        raise MalformedError("a name is not UTF-8") from error


def texts(data: memoryview, number: int) -> list[str]:
    """Return the texts of all fields of a message that have this number."""
    return [text(data, found) for found in fields(data) if found.number == number]


def name_of(data: memoryview, number: int) -> str:
    """Return the one text of a field; the last one if there are several, as protobuf does."""
    return (texts(data, number) or [""])[-1]


def messages(data: memoryview, number: int) -> list[memoryview]:
    """Return the contents of all fields of a message that have this number."""
    return [
        data[found.body : found.end]
        for found in fields(data)
        if found.number == number and found.kind == BYTES
    ]


def number_field(number: int, value: int) -> bytes:
    """Return a field that holds a whole number, 0 or more."""
    return _varint(number << 3 | VARINT) + _varint(value)


def header(number: int, length: int) -> bytes:
    """Return tag and length of a field of bytes, text or a message."""
    return _varint(number << 3 | BYTES) + _varint(length)


def bytes_field(number: int, pieces: Iterable[Piece]) -> list[Piece]:
    """Return the pieces of a field that holds these pieces one after the other."""
    content = list(pieces)
    return [header(number, size(content)), *content]


def replaced(
    data: memoryview, changes: Mapping[int, Callable[[memoryview], Iterable[Piece]]]
) -> list[Piece]:
    """Return the pieces of a message in which fields of some numbers have other contents."""
    pieces: list[Piece] = []
    for found in fields(data):
        change = changes.get(found.number) if found.kind == BYTES else None
        if change is None:
            pieces.append(data[found.start : found.end])
        else:
            pieces += bytes_field(found.number, change(data[found.body : found.end]))
    return pieces


def size(pieces: Iterable[Piece]) -> int:
    """Return the number of bytes of pieces together."""
    return sum(len(piece) for piece in pieces)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def tensors(message: Any) -> Iterator[Any]:
    """Every tensor in a protobuf message: initializers, attributes, those of subgraphs."""
    if message.DESCRIPTOR.full_name == "onnx.TensorProto":
        yield message
        return
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for inner in [value] if hasattr(value, "ListFields") else value:
                yield from tensors(inner)


def not_text(message: Any) -> Iterator[bytes]:
    """What should be text in an ONNX message, and is not UTF-8."""
    kind = message.DESCRIPTOR.full_name
    if kind == "onnx.TensorProto":  # its values may be gigabytes
        found = [message.name, *(t for e in message.external_data for t in (e.key, e.value))]
        yield from (text for text in found if isinstance(text, bytes))
        return
    if kind == "onnx.NodeProto" and message.domain in ("", "ai.onnx"):
        given = (text for each in message.attribute for text in (each.s, *each.strings))
        yield from (text for text in given if text != text.decode(errors="ignore").encode())
    for field, value in message.ListFields():
        single = isinstance(value, str | bytes) or hasattr(value, "ListFields")
        if field.type == field.TYPE_STRING:
            yield from (text for text in ([value] if single else value) if isinstance(text, bytes))
        elif field.type == field.TYPE_MESSAGE:
            for inner in [value] if single else value:
                yield from not_text(inner)
