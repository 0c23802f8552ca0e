"""Nothing is sent by a training: the telemetry of ONNX Runtime is off unless an app turns it on."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import types
from pathlib import Path

import onnxruntime
import pytest

from odtpack_runtime import telemetry
from tests import zoo

VARIABLE = "ORT_DISABLE_TELEMETRY"
SESSION = "import onnxruntime, sys; onnxruntime.InferenceSession(sys.argv[1])"


def written(home: Path, statements: str, **variables: str) -> list[str]:
    """Files in the home of a user whose process opens a session after these statements."""
    model = home.with_suffix(".onnx")
    model.write_bytes(zoo.mlp((4, 3)).SerializeToString())
    home.mkdir()
    # Without the variables of build servers, at whose sight ONNX Runtime sends nothing.
    environment = {"HOME": str(home), "PATH": os.environ["PATH"], **variables}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    subprocess.run(
        [sys.executable, "-c", f"{statements}\n{SESSION}", str(model)], check=True, env=environment
    )
    return sorted(path.name for path in home.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def _sends(tmp_path_factory: pytest.TempPathFactory) -> None:
    """ONNX Runtime by itself leaves an identifier of the device."""
    library = Path(onnxruntime.__file__).parent / "capi"
    if not any(VARIABLE.encode() in path.read_bytes() for path in library.glob("*.so*")):
        pytest.skip(f"ONNX Runtime {onnxruntime.__version__} for this system has no telemetry")
    assert "deviceid" in written(tmp_path_factory.mktemp("plain") / "home", "")


@pytest.mark.usefixtures("_sends")
@pytest.mark.parametrize("module", ["odtpack", "odtpack_runtime", "odtpack_simulator"])
def test_off_by_default(module: str, tmp_path: Path) -> None:
    assert written(tmp_path / "home", f"import {module}") == []


@pytest.mark.usefixtures("_sends")
def test_an_app_may_turn_it_on(tmp_path: Path) -> None:
    assert "deviceid" in written(tmp_path / "home", "import odtpack_runtime", **{VARIABLE: "0"})


@pytest.mark.parametrize(("chosen", "calls"), [(None, 1), ("0", 0), ("1", 0)])
def test_of_a_library_that_is_loaded_events_stop(
    chosen: str | None, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if chosen is not None:
        monkeypatch.setenv(VARIABLE, chosen)
    called: list[bool] = []
    library = types.SimpleNamespace(disable_telemetry_events=lambda: called.append(True))
    monkeypatch.setitem(sys.modules, "onnxruntime", library)  # type: ignore[arg-type]
    runpy.run_path(telemetry.__file__)
    assert len(called) == calls
    assert os.environ[VARIABLE] == (chosen or "1")
