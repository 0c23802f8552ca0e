"""Old releases of ONNX Runtime are set up, and what cannot be is said in a sentence."""

import re
import subprocess
from unittest import mock

import numpy as np
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from benchmarks.models.__main__ import models
from scripts import old_runtimes
from tests.kits.ran import Ran
from tests.model_text import drawn, parsed
from tests.onnx_torch import Interpreter


def test_a_missing_python_is_an_error_and_the_other_releases_are_set_up(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(old_runtimes, "CACHE", tmp_path)
    monkeypatch.setattr(old_runtimes, "_works", lambda python: python == "python3.11")
    ran = []

    def run(command: list[object], check: bool) -> None:
        ran.append([str(word) for word in command])
        (tmp_path / "1.20").mkdir(exist_ok=True)

    monkeypatch.setattr(subprocess, "run", run)
    assert old_runtimes.main(["1.12", "1.20"]) == 2
    error = capsys.readouterr().err
    assert "error: ONNX Runtime 1.12 has wheels for Python 3.7 to 3.10" in error
    assert "help: pyenv install 3.10" in error
    assert ran[0] == ["python3.11", "-m", "venv", str(tmp_path / "1.20")]
    assert (tmp_path / "1.20" / ".ready").is_file()
    assert not (tmp_path / "1.12" / ".ready").exists()


def test_a_release_that_pip_cannot_install_is_an_error(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(old_runtimes, "CACHE", tmp_path)
    monkeypatch.setattr(old_runtimes, "_works", lambda python: True)

    failed = subprocess.CalledProcessError(1, [])
    monkeypatch.setattr(subprocess, "run", mock.Mock(side_effect=failed))
    assert old_runtimes.main(["1.20"]) == 2
    assert "error: ONNX Runtime 1.20 could not be installed" in capsys.readouterr().err


# The tools of ``make models``: the list, and the interpreter that is the oracle.

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(2, 3, 6, 7)).astype(np.float32)
# Operators whose attributes leave the most to get wrong; the others are PyTorch's own functions.
GRAPHS = {
    "convolution": "a = Conv <strides = [2, 1], pads = [1, 0, 2, 1], dilations = [1, 2]> (x, w)"
    " y = ConvTranspose <strides = [2, 2], pads = [1, 0, 0, 1], output_padding = [1, 0]> (a, v)",
    "same": 'y = Conv <auto_pad = "SAME_LOWER", strides = [2, 2]> (x, w)',
    "max pool": "y = MaxPool <kernel_shape = [3, 2], strides = [2, 2], pads = [1, 0, 1, 1],"
    " ceil_mode = 1> (x)",
    "average pool": "y = AveragePool <kernel_shape = [3, 2], strides = [2, 2], pads = [1, 0, 1, 1]>"
    " (x)",
    "pad": "p = Constant <value_ints = [0, 0, 1, 2, 0, 0, 2, 3]> () a = Pad (x, p)"
    ' q = Constant <value_ints = [0, 0, 2, 1, 0, 0, 1, 2]> () y = Pad <mode = "reflect"> (a, q)',
    "resize": 's = Constant <value_floats = [1.0, 1.0, 2.0, 1.5]> () y = Resize <mode = "linear",'
    ' coordinate_transformation_mode = "pytorch_half_pixel"> (x, , s)',
    "slice": "a = Constant <value_ints = [5, -1]> () b = Constant <value_ints = [-100, 1]> ()"
    " c = Constant <value_ints = [2, 3]> () d = Constant <value_ints = [-2, -1]> ()"
    " y = Slice (x, a, b, c, d)",
    "norm": "f = Constant <value_floats = [1.0, 2.0, 3.0]> () m = Constant <value_floats = [0.1,"
    " 0.2, 0.3]> () y = BatchNormalization (x, f, m, m, f)",
    "LSTM": "t = Constant <value_ints = [6, 2, 21]> () a = Reshape (x, t)"
    ' y, h, c = LSTM <hidden_size = 4, direction = "bidirectional"> (a, wl, rl, bl)',
    "GRU": "t = Constant <value_ints = [6, 2, 21]> () a = Reshape (x, t)"
    " y, h = GRU <hidden_size = 4, linear_before_reset = 1> (a, wg, rg)",
    "If": "s = ReduceSum <keepdims = 0> (x) z = Sub(s, s) c = Less(s, z)"
    " y = If (c) <then_branch = a () => (float p) { p = Exp(s) },"
    " else_branch = b () => (float q) { q = Neg(s) }>",
}
WEIGHTS = {"w": (4, 3, 3, 2), "v": (4, 2, 2, 3), "wl": (2, 16, 21), "rl": (2, 16, 4),
           "bl": (2, 32), "wg": (1, 12, 21), "rg": (1, 12, 4)}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_the_oracle_computes_what_onnx_defines(name):
    read = [each for each in WEIGHTS if re.search(rf" {each}[,)]", GRAPHS[name])]
    values = drawn(np.random.default_rng(1), **{each: WEIGHTS[each] for each in read})
    model = parsed(f"(float[2, 3, 6, 7] x) => (float y) {{ {GRAPHS[name]} }}", **values)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    (expected,) = ReferenceEvaluator(model).run(["y"], {"x": X})
    oracle = Interpreter(model)
    found = oracle({"x": X})["y"]
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-4, atol=1e-5)
    if model.graph.initializer:
        found.square().sum().backward()
        for tensor in model.graph.initializer:
            assert oracle.constants[tensor.name].grad.norm() > 0, tensor.name


def test_the_list_is_well_formed():
    listed = models()
    assert len(listed) == 30
    assert len({model.sha256 for model in listed}) == 30
    for model in listed:
        assert model.registry in ("PyPI", "npm")
        assert len(bytes.fromhex(model.sha256)) == 32
        assert all(array.dtype.kind in "fib" for array in model.feeds().values())


# What `make kits` says at its end: which kits ran, and why others did not.


def test_what_ran_and_what_did_not_is_said_with_the_reason():
    ran = Ran()
    ran.add("tests/kits/test_cpp.py::test_a", "passed", "")
    ran.add("tests/kits/test_cpp.py::test_b", "failed", "")
    ran.add("tests/kits/test_cpp.py::test_on_arm64", "passed", "")
    ran.add("tests/kits/test_js.py::test_a", "passed", "")
    ran.add("tests/kits/test_js.py::test_b", "skipped", "no reference")
    ran.add("tests/kits/test_swift_apps.py::test_a", "skipped", "there is no toolchain")
    ran.add("tests/kits/test_python.py::test_a", "passed", "")
    did, did_not = ran.lines()
    assert did == (
        "kits that ran: C++ on ARM64, emulated (1 passed), C++ on x86-64 (1 failed, 1 passed), "
        "Node.js (1 passed, 1 skipped)"
    )
    assert "Swift on Linux: there is no toolchain" in did_not
    assert "Kotlin and Java on the JVM: not asked for" in did_not


def test_a_later_run_of_some_tests_changes_those_only(tmp_path):
    path = tmp_path / "build" / "ran.json"
    first, later = Ran(), Ran()
    first.add("tests/kits/test_js.py::test_a", "failed", "")
    first.add("tests/kits/test_js.py::test_b", "skipped", "no reference")
    first.write(path)
    later.add("tests/kits/test_js.py::test_a", "passed", "")
    later.write(path)
    both = Ran.read(path)
    assert both.counts("Node.js") == {"passed": 1, "skipped": 1}
    assert both.reasons("Node.js") == "no reference"
    assert not both.ran("Swift on Linux")
