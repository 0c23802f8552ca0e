"""odtpack: build on-device training packages for stock ONNX Runtime."""

from importlib.metadata import version

__version__ = version("odtpack")
