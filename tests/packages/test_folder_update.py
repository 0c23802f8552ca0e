"""Replacing the files of a folder: what stays, what goes, and what is refused."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import pytest

from odtpack_runtime import OdtpackError
from odtpack_runtime.files import folder_update
from odtpack_runtime.files.folder_update import check_finished, finish_update, update_folder
from tests.failing import failing
from tests.refused import refused


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def texts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a folder may be written."""
    return tmp_path / "folder"


def replace(folder: Path, **options: object) -> None:
    with update_folder(folder, last="last", **options) as stage:  # type: ignore[arg-type]
        for name in ("a", "last"):
            (stage / name).write_text("new")


@pytest.fixture(params=["swap", "plan"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plan":
        monkeypatch.setattr(folder_update, "_exchange", lambda first, second: False)
    return str(request.param)


def test_a_new_folder_and_those_above_it(tmp_path):
    replace(tmp_path / "x" / "y" / "z")
    assert names(tmp_path / "x" / "y" / "z") == ["a", "last"]
    assert names(tmp_path / "x" / "y") == ["z"]


def test_what_is_replaced_and_what_stays(folder, tmp_path, way):
    folder.mkdir(mode=0o750)
    for name in ("a", "last", "old"):
        (folder / name).write_text("old")
    inode = folder.stat().st_ino
    replace(folder, obsolete=["old"])
    assert texts(folder) == {"a": "new", "last": "new"}
    assert names(tmp_path) == ["folder"]
    assert folder.stat().st_mode & 0o777 == 0o750
    assert way == "swap" or folder.stat().st_ino == inode
    (folder / "mine").write_text("mine")
    replace(folder)
    assert names(folder) == ["a", "last", "mine"]


def test_a_linked_folder_stays_a_link(tmp_path, way):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    replace(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert names(tmp_path / "real") == ["a", "last"]
    assert names(tmp_path) == ["link", "real"], way


def test_the_current_folder_stays_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inode = tmp_path.stat().st_ino
    replace(Path())
    assert tmp_path.stat().st_ino == inode
    assert names(Path()) == ["a", "last"]


def test_an_error_changes_nothing(folder, tmp_path, way):

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


def test_a_folder_in_the_place_of_a_file(tmp_path, way):
    (tmp_path / "folder" / "a").mkdir(parents=True)
    (tmp_path / "folder" / "a" / "mine").write_text("mine")
    with refused("package-not-written"):
        replace(tmp_path / "folder")
    assert (tmp_path / "folder" / "a" / "mine").read_text() == "mine"
    assert names(tmp_path / "folder") == ["a"], way


def test_another_file_system(folder, tmp_path, monkeypatch):
    """The stage lies beside the folder, and cannot be moved into it."""
    replace(folder)
    (folder / "mine").write_text("mine")
    error = OSError(18, os.strerror(18))
    across = failing(Path.rename, error, lambda path, to: path.parent != Path(to).parent)
    monkeypatch.setattr(Path, "rename", across)
    with update_folder(folder, last="last") as stage:
        (stage / "a").write_text("newer")
    assert (folder / "a").read_text() == "newer"
    assert names(folder) == ["a", "mine"], "without a new last file the old one is gone"
    assert names(tmp_path) == ["folder"]


def begun(where: Path, names: Sequence[str] = ("a", "last"), **changed: object) -> None:
    """A write of a folder that was interrupted right after its commit."""
    where.mkdir(exist_ok=True)
    inside = where / ".odtpack-update-0123456789ab"
    inside.mkdir()
    for name in names:
        (inside / name).write_text("new")
    plan = {
        "folder": str(where.resolve()), "stage": inside.name, "last": "last", "remove": ["old"],
        "move": list(names), **changed,
    }  # fmt: skip
    (where.parent / f".{where.name}.odtpack-plan").write_text(json.dumps(plan))


@pytest.mark.parametrize("gone", [[], ["last"], ["last", "old"], ["a", "last", "old"]])
def test_whoever_reads_changes_nothing_and_the_next_write_finishes(folder, tmp_path, gone):
    begun(folder)
    for name in ("a", "last", "old"):
        if name not in gone:
            (folder / name).write_text("old")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with refused("update-unfinished"):
        check_finished(folder)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    finish_update(folder)
    check_finished(folder)
    assert texts(folder) == {"a": "new", "last": "new"}
    assert names(tmp_path) == ["folder"]


def test_a_finished_last_file_is_not_removed_again(folder):
    """As where a file system made the renames durable in another order than theirs."""
    begun(folder)
    (folder / ".odtpack-update-0123456789ab" / "last").rename(folder / "last")
    finish_update(folder)
    assert texts(folder) == {"a": "new", "last": "new"}


PLANS = {
    "not text": {"folder": 1}, "not lists": {"remove": 1}, "a number": {"move": [1]},
    "above": {"remove": ["../victim"]}, "below": {"remove": ["a/b"]},
    "absolute": {"remove": ["/etc/passwd"]}, "last above": {"last": "../victim"},
    "another folder": {"folder": "/somewhere/else"}, "another stage": {"stage": "../victim"},
    "a stage that is a file": {"stage": "a"}, "huge": {"remove": ["x" * 2**20]},
}  # fmt: skip


@pytest.mark.parametrize("plan", PLANS)
def test_plans_that_are_not_for_the_folder(folder, tmp_path, plan):
    """They are ignored, and go with the next write."""
    begun(folder, **PLANS[plan])
    for path in (folder / "a", folder / "old", tmp_path / "victim"):
        path.write_text("alive")
    check_finished(folder)
    finish_update(folder)
    for path in (folder / "a", folder / "old", tmp_path / "victim"):
        assert path.read_text() == "alive"
    assert names(tmp_path) == ["folder", "victim"]


def test_a_stage_behind_a_link(folder, tmp_path):
    begun(folder)
    (folder / ".odtpack-update-0123456789ab").rename(tmp_path / "elsewhere")
    (folder / ".odtpack-update-0123456789ab").symlink_to(tmp_path / "elsewhere")
    with refused("update-unfinished", "it is a link"):
        finish_update(folder)
    assert names(tmp_path / "elsewhere") == ["a", "last"]


def test_a_plan_inside_of_the_folder_means_nothing(folder, caplog):
    replace(folder)
    inside = folder / ".odtpack-update"
    inside.mkdir()
    plan = {"folder": str(folder), "stage": inside.name, "last": "last", "remove": [], "move": []}
    for path in (inside / "plan.json", folder / ".folder.odtpack-plan"):
        path.write_text(json.dumps(plan))
    check_finished(folder)
    assert "is not part of the package" in caplog.text
    finish_update(folder)
    replace(folder)
    assert names(folder) == [".folder.odtpack-plan", ".odtpack-update", "a", "last"]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root writes everywhere")
@pytest.mark.parametrize("holds", [True, False])
def test_a_folder_whose_parent_takes_no_file(tmp_path, holds):
    """What is empty is filled; what would be replaced stays, for it could not be finished."""
    folder = tmp_path / "parent" / "folder"
    folder.mkdir(parents=True)
    if holds:
        replace(folder)
        (folder / "mine").write_text("mine")
    (tmp_path / "parent").chmod(0o500)
    try:
        if holds:
            with pytest.raises(OdtpackError, match="cannot be replaced atomically"):
                replace(folder)
        else:
            replace(folder)
    finally:
        (tmp_path / "parent").chmod(0o700)
    assert names(folder) == ["a", "last", *(["mine"] if holds else [])]


def test_the_folders_that_are_made_are_synced(tmp_path, monkeypatch):
    synced: list[Path] = []
    monkeypatch.setattr(folder_update.atomic, "sync_folder", synced.append)
    replace(tmp_path / "x" / "y" / "z")
    assert synced[-3:] == [tmp_path / "x" / "y", tmp_path / "x", tmp_path]


@pytest.mark.parametrize("exists", [True, False])
def test_a_folder_that_cannot_be_synced_is_said(folder, tmp_path, monkeypatch, exists):
    if exists:
        replace(folder)
        (folder / "a").write_text("old")

    fail = failing(mock.Mock(), OSError(5, os.strerror(5)), lambda path: path == tmp_path)
    monkeypatch.setattr(folder_update.atomic, "sync_folder", fail)
    with pytest.raises(OdtpackError, match="was written, but it may not survive a power cut"):
        replace(folder)
    assert (folder / "a").read_text() == "new"
    assert names(tmp_path) == ["folder"]


@pytest.mark.parametrize("fails", range(1, 40))
def test_a_call_that_fails_loses_nothing(folder, monkeypatch, fails):
    """Each rename, removal and sync of the way without a swap fails once."""
    replace(folder)
    for name in ("a", "last", "old", "mine"):
        (folder / name).write_text("old")
    monkeypatch.setattr(folder_update, "_exchange", lambda first, second: False)
    left = fails

    def counted(call: Callable[..., object]) -> Callable[..., object]:
        def counting(*arguments: object, **options: object) -> object:
            nonlocal left
            left -= 1
            if left == 0:
                raise OSError(5, os.strerror(5))
            return call(*arguments, **options)

        return counting

    code = ""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (Path, "rename"), (Path, "replace"), (Path, "unlink"), (os, "fsync"), (os, "rmdir"),
        ):  # fmt: skip
            patch.setattr(owner, name, counted(getattr(owner, name)))
        try:
            replace(folder, obsolete=["old"])
        except OdtpackError as error:
            code = "" if "but it may not survive" in error.what else error.code
    if code == "update-unfinished":
        with pytest.raises(OdtpackError):
            check_finished(folder)
        finish_update(folder)
        code = ""
    new = {"a": "new", "last": "new", "mine": "old"}
    old = {"a": "old", "last": "old", "old": "old", "mine": "old"}
    assert texts(folder) == (old if code else new)
    check_finished(folder)


def test_a_plan_that_cannot_be_read_is_not_thrown_away(folder, monkeypatch):
    begun(folder)
    with monkeypatch.context() as patch:
        fail = failing(Path.open, OSError(5, "no"), lambda path, *_: path.name.endswith("-plan"))
        patch.setattr(Path, "open", fail)
        for call in (check_finished, finish_update):
            with refused("update-unfinished"):
                call(folder)
    finish_update(folder)
    assert names(folder) == ["a", "last"]
