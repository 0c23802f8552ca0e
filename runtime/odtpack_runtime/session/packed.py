"""A decoder's weights as ONNX Runtime packs them for a processor, in a file that is mapped.

ONNX Runtime packs the weights of ``MatMulNBits`` into memory of the process when it loads them. It
can write them into a file beside the model instead, and maps them from there.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Final

import onnxruntime

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.atomic import locked, sync_folder
from odtpack_runtime.session.session import open_session

ENTRY: Final = "odtpack.packed_weights"
"""Session option: a folder that keeps packed weights of decoders."""

_MODEL, _WEIGHTS, _START = "decoder.onnx", "decoder.weights", "odtpack-packed-"
_SAVE: Final = "session.save_external_prepacked_constant_initializers"
_SAVED: Final = {
    "session.optimized_model_external_initializers_file_name": _WEIGHTS,
    "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
}


def open_decoder(
    decoder: Path,
    options: onnxruntime.SessionOptions,
    beside: Collection[str],
    package_sha256: str,
) -> onnxruntime.InferenceSession:
    """Open a decoder, from packed weights where the options name a folder for them."""
    # `beside`: files of its folder that its tensors may lie in.
    try:
        folder = Path(options.get_session_config_entry(ENTRY))
    except RuntimeError:  # there is no such entry
        return open_session(decoder, options, beside=beside)
    target = folder / f"{_START}{_key(package_sha256)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            if not target.is_dir():
                for stale in folder.glob(f"{_START}*"):
                    shutil.rmtree(stale)
                _write(decoder, options, beside, target)
    except OSError as error:
        raise OdtpackError(
            "packed-not-written",
            f"Packed weights cannot be kept in {folder}: {error.strerror}.",
            where=str(folder),
        ) from error
    return open_session(target / _MODEL, options, beside=(_WEIGHTS,))


def _write(
    decoder: Path, options: onnxruntime.SessionOptions, beside: Collection[str], target: Path
) -> None:
    stage = target.with_name(f"{target.name}.part")
    stage.mkdir()
    for name, value in {_SAVE: "1", **_SAVED}.items():
        options.add_session_config_entry(name, value)
    options.optimized_model_filepath = str(stage / _MODEL)
    try:
        try:
            open_session(decoder, options, beside=beside)
        except OdtpackError as error:
            what = f"Packed weights cannot be written: {error.what}"
            raise OdtpackError("packed-not-written", what, where=str(target.parent)) from error
        for path in stage.iterdir():
            with path.open("r+b") as stream:
                os.fsync(stream.fileno())
        sync_folder(stage)
        stage.rename(target)
        sync_folder(target.parent)
    finally:
        options.optimized_model_filepath = ""
        options.add_session_config_entry(_SAVE, "0")
        shutil.rmtree(stage, ignore_errors=True)


def _key(package_sha256: str) -> str:
    """What packed weights depend on; ONNX Runtime does not check where they are from."""
    known = platform.uname()
    about = {known.version, known.processor}
    if (processor := Path("/proc/cpuinfo")).is_file():
        names = ("flags", "Features", "model name", "CPU implementer", "CPU part")
        lines = processor.read_text(errors="replace").splitlines()
        about = {line for line in lines if line.startswith(names)}
    text = [package_sha256, onnxruntime.__version__, known.machine, *sorted(about)]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]
