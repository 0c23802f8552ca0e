"""An app that trains with a kit sends nothing, as far as the kit can see to that."""

import os
from pathlib import Path

import numpy as np
import pytest

from odtpack.build import build_package
from tests import zoo
from tests.kits import javascript, kotlin_kit
from tests.kits.harness import save_arrays

pytestmark = pytest.mark.kits
VARIABLE = "ORT_DISABLE_TELEMETRY"
KEPT = {"PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "JAVA_HOME", "ODTPACK_SWIFT", "TMPDIR"}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages") / "package"
    build_package(zoo.mlp((8, 6, 10)), folder, loss="cross_entropy")
    return folder


@pytest.mark.parametrize("chosen", [None, "0"])
def test_off_unless_the_app_says_otherwise(every, chosen, package, tmp_path, monkeypatch):
    (tmp_path / "package").symlink_to(package)
    rng = np.random.default_rng(0)
    batch = {"input": rng.standard_normal((4, 8), np.float32), "labels": np.arange(4)}
    data = save_arrays(tmp_path, **batch)
    task = {"package": tmp_path / "package", "data": data, "steps": 3, "evaluate": True}
    # Without the variables of build servers, at whose sight ONNX Runtime sends nothing.
    for variable in os.environ.keys() - KEPT:
        monkeypatch.delenv(variable)
    if chosen is not None:
        monkeypatch.setenv(VARIABLE, chosen)
    elif every is kotlin_kit:  # Java cannot set it: on a JVM the app is started with it
        monkeypatch.setenv(VARIABLE, "1")
    for own in (False, True) if every is javascript else (False,):  # the app's ONNX Runtime
        home = tmp_path / f"home-{own}"
        home.mkdir()
        monkeypatch.setenv("HOME", str(home))
        every.train({**task, "ort": own}, "kit")
        left = {path.name for path in home.rglob("*") if path.is_file()}
        assert ("deviceid" in left) == (chosen == "0")
