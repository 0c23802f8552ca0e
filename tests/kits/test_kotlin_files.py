"""Files that the Kotlin kit saves, and what may go wrong: damage, other names, a full disk."""

import errno
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odtpack_runtime.checkpoint.format import CheckpointData, read_checkpoint
from odtpack_runtime.checkpoint.writer import write_checkpoint
from tests.faults.inject import (
    CHANGES,
    MAKE,
    OPEN,
    REMOVE,
    RENAME,
    SYNC,
    WRITE,
    Control,
    compile_library,
    environment,
)
from tests.kits import kotlin_kit
from tests.kits.harness import full_disk, needs
from tests.kits.kotlin_kit import run
from tests.powercut.check import check, kit_paths, recorded_kit
from tests.powercut.paths import PATHS, look_at_checkpoint
from tests.powercut.record import STRACE
from tests.powercut.test_powercut import order
from tests.programs import ran

pytestmark = needs(kotlin_kit.unavailable())
INSIDE, OUTSIDE = 2**30, 1000
"""Bytes of elements above which they lie in a data file."""


def write(path: Path, number: int) -> None:
    arrays = {f"p{i}": np.full(1000, number, np.float32) for i in range(4)}
    write_checkpoint(path, CheckpointData(arrays, {}, properties={"number": number}))


def number(path: Path) -> Any:
    return read_checkpoint(path).properties["number"]


def save(path: object, above: int, *saves: object) -> list[str]:
    """Load a checkpoint and save it to each of some paths, keeping the one before."""
    return run("resave", path, above, *saves).splitlines()


@pytest.mark.parametrize("above", [INSIDE, OUTSIDE])
def test_a_damaged_file_never_replaces_the_save_before_whatever_it_is_called(above, tmp_path):
    path = tmp_path / "ck"
    write(path, 1)
    assert save(path, above, path, path) == ["written"] * 2
    before = tmp_path / "ck.previous"
    kept = before.read_bytes()
    path.write_bytes(bytes(4) + path.read_bytes()[4:])
    for name in (f"{tmp_path}/./ck", f"{tmp_path}/../{tmp_path.name}/ck"):
        assert save(path, above, name) == ["written"]
        assert before.read_bytes() == kept
        assert (number(path), number(before)) == (3, 2)
        path.write_bytes(bytes(4) + path.read_bytes()[4:])
    (tmp_path / "link").symlink_to(tmp_path)
    assert save(path, above, tmp_path / "link" / "ck") == ["written"]
    assert before.read_bytes() == kept
    # Another state's file is read before it is moved on, too.
    other = tmp_path / "other"
    write(other, 7)
    path.write_bytes(path.read_bytes()[:-50])
    assert save(other, above, path) == ["written"]
    assert before.read_bytes() == kept
    assert save(other, above, path) == ["written"]
    assert number(before) == 8


def test_the_data_file_holds_two_regions_however_often_is_saved(tmp_path):
    path = tmp_path / "ck"
    write(path, 1)
    assert save(path, OUTSIDE, *[path] * 40) == ["written"] * 40
    assert (tmp_path / "ck.data").stat().st_size == 2 * 4 * 4000
    assert (tmp_path / "ck.data").samefile(tmp_path / "ck.previous.data")
    assert (number(path), number(tmp_path / "ck.previous")) == (41, 40)
    for each in (path, tmp_path / "ck.previous"):
        assert all((a == number(each)).all() for a in read_checkpoint(each).trainable.values())
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("above", [INSIDE, OUTSIDE])
def test_two_processes_save_one_checkpoint(above, tmp_path):
    path = tmp_path / "ck"
    state = CheckpointData({"p": np.full(50_000, 1, np.float32)}, {}, properties={"number": 1})
    write_checkpoint(path, state)
    words = kotlin_kit.command("resave", path, above, *[path] * 150)
    processes = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in processes:
        assert process.communicate(timeout=600)[0].split() == ["written"] * 150
    for name in (path, tmp_path / "ck.previous"):
        data = read_checkpoint(name)
        assert data.checked
        assert set(data.trainable["p"]) == {data.properties["number"]}
    assert not list(tmp_path.glob(".*"))
    if above == OUTSIDE:
        assert (tmp_path / "ck.data").stat().st_size == 2 * 4 * 50_000


