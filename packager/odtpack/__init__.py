"""odtpack: build on-device training packages for stock ONNX Runtime."""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import version
from importlib.util import LazyLoader
from typing import ClassVar

from odtpack.names_file import names

# As odtpack_runtime does, for modules that import onnxruntime before it.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__all__ = ["__version__", "names"]
__version__ = version("odtpack")


class _Later:
    """Loads sympy once something of it is read; onnx_ir imports it for arithmetic with names."""

    # It takes as long to load as everything else that a small build does.

    names: ClassVar = {"sympy", "onnx_ir._symbolic_shapes"}

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, *_: object) -> ModuleSpec | None:
        if name not in _Later.names:
            return None
        _Later.names.remove(name)
        if not _Later.names:
            sys.meta_path.remove(_Later)
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


if "sympy" not in sys.modules:
    sys.meta_path.insert(0, _Later)
