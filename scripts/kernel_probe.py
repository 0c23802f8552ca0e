"""Lists which kernels the ONNX Runtime of this Python has; for scripts/kernel_table.py.

It runs in the environments of old releases, so it is written for Python 3.8 and imports nothing
of this project.

usage: kernel_probe.py list              kernels as the library lists them; null if it does not
       kernel_probe.py load MODELS.json  for each model, whether it has a kernel for its node
"""

import base64
import json
import sys
from pathlib import Path

import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as native

PROVIDER = "CPUExecutionProvider"


def kernels():
    tell = getattr(native, "get_all_opkernel_def", None)
    if tell is None:
        return None
    return [
        [k.domain or "ai.onnx", k.op_name, list(k.version_range), dict(k.type_constraints)]
        for k in tell()
        if k.provider == PROVIDER
    ]


def outcome(model):
    """``yes``; ``no``; or the message of an error that says neither."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(model, options, providers=[PROVIDER])
    except Exception as error:
        message = str(error)
        if "NOT_IMPLEMENTED" in message:
            return "no"
        # Kernels are looked up before they are made: one that refuses its node is there.
        return "yes" if "kernel" in message.lower() else message
    return "yes"


if __name__ == "__main__":
    if sys.argv[1] == "list":
        result = kernels()
    else:
        with Path(sys.argv[2]).open() as stream:
            result = [outcome(base64.b64decode(model)) for model in json.load(stream)]
    json.dump(result, sys.stdout)
