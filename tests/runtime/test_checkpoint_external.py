"""Above a size the tensors of a checkpoint stand in a second file."""

import errno
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from odtpack_runtime.checkpoint import writer
from odtpack_runtime.checkpoint.format import CheckpointData, read_checkpoint
from odtpack_runtime.checkpoint.writer import write_checkpoint
from odtpack_runtime.errors import OdtpackError
from tests.refused import refused
from tests.runtime.checkpoint_samples import Foreign, assert_same, sample


@pytest.fixture(autouse=True)
def _low_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "EXTERNAL_DATA_THRESHOLD", 64)


def filled(count: int, value: float = 1) -> CheckpointData:
    return CheckpointData({"w": np.full(count, value, np.float32)}, {})


def test_round_trip(tmp_path):
    data = sample()
    write_checkpoint(tmp_path / "c", data)
    arrays = [*data.trainable.values(), *data.frozen.values()]
    arrays += [m for moments in data.optimizer.moments.values() for m in moments]
    packed = b"".join(array.tobytes() for array in arrays)
    assert (tmp_path / "c.data").read_bytes() == packed
    assert_same(data, read_checkpoint(tmp_path / "c"))


def test_damage_to_the_data_file_is_found(tmp_path):
    write_checkpoint(tmp_path / "c", sample())
    assert read_checkpoint(tmp_path / "c").checked
    stored = bytearray((tmp_path / "c.data").read_bytes())
    for position in range(len(stored)):
        stored[position] ^= 16
        (tmp_path / "c.data").write_bytes(stored)
        with pytest.raises(OdtpackError, match=r"do not match their digests: .|neither 0 nor 1"):
            read_checkpoint(tmp_path / "c")
        stored[position] ^= 16


def test_the_current_data_are_never_overwritten(tmp_path):
    path, sizes = tmp_path / "c", []
    for value, count in [(1, 50), (2, 50), (3, 50), (4, 80), (5, 80), (6, 20), (7, 20)]:
        before = (tmp_path / "c").read_bytes() if value > 1 else None
        write_checkpoint(path, filled(count, value))
        sizes.append((tmp_path / "c.data").stat().st_size)
        if before is not None and sizes[-1] > sizes[-2]:
            # As if the process had died before the checkpoint was replaced.
            (tmp_path / "old").write_bytes(before)
            (tmp_path / "old.data").write_bytes((tmp_path / "c.data").read_bytes())
            assert set(read_checkpoint(tmp_path / "old").trainable["w"]) == {value - 1}
        assert_same(read_checkpoint(path), filled(count, value))
    assert max(sizes) <= 3 * 80 * 4
    assert sizes[:3] == [200, 400, 200]


def test_the_data_file_goes_when_it_is_not_needed(tmp_path):
    write_checkpoint(tmp_path / "c", filled(50))
    write_checkpoint(tmp_path / "c", filled(5))
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def another_saves(patch: pytest.MonkeyPatch, path: Path) -> None:
    """Another process saves, with a data file, before the next save takes its lock."""
    lock = writer.atomic.locked

    def late(locked: Path) -> AbstractContextManager[None]:
        patch.setattr(writer.atomic, "locked", lock)
        write_checkpoint(path, filled(50, 7))
        return lock(locked)

    patch.setattr(writer.atomic, "locked", late)


def test_the_data_of_another_process_stay(tmp_path, monkeypatch):
    """Another process saves with a data file between a save without one and its tidying."""
    write_checkpoint(tmp_path / "c", filled(50))
    another_saves(monkeypatch, tmp_path / "c")
    write_checkpoint(tmp_path / "c", filled(5))
    assert_same(filled(50, 7), read_checkpoint(tmp_path / "c"))


def test_a_save_that_fails_leaves_the_data_of_another_process(tmp_path, monkeypatch):
    """Another process saves once the data file was made, and before it is locked."""
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "full"))
    another_saves(monkeypatch, tmp_path / "c")
    with refused("file-not-written", "full"):
        write_checkpoint(tmp_path / "c", filled(80), open_file=full)
    assert_same(filled(50, 7), read_checkpoint(tmp_path / "c"))
    assert (tmp_path / "c.data").stat().st_size == 200


