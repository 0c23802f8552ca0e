"""The session options of a package: one place that turns them into ONNX Runtime's."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import onnxruntime

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.protobuf_wire import BYTES, fields, name_of
from odtpack_runtime.files.records import InvalidRecordError, parse_json
from odtpack_runtime.package.records import (
    MAX_MANIFEST_BYTES,
    MAX_THREADS,
    SESSION_CONFIG,
    OptimizationLevel,
    SessionInfo,
)
from odtpack_runtime.session.native import say_counts

_METADATA = 14  # number of the field metadata_props in ModelProto
LEVELS: Final[dict[OptimizationLevel, onnxruntime.GraphOptimizationLevel]] = {
    "disabled": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


def usual_session(optimization_level: str, **memory: bool | int | None) -> SessionInfo:
    """Return the options that suit a training."""
    # Memory patterns are off. A pattern keeps one block for the peak of a whole run beside the
    # arena that the first run filled: a step of MobileNetV2 takes 139 MiB instead of 218 without
    # it, as fast. Threads rest between runs, see SESSION_CONFIG.
    # `optimization_level`: What suits the training model. `extended` leaves out the layout for
    # constant convolution weights, which a model whose weights are all inputs pays for and does not
    # gain from. `basic` is for float64, which fused operators would round to float32 in places.
    # What is not known counts as `all`.
    # `**memory`: where the sessions take their memory from, fields of SessionInfo; without any from
    # an arena of each session's own, as packages had it that say nothing of them.
    level = optimization_level if optimization_level in LEVELS else "all"
    content = {"optimization_level": level, "memory_pattern": False, "config": dict(SESSION_CONFIG)}
    return SessionInfo.read(content | memory)


def default_session_options(
    train_model_uri: str | os.PathLike[str], threads: int | None = None
) -> onnxruntime.SessionOptions:
    """Return the options that the package of a training model asks for.

    They follow from :func:`session_info`, and name the native kernels that the package has:
    sessions of another package would run its other kernels as plain nodes. Sessions opened with the
    same options share an arena where the package asks for it; each call begins a new one.

    Args:
        train_model_uri: Training model; a file that cannot be read gives the defaults.
        threads: Threads within an operator; the package's choice if None.

    Raises:
        OdtpackError: ``manifest-invalid``, as :func:`session_info`.
    """
    path = Path(train_model_uri)
    return options_of(manifest_beside(path), path, threads)


def options_of(
    manifest: dict[str, Any] | None, model: Path, threads: int | None = None
) -> onnxruntime.SessionOptions:
    """Return :func:`default_session_options` by the content of a manifest."""
    options = session_options(session_of(manifest, model), threads)
    say_counts(options, manifest)
    return options


def session_info(train_model_uri: str | os.PathLike[str]) -> SessionInfo:
    """Return the session entries of a training model's package."""
    path = Path(train_model_uri)
    return session_of(manifest_beside(path), path)


def session_of(manifest: dict[str, Any] | None, model: Path) -> SessionInfo:
    """Return the session entries in the content of a manifest."""
    # A model may be opened without its package: the rest of the manifest is not judged here.
    # Without one it is usual_session, with the optimization level that the packager recorded in
    # the model; a file that cannot be read gives the defaults.
    if manifest is None or manifest.get("session") is None:
        return usual_session(read_metadata(model).get("odtpack.optimization_level", ""))
    try:
        return SessionInfo.read(manifest["session"], ("session",))
    except InvalidRecordError as error:
        what = f"The manifest is not valid: {error}."
        raise OdtpackError("manifest-invalid", what, where=str(model.parent)) from error


def session_options(info: SessionInfo, threads: int | None = None) -> onnxruntime.SessionOptions:
    """Return options of a package as ONNX Runtime takes them."""
    # `threads`: threads within an operator, in place of the manifest's.
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = LEVELS[info.optimization_level]
    options.enable_mem_pattern = info.memory_pattern
    options.enable_cpu_mem_arena = info.arena
    if threads and threads > MAX_THREADS:
        raise OdtpackError(
            "bad-argument", f"A session has at most {MAX_THREADS} threads, not {threads}.",
            hint="pass none, and the package or ONNX Runtime chooses",
        )  # fmt: skip
    options.intra_op_num_threads = threads or info.threads or 0
    if not info.prepacking:
        options.add_session_config_entry("session.disable_prepacking", "1")
    if info.shared_allocator:
        _share_allocator(info)
        options.add_session_config_entry("session.use_env_allocators", "1")
    for key, value in info.config.items():
        options.add_session_config_entry(key, value)
    return options


def release_arena() -> None:
    """Let go of the arena that closed sessions shared, so that its memory goes back to the system.

    An arena lives as long as a session that uses it, and the last one that was begun until the
    next: call this once the modules and optimizers of a training are gone, for example when the
    system warns that memory is low. Before ONNX Runtime 1.23 a process has one arena, to its end.
    """
    _share_allocator(usual_session("all"))


def _share_allocator(info: SessionInfo) -> None:
    """Begin an allocator that the sessions to come may share, in place of the last one."""
    kind = onnxruntime.OrtAllocatorType
    memory = onnxruntime.OrtMemoryInfo(
        "Cpu",
        kind.ORT_ARENA_ALLOCATOR if info.arena else kind.ORT_DEVICE_ALLOCATOR,
        0,
        onnxruntime.OrtMemType.DEFAULT,
    )
    # Without a limit, and growing as by default.
    sizes = (info.initial_chunk_size_bytes or -1, info.max_dead_bytes_per_chunk or -1)
    with suppress(RuntimeError):  # older releases keep the first one
        onnxruntime.create_and_register_allocator(memory, onnxruntime.OrtArenaCfg(0, -1, *sizes))


def manifest_beside(model: Path) -> dict[str, Any] | None:
    """Return the content of the manifest in the folder of a model, unchecked."""
    # None if there is none that names the model, or it is no JSON.
    prefix, found, _ = model.name.partition("training_model")
    manifest = model.with_name(f"{prefix if found else ''}manifest.json")
    # The folder is searched only where the usual name leads to none: a manifest may be renamed.
    places = ([manifest], model.parent.glob("*manifest.json"))
    for path in filter(Path.is_file, (path for found in places for path in sorted(found))):
        with suppress(OSError, InvalidRecordError, LookupError, TypeError, AttributeError):
            with path.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                content = parse_json(stream.read(min(size, MAX_MANIFEST_BYTES)))
            files = content["files"]
            named = [files["training_model"], *files.get("extra", ())]
            named += [files[key] for key in ("step_model", "optimizer_model") if files.get(key)]
            if model.name in (entry["path"] for entry in named):
                return dict(content)
    return None


def read_metadata(path: Path) -> dict[str, str]:
    """Metadata of an ONNX file, without loading its graph; empty if there is none to read."""
    # Options must be chosen before a session exists that could be asked. The file is a protobuf
    # message, of which all fields but one are skipped. An entry's field 1 is the key, 2 the value.
    found: dict[str, str] = {}
    with (
        suppress(OSError, ValueError),
        path.open("rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        for entry in fields(content):
            if entry.number == _METADATA and entry.kind == BYTES:
                pair = memoryview(content[entry.body : entry.end])
                found[name_of(pair, 1)] = name_of(pair, 2)
    return found
