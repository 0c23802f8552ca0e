"""The training core must install and start where little else does."""

from __future__ import annotations

import json
import subprocess
import sys

FORBIDDEN = (
    "onnx", "onnx_ir", "onnxscript", "pydantic", "typer", "rich", "jinja2", "google", "torch",
    "odtpack", "ml_dtypes", "sklearn", "scipy",
)  # fmt: skip

PROBE = """
import json, sys
before = set(sys.modules)
import numpy, onnxruntime, flatbuffers
allowed = set(sys.modules)
import odtpack_runtime
print(json.dumps(sorted(set(sys.modules) - allowed)))
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
print(json.dumps(sorted({name.split(".")[0] for name in allowed})))
"""


def test_the_core_imports_numpy_onnxruntime_and_flatbuffers_only() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    added, everything, allowed = (json.loads(line) for line in done.stdout.splitlines())
    tops = {name.split(".")[0] for name in added}
    assert tops - set(sys.stdlib_module_names) <= {"odtpack_runtime", "numpy"}
    assert not set(FORBIDDEN) & (set(everything) - set(allowed))
    inside = {name.split(".")[1] for name in added if name.startswith("odtpack_runtime.")}
    assert not inside & {"manifest", "package", "simulator", "reports", "export", "data"}


def test_forbidden_modules_are_not_imported_at_all() -> None:
    code = (
        "import sys, odtpack_runtime, odtpack_runtime.training.data\n"
        "import odtpack_runtime.export.inference_model\n"
        f"print([name for name in {FORBIDDEN!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
