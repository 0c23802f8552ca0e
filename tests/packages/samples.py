"""Small packages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from odtpack.build import build_package
from odtpack_runtime.files.atomic import file_sha256
from odtpack_runtime.package.package import Package
from tests import zoo


def small_model(**options: Any) -> onnx.ModelProto:
    return zoo.cnn(**{"size": 8, "width": (4, 8), "classes": 3, **options})


def with_values(model: onnx.ModelProto, *names: str, seed: int = 1) -> onnx.ModelProto:
    """The model with other values of some of its initializers; of all if none is named."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    random = np.random.default_rng(seed)
    for tensor in changed.graph.initializer:
        if not names or tensor.name in names:
            array = onnx.numpy_helper.to_array(tensor)
            moved = array + random.normal(0, 0.1, array.shape).astype(array.dtype)
            tensor.CopyFrom(onnx.numpy_helper.from_array(moved, tensor.name))
    return changed


def build(folder: Path, model: onnx.ModelProto | None = None, **options: Any) -> Path:
    build_package(model or small_model(), folder, **{"loss": "cross_entropy", **options})
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def list_extra(folder: Path) -> Path:
    """Let the manifest of a package list the models in ORT format that lie beside it."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    if "extra" not in content["files"]:
        content["files"]["extra"] = [
            {
                "path": file.name,
                "size_bytes": file.stat().st_size,
                "sha256": file_sha256(file),
                "role": "ort_model",
                "of": file.stem,
                "style": "fixed",
            }
            for file in sorted(folder.glob("*.ort"))
        ]
        for file in folder.glob("*.config"):
            file.unlink()
        content.pop("digest", None)
        path.write_text(json.dumps(content, indent=2))
    assert Package.open(folder).manifest.files.extra
    return folder
