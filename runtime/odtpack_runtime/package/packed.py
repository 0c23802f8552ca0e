"""A decoder's weights as ONNX Runtime packs them for a processor, in a file that is mapped.

ONNX Runtime packs the weights of ``MatMulNBits`` into memory of the process when it loads them. It
can write them into a file beside the model instead, and maps them from there. To write them it has
all of them in memory, so that they are packed part by part here, each part as a model of its own.

Source of the entries ``prepacked_0``, ... of a tensor's external data,
``key|offset;length;checksum|...``: ``core/framework/tensor_external_data_info.cc`` of ONNX Runtime.
"""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

import onnxruntime

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.export.onnx_wire import (
    GRAPH_NAME,
    INITIALIZERS,
    INPUTS,
    MODEL_GRAPH,
    MODEL_IR_VERSION,
    MODEL_OPSETS,
    NODES,
    OUTPUTS,
    TENSOR_EXTERNAL,
    TENSOR_TYPE,
    VALUE_INFO,
    Node,
    tensor_name,
    value_name,
)
from odtpack_runtime.files.atomic import locked, sync_folder
from odtpack_runtime.files.protobuf_wire import (
    Piece,
    bytes_field,
    fields,
    messages,
    name_of,
    number_field,
    replaced,
)
from odtpack_runtime.session.mapped_weights import give_back_freed_memory
from odtpack_runtime.session.session import open_session

ENTRY: Final = "odtpack.packed_weights"
"""Session option: a folder that keeps packed weights of decoders."""

_MODEL, _WEIGHTS, _SIZES = "decoder.onnx", "decoder.weights", "sizes"
_START: Final = "odtpack-packed-"
_PART, _PACKED = "part.onnx", "packed"
_AT_ONCE: Final = 32 << 20
"""Bytes of weights that are packed together; the packed ones are all in memory until written."""
_PAGE, _CHUNK = 4096, 1 << 20
_FLOATING: Final = (1, 10)  # codes of float32 and float16


def open_decoder(
    decoder: Path, options: onnxruntime.SessionOptions, beside: Collection[str], package_sha256: str
) -> onnxruntime.InferenceSession:
    """Open a decoder, from packed weights where the options name a folder for them."""
    # `beside`: files of its folder that its tensors may lie in.
    try:
        folder = Path(options.get_session_config_entry(ENTRY))
    except RuntimeError:  # there is no such entry
        return open_session(decoder, options, beside=beside)
    target = folder / f"{_START}{_key(package_sha256, options)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):  # until it is open: whoever packs another decoder removes this one
            with suppress(OSError, OdtpackError):  # some is missing, or damaged: write it anew
                if (target / _SIZES).read_bytes() == _sizes(target):
                    return open_session(target / _MODEL, options, beside=(_WEIGHTS,))
            for stale in folder.glob(f"{_START}*"):
                if stale.is_dir():
                    shutil.rmtree(stale)
                else:
                    stale.unlink()
            _write(decoder, options, beside, target)
            return open_session(target / _MODEL, options, beside=(_WEIGHTS,))
    except OSError as error:
        what = f"Packed weights cannot be kept in {folder}: {error.strerror}."
        raise OdtpackError("packed-not-written", what, where=str(folder)) from error


def _sizes(folder: Path) -> bytes:
    """Return the sizes of the model and its weights: ONNX Runtime maps what it does not check."""
    sizes = ((folder / name).stat().st_size for name in (_MODEL, _WEIGHTS))
    return " ".join(map(str, sizes)).encode()


