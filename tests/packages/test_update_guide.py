"""The way of the updates guide, interrupted at every step: the old release or the new one."""

import contextlib
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odtpack.optimizers import AdamW
from odtpack.update.release import new_key, sign_package
from odtpack_runtime import CheckpointState
from odtpack_runtime.errors import OdtpackError
from tests.packages.killer import Killer
from tests.packages.samples import build

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "updates.md"


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A device with a trained release, and the archive of the next one."""
    folder = tmp_path_factory.mktemp("device")
    new_key(folder / "key.pem")
    for release, name, beta1 in ((1, "package-1", 0.8), (2, "new", 0.7)):
        build(folder / name, optimizer=AdamW(beta1=beta1), self_check=False)
        sign_package(folder / name, folder / "key.pem", release=release)
    state = CheckpointState.load_checkpoint(folder / "package-1" / "checkpoint")
    for name in state.arrays(trainable=True):
        state.parameters[name].data[:] = 5
    CheckpointState.save_checkpoint(state, folder / "trained-1.ckpt", True)
    shutil.make_archive(str(folder / "download"), "zip", folder / "new")
    shutil.rmtree(folder / "new")
    return folder


def guide() -> dict[str, Any]:
    """The functions of the guide's program, without its last lines, which use them."""
    (program,) = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.M | re.S)
    names: dict[str, Any] = {}
    exec(program[: program.index("shutil.make_archive")], names)  # noqa: S102 - our own page
    # What it checks has tests of its own, and takes seconds.
    names["verify_package"].__globals__["run_steps"] = lambda *arguments, **options: None
    return names


def in_use(names: dict[str, Any], folder: Path) -> int:
    """The release that starts, with what was trained."""
    with contextlib.chdir(folder):
        optimizer = names["start"]()
        release = int(names["release_in_use"]())
    arrays = optimizer.checkpoint_state.arrays(trainable=True).values()
    assert all(set(np.unique(array)) == {5} for array in arrays)
    return release


@pytest.mark.skipif(os.name != "posix", reason="fork and SIGKILL")
def test_interrupted_at_every_step(device, tmp_path):
    names, found, at, ended = guide(), [], 0, False
    while not ended:
        at += 1
        folder = Path(shutil.copytree(device, tmp_path / str(at)))
        pid = os.fork()
        if pid == 0:
            os.chdir(folder)
            Killer(at).install()
            names["update"]("download.zip", 2)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        assert status in (0, signal.SIGKILL), at
        ended = status == 0
        found.append(in_use(names, folder))
        with contextlib.chdir(folder):  # once more, whatever was left
            names["update"]("download.zip", 2)
        assert in_use(names, folder) == 2
        left = {path.name for path in folder.iterdir() if not path.name.startswith("key")}
        assert left == {"download.zip", "package-2", "trained-1.ckpt", "trained-2.ckpt"}
        shutil.rmtree(folder)
    assert len(found) > 20
    assert found == sorted(found)
    assert (found[0], found[-1]) == (1, 2)


@pytest.mark.parametrize("problem", ["another key", "an older release", "damage"])
def test_what_is_not_to_be_trusted_changes_nothing(device, tmp_path, problem):
    names, folder = guide(), tmp_path / "device"
    shutil.copytree(device, folder)
    release = 2
    if problem == "another key":
        new_key(folder / "other.pem")
        shutil.copyfile(folder / "other.pub", folder / "key.pub")
    elif problem == "an older release":
        release = 3
    else:
        shutil.unpack_archive(folder / "download.zip", folder / "new")
        (folder / "new" / "checkpoint").write_bytes(b"damaged")
        shutil.make_archive(str(folder / "download"), "zip", folder / "new")
        shutil.rmtree(folder / "new")
    before = sorted(path.name for path in folder.iterdir())
    with contextlib.chdir(folder), pytest.raises(OdtpackError) as caught:
        names["update"]("download.zip", release)
    expected = {"another key": "signature-wrong", "an older release": "package-downgrade",
                "damage": "package-changed"}  # fmt: skip
    assert caught.value.code == expected[problem]
    assert sorted(path.name for path in folder.iterdir()) == before
    assert in_use(names, folder) == 1
