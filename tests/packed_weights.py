"""What of a decoder's weights is packed in a file, what ONNX Runtime packs of it by itself, and how
such files are damaged."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime

FILES = {"decoder.onnx", "decoder.weights", "sizes"}
Packed = dict[str, list[tuple[str, bytes]]]


def damaged(kept: Path) -> Iterator[str]:
    """Damage packed weights in one way after another; each says what was done."""
    for name in sorted(FILES):
        (kept / name).unlink()
        yield f"no {name}"
        os.truncate(kept / name, (kept / name).stat().st_size // 2)
        yield f"half of {name}"
    (kept / "decoder.onnx").write_bytes(b"\xff" * (kept / "decoder.onnx").stat().st_size)
    yield "a model of other bytes"
    shutil.rmtree(kept)
    kept.mkdir()
    yield "an empty folder"
    shutil.rmtree(kept)
    kept.write_bytes(b"")
    yield "a file in the folder's place"
    shutil.rmtree(kept)
    kept.with_name(f"{kept.name}.part").write_bytes(b"")
    yield "a file in the place of what is written"


def at_once(*commands: Sequence[object], **options: Any) -> list[str]:
    """Run programs at the same time to their ends; return what they print."""
    started = [
        subprocess.Popen([*map(str, words)], stdout=subprocess.PIPE, text=True, **options)
        for words in commands
    ]
    printed = [each.communicate(timeout=900)[0] for each in started]
    assert [each.returncode for each in started] == [0] * len(started), printed
    return printed


def packed_in(folder: Path) -> Packed:
    """The keys and bytes of what is packed of each tensor of ``decoder.onnx``."""
    model = onnx.load(folder / "decoder.onnx", load_external_data=False)
    found: Packed = {}
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key.startswith("prepacked"):
                key, *places = entry.value.split("|")
                data = (folder / "decoder.weights").read_bytes()
                spans = [map(int, place.split(";")[:2]) for place in places]
                packed = [data[offset : offset + length] for offset, length in spans]
                assert all(len(each) > 0 for each in packed)
                found.setdefault(tensor.name, []).append((key, b"".join(packed)))
    return found


def packed_by_onnxruntime(decoder: Path, folder: Path) -> Packed:
    """The same, of the file that ONNX Runtime writes of the whole decoder."""
    folder.mkdir()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(folder / "decoder.onnx")
    for key, value in (
        ("save_external_prepacked_constant_initializers", "1"),
        ("optimized_model_external_initializers_file_name", "decoder.weights"),
        ("optimized_model_external_initializers_min_size_in_bytes", "1024"),
    ):
        options.add_session_config_entry(f"session.{key}", value)
    onnxruntime.InferenceSession(decoder, options)
    return packed_in(folder)