def test_a_checkpoint_that_may_only_be_read_gets_a_data_file(tmp_path):
    path = tmp_path / "c"
    write_checkpoint(path, filled(2))
    path.chmod(0o440)
    for _ in range(2):
        write_checkpoint(path, filled(50))
    found = {entry.name: entry.stat().st_mode & 0o777 for entry in tmp_path.iterdir()}
    assert found == {"c": 0o440, "c.data": 0o640}


def test_a_missing_or_short_data_file_is_an_error(tmp_path):
    write_checkpoint(tmp_path / "c", filled(50))
    data = (tmp_path / "c.data").read_bytes()
    (tmp_path / "c.data").write_bytes(data[:-1])
    with refused("checkpoint-corrupt"):
        read_checkpoint(tmp_path / "c")
    (tmp_path / "c.data").unlink()
    with pytest.raises(OdtpackError, match=r"c\.data"):
        read_checkpoint(tmp_path / "c")


def test_a_data_file_that_is_shared_by_tensors_is_refused(tmp_path):
    f = Foreign()
    tensors = [f.tensor(name, (25,), raw=None, offset=0) for name in "wv"]
    (tmp_path / "c").write_bytes(f.finish(tensors, external=True))
    (tmp_path / "c.data").write_bytes(bytes(100))
    with pytest.raises(OdtpackError, match="overlap"):
        read_checkpoint(tmp_path / "c")


def test_a_folder_that_does_not_exist(tmp_path):
    with refused("file-not-written"):
        write_checkpoint(tmp_path / "absent" / "c", filled(50))


@pytest.mark.parametrize("length", [50, 2], ids=["data file", "one file"])
@pytest.mark.parametrize("previous", ["none", "replaced"])
def test_a_save_keeps_permissions(previous, length, tmp_path):
    path = tmp_path / "c"
    write_checkpoint(path, filled(2))
    path.chmod(0o600)
    for _ in range(3):
        write_checkpoint(path, filled(length), previous=previous)
    found = {entry.name: entry.stat().st_mode & 0o777 for entry in tmp_path.iterdir()}
    assert set(found.values()) == {0o600}, found


@pytest.mark.parametrize("length", [50, 2], ids=["data file", "one file"])
def test_a_checkpoint_that_is_a_link_is_not_written(length, tmp_path):
    write_checkpoint(tmp_path / "real", filled(length))
    (tmp_path / "c").symlink_to("real")
    assert read_checkpoint(tmp_path / "c" if length == 2 else tmp_path / "real").checked
    with refused("file-not-written", "is a link"):
        write_checkpoint(tmp_path / "c", filled(length), previous="replaced")
    assert (tmp_path / "c").is_symlink()
    assert not list(tmp_path.glob("c.*"))


@pytest.mark.parametrize("length", [50, 2], ids=["data file", "one file"])
@pytest.mark.parametrize("signs", [250, 255, 300])
def test_a_name_that_is_too_long(signs, length, tmp_path):
    with refused("file-not-written"):
        write_checkpoint(tmp_path / ("c" * signs), filled(length))
    assert not list(tmp_path.iterdir())


def test_a_data_file_that_is_a_link_is_neither_read_nor_written(tmp_path):
    write_checkpoint(tmp_path / "c", filled(50))
    (tmp_path / "c.data").rename(tmp_path / "elsewhere")
    (tmp_path / "c.data").symlink_to("elsewhere")
    before = (tmp_path / "elsewhere").read_bytes()
    with pytest.raises(OdtpackError, match="link"):
        read_checkpoint(tmp_path / "c")
    with pytest.raises(OdtpackError, match="link"):
        write_checkpoint(tmp_path / "c", filled(50))
    assert (tmp_path / "elsewhere").read_bytes() == before
