"""Old releases of ONNX Runtime are set up, and what cannot be is said in a sentence."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts import old_runtimes


def test_a_missing_python_is_an_error_and_the_other_releases_are_set_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_release_that_pip_cannot_install_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(old_runtimes, "CACHE", tmp_path)
    monkeypatch.setattr(old_runtimes, "_works", lambda python: True)

    def refuse(command: list[object], check: bool) -> None:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(subprocess, "run", refuse)
    assert old_runtimes.main(["1.20"]) == 2
    assert "error: ONNX Runtime 1.20 could not be installed" in capsys.readouterr().err
