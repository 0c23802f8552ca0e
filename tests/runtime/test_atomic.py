from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files import atomic
from odtpack_runtime.files.atomic import atomic_write


def test_a_file_is_replaced_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with atomic_write(path) as stream:
        stream.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_the_mode_follows_the_umask(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "ours") as stream:
        stream.write(b"x")
    (tmp_path / "plain").write_bytes(b"x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_an_exception_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
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
def test_what_the_system_refuses_is_an_odtpack_error(tmp_path: Path, path: str) -> None:
    with pytest.raises(OdtpackError), atomic_write(tmp_path / path) as stream:
        stream.write(b"x")
    assert list(tmp_path.iterdir()) == []


def test_an_oserror_of_the_block_counts_as_a_refusal(tmp_path: Path) -> None:
    with (
        pytest.raises(OdtpackError, match="No space left") as caught,
        atomic_write(tmp_path / "file"),
    ):
        raise OSError(28, os.strerror(28))
    assert caught.value.code == "file-not-written"


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
def test_a_killed_write_leaves_the_old_file_and_the_next_write_cleans_up(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    (tmp_path / ".file.notes.tmp").write_bytes(b"not ours")
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        process.send_signal(signal.SIGKILL)
    assert path.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 3
    with atomic_write(path) as stream:
        stream.write(b"new")
    assert path.read_bytes() == b"new"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".file.notes.tmp", "file"]


@pytest.mark.skipif(os.name != "posix", reason="process ids")
def test_the_temporary_file_of_a_running_process_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with atomic_write(path) as stream:
            stream.write(b"ours")
        assert len(list(tmp_path.iterdir())) == 2
        process.kill()


SAVER = """
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
def test_a_checkpoint_survives_a_kill_in_the_middle_of_a_save(
    tmp_path: Path, delay_ms: int
) -> None:
    from odtpack_runtime.checkpoint.format import read_checkpoint

    path = tmp_path / "checkpoint"
    with subprocess.Popen(
        [sys.executable, "-c", SAVER, str(path)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.readline()
        time.sleep(delay_ms / 1000)
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split()
    done = int(rest[-1]) if rest else 2
    data = read_checkpoint(path)
    (value,) = set(data.trainable["w"]) | set(data.trainable["v"])
    assert value in (done, done + 1)


def test_a_signal_while_the_file_is_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python raises it when the call returns: the file is there, and nobody has its number."""
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


def test_a_folder_that_cannot_be_synced_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new file is in place, and whoever takes it for lost may do harm."""

    def fail(folder: Path) -> None:
        raise OSError(5, os.strerror(5))

    (tmp_path / "file").write_bytes(b"old")
    monkeypatch.setattr(atomic, "sync_folder", fail)
    with (
        pytest.raises(OdtpackError, match="written, but it may not survive a power cut") as caught,
        atomic_write(tmp_path / "file") as stream,
    ):
        stream.write(b"new")
    assert caught.value.code == "file-not-written"
    assert (tmp_path / "file").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.name != "posix", reason="pipes and sockets as files")
@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "link to a pipe"])
def test_what_is_not_a_file_is_not_replaced(tmp_path: Path, kind: str) -> None:
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
    with pytest.raises(OdtpackError, match="not an ordinary file") as caught, atomic_write(path):
        pytest.fail("it was opened")
    assert caught.value.code == "file-not-written"
    assert sorted((entry.name, entry.lstat().st_ino) for entry in tmp_path.iterdir()) == before
