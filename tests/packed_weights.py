"""What of a decoder's weights is packed in a file, and what ONNX Runtime packs of it by itself."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime

Packed = dict[str, list[tuple[str, bytes]]]


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
