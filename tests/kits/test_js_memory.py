"""What reading a hostile checkpoint takes in Node: the bound of docs/threat-model.md."""

import sys

import numpy as np
import pytest

from odtpack_runtime.checkpoint.format import CheckpointData
from tests.fuzz.guard import MEMORY_BYTES
from tests.hostile.checkpoints import many_tensors, plain, shared_table, written
from tests.kits import javascript
from tests.kits.harness import needs
from tests.kits.javascript import node
from tests.runtime.checkpoint_samples import Foreign

COUNT = 300_000
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the most memory is read from /proc"),
    *needs(javascript.unavailable()),
]


def states(count: int) -> bytes:
    """So many empty tensors, each with an entry of the optimizer that has no moments."""
    made = Foreign()
    dims = made.b.CreateNumpyVector(np.array((0,), np.int64))
    names = [made.b.CreateString(f"p{index}") for index in range(count)]
    tensors = [made.table({0: name, 2: dims, 3: ("Int32", 1)}) for name in names]
    group = made.group(states=[made.table({0: name}) for name in names])
    return made.finish(tensors, groups=made.vector([group]))


def properties(count: int) -> bytes:
    """So many numbers of the user's."""
    values = {f"p{index}": index for index in range(count)}
    return written(CheckpointData({}, {}, properties=dict(values)))


@pytest.mark.parametrize(("make", "count", "outcome"), [
    (many_tensors, COUNT, COUNT), (states, COUNT // 2, COUNT // 2), (properties, COUNT, 0),
    (shared_table, 3 * COUNT, "checkpoint-corrupt"),
])  # fmt: skip
def test_reading_takes_memory_in_proportion_to_the_file(make, count, outcome, tmp_path):
    small, file = tmp_path / "small", tmp_path / "file"
    small.write_bytes(written(plain()))
    file.write_bytes(make(count))
    found, grown = node("memory.mjs", small, file)
    assert found == outcome
    assert grown <= 10 * file.stat().st_size + MEMORY_BYTES
