"""Training through the C API of a library, in a process without any other ONNX Runtime.

Where ``ODTPACK_MINIMAL_ORT`` names the library of a minimal build, that one is used too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from odtpack.build import build_package
from odtpack.errors import OdtpackError
from odtpack.optimizers import SGD, Adafactor
from odtpack.ort import native_training
from odtpack.ort.choices import OrtFormat
from odtpack.ort.native_training import (
    LIBRARY_VARIABLE,
    LibraryRefusedError,
    NativeResult,
    train_natively,
)
from odtpack.ort.session_runs import TRAINING_MODELS
from odtpack_runtime.package.package import Package
from tests import zoo
from tests.ort.conftest import Shared
from tests.ort.models import MODELS, package_of

(STOCK,) = (Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so*")


def models(package: Package) -> dict[str, Path]:
    return {key: package.ort_model(key) for key in TRAINING_MODELS}


@pytest.mark.parametrize("name", MODELS)
def test_the_library_of_the_wheel_trains_as_python_does(
    name: str, tmp_path: Path, shared_package: Shared
) -> None:
    package = shared_package(name, OrtFormat())
    result = train_natively(package, models(package), STOCK, tmp_path)
    assert result.version == onnxruntime.__version__
    np.testing.assert_allclose(result.losses, result.expected, rtol=1e-6)
    assert result.losses[-1] < result.losses[0]
    assert result.agrees


def test_sgd_and_running_statistics(tmp_path: Path) -> None:
    build_package(
        zoo.mobilenet_v2(32, 4, 0.1, "train"),
        tmp_path / "p",
        loss="cross_entropy",
        optimizer=SGD(momentum=0.9),
        ort_format=OrtFormat(),
    )
    package = Package.open(tmp_path / "p")
    result = train_natively(package, models(package), STOCK, tmp_path)
    np.testing.assert_allclose(result.losses, result.expected, rtol=1e-5)


def test_other_losses_do_not_agree() -> None:
    assert NativeResult("1", (1.0, 0.5), (1.00001, 0.5)).agrees
    assert not NativeResult("1", (1.0, 0.5), (1.001, 0.5)).agrees
    assert not NativeResult("1", (1.0, float("nan")), (1.0, 0.5)).agrees


def test_a_model_that_the_library_refuses(tmp_path: Path) -> None:
    package = package_of("mlp", tmp_path / "p", OrtFormat())
    data = package.ort_model("training_model").read_bytes()
    (tmp_path / "m.ort").write_bytes(data.replace(b"MatMul", b"MatNul").replace(b"Gemm", b"Gemn"))
    changed = {**models(package), "training_model": tmp_path / "m.ort"}
    with pytest.raises(LibraryRefusedError, match="Gemn"):
        train_natively(package, changed, STOCK, tmp_path)


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    package = package_of("mlp", tmp_path / "p", OrtFormat())
    (tmp_path / "lib.so").write_bytes(b"no library")
    with pytest.raises(OdtpackError, match="not a library of ONNX Runtime"):
        train_natively(package, models(package), tmp_path / "lib.so", tmp_path)


def test_an_optimizer_that_is_not_one_of_flat_vectors(tmp_path: Path) -> None:
    model, optimizer = zoo.mlp((4, 3)), Adafactor()
    build_package(
        model, tmp_path, loss="cross_entropy", optimizer=optimizer, ort_format=OrtFormat()
    )
    package = Package.open(tmp_path)
    with pytest.raises(OdtpackError) as caught:
        train_natively(package, models(package), STOCK, tmp_path)
    assert caught.value.code == "native-optimizer"


def test_the_process_loads_no_other_onnx_runtime() -> None:
    code = (
        "import sys, odtpack.ort.native_training\n"
        "print([n for n in sys.modules if n.split('.')[0] in ('onnxruntime', 'onnx')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.skipif(
    not os.environ.get(LIBRARY_VARIABLE), reason=f"{LIBRARY_VARIABLE} names no minimal build"
)
def test_the_minimal_build_trains(tmp_path: Path) -> None:
    package = package_of("mlp", tmp_path / "p", OrtFormat())
    library = Path(os.environ[native_training.LIBRARY_VARIABLE])
    assert train_natively(package, models(package), library, tmp_path).agrees
