"""odtpack: build on-device training packages for stock ONNX Runtime."""

import os
from importlib.metadata import version

# As odtpack_runtime does, for modules that import onnxruntime before it.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__version__ = version("odtpack")
