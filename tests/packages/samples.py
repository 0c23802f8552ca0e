"""Small packages."""

import atexit
import copy
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from odtpack.build import build_package
from odtpack_runtime.files.atomic import file_sha256
from odtpack_runtime.package.package import Package
from tests import zoo
from tests.model_text import with_arrays
from tests.packages.mutations import edit


def small_model(**options: Any) -> onnx.ModelProto:
    return zoo.cnn(**{"size": 8, "width": (4, 8), "classes": 3, **options})


def with_values(model: onnx.ModelProto, *names: str, seed: int = 1) -> onnx.ModelProto:
    """The model with other values of some of its initializers; of all if none is named."""
    random = np.random.default_rng(seed)

    def moved(name: str, array: np.ndarray) -> np.ndarray:
        if names and name not in names:
            return array
        return array + random.normal(0, 0.1, array.shape).astype(array.dtype)

    return with_arrays(model, moved)


def renamed(model: onnx.ModelProto, old: str, new: str) -> onnx.ModelProto:
    """The model with another name of an initializer."""
    changed = copy.deepcopy(model)
    for tensor in changed.graph.initializer:
        tensor.name = new if tensor.name == old else tensor.name
    for node in changed.graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
    return changed


@functools.cache
def _plain() -> Path:
    """The package without options, built once in a process."""
    folder = Path(tempfile.mkdtemp(prefix="odtpack-plain-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return build(folder / "package", small_model())


def build(folder: Path, model: onnx.ModelProto | None = None, **options: Any) -> Path:
    if model is None and not options:
        return Path(shutil.copytree(_plain(), folder))
    build_package(model or small_model(), folder, **{"loss": "cross_entropy", **options})
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def list_extra(folder: Path) -> Path:
    """Let the manifest of a package list the models in ORT format that lie beside it."""
    if not Package.open(folder).manifest.files.extra:
        extra = [
            {"path": file.name, "size_bytes": file.stat().st_size, "sha256": file_sha256(file),
             "role": "ort_model", "of": file.stem, "style": "fixed"}
            for file in sorted(folder.glob("*.ort"))
        ]  # fmt: skip
        for file in folder.glob("*.config"):
            file.unlink()
        edit(folder, lambda content: content["files"].update(extra=extra))
    assert Package.open(folder).manifest.files.extra
    return folder
