"""Destinations are tried before the work whose result they get, and left as they were."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from odtpack.cli._files import check_creatable, check_writable
from odtpack_runtime.errors import OdtpackError
from tests.cli.conftest import Run, Shared, assert_refused, tree

NOTHING_IS_CREATED = Path("/proc")
"""Where even root, whom no permission stops, can create no file."""


def places(folder: Path) -> list[tuple[Path, str]]:
    """Paths that cannot be written, and what is said about them."""
    (folder / "file").write_text("mine")
    (folder / "dangling").symlink_to(folder / "nowhere")
    return [
        (folder, "it is a folder"),
        (folder / "file" / "new", "is not a folder"),
        (folder / "file" / "deeper" / "new", "is not a folder"),
        (folder / "dangling" / "new", "is not a folder"),
        (folder / "missing" / "new", "does not exist"),
        (folder / ("x" * 300), "name too long"),
        # The name itself would do; that under which it is written first would not.
        (folder / ("x" * 250), "name too long"),
        (Path(os.devnull), "not an ordinary file"),
        (NOTHING_IS_CREATED / "new", "no file can be created in the folder"),
        (NOTHING_IS_CREATED / "deeper" / "new", "no file can be created in the folder"),
    ]


@pytest.mark.skipif(not NOTHING_IS_CREATED.is_dir(), reason="needs a folder that takes no file")
def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    found = places(tmp_path)
    before = tree(tmp_path)
    for path, words in found:
        with pytest.raises(OdtpackError) as caught:
            check_writable(path, "--out")
        assert caught.value.code == "cannot-write"
        assert words.lower() in caught.value.what.lower()
        assert str(path) in caught.value.what
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["new", "file", "x" * 200, "dangling"])
def test_places_that_can_be_written(tmp_path: Path, name: str) -> None:
    places(tmp_path)
    before = tree(tmp_path)
    check_writable(tmp_path / name, "--out")
    assert tree(tmp_path) == before


def test_folders_that_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (Path(), Path("..") / tmp_path.name, Path("new"), Path("new/deep"), tmp_path):
        check_creatable(path, "--out")
    assert tree(tmp_path) == {}


def test_a_folder_that_takes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permissions say yes, and the system says no: full, read-only, of another kind."""
    monkeypatch.setattr(os, "access", lambda *_: True)

    def refuse(*_: object) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "open", refuse)
    for check in (check_writable, check_creatable):
        with pytest.raises(OdtpackError, match="Read-only file system"):
            check(tmp_path / "new", "--out")


@pytest.mark.skipif(not NOTHING_IS_CREATED.is_dir(), reason="needs a folder that takes no file")
@pytest.mark.parametrize("place", ["below a file", "below proc"])
def test_nothing_is_trained_for_a_report_that_cannot_be_written(
    run: Run, shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    from odtpack_simulator import simulation

    def started(*_: object, **__: object) -> None:
        raise AssertionError("the replay was started")

    monkeypatch.setattr(simulation, "simulate", started)
    (tmp_path / "file").write_text("mine")
    path = tmp_path / "file" / "r" if place == "below a file" else NOTHING_IS_CREATED / "r"
    command = "simulate", shared.package, "--data", shared.data, "--device", "pixel-8a"
    for form in ("html", "json", "junit", "markdown", "github"):
        outcome = run(*command, "--report", f"{form}:{path}")
        assert_refused(outcome, "cannot-write", str(path))
    outcome = run("train", shared.package, "--data", shared.data, "--out", path)
    assert_refused(outcome, "cannot-write", str(path))
    command = "fit", shared.model, "--data", shared.data, "--device", "pixel-8a"
    outcome = run(*command, "--loss", "cross_entropy", "--out", path)
    assert_refused(outcome, "cannot-write", str(path))
    assert tree(tmp_path) == {"file": b"mine"}


def test_what_a_killed_check_left_is_removed_by_the_next(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    left = tmp_path / f".m.onnx.{process.pid}-0123456789ab.tmp"
    left.touch()
    check_writable(tmp_path / "m.onnx", "--out")
    assert list(tmp_path.iterdir()) == []
