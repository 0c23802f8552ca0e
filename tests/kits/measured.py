"""What the benchmark of every kit has to write, whatever its language."""

import json
import os
from pathlib import Path
from typing import Any

import jsonschema

SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "measurements.schema.json"
RATES = ("gemm_flops", "gemm_single_flops", "convolution_flops", "copy_bytes_per_second",
         "write_bytes_per_second", "read_bytes_per_second", "sync_seconds")  # fmt: skip


def measurements(text: str) -> dict[str, Any]:
    """What a benchmark printed, held to the schema of the format."""
    found: dict[str, Any] = json.loads(text)
    jsonschema.validate(found, json.loads(SCHEMA.read_text()))
    return found


def check_measurements(text, kit, version, system="linux", unmeasured=()):
    """Hold what a benchmark printed to this machine: on one thread, with 500 MB granted."""
    found = measurements(text)
    assert (found["format"], found["kit"], found["onnxruntime"]) == (1, kit, version)
    assert found.get("system") == system
    assert found["memory_limit_bytes"] == 5 * 10**8
    if system == "linux":
        assert found["memory_bytes"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    assert found["threads"] == 1
    assert found["file_bytes"] == (0 if "write_bytes_per_second" in unmeasured else 64 * 2**20)
    for name in RATES:
        count = 0 if name in unmeasured else 40 if name == "sync_seconds" else 5
        assert len(found[name]) == count, name
        assert all(each > 0 for each in found[name]), name
    assert found["gemm_single_flops"] == found["gemm_flops"]
