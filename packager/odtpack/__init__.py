"""odtpack: build on-device training packages for stock ONNX Runtime."""

import os
from importlib.metadata import version

from odtpack.names_file import names

# As odtpack_runtime does, for modules that import onnxruntime before it.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__all__ = ["__version__", "names"]
__version__ = version("odtpack")
