"""Saves of the C++ kit: under any spelling of a path, on failing disks, over what is not a file."""

import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odtpack_runtime import OdtpackError
from odtpack_runtime.checkpoint import writer
from odtpack_runtime.checkpoint.format import CheckpointData, OptimizerState, read_checkpoint
from odtpack_runtime.checkpoint.writer import write_checkpoint
from odtpack_runtime.files.atomic import locked
from tests.kits import cpp_kit
from tests.kits.cpp_kit import run
from tests.kits.harness import full_disk, needs
from tests.programs import ran

pytestmark = needs(cpp_kit.unavailable())
ELEMENTS = 2000
ABOVE = pytest.mark.parametrize("above", [2**30, 64], ids=["one file", "external data"])
CHANGES = ("openat", "write", "fsync", "rename", "link", "linkat", "unlink", "ftruncate")


def write(path: Path, value: float) -> None:
    """A checkpoint with one value everywhere."""
    array = np.full(ELEMENTS, value, np.float32)
    state = OptimizerState(int(value), 0.1, {"w": [array]})
    write_checkpoint(path, CheckpointData({"w": array}, {}, optimizer=state))


def value(path: Path) -> float | None:
    """The value that a checkpoint has everywhere, None if it is not whole."""
    try:
        (found,) = set(read_checkpoint(path).trainable["w"].tolist())
    except OdtpackError:
        return None
    return float(found)


def save(number: float, path: Path | str, above: int, **options: object) -> tuple[str, str]:
    """Save a value with the save before kept; return the code of an error, and its message."""
    source = Path(options.pop("scratch", Path(path).parent)) / "source"  # type: ignore[arg-type]
    write(source, number)
    done = run("trust", "keep", source, path, above, **options)
    code, _, message = done.stdout.partition("\n")
    return code, message


@ABOVE
def test_a_damaged_file_never_becomes_the_save_before(above, tmp_path):
    path = tmp_path / "trained"
    for number in (1, 2):
        assert save(number, path, above) == ("", "")
    damaged = bytes(4) + path.read_bytes()[4:]
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    for spelling in (str(path), f"{tmp_path}/./trained", f"{link}/trained", "trained"):
        path.write_bytes(damaged)
        assert value(path.with_name("trained.previous")) == 1
        # Loaded from the save before, and saved under another name of the same file.
        assert run("trust", "keep", path, spelling, above, cwd=tmp_path).stdout == ""
        assert value(path) == 1
        assert value(path.with_name("trained.previous")) == 1


@ABOVE
def test_a_file_that_another_process_damaged_replaces_nothing(above, tmp_path):
    path = tmp_path / "trained"
    for number in (1, 2):
        save(number, path, above)
    path.write_bytes(path.read_bytes()[:-9])
    assert save(3, path, above) == ("", "")
    assert (value(path), value(tmp_path / "trained.previous")) == (3, 1)


def test_the_data_file_keeps_two_regions(tmp_path):
    path = tmp_path / "trained"
    sizes = []
    for number in range(1, 12):
        assert save(number, path, 64) == ("", "")
        assert value(path) == number
        assert value(tmp_path / "trained.previous") == (number - 1 or None)
        sizes.append((tmp_path / "trained.data").stat().st_size)
    assert max(sizes) == 2 * sizes[0] == 2 * 2 * 4 * ELEMENTS


def test_a_full_disk_leaves_nothing_in_the_data_file(tmp_path):
    path = tmp_path / "trained"
    save(1, path, 64)
    data = tmp_path / "trained.data"
    size = data.stat().st_size
    write(tmp_path / "source", 2)
    keep = "trust", "keep", tmp_path / "source"
    done = run(*keep, path, 64, **full_disk(size + 100))
    assert done.stdout.startswith("file-not-written\n")
    assert (value(path), data.stat().st_size) == (1, size)
    fresh = tmp_path / "fresh"  # no data file of a save that failed stays
    done = run(*keep, fresh, 64, **full_disk(200))
    assert done.stdout.startswith("file-not-written\n")
    assert not list(tmp_path.glob("*fresh*"))


@ABOVE
def test_what_killed_saves_left_is_removed(above, tmp_path):
    path = tmp_path / "trained"
    write(path, 1)
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    mine = tmp_path / f".trained.{os.getpid()}-0123456789ab.tmp"
    left = tmp_path / f".trained.{gone.pid}-0123456789ab.tmp"
    mine.touch()
    os.link(path, left)
    save(2, path, above)
    assert [mine] == list(tmp_path.glob(".*"))


