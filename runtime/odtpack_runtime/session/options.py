"""How ONNX Runtime runs a training model best, where the user asks for nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import onnxruntime

_METADATA = 14  # number of the field metadata_props in ModelProto
_LEVELS = {
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


def default_session_options(
    train_model_uri: str | os.PathLike[str], threads: int | None = None
) -> onnxruntime.SessionOptions:
    """Return ONNX Runtime's defaults, with three exceptions.

    - Memory patterns are off. A pattern keeps one block for the peak of a whole run beside
      the arena that the first run filled: a step of MobileNetV2 takes 139 MiB instead of
      218 without it, as fast.
    - The optimization level is the one that the packager recorded in the model. ``extended``
      leaves out the layout for constant convolution weights, which a model whose weights
      are all inputs pays for and does not gain from. ``basic`` is for float64, which fused
      operators would round to float32 in places.
    - Threads rest between runs, see :func:`rest_between_runs`.

    Args:
        train_model_uri: Training model; a file that cannot be read gives the defaults.
        threads: Threads within an operator; ONNX Runtime's choice if None.
    """
    options = onnxruntime.SessionOptions()
    options.enable_mem_pattern = False
    level = _LEVELS.get(read_metadata(Path(train_model_uri)).get("odtpack.optimization_level", ""))
    if level is not None:
        options.graph_optimization_level = level
    if threads is not None:
        options.intra_op_num_threads = threads
    rest_between_runs(options)
    return options


def rest_between_runs(options: onnxruntime.SessionOptions) -> None:
    """Let the threads of a session stop to spin as soon as its run ends.

    A training has a session for the training model and one for the optimizer, each with
    threads of its own. By default they go on to spin for a while after a run, to be there
    for the next one, and so take the cores from the other session, whose turn it is.
    """
    options.add_session_config_entry("session.force_spinning_stop", "1")


def read_metadata(path: Path) -> dict[str, str]:
    """Metadata of an ONNX file, without loading its graph; empty if there is none to read.

    Options must be chosen before a session exists that could be asked. The file is a
    protobuf message: fields of (number, type), length and content, all but one skipped.
    """
    found: dict[str, str] = {}
    try:
        with path.open("rb") as stream:
            end = stream.seek(0, os.SEEK_END)
            stream.seek(0)
            while stream.tell() < end:
                number, kind = divmod(_varint(stream), 8)
                if kind == 0:
                    _varint(stream)
                    continue
                if kind != 2:
                    return found
                length = _varint(stream)
                if length > end - stream.tell():
                    return found
                if number == _METADATA:
                    key, value = _pair(stream, stream.tell() + length)
                    found[key] = value
                else:
                    stream.seek(length, os.SEEK_CUR)
    except (OSError, ValueError):
        return found
    return found


def _pair(stream: BinaryIO, end: int) -> tuple[str, str]:
    """A StringStringEntryProto: field 1 is the key, field 2 the value."""
    parts = {1: "", 2: ""}
    while stream.tell() < end:
        number, kind = divmod(_varint(stream), 8)
        if kind != 2:
            raise ValueError("not a text field")
        length = _varint(stream)
        if length > end - stream.tell():
            raise ValueError("a text reaches past its message")
        parts[number] = stream.read(length).decode()
    return parts[1], parts[2]


def _varint(stream: BinaryIO) -> int:
    """Base-128 number, lowest seven bits first; at most ten bytes."""
    value = 0
    for shift in range(0, 70, 7):
        byte = stream.read(1)
        if not byte:
            raise ValueError("the file ends in a number")
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    raise ValueError("a number has more than ten bytes")
