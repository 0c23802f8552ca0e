"""Asks the WebGPU provider which operators it has kernels for, and of which types.

Each operator is loaded in models of one node, one for each type; ONNX Runtime says which provider
takes the node. No adapter runs anything, but one must be there (docs/guides/gpu.md).

usage: python -m scripts.webgpu_kernels
"""

import json
from pathlib import Path
from typing import Any

import onnx
import onnxruntime

from odtpack_runtime.session.device import Device
from scripts.kernel_table import OLDEST_OPSET, probe, versions

TABLE = Path(__file__).parents[1] / "packager/odtpack/ort/webgpu_kernels.json"
_TYPES = ("float", "int32", "int64", "bool", "float16", "double", "uint8", "int8", "uint32", "int4",
          "uint4")  # fmt: skip


def taken(device: Device, model: bytes) -> bool:
    """Whether the provider takes the node of a model."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    try:
        proto = onnx.load_from_string(model)
        proto.opset_import[0].version = max(proto.opset_import[0].version, OLDEST_OPSET)
        session = device.session(proto.SerializeToString(), options)
    except Exception:
        return False
    parts = session.get_provider_graph_assignment_info()
    return bool(parts) and all(part.ep_name == device.provider for part in parts)


def main() -> None:
    device = Device("webgpu")
    onnxruntime.set_default_logger_severity(4)
    tree: dict[str, Any] = {}
    for schema in versions():
        allowed = {
            each.type_param_str: [t for t in _TYPES if f"tensor({t})" in each.allowed_type_strs]
            for each in schema.type_constraints
        }
        first = {name: f"tensor({types[0]})" for name, types in allowed.items() if types}
        for constraint, types in allowed.items() or {"": [""]}.items():
            for each in types:
                own = {**first, constraint: f"tensor({each})"} if constraint else {}
                model = probe(schema, own)
                if model is not None and taken(device, model):
                    entry = tree.setdefault(f"{schema.name};{schema.since_version}", {})
                    entry.setdefault(constraint, []).append(each)
    found = {"provider": device.provider, "onnxruntime": onnxruntime.__version__, "kernels": tree}
    TABLE.write_text(json.dumps(found, separators=(",", ":"), sort_keys=True) + "\n")
    print(len(tree), "operators")


if __name__ == "__main__":
    main()
