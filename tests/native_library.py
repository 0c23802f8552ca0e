"""The library of native kernels, built once, and models of its kernels."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx.helper
import onnxruntime
import pytest

from odtpack_runtime.files.atomic import locked
from odtpack_runtime.package.native import program_of
from odtpack_runtime.session.native import DOMAIN

ROOT = Path(__file__).parents[1]
INCLUDE = ROOT / "build/cpp-deps/include"
OPSET = 17


@functools.cache
def library() -> Path:
    """The library; the test is skipped where it cannot be built."""
    missing = [tool for tool in ("cmake", "c++") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"there is no {missing[0]}")
    if not (INCLUDE / "onnxruntime_c_api.h").is_file():
        pytest.skip("make kits sets up ONNX Runtime's header")
    lock = ROOT / "build/native.lock"
    lock.touch()
    with locked(lock):  # other test processes build it too
        command = ["make", "--silent", "native"]
        made = subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return next((ROOT / made.stdout.decode().strip()).glob("*odtpack-kernels.*"))


def options(*, native: bool) -> onnxruntime.SessionOptions:
    """Session options, with the library or without."""
    chosen = onnxruntime.SessionOptions()
    chosen.intra_op_num_threads = 2
    chosen.log_severity_level = 4
    if native:
        chosen.register_custom_ops_library(str(library()))
    return chosen


def session(model: onnx.ModelProto, *, native: bool) -> onnxruntime.InferenceSession:
    """A session with the library or without."""
    return onnxruntime.InferenceSession(model.SerializeToString(), options(native=native))


def kernel_model(
    nodes: list[onnx.NodeProto],
    inputs: Mapping[str, tuple[int, ...]],
    outputs: list[str],
    *,
    kernel: str = "elementwise",
    program: list[int] | None = None,
) -> onnx.ModelProto:
    """A model of one native node, whose body is ``nodes``; the program is theirs if not given."""
    opsets = [onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid(DOMAIN, 1)]
    code = program_of(nodes, list(inputs), outputs) if program is None else program
    function = onnx.helper.make_function(
        DOMAIN, "Kernel0", list(inputs), outputs, nodes, opsets[:1], ["kernel", "program"]
    )
    call = onnx.helper.make_node("Kernel0", list(inputs), outputs, domain=DOMAIN, kernel=kernel)
    call.attribute.append(
        onnx.helper.make_attribute("program", code, attr_type=onnx.AttributeProto.INTS)
    )
    number = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        [call],
        "native",
        [onnx.helper.make_tensor_value_info(name, number, dims) for name, dims in inputs.items()],
        [onnx.helper.make_tensor_value_info(name, number, None) for name in outputs],
    )
    return onnx.ModelProto(ir_version=8, graph=graph, functions=[function], opset_import=opsets)


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether two arrays are the same to the bit; one NaN is as good as another."""
    both = np.isnan(left) & np.isnan(right)
    return left.shape == right.shape and bool(
        (both | (left.view(np.uint32) == right.view(np.uint32))).all()
    )
