"""The runtime needs three libraries. Who imports whom is in pyproject.toml (import-linter)."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "runtime/odtpack_runtime").rglob("*.py"))

# What the runtime may import beside the standard library, and what one module of it may besides.
ITS_THREE = {"numpy", "onnxruntime", "flatbuffers", "odtpack_runtime"}
WHERE_INSTALLED = {
    "manifest_signature.py": {"cryptography"},
    "native.py": {"onnx"},  # a type only
    "native_conv.py": {"onnx"},  # bodies are run by verify
    "onnx_files.py": {"onnx"},
    "verify_models.py": {"onnx"},
}


def test_the_runtime_imports_three_libraries() -> None:
    used = set()
    for path in SOURCES:
        found = set(_imported(path)) - sys.stdlib_module_names
        used |= found
        assert found <= ITS_THREE | WHERE_INSTALLED.get(path.name, set()), path
    assert used >= ITS_THREE


def _imported(path: Path) -> Iterator[str]:
    """Top names of all imports of a file, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module
            assert not node.level
            yield node.module.partition(".")[0]
