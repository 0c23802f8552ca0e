"""A checkpoint that comes to harm costs what was trained since the save before it, and no more."""

import errno
import logging
import os
import signal
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from unittest import mock

import numpy as np
import pytest

from odtpack_runtime import CheckpointState
from odtpack_runtime.checkpoint import writer
from odtpack_runtime.checkpoint.format import CheckpointData, OptimizerState, read_checkpoint
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files import atomic
from odtpack_runtime.files.atomic import atomic_write
from tests.failing import failing
from tests.programs import started
from tests.refused import refused
from tests.runtime.checkpoint_samples import assert_same


def content(step: int, size: int = 50) -> CheckpointData:
    weight = np.full(size, step, np.float32)
    moments = {"w": [weight / 2, weight / 4]}
    return CheckpointData({"w": weight}, {}, optimizer=OptimizerState(step, 0.5, moments))


def save(path: Path, step: int, size: int = 50, *, keep: bool = True) -> None:
    state = CheckpointState(content(step, size))
    CheckpointState.save_checkpoint(state, path, include_optimizer_state=True, keep_previous=keep)


def step_of(state: CheckpointState) -> int:
    assert set(state.parameters["w"].data) == {state.optimizer.step}
    return state.optimizer.step


def harm(path: Path) -> None:
    outside = Path(f"{path}.data")
    path = outside if outside.exists() else path
    data = bytearray(path.read_bytes())
    data[data.index(np.float32([5, 5]).tobytes()) + 2] ^= 4
    path.write_bytes(data)


@pytest.fixture(params=["one file", "external data"])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if request.param == "external data":
        monkeypatch.setattr(writer, "EXTERNAL_DATA_THRESHOLD", 64)
    return tmp_path / "trained.ckpt"


def test_two_saves_are_kept(path):
    for step in range(1, 6):
        save(path, step)
        if step > 1:
            assert_same(read_checkpoint(Path(f"{path}.previous")), content(step - 1))
        assert step_of(CheckpointState.load_checkpoint(path)) == step
    names = {entry.name for entry in path.parent.iterdir()}
    assert {name.removesuffix(".data") for name in names} == {
        "trained.ckpt", "trained.ckpt.previous"
    }  # fmt: skip


def test_a_damaged_one_falls_back(path, caplog):
    save(path, 3)
    save(path, 5)
    harm(path)
    with caplog.at_level(logging.WARNING):
        state = CheckpointState.load_checkpoint(path)
    assert step_of(state) == 3
    assert state.recovered == caplog.messages[0]
    assert "do not match their digests: 'w'" in state.recovered
    assert "trained.ckpt.previous, of optimizer step 3" in state.recovered
    assert "2 optimizer steps made since are lost" in state.recovered
    # The next save replaces the damaged file; the good one is not rotated away for it.
    state.parameters["w"].data[:] = 4
    state.optimizer = content(4).optimizer
    CheckpointState.save_checkpoint(state, path, True, keep_previous=True)
    assert step_of(CheckpointState.load_checkpoint(path)) == 4
    assert step_of(CheckpointState.load_checkpoint(Path(f"{path}.previous"))) == 3
    CheckpointState.save_checkpoint(state, path, True, keep_previous=True)
    assert step_of(CheckpointState.load_checkpoint(Path(f"{path}.previous"))) == 4


def test_a_missing_one_falls_back(path):
    """As where the file system has no hard links, between two renames."""
    save(path, 3)
    save(path, 5)
    path.unlink()
    state = CheckpointState.load_checkpoint(path)
    assert step_of(state) == 3
    assert "There is no checkpoint" in str(state.recovered)


def refuse_links(monkeypatch: pytest.MonkeyPatch, number: int = errno.EPERM) -> None:
    """What FAT and exFAT do, which have no hard links."""
    monkeypatch.setattr(os, "link", mock.Mock(side_effect=OSError(number, os.strerror(number))))


def test_without_hard_links(tmp_path, monkeypatch):
    refuse_links(monkeypatch)
    for step in (1, 2, 3):
        save(tmp_path / "c", step)
    assert step_of(CheckpointState.load_checkpoint(tmp_path / "c")) == 3
    assert step_of(CheckpointState.load_checkpoint(tmp_path / "c.previous")) == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_without_hard_links_a_failed_rename_is_taken_back(tmp_path, monkeypatch):
    save(tmp_path / "c", 1)
    refuse_links(monkeypatch)
    error = OSError(errno.EIO, os.strerror(errno.EIO))
    refuse = failing(Path.replace, error, lambda path, to: path.suffix == ".tmp")
    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OdtpackError, match="could not be written"):
        save(tmp_path / "c", 2)
    assert step_of(CheckpointState.load_checkpoint(tmp_path / "c")) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EIO])
