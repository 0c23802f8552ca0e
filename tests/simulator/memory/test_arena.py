"""The arena against ONNX Runtime's own, and what must hold of any."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odtpack_runtime.package.records import SessionInfo
from odtpack_simulator.memory.arena import FIRST_REGION_BYTES, UNIT, Arena, sharing_of
from odtpack_simulator.memory.memory_plan import plan_arenas, plan_memory
from odtpack_simulator.memory.process_memory import PAGE
from odtpack_simulator.replay.replay import hold
from odtpack_simulator.simulation import _with_default_options
from tests.simulator.packages import Case

TRAINING = """
import sys
import numpy as np
import onnxruntime
onnxruntime.set_default_logger_severity(1)
from odtpack_runtime import CheckpointState, Module, Optimizer
from odtpack_runtime.session.options import default_session_options
from odtpack_runtime.package.package import Package
package = Package.open(sys.argv[1])
options = default_session_options(package.training_model, 1)
options.log_severity_level = 1
state = CheckpointState.load_checkpoint(package.checkpoint)
module = Module(package.training_model, state, package.eval_model, session_options=options)
optimizer = Optimizer(package.optimizer_model, module)
batch = [np.load(path) for path in sys.argv[2:]]
for _ in range(2):
    module.eval()(*batch)
    module.train()(*batch)
    optimizer.step()
    module.lazy_reset_grad()
