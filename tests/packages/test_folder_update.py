"""Replacing the files of a folder: what stays, what goes, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from odtpack_runtime import OdtpackError
from odtpack_runtime.files import folder_update
from odtpack_runtime.files.folder_update import UPDATE_NAME, finish_update, update_folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def replace(folder: Path, **options: object) -> None:
    with update_folder(folder, last="last", **options) as stage:  # type: ignore[arg-type]
        for name in ("a", "last"):
            (stage / name).write_text("new")


@pytest.fixture(params=["swap", "plan"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plan":
        monkeypatch.setattr(folder_update, "_exchange", lambda first, second: False)
    return str(request.param)


def test_a_new_folder_and_those_above_it(tmp_path: Path) -> None:
    replace(tmp_path / "x" / "y" / "z")
    assert names(tmp_path / "x" / "y" / "z") == ["a", "last"]
    assert names(tmp_path / "x" / "y") == ["z"]


def test_what_is_replaced_and_what_stays(tmp_path: Path, way: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o750)
    for name in ("a", "last", "old"):
        (folder / name).write_text("old")
    inode = folder.stat().st_ino
    replace(folder, obsolete=["old"])
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"a": "new", "last": "new"}
    assert names(tmp_path) == ["folder"]
    assert folder.stat().st_mode & 0o777 == 0o750
    assert way == "swap" or folder.stat().st_ino == inode
    (folder / "mine").write_text("mine")
    replace(folder)
    assert names(folder) == ["a", "last", "mine"]


def test_a_linked_folder_stays_a_link(tmp_path: Path, way: str) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    replace(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert names(tmp_path / "real") == ["a", "last"]
    assert names(tmp_path) == ["link", "real"], way


def test_the_current_folder_stays_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    inode = tmp_path.stat().st_ino
    replace(Path())
    assert tmp_path.stat().st_ino == inode
    assert names(Path()) == ["a", "last"]


def test_an_error_changes_nothing(tmp_path: Path, way: str) -> None:
    folder = tmp_path / "folder"

    def fail() -> None:
        with update_folder(folder, last="last") as stage:
            (stage / "a").write_text("new")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert names(tmp_path) == [], way
    replace(folder)
    with pytest.raises(KeyError):
        fail()
    assert names(folder) == ["a", "last"]
    assert names(tmp_path) == ["folder"]


def test_a_folder_in_the_place_of_a_file(tmp_path: Path, way: str) -> None:
    (tmp_path / "folder" / "a").mkdir(parents=True)
    (tmp_path / "folder" / "a" / "mine").write_text("mine")
    with pytest.raises(OdtpackError) as caught:
        replace(tmp_path / "folder")
    assert caught.value.code == "package-not-written", way
    assert (tmp_path / "folder" / "a" / "mine").read_text() == "mine"
    assert names(tmp_path / "folder") == ["a"]


def test_another_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage lies beside the folder, and cannot be moved into it."""
    folder = tmp_path / "folder"
    replace(folder)
    (folder / "mine").write_text("mine")
    rename = Path.rename

    def refused(self: Path, target: Path) -> Path:
        if self.parent != Path(target).parent:
            raise OSError(18, os.strerror(18))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refused)
    with update_folder(folder, last="last") as stage:
        (stage / "a").write_text("newer")
    assert (folder / "a").read_text() == "newer"
    assert names(folder) == ["a", "mine"], "without a new last file the old one is gone"
    assert names(tmp_path) == ["folder"]


PLANS = {
    "text": b"x",
    "not lists": b'{"remove": 1, "move": []}',
    "a number": b'{"remove": [], "move": [1]}',
    "above": b'{"remove": ["../victim"], "move": []}',
    "below": b'{"remove": ["a/b"], "move": []}',
    "absolute": b'{"remove": ["/etc/passwd"], "move": []}',
    "itself": b'{"remove": [".odtpack-update"], "move": []}',
    "huge": b'{"remove": ["' + b"x" * 2**20 + b'"], "move": []}',
    "deep": b"[" * 100_000,
    "unlisted": b'{"remove": [], "move": []}',
}


@pytest.mark.parametrize("plan", PLANS)
def test_hostile_plans(tmp_path: Path, plan: str) -> None:
    folder = tmp_path / "folder"
    (folder / UPDATE_NAME).mkdir(parents=True)
    (folder / UPDATE_NAME / "more").write_text("more")
    (folder / UPDATE_NAME / "plan.json").write_bytes(PLANS[plan])
    (folder / "a").write_text("a")
    (tmp_path / "victim").write_text("alive")
    with pytest.raises(OdtpackError) as caught:
        finish_update(folder)
    assert caught.value.code == "update-unfinished"
    assert (tmp_path / "victim").read_text() == "alive"
    assert (folder / "a").read_text() == "a"


def test_an_update_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    plan = {"remove": [], "move": ["secret"]}
    (tmp_path / "elsewhere" / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "elsewhere" / "secret").write_text("secret")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / UPDATE_NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OdtpackError, match="it is a link"):
        finish_update(tmp_path / "folder")
    assert (tmp_path / "elsewhere" / "secret").exists()
