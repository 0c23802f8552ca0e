"""Native kernels inside the kits on the native core: taken by themselves, and turned off."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from odtpack.adapters import AdapterSpec
from odtpack.build import build_package
from odtpack.optimizers import SGD, AdamW
from odtpack_runtime import Package
from odtpack_runtime.session.native import VARIABLE
from odtpack_runtime.session.options import default_session_options
from odtpack_runtime.training.loop import loss_of
from tests import native_library, zoo
from tests.kits import cpp_kit
from tests.kits.harness import save_batch
from tests.once import made_once
from tests.packaging_tools import batch, open_training

pytestmark = pytest.mark.kits
STEPS, RATE = 6, 0.003
LORA = {"adapter": AdapterSpec("lora", ("*",), (), 4, 8.0), "base": "int8"}


def transformer() -> onnx.ModelProto:
    """An encoder of two layers."""
    return zoo.transformer_encoder(vocab=50, d=64, layers=2, T=32, ff=128)


# A network, options of the build, and whether kernels give the bits of the bodies (docs/native.md):
# None where that depends on the processor's vectors.
CASES: dict[str, tuple[Callable[[], onnx.ModelProto], dict[str, Any], bool | None]] = {
    "adamw": (lambda: zoo.mlp((16, 32, 10)), {"optimizer": AdamW(weight_decay=0.01)}, True),
    "sgd": (lambda: zoo.mlp((16, 32, 10)), {"optimizer": SGD()}, True),
    "depthwise": (lambda: zoo.mobilenet_v2(32, stages=3), {}, False),
    "transformer": (transformer, {}, False),
    "product": (transformer, LORA, None),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A package, a batch, and whether its results are to be the bits of the bodies."""
    factory, options, same = CASES[request.param]
    model = factory()

    def built(folder: Path) -> None:
        build_package(model, folder, loss="cross_entropy", native=True, **options)

    return made_once(tmp_path_factory, f"native-{request.param}", built), batch(model, 8), same


def test_the_conformance_suite_without_kernels(native, suite, monkeypatch):
    """With them it is in the whole suite, to the same bits."""
    monkeypatch.setenv(VARIABLE, "0")
    names = ("native_adamw", "native_sgd")
    printed = native.run("conformance", suite, *names).stdout
    assert printed.splitlines() == [f"passed {name}" for name in names]


def losses_of_steps(package: Path, arrays: tuple[Any, ...]) -> list[float]:
    """The losses of Python's steps."""
    opened = Package.open(package)
    options = default_session_options(opened.training_model, threads=1)
    _, _, optimizer = open_training(package, options, step_model_uri=opened.step_model)
    optimizer.set_learning_rate(RATE)
    return [loss_of(optimizer.step_on(*arrays)) for _ in range(STEPS)]


def test_a_session_takes_kernels_by_itself(native, case, tmp_path, monkeypatch):
    package, arrays, same = case
    names = [each.name for each in Package.open(package).manifest.inputs]
    saved = save_batch(tmp_path / "batch", dict(zip(names, arrays, strict=True)))
    job = {"package": package, "steps": [saved], "count": STEPS, "threads": 1,
           "learning_rate": RATE}  # fmt: skip
    found, expected = {}, {}
    for value, library in (("0", "0"), ("1", str(native_library.library()))):
        monkeypatch.setenv(VARIABLE, library)
        expected[value] = losses_of_steps(package, arrays)
        monkeypatch.setenv(VARIABLE, value)
        result = native.measure(job, tmp_path)
        assert result["kernels"] is (value == "1")
        found[value] = result["losses"]
    if native is cpp_kit:  # an entry of the session options turns them off too
        result = native.measure({**job, "kernels": False}, tmp_path)
        assert (result["kernels"], result["losses"]) == (False, found["0"])
    assert found["0"] == expected["0"]
    assert found["0"][-1] < found["0"][0]
    np.testing.assert_allclose(found["1"], expected["1"], rtol=1e-6)
    assert same is None or (found["1"] == found["0"]) is same
    np.testing.assert_allclose(found["1"], found["0"], rtol=1e-5)
