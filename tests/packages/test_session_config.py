"""Nothing of a manifest's session configuration reaches ONNX Runtime but what odtpack writes.

Some of its entries name files that it reads, writes or loads as code. The keys are those of its
headers (``tests/hostile/config_keys.txt``, of 1.32) and those that stand in the library that runs.
"""

import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from odtpack_runtime import CheckpointState, Module, OdtpackError
from odtpack_runtime.package.manifest import Manifest
from odtpack_runtime.package.package import Package
from odtpack_runtime.package.records import SESSION_CONFIG
from odtpack_runtime.package.verify import verify_package
from tests.packages.mutations import edit
from tests.packaging_tools import open_module
from tests.programs import ran
from tests.refused import refused

HEADERS = Path(__file__).parents[1] / "hostile" / "config_keys.txt"
WRITES = "session.collect_node_memory_stats_to_file"
_KEY = re.compile(rb"(?:session|ep|optimization|mlas)\.[A-Za-z0-9_.]{2,100}")


@cache
def config_keys() -> tuple[str, ...]:
    """Every key that ONNX Runtime may know."""
    found = set(HEADERS.read_text().split())
    for library in (Path(onnxruntime.__file__).parent / "capi").glob("*onnxruntime_pybind11*"):
        found |= {match.decode() for match in _KEY.findall(library.read_bytes())}
    return tuple(sorted(found))


def with_config(folder: Path, config: dict[str, Any]) -> bytes:
    """Put a session configuration into a package's manifest, which has no digest then."""
    return edit(folder, lambda content: content["session"].update(config=config), sealed=False)


