"""What a disk without space left does to a simulation: one clear error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from odtpack_runtime.errors import OdtpackError
from odtpack_simulator.measure.operators import model_runs
from odtpack_simulator.replay.replay import write_data


@contextmanager
def files_of_at_most(count: int) -> Iterator[None]:
    """Let the system write no more than so many bytes of any file, as a disk that is full."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.skipif(sys.platform == "win32", reason="no limit on the size of files")
@pytest.mark.parametrize("room", [0, 4096])
def test_data_that_cannot_be_copied(tmp_path: Path, room: int) -> None:
    arrays = {"input": np.zeros((1000, 10), np.float32)}
    with files_of_at_most(room), pytest.raises(OdtpackError) as caught:
        write_data(arrays, tmp_path)
    assert caught.value.code == "data-not-written"
    assert caught.value.where == str(tmp_path)
    assert "40.0 kB" in (caught.value.hint or "")


def test_a_profile_that_was_not_written_whole(tmp_path: Path) -> None:
    file = tmp_path / "training.json"
    file.write_text('[{"cat": "Node", "name": "Ma', encoding="utf-8")
    with pytest.raises(OdtpackError) as caught:
        model_runs(file)
    assert caught.value.code == "profile-not-whole"
    assert "28 bytes" in caught.value.what
    assert "TMPDIR" in (caught.value.hint or "")
