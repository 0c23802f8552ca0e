"""Native kernels of odtpack for this platform, as a library that ONNX Runtime registers."""

from pathlib import Path

(LIBRARY,) = Path(__file__).parent.glob("*odtpack-kernels.*")
"""The library's file. ``odtpack_runtime`` takes it where ``ODTPACK_NATIVE`` names none."""
