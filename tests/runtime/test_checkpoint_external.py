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
        new = np.full(count, value, np.float32)
        write_checkpoint(path, CheckpointData({"w": new}, {}))
        sizes.append((tmp_path / "c.data").stat().st_size)
        if before is not None and sizes[-1] > sizes[-2]:
            # As if the process had died before the checkpoint was replaced.
            (tmp_path / "old").write_bytes(before)
            (tmp_path / "old.data").write_bytes((tmp_path / "c.data").read_bytes())
            assert set(read_checkpoint(tmp_path / "old").trainable["w"]) == {value - 1}
        assert np.array_equal(read_checkpoint(path).trainable["w"], new)
    assert max(sizes) <= 3 * 80 * 4
    assert sizes[0] == 200
    assert sizes[1] == 400
    assert sizes[2] == 200


def test_the_data_file_goes_when_it_is_not_needed(tmp_path):
    write_checkpoint(tmp_path / "c", CheckpointData({"w": np.ones(50, np.float32)}, {}))
    write_checkpoint(tmp_path / "c", CheckpointData({"w": np.ones(5, np.float32)}, {}))
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_the_data_of_another_process_stay(tmp_path, monkeypatch):
    """Another process saves with a data file between a save without one and its tidying."""
    path, lock = tmp_path / "c", writer.atomic.locked
    other = CheckpointData({"w": np.full(50, 7, np.float32)}, {})
    write_checkpoint(path, CheckpointData({"w": np.ones(50, np.float32)}, {}))

    def late(locked: Path) -> AbstractContextManager[None]:
        monkeypatch.setattr(writer.atomic, "locked", lock)
        write_checkpoint(path, other)
        return lock(locked)

    monkeypatch.setattr(writer.atomic, "locked", late)
    write_checkpoint(path, CheckpointData({"w": np.ones(5, np.float32)}, {}))
    assert_same(other, read_checkpoint(path))


def test_a_save_that_fails_leaves_the_data_of_another_process(tmp_path, monkeypatch):
    """Another process saves once the data file was made, and before it is locked."""
    path, lock = tmp_path / "c", writer.atomic.locked
    other = CheckpointData({"w": np.full(50, 7, np.float32)}, {})

    def late(locked: Path) -> AbstractContextManager[None]:
        monkeypatch.setattr(writer.atomic, "locked", lock)
        write_checkpoint(path, other)
        return lock(locked)

    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "full"))
    monkeypatch.setattr(writer.atomic, "locked", late)
    with refused("file-not-written", "full"):
        write_checkpoint(path, CheckpointData({"w": np.ones(80, np.float32)}, {}), open_file=full)
    assert_same(other, read_checkpoint(path))
    assert (tmp_path / "c.data").stat().st_size == 200


def test_a_checkpoint_that_may_only_be_read_gets_a_data_file(tmp_path):
    path = tmp_path / "c"
    write_checkpoint(path, CheckpointData({"w": np.ones(2, np.float32)}, {}))
    path.chmod(0o440)
    for _ in range(2):
        write_checkpoint(path, CheckpointData({"w": np.ones(50, np.float32)}, {}))
    found = {entry.name: entry.stat().st_mode & 0o777 for entry in tmp_path.iterdir()}
    assert found == {"c": 0o440, "c.data": 0o640}


def test_a_missing_or_short_data_file_is_an_error(tmp_path):
    write_checkpoint(tmp_path / "c", CheckpointData({"w": np.ones(50, np.float32)}, {}))
    data = (tmp_path / "c.data").read_bytes()
    (tmp_path / "c.data").write_bytes(data[:-1])
    with refused("checkpoint-corrupt"):
        read_checkpoint(tmp_path / "c")
    (tmp_path / "c.data").unlink()
    with pytest.raises(OdtpackError, match=r"c\.data"):
        read_checkpoint(tmp_path / "c")


def test_a_data_file_that_is_shared_by_tensors_is_refused(tmp_path):
    f = Foreign()
    (tmp_path / "c").write_bytes(
        f.finish([f.tensor(dims=(25,), raw=None, offset=0), f.tensor("v", (25,), 1, None, 0)],
                 external=True),
    )  # fmt: skip
    (tmp_path / "c.data").write_bytes(bytes(100))
    with pytest.raises(OdtpackError, match="overlap"):
        read_checkpoint(tmp_path / "c")


def test_a_folder_that_does_not_exist(tmp_path):
    with refused("file-not-written"):
        write_checkpoint(
            tmp_path / "absent" / "c", CheckpointData({"w": np.ones(50, np.float32)}, {})
        )


@pytest.mark.parametrize("length", [50, 2], ids=["data file", "one file"])
@pytest.mark.parametrize("previous", ["none", "replaced"])
def test_a_save_keeps_permissions(previous, length, tmp_path):
    path = tmp_path / "c"
    data = CheckpointData({"w": np.ones(length, np.float32)}, {})
    write_checkpoint(path, CheckpointData({"w": np.ones(2, np.float32)}, {}))
    path.chmod(0o600)
    for _ in range(3):
        write_checkpoint(path, data, previous=previous)
    found = {entry.name: entry.stat().st_mode & 0o777 for entry in tmp_path.iterdir()}
    assert set(found.values()) == {0o600}, found


@pytest.mark.parametrize("length", [50, 2], ids=["data file", "one file"])
def test_a_checkpoint_that_is_a_link_is_not_written(length, tmp_path):
    data = CheckpointData({"w": np.ones(length, np.float32)}, {})
    write_checkpoint(tmp_path / "real", data)
    (tmp_path / "c").symlink_to("real")
    assert read_checkpoint(tmp_path / "c" if length == 2 else tmp_path / "real").checked
    with refused("file-not-written", "is a link"):
        write_checkpoint(tmp_path / "c", data, previous="replaced")
    assert (tmp_path / "c").is_symlink()
    assert not list(tmp_path.glob("c.*"))


@pytest.mark.parametrize("length", [50, 2], ids=["data file", "one file"])
@pytest.mark.parametrize("signs", [250, 255, 300])
def test_a_name_that_is_too_long(signs, length, tmp_path):
    with refused("file-not-written"):
        write_checkpoint(
            tmp_path / ("c" * signs), CheckpointData({"w": np.ones(length, np.float32)}, {})
        )
    assert not list(tmp_path.iterdir())


def test_a_data_file_that_is_a_link_is_neither_read_nor_written(tmp_path):
    data = CheckpointData({"w": np.ones(50, np.float32)}, {})
    write_checkpoint(tmp_path / "c", data)
    (tmp_path / "c.data").rename(tmp_path / "elsewhere")
    (tmp_path / "c.data").symlink_to("elsewhere")
    before = (tmp_path / "elsewhere").read_bytes()
    with pytest.raises(OdtpackError, match="link"):
        read_checkpoint(tmp_path / "c")
    with pytest.raises(OdtpackError, match="link"):
        write_checkpoint(tmp_path / "c", data)
    assert (tmp_path / "elsewhere").read_bytes() == before