def test_what_is_not_a_file_is_not_replaced(tmp_path):
    path, pipe = tmp_path / "ck", tmp_path / "pipe"
    write(path, 1)
    os.mkfifo(pipe)
    (tmp_path / "folder").mkdir()
    targets = ["/", "", tmp_path / "folder", pipe, "/dev/null", tmp_path / "none" / "ck"]
    folder, refused = "path-is-a-folder", "file-not-written"
    here = set(Path().iterdir())
    for above in (INSIDE, OUTSIDE):
        codes = save(path, above, *targets)
        assert codes == [folder, folder, folder, refused, refused, refused]
    assert pipe.is_fifo()
    assert Path("/dev/null").is_char_device()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["ck", "folder", "pipe"]
    # Of an empty path the data file would be this.
    assert Path(".data") not in set(Path().iterdir()) - here


def test_a_full_disk_leaves_the_data_file_as_it_was(tmp_path):
    path = tmp_path / "ck"
    write(path, 1)
    assert save(path, OUTSIDE, path) == ["written"]
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    assert len(before["ck.data"]) == 16_000

    done = ran(*kotlin_kit.command("resave", path, OUTSIDE, path), **full_disk(20_000))
    assert done.stdout.split() == ["file-not-written"]
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before


FAULTS = {
    "EIO": (CHANGES & ~REMOVE, errno.EIO, False),
    "ENOSPC": (WRITE | SYNC | MAKE, errno.ENOSPC, True),
    "EACCES": (OPEN | RENAME | MAKE, errno.EACCES, False),
    "EPERM": (RENAME, errno.EPERM, False),
    "EXDEV": (RENAME, errno.EXDEV, True),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("above", [INSIDE, OUTSIDE])
def test_every_fault_of_a_save_leaves_a_whole_checkpoint(fault, above, tmp_path):
    """The old one, or the new one with the word that it may not survive; and nothing else."""
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("there is no C compiler")
    library = compile_library(tmp_path)
    control = tmp_path / "control"
    Control(control)
    folder = tmp_path / "good"
    folder.mkdir()
    write(folder / "ck", 1)
    assert save(folder / "ck", above, *[folder / "ck"] * 2) == ["written"] * 2
    kinds, error, sticky = FAULTS[fault]
    words = kotlin_kit.command("faults", folder, control, above, kinds, error, int(sticky))
    lines = kotlin_kit.finish(words, env=environment(library, control)).splitlines()
    assert len(lines) > 2
    whole = {"ck", "ck.previous"} | ({"ck.data", "ck.previous.data"} if above == OUTSIDE else set())
    seen = set()
    for line in lines:
        _, hits, said, current, previous, left = line.split("\t")
        seen.add((int(hits) > 0, said))
        assert said in ("written", "not durable", "file-not-written"), line
        assert current == ("3" if said == "file-not-written" else "4"), line
        # Of elements outside, the save writes where those of the one before were.
        assert previous in ("2", "3") or (above == OUTSIDE and said == "file-not-written"), line
        assert said == "file-not-written" or previous == "3", line
        assert set(left.split(",")) == whole, line
    assert (False, "written") in seen
    # A link that is refused has another way, and a rename is tried twice.
    assert any(hit and (said != "written" or fault == "EPERM") for hit, said in seen)
    if fault in ("EIO", "ENOSPC"):
        assert any(said == "not durable" for _, said in seen) or fault == "ENOSPC"


PLAIN = ["write tmp", "sync tmp", "rename tmp ck", "sync ."]
KEPT = ["write tmp", "sync tmp", "link ck tmp", "rename tmp ck.previous", "rename tmp ck", "sync ."]
DATA = ["write ck.data", "sync ck.data", "sync ."]
ORDERS = {
    "Kotlin": PLAIN,
    "Kotlin, the one before kept": KEPT,
    "Kotlin, data outside": [*DATA, *PLAIN],
    "Kotlin, data outside, the one before kept": [*DATA, *KEPT],
}


@pytest.mark.skipif(STRACE is None, reason="strace records the calls")
@pytest.mark.parametrize("name", kit_paths("Kotlin"))
def test_what_a_power_cut_leaves_of_a_save(name, tmp_path):
    """The old save or the new one whole in each state, and only the new one after success."""
    calls, start = recorded_kit("Kotlin", name, tmp_path)
    words = order(calls)
    if name in ORDERS:
        assert words[words.index("done 2") + 1 : words.index("done 3")] == ORDERS[name]
    look = PATHS["export"].look if name.endswith("export") else look_at_checkpoint
    for model, states, problems in check(start, calls, look, tmp_path / "folder"):
        assert states > 3, model
        assert problems == []
