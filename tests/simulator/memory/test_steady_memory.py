"""What is measured is the training's memory, whatever the process did before it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from odtpack_simulator.memory.memory_plan import plan_memory
from odtpack_simulator.replay.replay import run_training_child
from tests.simulator.packages import Case

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux")


def test_bytecode_that_nobody_stored(
    case: Callable[[str], Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling every module of the process frees megabytes that the training must not hide in."""
    this = case("cnn")
    plan = plan_memory(this.package, this.shapes)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "bytecode"))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    compiled = run_training_child(this.job(tmp_path)).peak_bytes
    assert not (tmp_path / "bytecode").exists()
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE")
    run_training_child(this.job(tmp_path))
    stored = run_training_child(this.job(tmp_path)).peak_bytes
    assert any((tmp_path / "bytecode").rglob("*.pyc"))
    assert stored is not None
    assert compiled == pytest.approx(stored, abs=400_000)
    assert plan.peak.nbytes == pytest.approx(stored, rel=0.1)
    assert plan.peak.nbytes == pytest.approx(compiled, rel=0.1)
