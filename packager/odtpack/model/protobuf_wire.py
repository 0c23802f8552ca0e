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

from odtpack_runtime.files.protobuf_wire import BYTES, MalformedError, fields, header

_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9
_EXTERNAL_DATA, _DATA_LOCATION = 13, 14
LEAST = 1024
"""Bytes below which a tensor stays in the message."""


@dataclasses.dataclass(frozen=True)
class Span:
    """Where the bytes of a tensor stand in a file."""

    offset: int
    length: int


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
        for found in fields(data):
            if found.number != _GRAPH or found.kind != BYTES:
                chunks.append(data[found.start : found.end])
                continue
            graph, count = _graph(data, found.body, found.end, spans, count)
            chunks += [header(_GRAPH, sum(map(len, graph))), *graph]
    except MalformedError:
        return data, {}
    return (b"".join(chunks), spans) if spans else (data, {})


def _graph(
    data: memoryview, start: int, end: int, spans: dict[int, Span], count: int
) -> tuple[list[bytes | memoryview], int]:
    """The pieces of a graph without its large tensors, and the number of initializers so far."""
    pieces: list[bytes | memoryview] = []
    kept = start  # what lies between two initializers is copied in one piece
    for found in fields(data, start, end):
        if found.number != _INITIALIZER or found.kind != BYTES:
            continue
        raw = _raw_data(data, found.body, found.end)
        if raw is not None:
            tag, raw_end, span = raw
            rest = [data[found.body : tag], data[raw_end : found.end]]
            pieces += [data[kept : found.start], header(_INITIALIZER, sum(map(len, rest))), *rest]
            spans[count] = span
            kept = found.end
        count += 1
    pieces.append(data[kept:end])
    return pieces, count


def _raw_data(data: memoryview, start: int, end: int) -> tuple[int, int, Span] | None:
    """Start and end of the one large ``raw_data`` field of a tensor, and its bytes."""
    found = None
    for each in fields(data, start, end):
        if each.number in (_EXTERNAL_DATA, _DATA_LOCATION):
            return None
        if each.number == _RAW_DATA:
            if found is not None or each.kind != BYTES:
                return None
            found = each.start, each.end, Span(each.body, each.end - each.body)
    return found if found is not None and found[2].length >= LEAST else None
