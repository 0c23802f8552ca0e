"""Turns off the telemetry of ONNX Runtime when it is imported, before ONNX Runtime is.

From 1.29 on the official builds for Linux, macOS, Android and iOS send events: names and hashes of
models, and an identifier of the device, which they write to the user's cache. An app that wants
that sets the variable itself, to 0.
"""

from __future__ import annotations

import os
import sys

_VARIABLE = "ORT_DISABLE_TELEMETRY"

if _VARIABLE not in os.environ:
    os.environ[_VARIABLE] = "1"
    if (
        "onnxruntime" in sys.modules
    ):  # too late for the variable: what comes from now on is not sent
        sys.modules["onnxruntime"].disable_telemetry_events()