def tree(*folders: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of every file below some folders."""
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns)
        for folder in folders
        for path in folder.rglob("*")
    }


def opens(folder: Path) -> Iterator[str]:
    """Whatever reads a manifest, by the code of its refusal."""
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    for use in (
        lambda: Package.open(folder),
        lambda: Module(folder / "training_model.onnx", state, folder / "eval_model.onnx"),
        lambda: verify_package(folder),
    ):
        try:
            use()
        except OdtpackError as error:
            yield error.code
        else:
            yield "accepted"


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "package"))


def test_the_keys_are_many():
    assert {WRITES, *SESSION_CONFIG} <= set(config_keys())
    assert len(config_keys()) > 100


def test_no_key_but_ours_is_accepted(copy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where "1" would be written
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "mine.txt").write_text("my only copy")
    before = tree(outside)
    for key in config_keys():
        for value in ("1", str(outside / "mine.txt"), str(outside / "new")):
            if (key, value) in SESSION_CONFIG.items():
                continue
            data = with_config(copy, {key: value})
            with refused("manifest-invalid"):
                Manifest.from_json(data, "manifest.json")
        assert list(opens(copy)) == ["manifest-invalid"] * 3, key
    assert tree(outside) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside", "package"]


def as_user(user: int, function: Callable[[], object]) -> Any:
    """Return what a function returns in a process of a user without rights, as JSON has it.

    The process is a copy of this one: an interpreter in root's home is not there for others.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            found = {"user": os.getuid(), "found": function()}
        except BaseException:
            found = {"error": traceback.format_exc()}
        os.write(writing, json.dumps(found).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as stream:  # noqa: PTH123 - a descriptor
        answer = json.loads(stream.read())
    os.waitpid(child, 0)
    assert "error" not in answer, answer["error"]
    assert answer["user"] == user != 0
    return answer["found"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="users are those of POSIX")
def test_nothing_is_written_by_a_user_without_rights(built):
    """It may change none of root's files, and of its own none changes: that is all files there
    are, but for folders in which everybody may write.
    """
    user = 61_000 + os.getpid() % 4_000 if os.getuid() == 0 else os.getuid()
    with tempfile.TemporaryDirectory(prefix="odtpack-user-") as name:
        home = Path(name).resolve()
        package = Path(shutil.copytree(built, home / "package"))
        (home / "outside").mkdir()
        (home / "outside" / "mine.txt").write_text("my only copy")
        assert list(opens(package)) == ["accepted"] * 3  # all is imported now

        def try_keys() -> dict[str, list[str]]:
            os.chdir(home)
            found = {}
            for key in config_keys():
                with_config(package, {key: str(home / "outside" / "new")})
                found[key] = list(opens(package))
            (package / "manifest.json").write_bytes(manifest)
            return found

        manifest = (package / "manifest.json").read_bytes()
        with_config(package, {"": ""})
        assert list(opens(package)) == ["manifest-invalid"] * 3
        (package / "manifest.json").write_bytes(manifest)
        if os.getuid() == 0:
            for path in (home, *home.rglob("*")):
                os.chown(path, user, user)
        public = [Path(place) for place in ("/tmp", "/var/tmp", "/dev/shm", "/run/lock")]  # noqa: S108
        before, others = contents(home), owned(public, user, home)
        found = as_user(user, try_keys)
        assert found == dict.fromkeys(config_keys(), ["manifest-invalid"] * 3)
        assert contents(home) == before
        assert owned(public, user, home) == others
        # What a user without rights writes is seen.
        as_user(user, lambda: (home / "outside" / "new").write_text("1"))
        assert contents(home) != before


def contents(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder; None for folders."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def owned(folders: list[Path], user: int, but: Path) -> set[str]:
    """Files of a user below some folders."""
    found = set()
    for folder in folders:
        for parent, folders_in_it, files in os.walk(folder):
            for name in (*folders_in_it, *files):
                path = Path(parent) / name
                with contextlib.suppress(OSError):  # gone meanwhile
                    if path.lstat().st_uid == user and but not in (path, *path.parents):
                        found.add(str(path))
    return found


def test_the_command_refuses_and_writes_nothing(copy, tmp_path):
    victim = tmp_path / "mine.txt"
    victim.write_text("my only copy")
    with_config(copy, dict(SESSION_CONFIG) | {WRITES: str(victim)})
    data = tmp_path / "data.npz"
    np.savez(data, input=np.ones((4, 6), np.float32), labels=np.zeros(4, np.int64))
    for command in (
        ["verify", str(copy), "--stranger"],
        ["train", str(copy), "--data", str(data), "--out", str(tmp_path / "trained")],
    ):
        done = ran(sys.executable, "-m", "odtpack", *command, code=2, cwd=tmp_path)
        assert "manifest-invalid" in done.stderr
        assert victim.read_text() == "my only copy"


@pytest.mark.parametrize("session", [
    *({"optimization_level": "all", **wrong} for wrong in (
        {"config": {"session.force_spinning_stop": "0"}}, {"config": {"": ""}}, {"config": []},
        {"config": {"session.force_spinning_stop": 1}}, {"profiling": "x"}, {"threads": 257},
        {"threads": 0},
    )),
    {"optimization_level": "odd"}, {}, [], 3,
])  # fmt: skip
def test_an_invalid_session_is_not_replaced_by_defaults(copy, session):
    edit(copy, lambda content: content.update(session=session), sealed=False)
    assert list(opens(copy)) == ["manifest-invalid"] * 3


@pytest.mark.parametrize("session", [None, {"optimization_level": "all"}])
def test_what_an_older_package_says_is_taken(copy, session):
    edit(copy, lambda content: content.update(session=session), sealed=False)
    open_module(copy)(np.ones((2, 6), np.float32), np.zeros(2, np.int64))


def test_onnx_runtime_itself_would_write(copy, tmp_path):
    """Or what is tested here shows nothing."""
    options = onnxruntime.SessionOptions()
    written = tmp_path / "written.csv"
    options.add_session_config_entry(WRITES, str(written))
    path = copy / "training_model.onnx"
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feeds = {
        node.name: np.zeros([size if isinstance(size, int) else 2 for size in node.shape], kind)
        for node in session.get_inputs()
        for kind in ({"tensor(int64)": np.int64, "tensor(bool)": np.bool_}.get(
            node.type, np.float32),)
    }  # fmt: skip
    session.run(None, feeds)
    del session
    assert written.exists()