def test_data_outside_need_hard_links_and_lose_nothing_without(tmp_path, monkeypatch, number):
    """Inside, outside, then a save whose predecessor cannot be given a second name."""
    path = tmp_path / "c"
    monkeypatch.setattr(writer, "EXTERNAL_DATA_THRESHOLD", 1000)
    save(path, 1, 50)
    save(path, 2, 300)
    before = {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()}
    refuse_links(monkeypatch, number)
    with refused("file-not-written") as caught:
        save(path, 3, 300)
    assert ("has no hard links" in caught.value.what) == (number == errno.EPERM)
    assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()} == before
    assert step_of(CheckpointState.load_checkpoint(Path(f"{path}.previous"))) == 1
    save(path, 4, 300, keep=False)
    assert step_of(CheckpointState.load_checkpoint(path)) == 4


SPELLINGS = {
    "absolute": lambda path: path.resolve(),
    "relative": lambda path: Path(os.path.relpath(path)),
    "roundabout": lambda path: path.parent / "x" / ".." / path.name,
    "through a link": lambda path: path.parent / "folder" / path.name,
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("loads", [True, False])
def test_what_is_not_whole_never_replaces_the_save_before(path, spelling, loads):
    """Whatever its path is called, and whether or not the state knows that it was damaged."""
    (path.parent / "x").mkdir()
    (path.parent / "folder").symlink_to(".")
    save(path, 3)
    save(path, 5)
    state = CheckpointState(content(4))
    with path.open("r+b") as stream:
        stream.write(bytes(4))
    if loads:
        assert step_of(CheckpointState.load_checkpoint(path)) == 3
        state = CheckpointState.load_checkpoint(path)
    with pytest.raises(KeyboardInterrupt), _interrupted_at_the_end():
        CheckpointState.save_checkpoint(state, SPELLINGS[spelling](path), True, keep_previous=True)
    assert step_of(CheckpointState.load_checkpoint(path)) == 3, "nothing was lost on the way"
    CheckpointState.save_checkpoint(state, SPELLINGS[spelling](path), True, keep_previous=True)
    assert step_of(CheckpointState.load_checkpoint(path)) == (3 if loads else 4)
    assert step_of(CheckpointState.load_checkpoint(Path(f"{path}.previous"))) == 3


@contextmanager
def _interrupted_at_the_end() -> Iterator[None]:
    """The last rename of a save does not happen."""
    stop = failing(Path.replace, KeyboardInterrupt(), lambda _, to: to.name == "trained.ckpt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", stop)
        yield


def test_a_save_without_the_one_before_leaves_that_one_whole(path):
    save(path, 3)
    save(path, 5)
    for step in (6, 7, 8):
        save(path, step, keep=False)
        assert step_of(CheckpointState.load_checkpoint(path)) == step
        assert step_of(CheckpointState.load_checkpoint(Path(f"{path}.previous"))) == 3


@pytest.mark.parametrize("same_state", [True, False])
def test_forty_saves_take_two_regions(tmp_path, monkeypatch, same_state):
    monkeypatch.setattr(writer, "EXTERNAL_DATA_THRESHOLD", 1000)
    state, size = CheckpointState(content(1, 300)), 300 * 4 * 3
    for step in range(1, 41):
        if same_state:
            state.parameters["w"].data[:] = step
            assert state.optimizer is not None
            state.optimizer = content(step, 300).optimizer
            CheckpointState.save_checkpoint(state, tmp_path / "c", True, keep_previous=True)
        else:
            save(tmp_path / "c", step, 300)
        assert (tmp_path / "c.data").stat().st_size <= 2 * size
        if step > 1:
            assert_same(read_checkpoint(tmp_path / "c.previous"), content(step - 1, 300))
    assert_same(read_checkpoint(tmp_path / "c"), content(40, 300))
    assert {entry.name for entry in tmp_path.iterdir()} == {
        "c", "c.data", "c.previous", "c.previous.data"
    }  # fmt: skip


SAVER = """
import sys
import numpy as np
from odtpack_runtime.checkpoint import writer
from odtpack_runtime.checkpoint.format import CheckpointData
writer.EXTERNAL_DATA_THRESHOLD = 1000
known, step = None, 0
while True:
    step += 1
    data = CheckpointData({"w": np.full(int(sys.argv[2]), step, np.float32)}, {})
    known = writer.write_checkpoint(sys.argv[1], data, previous="replaced", whole=known)
    if step == 2:
        print(flush=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="a file that is open cannot be replaced there")
def test_a_reader_that_races_saves_sees_a_whole_checkpoint(tmp_path):
    """It is slower than the saves: each has replaced the data that it reads when it is done."""
    with started(SAVER, tmp_path / "c", 100000) as process:
        process.stdout.readline()
        try:
            last = 0.0
            for _ in range(150):
                found = read_checkpoint(tmp_path / "c").trainable["w"]
                assert set(found) == {found[0]}
                assert found[0] >= last
                last = float(found[0])
        finally:
            process.kill()
    assert last > 2


def test_what_a_failed_save_leaves(tmp_path, monkeypatch):
    """A full disk: the data file is as long as before, and a small save goes through."""
    monkeypatch.setattr(writer, "EXTERNAL_DATA_THRESHOLD", 1000)
    save(tmp_path / "c", 1, 300)
    size = (tmp_path / "c.data").stat().st_size

    def full(stream: BinaryIO, parts: Iterable[memoryview]) -> None:
        stream.write(next(iter(parts)))
        stream.flush()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "_write_all", full)
        with pytest.raises(OdtpackError, match="No space left"):
            save(tmp_path / "c", 2, 300)
        with pytest.raises(OdtpackError, match="No space left"):
            save(tmp_path / "d", 2, 300)
    assert (tmp_path / "c.data").stat().st_size == size
    assert {entry.name for entry in tmp_path.iterdir()} == {"c", "c.data"}
    assert step_of(CheckpointState.load_checkpoint(tmp_path / "c")) == 1


def test_data_that_are_missing_do_not_stop_the_next_save(path):
    save(path, 1)
    state = CheckpointState.load_checkpoint(path)
    Path(f"{path}.data").unlink(missing_ok=True)
    state.parameters["w"].data[:] = 2
    state.optimizer = content(2).optimizer
    CheckpointState.save_checkpoint(state, path, True, keep_previous=True)
    assert step_of(CheckpointState.load_checkpoint(path)) == 2


def test_both_damaged_is_one_error(path):
    save(path, 5)
    save(path, 5)
    for name in {path, Path(f"{path}.previous")}:
        name.write_bytes(name.read_bytes()[:-1])
    with refused("checkpoint-corrupt", "save before it is of no use either"):
        CheckpointState.load_checkpoint(path)


def test_nothing_is_kept_unless_asked(tmp_path):
    save(tmp_path / "c", 1, keep=False)
    save(tmp_path / "c", 5, keep=False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
    harm(tmp_path / "c")
    with pytest.raises(OdtpackError, match="do not match their digests"):
        CheckpointState.load_checkpoint(tmp_path / "c")


def test_data_move_in_and_out_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "EXTERNAL_DATA_THRESHOLD", 1000)
    sizes = [50, 300, 400, 50, 60, 300, 300, 500, 300, 50]
    for step, size in enumerate(sizes, 1):
        save(tmp_path / "c", step, size)
        assert_same(read_checkpoint(tmp_path / "c"), content(step, size))
        if step > 1:
            before = content(step - 1, sizes[step - 2])
            assert_same(read_checkpoint(tmp_path / "c.previous"), before)
            external = before.trainable["w"].nbytes * 3 > 1000
            assert (tmp_path / "c.previous.data").exists() == external


def test_a_file_is_replaced_when_the_block_ends(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with atomic_write(path) as stream:
        stream.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_the_mode_follows_the_umask(tmp_path):
    with atomic_write(tmp_path / "ours") as stream:
        stream.write(b"x")
    (tmp_path / "plain").write_bytes(b"x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_an_exception_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def interrupted() -> None:
        with atomic_write(path) as stream:
            stream.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("path", ["absent/file", "."])
def test_what_the_system_refuses_is_an_odtpack_error(tmp_path, path):
    with pytest.raises(OdtpackError), atomic_write(tmp_path / path) as stream:
        stream.write(b"x")
    assert list(tmp_path.iterdir()) == []


def test_an_oserror_of_the_block_counts_as_a_refusal(tmp_path):
    with refused("file-not-written", "No space left"), atomic_write(tmp_path / "file"):
        raise OSError(28, os.strerror(28))


KILLED = """
import sys, time
from odtpack_runtime.files.atomic import atomic_write
with atomic_write(sys.argv[1]) as stream:
    stream.write(b"half")
    stream.flush()
    print("written", flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_a_killed_write_leaves_the_old_file_and_the_next_write_cleans_up(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    (tmp_path / ".file.notes.tmp").write_bytes(b"not ours")
    with started(KILLED, path) as process:
        assert process.stdout.readline() == b"written\n"
        process.send_signal(signal.SIGKILL)
    assert path.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 3
    with atomic_write(path) as stream:
        stream.write(b"new")
    assert path.read_bytes() == b"new"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".file.notes.tmp", "file"]


@pytest.mark.skipif(os.name != "posix", reason="process ids")
def test_the_temporary_file_of_a_running_process_stays(tmp_path):
    path = tmp_path / "file"
    with started(KILLED, path) as process:
        process.stdout.readline()
        with atomic_write(path) as stream:
            stream.write(b"ours")
        assert len(list(tmp_path.iterdir())) == 2
        process.kill()


WRITER = """
import sys, numpy as np
from odtpack_runtime.checkpoint.format import CheckpointData
from odtpack_runtime.checkpoint.writer import write_checkpoint
value = 0
while True:
    value += 1
    array = np.full(2_000_000, value, np.float32)
    write_checkpoint(sys.argv[1], CheckpointData({"w": array, "v": array}, {}))
    print(value, flush=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
@pytest.mark.parametrize("delay_ms", [0, 7, 15])
def test_a_checkpoint_survives_a_kill_in_the_middle_of_a_save(tmp_path, delay_ms):
    path = tmp_path / "checkpoint"
    with started(WRITER, path) as process:
        process.stdout.readline()
        process.stdout.readline()
        time.sleep(delay_ms / 1000)
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split()
    done = int(rest[-1]) if rest else 2
    data = read_checkpoint(path)
    (value,) = set(data.trainable["w"]) | set(data.trainable["v"])
    assert value in (done, done + 1)


def test_a_signal_while_the_file_is_made_leaves_nothing(tmp_path, monkeypatch):
    """Python raises it when the call returns: the file exists, and its descriptor is lost."""
    make = os.open

    def interrupted(path: Path, flags: int, mode: int) -> int:
        os.close(make(path, flags, mode))
        raise KeyboardInterrupt

    (tmp_path / "file").write_bytes(b"old")
    monkeypatch.setattr(os, "open", interrupted)
    with pytest.raises(KeyboardInterrupt), atomic_write(tmp_path / "file"):
        pytest.fail("there is nothing to write to")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_a_folder_that_cannot_be_synced_is_said(tmp_path, monkeypatch):
    """The new file is in place, and whoever takes it for lost may do harm."""
    (tmp_path / "file").write_bytes(b"old")
    fail = mock.Mock(side_effect=OSError(5, os.strerror(5)))
    monkeypatch.setattr(atomic, "sync_folder", fail)
    said = "written, but it may not survive a power cut"
    with refused("file-not-written", said), atomic_write(tmp_path / "file") as stream:
        stream.write(b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_name_that_no_file_has_is_refused(tmp_path):
    with refused("file-not-written", "embedded null"), atomic_write(tmp_path / "a\0b"):
        pytest.fail("it was opened")


@pytest.mark.skipif(os.name != "posix", reason="pipes and sockets as files")
@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "link to a pipe"])
def test_what_is_not_a_file_is_not_replaced(tmp_path, kind):
    path = tmp_path / "special"
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    elif kind == "device":
        path.symlink_to("/dev/null")
    else:
        os.mkfifo(tmp_path / "pipe")
        path = path if kind != "pipe" else tmp_path / "pipe"
        if kind != "pipe":
            path.symlink_to("pipe")
    before = sorted((entry.name, entry.lstat().st_ino) for entry in tmp_path.iterdir())
    with refused("file-not-written", "not an ordinary file"), atomic_write(path):
        pytest.fail("it was opened")
    assert sorted((entry.name, entry.lstat().st_ino) for entry in tmp_path.iterdir()) == before
