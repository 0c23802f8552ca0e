"""What a model may not ask of ONNX Runtime: other files, memory, options of the session.

A tensor with external data names a file, by any path in older releases, and since 1.22 may name
memory of the process (``*/_ORT_MEM_ADDR_/*``); the entry ``ort_config`` of the metadata sets
options where ``ORT_LOAD_CONFIG_FROM_MODEL`` is set.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection
from pathlib import Path
from typing import Final

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.protobuf_wire import BYTES, VARINT, MalformedError, fields, messages

_LOCATION, _CONFIG = b"location", b"ort_config"
ORT_IDENTIFIER: Final = b"ORTM"
"""Bytes 4 to 8 of a model in ORT format."""

_METADATA: Final = ("model", 14)
_INNER: Final = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
"""Messages of onnx.proto that lead to tensors, by number of the field."""
_TENSOR_NAME, _EXTERNAL_DATA, _DATA_LOCATION, _EXTERNAL = 8, 13, 14, 1


def is_in_ort_format(path: Path) -> bool:
    """Whether ONNX Runtime will read a file as one in ORT format: it looks at the name alone."""
    return path.suffix.lower() == ".ort"


def outside_tensor(path: Path, name: str) -> OdtpackError:
    """The error for a model with a tensor in another file."""
    return OdtpackError(
        "model-external-data",
        f"{path.name} reads its tensor {name!r} from another file, and the models of a package "
        "must contain theirs.",
        where=str(path),
    )


def check_model_file(path: Path, beside: Collection[str] = ()) -> None:
    """Refuse a model that asks for what is not in it."""
    # `beside`: files of its folder that its tensors may lie in.
    # A file in ORT format cannot: ONNX Runtime reads no external data of it when it infers.
    try:
        with path.open("rb") as stream, mmap.mmap(
            stream.fileno(), 0, access=mmap.ACCESS_READ
        ) as content:  # fmt: skip
            in_ort_format = content[4:8] == ORT_IDENTIFIER
            if in_ort_format and is_in_ort_format(path):
                return
            # Most models are not parsed: either needs a name in the file.
            if content.find(_LOCATION) == content.find(_CONFIG) == -1 and not in_ort_format:
                return
            data = b"" if in_ort_format else content[:]
    except (OSError, ValueError):  # not readable or empty, as ONNX Runtime will say
        return
    if in_ort_format:
        # The letters can be part of an ONNX model as well: it would be read as either.
        raise OdtpackError(
            "model-not-loadable",
            f"{path.name} begins as a model in ORT format does, and its name does not end in .ort.",
            where=str(path),
            hint="name it .ort",
        )
    try:
        _check(memoryview(data), path, frozenset(name.encode() for name in beside))
    except MalformedError as error:
        what = f"{path} is not an ONNX model: {error}."
        raise OdtpackError("model-not-loadable", what, where=str(path)) from error


def _check(data: memoryview, path: Path, beside: Collection[bytes]) -> None:
    waiting = [("model", 0, len(data))]
    while waiting:
        message, start, end = waiting.pop()
        for found in fields(data, start, end):
            if found.kind == BYTES and (inner := _INNER[message].get(found.number)):
                waiting.append((inner, found.body, found.end))
            elif (message, found.number) == _METADATA and found.kind == BYTES:
                if _CONFIG in messages(data[found.body : found.end], 1):
                    raise OdtpackError(
                        "bad-metadata",
                        f"The metadata of {path.name} hold ort_config, options that its session "
                        "would take.",
                        where=str(path),
                    )
            elif message == "tensor" and (
                (found.number == _EXTERNAL_DATA and found.kind == BYTES)
                or (found.number, found.kind, found.value) == (_DATA_LOCATION, VARINT, _EXTERNAL)
            ):
                entries = [*map(_entry, messages(data[start:end], _EXTERNAL_DATA))]
                places = {value for key, value in entries if key == _LOCATION}
                if places and places.issubset(beside):
                    continue
                names = messages(data[start:end], _TENSOR_NAME)
                name = b"".join(names[-1:]).decode(errors="replace")
                raise outside_tensor(path, name)


def _entry(entry: memoryview) -> tuple[bytes, bytes]:
    key, value = (b"".join(messages(entry, number)[-1:]) for number in (1, 2))
    return key, value
