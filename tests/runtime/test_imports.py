"""The training core must install and start where little else does."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime

from odtpack.build import build_package
from tests import zoo
from tests.programs import ran

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


def test_the_core_imports_numpy_onnxruntime_and_flatbuffers_only():
    done = ran(sys.executable, "-W", "error", "-c", PROBE)
    assert done.stderr == ""
    added, everything, allowed = map(json.loads, done.stdout.splitlines())
    tops = {name.split(".")[0] for name in added}
    assert tops - set(sys.stdlib_module_names) <= {"odtpack_runtime", "numpy"}
    assert not set(FORBIDDEN) & (set(everything) - set(allowed))
    inside = {name.split(".")[1] for name in added if name.startswith("odtpack_runtime.")}
    assert not inside & {"simulator", "reports", "export", "data"}


def test_a_package_opens_and_trains_without_them(tmp_path):
    """Whole: manifest, training, export and self-check where nothing of them can be imported."""
    build_package(zoo.mlp((6, 5, 3)), tmp_path / "p", loss="cross_entropy")
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({FORBIDDEN!r}))\n"
        "from odtpack_runtime import CheckpointState, Module, Optimizer\n"
        "from odtpack_runtime.package.verify import write_inference_model\n"
        "from odtpack_runtime.package.package import Package\n"
        "from odtpack_runtime.package.self_check import self_check\n"
        "package = Package.open(sys.argv[1])\n"
        "assert self_check(package).largest_part <= 1\n"
        "state = CheckpointState.load_checkpoint(package.checkpoint)\n"
        "module = Module(package.training_model, state, package.eval_model)\n"
        "module.export_model_for_inferencing(sys.argv[1] + '/a.onnx', ['output'])\n"
        "values = {name: item.data for name, item in state.parameters}\n"
        "write_inference_model(package, values, sys.argv[1] + '/b.onnx')\n"
    )
    folder = tmp_path / "p"
    subprocess.run([sys.executable, "-W", "error", "-c", code, str(folder)], check=True)
    x = np.random.default_rng(0).random((2, 6), np.float32)
    one, other = (
        onnxruntime.InferenceSession(str(folder / name)).run(None, {"input": x})[0]
        for name in ("a.onnx", "b.onnx")
    )
    np.testing.assert_array_equal(one, other)


def test_forbidden_modules_are_not_imported_at_all():
    code = (
        "import sys, odtpack_runtime, odtpack_runtime.training.loop\n"
        "import odtpack_runtime.export.inference_model\n"
        "import odtpack_runtime.package.self_check, odtpack_runtime.package.verify\n"
        f"print([name for name in {FORBIDDEN!r} if name in sys.modules])"
    )
    assert ran(sys.executable, "-W", "error", "-c", code).stdout == "[]\n"


def test_what_ships_imports_nothing_of_the_repository_besides():
    """A wheel has neither the tests' networks nor the benchmarks."""
    root = Path(__file__).parents[2]
    files = [path for name in ("packager", "runtime") for path in (root / name).rglob("*.py")]
    assert len(files) > 100
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            named = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                named = [node.module or ""]
            tops = {name.split(".")[0] for name in named}
            assert not tops & {"tests", "benchmarks", "scripts"}, path
