"""An app that trains with a kit sends nothing, as far as the kit can see to that."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odtpack.build import build_package
from tests import zoo
from tests.kits import cpp_kit, csharp_kit, javascript, kotlin_kit, swift_kit
from tests.kits.harness import Task

pytestmark = pytest.mark.kits
VARIABLE = "ORT_DISABLE_TELEMETRY"
KEPT = {"PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "JAVA_HOME", "ODTPACK_SWIFT", "TMPDIR"}


def _program(kit: Any) -> Callable[[dict[str, Any], Path], None]:
    def train(task: Task, folder: Path) -> None:
        steps = [{"inputs": [{"name": name, **each} for name, each in task["data"].items()]}]
        job = {"package": "package", "steps": steps, "evaluation": steps[0], "threads": 1}
        kit.measure({**job, "count": task["steps"]}, folder)

    return train


KITS: dict[str, tuple[Callable[[], str | None], Callable[[dict[str, Any], Path], Any]]] = {
    "cpp": (cpp_kit.unavailable, _program(cpp_kit)),
    "swift": (swift_kit.unavailable, _program(swift_kit)),
    "csharp": (csharp_kit.unavailable, _program(csharp_kit)),
    "node": (javascript.unavailable, lambda task, _: javascript.train(task, "node")),
    "node, ort passed in": (
        javascript.unavailable,
        lambda task, _: javascript.train({**task, "ort": True}, "node"),
    ),
    "kotlin": (kotlin_kit.unavailable, lambda task, _: kotlin_kit.train(task, "kotlin")),
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages") / "package"
    build_package(zoo.mlp((8, 6, 10)), folder, loss="cross_entropy")
    return folder


@pytest.mark.parametrize("name", KITS)
@pytest.mark.parametrize("chosen", [None, "0"])
def test_off_unless_the_app_says_otherwise(
    name: str, chosen: str | None, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unavailable, train = KITS[name]
    if reason := unavailable():
        pytest.skip(reason)
    (tmp_path / "package").symlink_to(package)
    rng = np.random.default_rng(0)
    batch = {"input": rng.standard_normal((4, 8), np.float32), "labels": np.arange(4)}
    data = javascript.save_batch(tmp_path, **batch)
    # Without the variables of build servers, at whose sight ONNX Runtime sends nothing.
    for variable in os.environ.keys() - KEPT:
        monkeypatch.delenv(variable)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    if chosen is not None:
        monkeypatch.setenv(VARIABLE, chosen)
    elif name == "kotlin":  # Java cannot set it: on a JVM the app is started with it
        monkeypatch.setenv(VARIABLE, "1")
    train({"package": str(tmp_path / "package"), "data": data, "steps": 3}, tmp_path)
    left = {path.name for path in home.rglob("*") if path.is_file()}
    assert ("deviceid" in left) == (chosen == "0")