@ABOVE
def test_only_files_are_replaced(above, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "socket"))
        (tmp_path / "folder").mkdir()
        kinds = {"pipe": "file-not-written", "socket": "file-not-written",
                 "folder": "path-is-a-folder"}  # fmt: skip
        for name, code in kinds.items():
            before = (tmp_path / name).stat().st_ino
            assert save(1, tmp_path / name, above)[0] == code
            assert (tmp_path / name).stat().st_ino == before
    assert save(1, "/", above, scratch=tmp_path)[0] == "path-is-a-folder"
    assert save(1, "/dev/null", above, scratch=tmp_path)[0] == "file-not-written"
    left = {path.name for path in tmp_path.iterdir()} - {"source"}
    assert left == set(kinds)


def _traced(folder: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Save the value 3 over that of 2; return how it ended and the calls of the main thread."""
    log = folder.with_suffix(".strace")
    done = ran(
        "strace", "-y", "-o", log, "-e", f"trace={','.join(CHANGES)}", *options,
        *cpp_kit.command("trust", "keep", folder.parent / "three", folder / "trained", folder.name),
        code=None,
    )  # fmt: skip
    return done, log.read_text().splitlines()


def _in_folder(lines: list[str], folder: Path) -> Iterator[tuple[str, int]]:
    """Name of each call below a folder, and the how manieth of that name it is."""
    seen: Counter[str] = Counter()
    for line in lines:
        if found := re.match(r"(\w+)\(", line):
            seen[found[1]] += 1
            if str(folder) in line and "O_RDONLY" not in line.replace("O_RDONLY|O_CLOEXEC", "x"):
                yield found[1], seen[found[1]]


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@ABOVE
@pytest.mark.parametrize("error", ["EIO", "ENOSPC", "EPERM"])
def test_a_call_that_fails_leaves_the_old_file_or_says_that_the_new_one_is_there(
    error, above, tmp_path
):
    write(tmp_path / "three", 3)
    start = tmp_path / "start"
    start.mkdir()
    for number in (1, 2):
        save(number, start / "trained", above, scratch=tmp_path)
    folder = tmp_path / str(above)  # its name is the argument of the program

    order = sorted(start.iterdir(), key=lambda path: path.name != "trained.data")
    start_data = start / "trained.data"

    def copy() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for path in order:
            if path.name == "trained.previous.data":
                os.link(folder / "trained.data", folder / path.name)
            else:
                shutil.copy(path, folder / path.name)

    copy()
    done, lines = _traced(folder)
    assert (done.stdout, value(folder / "trained")) == ("", 3)
    calls = list(_in_folder(lines, folder))
    assert {"fsync", "rename"} <= {name for name, _ in calls}
    said = Counter[str]()
    for name, index in calls:
        copy()
        done, lines = _traced(folder, "-e", f"inject={name}:error={error}:when={index}")
        where = f"{error} of {name} {index}: {done.stdout} {done.stderr[-300:]}"
        assert any("(INJECTED)" in line for line in lines), where
        found, before = value(folder / "trained"), value(folder / "trained.previous")
        if done.stdout == "":
            assert (done.returncode, found) == (0, 3), where
            assert name != "fsync", where
            said["done"] += 1
        elif "was written, but it may not survive a power cut" in done.stdout:
            assert (found, before) == (3, 2), where
            assert name in ("fsync", "openat"), where  # of the folder
            said["written"] += 1
        else:
            assert done.stdout.startswith("file-not-written\n"), where
            assert found == 2, where
            if above > 64:  # of a large one, its part of the data file may be gone
                assert before in (1, 2), where
            elif start_data.exists():
                assert (folder / "trained.data").stat().st_size == start_data.stat().st_size, where
            said["old"] += 1
        if name != "unlink":
            assert not list(folder.glob(".*")), where
    assert said["old"] >= 3, said
    assert said["written"] == 2, said


def test_a_data_file_that_is_cut_ends_no_reader(tmp_path):
    """A file that is mapped would: the pages behind its end are not there."""
    path, data = tmp_path / "trained", tmp_path / "trained.data"
    elements = 2**22
    write_external(path, np.zeros(elements, np.float32))
    ended = threading.Event()

    def cut() -> None:
        while not ended.is_set():
            os.truncate(data, 0)
            os.truncate(data, 4 * elements)

    cutter = threading.Thread(target=cut)
    cutter.start()
    try:
        codes = {run("trust", "load", path).returncode for _ in range(10)}
    finally:
        ended.set()
        cutter.join()
    assert codes <= {0, 2}, codes  # loaded, or refused


def write_external(path: Path, array: np.ndarray) -> None:
    """A checkpoint with a data file, of a number that is in all of it."""
    data = CheckpointData({"w": array}, {}, properties={"number": int(array[0])})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "EXTERNAL_DATA_THRESHOLD", 64)
        write_checkpoint(path, data)


def test_a_save_waits_for_the_lock_of_the_data_file(tmp_path):
    path = tmp_path / "trained"
    for number in (1, 2):
        save(number, path, 64)
    words = cpp_kit.command("trust", "keep", tmp_path / "source", path, 64)
    write(tmp_path / "source", 3)
    with locked(tmp_path / "trained.data"):
        saving = started(words)
        with pytest.raises(subprocess.TimeoutExpired):
            saving.wait(1)
        assert value(path) == 2
    saving.communicate(timeout=60)
    assert saving.returncode == 0
    assert value(path) == 3


def started(words: list[str], **options: Any) -> subprocess.Popen[str]:
    """Start a program of the kit, which is about to save when this returns."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(words, **pipes, **options)
    assert process.stderr.readline() == "saving\n"
    return process


def test_a_save_in_one_file_waits_for_the_data_file_that_is_there_now(tmp_path):
    path, data = tmp_path / "trained", tmp_path / "trained.data"
    save(1, path, 64)
    write(tmp_path / "source", 2)
    with locked(data):
        saving = started(cpp_kit.command("trust", "keep", tmp_path / "source", path, 2**30))
        with pytest.raises(subprocess.TimeoutExpired):
            saving.wait(1)
        shutil.copy(data, tmp_path / "new")
        held = locked(tmp_path / "new")
        held.__enter__()
        (tmp_path / "new").replace(data)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            saving.wait(1)
        assert value(path) == 1
    finally:
        held.__exit__(None, None, None)
    saving.communicate(timeout=60)
    assert saving.returncode == 0
    assert (value(path), data.exists()) == (2, False)


def delayed(*words: object, call: str) -> list[str]:
    """Words of a program each of whose calls of a name takes two seconds more."""
    return ["strace", "-qq", "-o", "/dev/null", "-e", f"trace={call.partition(':')[0]}",
            "-e", f"inject={call}=2000000", *cpp_kit.command(*words)]  # fmt: skip


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_a_save_that_fails_leaves_the_data_file_of_another_process(tmp_path):
    path, data = tmp_path / "trained", tmp_path / "trained.data"
    write(tmp_path / "two", 2)
    words = delayed("trust", "keep", tmp_path / "two", path, 64, call="flock:delay_enter")
    saving = started(words, **full_disk(100))
    while not data.exists():
        time.sleep(0.01)
    assert save(1, path, 64) == ("", "")
    assert saving.communicate(timeout=60)[0].startswith("file-not-written\n")
    assert value(path) == 1
    assert data.stat().st_size == 2 * 4 * ELEMENTS


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_a_save_in_one_file_leaves_the_data_file_of_a_later_save(tmp_path):
    path, data = tmp_path / "trained", tmp_path / "trained.data"
    save(1, path, 64)
    data.unlink()
    write(tmp_path / "two", 2)
    words = delayed("trust", "keep", tmp_path / "two", path, 2**30, call="rename:delay_exit")
    saving = started(words)
    while value(path) != 2:
        time.sleep(0.01)
    assert save(3, path, 64) == ("", "")
    saving.communicate(timeout=60)
    assert saving.returncode == 0
    assert value(path) == 3


def test_a_checkpoint_that_may_only_be_read_gets_a_data_file(tmp_path):
    path = tmp_path / "trained"
    save(1, path, 2**30)
    path.chmod(0o440)
    for number in (2, 3):
        assert save(number, path, 64) == ("", "")
    assert path.stat().st_mode & 0o777 == 0o440
    assert (tmp_path / "trained.data").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("kept", ["keep", "replace"])
def test_two_processes_that_save_one_checkpoint(kept, tmp_path):
    path = tmp_path / "trained"
    write_external(path, np.zeros(100_000, np.float32))
    words = cpp_kit.command("saves", path, 64, kept)
    savers = [subprocess.Popen(words, stdout=subprocess.DEVNULL) for _ in range(2)]
    try:
        seen = set()
        for _ in range(100):
            found = read_checkpoint(path)
            assert set(found.trainable["w"]) == {found.properties["number"]}
            seen.add(found.properties["number"])
        assert [saver.poll() for saver in savers] == [None, None]
    finally:
        for saver in savers:
            saver.kill()
            saver.wait()
    assert len(seen) > 1