def _write(
    decoder: Path, options: onnxruntime.SessionOptions, beside: Collection[str], target: Path
) -> None:
    stage = target.with_name(f"{target.name}.part")
    stage.mkdir()
    try:
        try:
            # The optimized decoder first, with its weights as they are: what it folds is there.
            _save(decoder, options, beside, stage / _MODEL, packed=False)
            _pack(stage, options)
        except OdtpackError as error:
            what = f"Packed weights cannot be written: {error.what}"
            if shutil.disk_usage(stage).free < _CHUNK:  # ONNX Runtime does not name the cause
                what = f"Packed weights cannot be written: {os.strerror(errno.ENOSPC)}."
            raise OdtpackError("packed-not-written", what, where=str(target.parent)) from error
        (stage / _SIZES).write_bytes(_sizes(stage))
        for path in stage.iterdir():
            with path.open("r+b") as stream:
                os.fsync(stream.fileno())
        sync_folder(stage)
        stage.rename(target)
        sync_folder(target.parent)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _save(
    model: Path,
    like: onnxruntime.SessionOptions,
    beside: Collection[str],
    out: Path,
    *,
    packed: bool,
) -> None:
    """Let ONNX Runtime write a model and its weights, which it packs or leaves as they are."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = like.log_severity_level
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = (
        level.ORT_DISABLE_ALL if packed else level.ORT_ENABLE_EXTENDED
    )
    entries = {
        "session.optimized_model_external_initializers_file_name": f"{out.stem}.weights",
        "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
        "session.save_external_prepacked_constant_initializers": str(int(packed)),
        "session.disable_prepacking": str(int(not packed)),
        **_choices(like),
    }
    for name, value in entries.items():
        options.add_session_config_entry(name, value)
    options.optimized_model_filepath = str(out)
    open_session(model, options, beside=beside)
    give_back_freed_memory()


def _choices(options: onnxruntime.SessionOptions) -> dict[str, str]:
    """Return the entries of options that decide how weights are packed, where they are set."""
    found = {}
    for name in ("mlas.disable_kleidiai", "mlas.use_lut_gemm"):
        with suppress(RuntimeError):  # there is no such entry
            found[name] = options.get_session_config_entry(name)
    return found


def _pack(stage: Path, options: onnxruntime.SessionOptions) -> None:
    """Pack the weights of a decoder part by part, behind the others in the file."""
    data = memoryview((stage / _MODEL).read_bytes())
    (graph,) = messages(data, MODEL_GRAPH)
    given = {*map(value_name, messages(graph, INPUTS))}  # an adapter's tensors are not constants
    tensors = {tensor_name(each): each for each in messages(graph, INITIALIZERS)}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in given}
    known = {value_name(v): v for number in (INPUTS, VALUE_INFO) for v in messages(graph, number)}
    head = [
        data[f.start : f.end] for f in fields(data) if f.number in (MODEL_IR_VERSION, MODEL_OPSETS)
    ]
    entries: dict[str, list[Piece]] = {}
    with (stage / _WEIGHTS).open("ab") as weights:
        for nodes in _parts(graph, tensors):
            model = [*head, *bytes_field(MODEL_GRAPH, _graph_of(nodes, tensors, known))]
            (stage / _PART).write_bytes(b"".join(model))
            _save(stage / _PART, options, (_WEIGHTS,), stage / f"{_PACKED}.onnx", packed=True)
            packed = memoryview((stage / f"{_PACKED}.onnx").read_bytes())
            with (stage / f"{_PACKED}.weights").open("rb") as source:
                for tensor in messages(messages(packed, MODEL_GRAPH)[0], INITIALIZERS):
                    if (name := tensor_name(tensor)) not in entries:  # not of an earlier part, too
                        entries[name] = _moved(tensor, source, weights)
    for name in (_PART, f"{_PACKED}.onnx", f"{_PACKED}.weights"):
        (stage / name).unlink(missing_ok=True)

    def completed(tensor: memoryview) -> list[Piece]:
        return [tensor, *entries.get(tensor_name(tensor), ())]

    whole = replaced(data, {MODEL_GRAPH: lambda body: replaced(body, {INITIALIZERS: completed})})
    with (stage / _MODEL).open("wb") as stream:
        stream.writelines(whole)


def _parts(graph: memoryview, tensors: Mapping[str, memoryview]) -> Iterator[list[Node]]:
    """Yield the products with weights in the file, as many together as are packed at once."""
    part: list[Node] = []
    total = 0
    for data in messages(graph, NODES):
        node = Node.read(data)
        if not ("MatMul" in node.op_type or node.op_type == "Gemm"):
            continue
        weights = (tensors[name] for name in node.inputs if name in tensors)
        size = sum(int(_entries(tensor).get("length", "0")) for tensor in weights)
        if size == 0:  # what is in the model is not packed in a file
            continue
        if part and total + size > _AT_ONCE:
            yield part
            part, total = [], 0
        part.append(node)
        total += size
    if part:
        yield part


def _graph_of(
    nodes: Sequence[Node], tensors: Mapping[str, memoryview], known: Mapping[str, memoryview]
) -> list[Piece]:
    """Return a graph of these products alone; ``known`` are the values that have a type."""
    made = {name for node in nodes for name in node.outputs}
    weights: dict[str, memoryview] = {}
    values: dict[str, list[Piece]] = {}
    pieces: list[Piece] = bytes_field(GRAPH_NAME, [b"part"])
    for node in nodes:
        pieces += bytes_field(NODES, [node.data])
        weights |= {name: tensors[name] for name in node.inputs if name in tensors}
        # A value without a type has that of the numbers that the weights are, or are scaled by.
        codes = [f.value for name in node.inputs if name in tensors
                 for f in fields(tensors[name]) if f.number == TENSOR_TYPE]  # fmt: skip
        code = next((code for code in codes if code in _FLOATING), codes[0])
        for name in (*node.inputs, *node.outputs):
            if name and name not in tensors and name not in values:
                kind = bytes_field(2, bytes_field(1, [number_field(1, code)]))
                value = (
                    [known[name]] if name in known else [*bytes_field(1, [name.encode()]), *kind]
                )
                values[name] = bytes_field(OUTPUTS if name in made else INPUTS, value)
    for tensor in weights.values():
        pieces += bytes_field(INITIALIZERS, [tensor])
    for each in values.values():
        pieces += each
    return pieces


def _entries(tensor: memoryview) -> dict[str, str]:
    """Return where the data of a tensor lie, and those that are packed of it."""
    return {name_of(each, 1): name_of(each, 2) for each in messages(tensor, TENSOR_EXTERNAL)}


def _moved(tensor: memoryview, source: IO[bytes], weights: IO[bytes]) -> list[Piece]:
    """Append what is packed of a tensor to a file, and return the entries that say where."""
    pieces: list[Piece] = []
    for key, value in _entries(tensor).items():
        if not key.startswith("prepacked"):
            continue
        said, *places = value.split("|")
        for place in places:
            offset, length, checksum = place.split(";")
            weights.write(bytes(-weights.tell() % _PAGE))
            said += f"|{weights.tell()};{length};{checksum}"
            source.seek(int(offset))
            for at in range(0, int(length), _CHUNK):
                weights.write(source.read(min(_CHUNK, int(length) - at)))
        entry = [*bytes_field(1, [key.encode()]), *bytes_field(2, [said.encode()])]
        pieces += bytes_field(TENSOR_EXTERNAL, entry)
    return pieces


def _key(package_sha256: str, options: onnxruntime.SessionOptions) -> str:
    """What packed weights depend on; ONNX Runtime does not check where they are from."""
    known = platform.uname()
    about = {known.version, known.processor}
    if (processor := Path("/proc/cpuinfo")).is_file():
        names = ("flags", "Features", "model name", "CPU implementer", "CPU part")
        lines = processor.read_text(errors="replace").splitlines()
        about = {line for line in lines if line.startswith(names)}
    choices = [f"{name}={value}" for name, value in _choices(options).items()]
    text = [package_sha256, onnxruntime.__version__, known.machine, *sorted(about), *choices]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]
