"""Every kit against Python on the same ONNX Runtime: the same bits, the same files."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from odtpack.build import build_package
from tests import zoo
from tests.kits import harness, javascript, kotlin_kit
from tests.kits.harness import OPTIONS, STEPS, Batch, Task, contents, save_arrays
from tests.kits.kills import loses_nothing
from tests.kits.measured import check_measurements

pytestmark = pytest.mark.kits
batches, packages = harness.batches, harness.packages


@pytest.fixture
def task(batches: list[Batch], tmp_path: Path) -> Task:
    saved = [save_arrays(tmp_path / str(i), **batch) for i, batch in enumerate(batches)]
    return {"batches": saved, "steps": STEPS, "rate": 0.01}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_training_gives_the_bits_of_python(every, name, packages, task, tmp_path):
    harness.same_bits(every, {**task, "package": packages[name]}, tmp_path)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "groups", "step model"])
def test_a_training_begun_in_one_goes_on_in_the_other(every, name, packages, task, tmp_path):
    harness.goes_on(every, {**task, "package": packages[name]}, tmp_path)


@pytest.mark.parametrize("every", ["swift", "csharp", "kotlin"], indirect=True)
def test_an_app_may_ask_for_gradients_after_steps_of_the_step_model(
    every, packages, task, tmp_path
):
    """The first call that asks for them closes the step model; nothing else changes."""
    task["package"] = packages["step model"]
    wanted = every.train({**task, "save": tmp_path / "python.ckpt"}, "python")["losses"]
    for whole in (STEPS, 3):
        found = every.train({**task, "whole_steps": whole, "save": tmp_path / "kit.ckpt"}, "kit")
        assert found["losses"] == wanted
        if every is not kotlin_kit:  # whose program does not say it
            assert found["step_model"] is (whole == STEPS)
        assert contents(tmp_path / "kit.ckpt") == contents(tmp_path / "python.ckpt")


@pytest.mark.parametrize("every", ["swift", "csharp", "kotlin"], indirect=True)
def test_gradients_take_no_memory_with_a_step_model(every, tmp_path):
    widths = (512, 4096, 4)
    build_package(zoo.mlp(widths), tmp_path / "package", loss="cross_entropy")
    rng = np.random.default_rng(3)
    arrays = {"input": rng.standard_normal((8, widths[0]), dtype=np.float32),
              "labels": rng.integers(0, widths[-1], 8)}  # fmt: skip
    task = {"package": tmp_path / "package", "data": save_arrays(tmp_path, **arrays), "steps": 20}
    taken = []
    for whole in (20, 0):
        found = every.train({**task, "evaluate": True, "whole_steps": whole}, "kit")
        taken.append((found.get("anonymous_bytes_by_tenth") or found["resident"])[-1])
    assert taken[1] - taken[0] > 0.7 * 4 * widths[0] * widths[1]


@harness.needs_reference
def test_a_checkpoint_loads_in_the_reference(every, packages, task, tmp_path):
    every.train({**task, "package": packages["adamw"], "save": tmp_path / "kit.ckpt"}, "kit")
    harness.loads_in_the_reference(tmp_path / "kit.ckpt")


@pytest.mark.parametrize("external_above", [2**30, 1000])
def test_100_kills_in_saves_lose_nothing(every, external_above, tmp_path):
    loses_nothing(every.saving, tmp_path, external_above)
    names = {path.name for path in tmp_path.iterdir() if path.suffix != ".tmp"}
    files = {"state"} if external_above > 1000 else {"state", "state.data"}
    assert names == files | {name.replace("state", "state.previous") for name in files}


@pytest.mark.parametrize("every", ["kotlin", "node"], indirect=True)
def test_a_full_disk_leaves_the_checkpoint_as_it_was(every, tmp_path):
    path = tmp_path / "state"
    said = harness.keeps_its_file_on_a_full_disk(every.saving(path, 2**30, "replace"), path)
    assert "file-not-written" in said


@pytest.mark.parametrize("every", ["kotlin", "node"], indirect=True)
def test_500_hostile_files_end_in_one_clear_error(every, packages, task, tmp_path):
    package, saved, folder = packages["adamw"], tmp_path / "good", tmp_path / "hostile"
    every.train({**task, "package": package, "steps": 1, "save": saved}, "kit")
    folder.mkdir()
    checkpoints = harness.damaged_checkpoints(folder, saved.read_bytes())
    changed = harness.damaged_packages(folder, package, 100, 110)
    flipped = harness.flipped_packages(folder, package, 60)
    made = {path.name for path in (*checkpoints, *changed, *flipped)}
    found = {name: answer for name, answer in every.damaged(folder).items() if name in made}
    assert len(found) == len(made) >= 500
    assert [answer for answer in found.values() if answer.startswith("unclear")] == []
    expected = {path.name: harness.outcome(path) for path in checkpoints}
    expected |= {path.name: "package-changed" for path in flipped}
    assert {name: found[name] for name in expected} == expected
    assert sum(answer != "loaded" for answer in found.values()) > 0.6 * len(found)


@pytest.mark.parametrize("every", ["swift", "csharp", "kotlin", "node"], indirect=True)
def test_the_benchmark_writes_every_measurement(every, tmp_path):
    printed, own = every.benchmark(tmp_path), every in (kotlin_kit, javascript)
    name = "js" if every is javascript else every.__name__.rpartition(".")[2].removesuffix("_kit")
    version = every.runtime_version() if own else onnxruntime.__version__
    unmeasured = ("read_bytes_per_second",) if own else ()
    check_measurements(printed, name, version, unmeasured=unmeasured)
    assert not list(tmp_path.iterdir())
