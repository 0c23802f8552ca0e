"""The arena that a build fits to the plan holds less in a real training."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from odtpack.build import build_package
from odtpack.ort import arena
from odtpack_runtime.files.records import InvalidRecordError
from odtpack_runtime.package.package import Package
from odtpack_runtime.package.records import SessionInfo
from odtpack_simulator.memory.arena import session_use
from odtpack_simulator.memory.memory_plan import plan_arenas, plan_memory
from odtpack_simulator.replay.job import Job
from odtpack_simulator.replay.replay import run_training_child, with_sessions
from tests import zoo
from tests.packaging_tools import batch

SIZE = 8


@pytest.fixture(scope="module")
def mobile(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """MobileNetV2 for small images, whose requests are of many sizes."""
    folder = tmp_path_factory.mktemp("mobile")
    model = zoo.mobilenet_v2(size=64, width_mult=0.5)
    build_package(model, folder / "package", loss="cross_entropy")
    inputs, labels = batch(model, 5 * SIZE)
    np.save(folder / "input.npy", inputs)
    np.save(folder / "labels.npy", labels)
    return Package.open(folder / "package")


def shapes(package: Package) -> dict[str, tuple[int, ...]]:
    return {n: (SIZE, *array.shape[1:]) for n, array in _data(package).items()}


def with_session(package: Package, **changes: int | None) -> Package:
    session = package.manifest.session
    assert session is not None
    changed = dataclasses.replace(session, **changes)
    return dataclasses.replace(
        package, manifest=dataclasses.replace(package.manifest, session=changed)
    )


def usual(package: Package) -> Package:
    return with_session(package, initial_chunk_size_bytes=None, max_dead_bytes_per_chunk=None)


def planned(package: Package, ballast: int = 0, evaluates: bool = True) -> int:
    step = session_use(package.manifest).step_model
    plans = plan_arenas(package, shapes(package), step_model=step)
    return plans.plan(package.manifest.session, ballast=ballast, evaluates=evaluates).peak.nbytes


def test_a_real_training_takes_less(mobile: Package) -> None:
    assert planned(usual(mobile)) - planned(mobile) > 2**20
    peaks = []
    for package in (usual(mobile), mobile):
        (package.path / "manifest.json").write_text(package.manifest.to_json())
        found = run_training_child(_job(package)).peak_bytes
        if found is None:
            pytest.skip("memory is measured on Linux only")
        peaks.append(found)
    assert peaks[0] - peaks[1] > 2**19


def test_no_other_settings_hold_less_in_kits_that_differ_a_little(mobile: Package) -> None:
    def most(package: Package) -> int:
        others = (planned(package, ballast) - ballast for ballast in (0, *arena._BALLASTS))
        return max(planned(package, evaluates=False), *others)

    least = most(mobile)
    for first in (2**20, 2**22, 2**23, 2**24):
        for dead in (None, 2**16):
            other = with_session(
                mobile, initial_chunk_size_bytes=first, max_dead_bytes_per_chunk=dead
            )
            assert least <= most(other), (first, dead)


def test_what_the_arena_must_hold_besides_is_counted(mobile: Package) -> None:
    """A MiB that lies in the way takes about a MiB, unless the arena grows for it."""
    assert planned(mobile, 2**20) >= planned(mobile) + 2**19


def test_a_budget_is_kept_with_the_arena_that_it_was_planned_with(tmp_path: Path) -> None:
    """It is planned without the step model, so that one decides nothing about the arena."""
    model = zoo.mobilenet_v2(size=64, width_mult=0.5)
    budget = 33_000_000
    build_package(
        model, tmp_path / "package", loss="cross_entropy", memory_budget=f"{budget} B",
        memory_batch=SIZE, self_check=False,
    )  # fmt: skip
    package = Package.open(tmp_path / "package")
    assert package.step_model is not None
    sizes = {i.name: (SIZE, *i.shape[1:]) for i in package.manifest.inputs}
    assert plan_memory(package, sizes).peak.nbytes <= budget  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["initial_chunk_size_bytes", "max_dead_bytes_per_chunk"])
@pytest.mark.parametrize("size", [-1, 0, 255, 2**30 + 1, 2.5, "1 MB"])
def test_sizes_that_make_no_sense_are_refused(key: str, size: object) -> None:
    with pytest.raises(InvalidRecordError, match=key):
        SessionInfo.read({"optimization_level": "all", key: size})


def _data(package: Package) -> dict[str, np.ndarray]:
    return {name: np.load(package.path.parent / f"{name}.npy") for name in ("input", "labels")}


def _job(package: Package) -> Job:
    folder = package.path.parent
    data = {name: str(folder / f"{name}.npy") for name in ("input", "labels")}
    files = (package.training_model, package.eval_model, package.optimizer_model)
    job = Job(
        "train", *map(str, files), str(package.checkpoint), str(folder), data, 5 * SIZE, SIZE,
        epochs=1, seed=0, full_batches=True, learning_rate=1e-3, threads=1,
    )  # fmt: skip
    return with_sessions(job, package, session_use(package.manifest))