"""


@pytest.mark.parametrize(
    "name", ["mlp", "cnn", "mobilenet", "transformer", "recurrent", "tables", "volumes"]
)
def test_regions_are_onnx_runtimes(
    name: str, case: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    """Size by size, in their order, of a whole training with its evaluations.

    In one of both ways that are planned of what becomes of results.
    """
    this = case(name)
    planned: dict[int, list[int]] = {}
    open_region = Arena._open_region

    def noted(arena: Arena, size: int) -> tuple[int, int]:
        before = arena.reserved
        chunk = open_region(arena, size)
        planned.setdefault(id(arena), []).append(arena.reserved - before)
        return chunk

    monkeypatch.setattr(Arena, "_open_region", noted)
    plan_memory(this.package, this.shapes)
    files = []
    for key, array in (("input", this.inputs), ("labels", this.labels)):
        files.append(f"{tmp_path}/{key}.npy")
        np.save(files[-1], array[: this.batch_size])
    done = subprocess.run(
        [sys.executable, "-c", TRAINING, str(this.folder / "package"), *files],
        capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": _path()},
    )  # fmt: skip
    real = re.findall(r"Extended allocation by (\d+) bytes", done.stderr)
    assert len(planned) == 2
    assert [int(size) for size in real] in planned.values()


def _path() -> str:
    return os.pathsep.join(path for path in sys.path if path)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3 * FIRST_REGION_BYTES), st.integers(0, 7)), max_size=60))
def test_chunks_do_not_overlap_and_all_come_back(requests: list[tuple[int, int]]) -> None:
    arena = Arena()
    held: list[tuple[int, int | None]] = []
    for nbytes, release in requests:
        resident = arena.resident
        held.append((nbytes, arena.allocate(nbytes)))
        assert arena.resident >= resident
        used = sorted((start, start + size) for start, size in arena.chunks.items())
        for one, two in itertools.pairwise(used):
            assert one[1] <= two[0]
        for asked, chunk in held:
            assert (chunk is None) == (asked == 0)
            if chunk is not None:
                assert asked <= arena.chunks[chunk] < 2 * max(asked, UNIT) + UNIT
        if release < len(held):
            arena.release(held.pop(release)[1])
    for _, chunk in held:
        arena.release(chunk)
    assert not arena.chunks
    assert sum(size for size, _ in arena.free) == arena.reserved
    assert arena.touched <= arena.reserved
    reserved = arena.reserved
    if reserved:  # every region is one free chunk again
        arena.allocate(FIRST_REGION_BYTES)
        assert arena.reserved == reserved


def test_pages_count_once() -> None:
    """Of ranges that touch, meet or lie in each other."""
    arena, pages = Arena(), set[int]()
    random = np.random.default_rng(0)
    for _ in range(300):
        first = int(random.integers(200))
        last = first + int(random.integers(1, 12))
        arena._touch(first, last)
        pages.update(range(first, last))
        assert arena.touched == len(pages) * PAGE


def test_of_chunks_of_one_size_the_newest_regions_is_taken() -> None:
    """It lies at the lowest address: Linux maps from the top down."""
    arena = Arena()
    first, second, _ = (arena.allocate(FIRST_REGION_BYTES) for _ in range(3))
    assert arena.reserved == 3 * FIRST_REGION_BYTES  # in two regions
    arena.release(first)
    arena.release(second)
    assert arena.allocate(FIRST_REGION_BYTES) == second


def test_who_shares() -> None:
    def options(**changes: bool) -> SessionInfo:
        return SessionInfo(optimization_level="all", **changes)

    assert sharing_of(None) == "own"
    assert sharing_of(options()) == "own"
    assert sharing_of(options(shared_allocator=True)) == "shared"
    assert sharing_of(options(shared_allocator=True, arena=False)) == "none"


def test_one_arena_takes_no_more_than_several(case: Callable[[str], Case]) -> None:
    this = case("cnn")
    shared, own = (
        plan_memory(this.package, this.shapes, sharing=sharing).peak.nbytes
        for sharing in ("shared", "own")
    )
    assert shared <= own


# A kit that cannot share an arena: the plan against a replay whose sessions have one each.


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
def test_plan_and_replay_agree(name: str, case: Callable[[str], Case], tmp_path: Path) -> None:
    """Over both lives: the one that begins, and the one that goes on from what that saved."""
    this = case(name)
    planned = plan_memory(this.package, this.shapes, sharing="own")
    shared = plan_memory(this.package, this.shapes)
    assert planned.peak.nbytes >= shared.peak.nbytes
    measured = hold(this.job(tmp_path, sharing="own"))
    assert measured.outcome == "completed"
    assert measured.peak_bytes is not None
    assert planned.peak.nbytes == pytest.approx(measured.peak_bytes, rel=0.05, abs=4e5)
    resuming = {peak.phase: peak for peak in planned.phase_peaks(measured.phase_peaks)}["resuming"]
    assert resuming.measured_bytes == pytest.approx(resuming.predicted_bytes, rel=0.1, abs=4e5)


def test_options_of_onnx_runtime(case: Callable[[str], Case], tmp_path: Path) -> None:
    """With memory patterns a session keeps a block for a whole run, beside its arena."""
    this = case("transformer")  # its data are too few to evaluate
    package = _with_default_options(this.package, tmp_path / "package")
    plan = plan_arenas(package, this.shapes).plan(package.manifest.session, evaluates=False)
    assert plan.peak.nbytes > 1.05 * plan_memory(this.package, this.shapes).peak.nbytes
    job = dataclasses.replace(
        this.job(tmp_path, sharing="own"), training_model=str(package.training_model),
        eval_model=str(package.eval_model), optimizer_model=str(package.optimizer_model),
    )  # fmt: skip
    measured = hold(job)
    assert measured.outcome == "completed"
    assert "evaluation" not in measured.phase_peaks
    assert plan.peak.nbytes == pytest.approx(measured.peak_bytes, rel=0.02)


def test_a_limit_between_the_two_is_refused_to_own_arenas_only(
    case: Callable[[str], Case], tmp_path: Path
) -> None:
    this = case("cnn")
    peaks = {}
    for own in (False, True):
        folder = tmp_path / str(own)
        folder.mkdir()
        peaks[own] = hold(this.job(folder, sharing="own" if own else None)).peak_bytes
    low, high = peaks[False], peaks[True]
    assert low is not None
    assert high is not None
    limit = (low + high) // 2
    assert high - low > 600_000  # more than a limit can be off by
    for own, outcome in ((False, "completed"), (True, "killed")):
        job = this.job(tmp_path / str(own), sharing="own" if own else None, limit_bytes=limit)
        assert hold(job).outcome == outcome
