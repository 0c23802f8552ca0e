"""The Kotlin kit with packages that are trained segment by segment."""

import json
import os
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.decoder.model import SHAPES, Shape, write_model
from odtpack_runtime.package.package import Package
from odtpack_simulator.memory.arena import session_use
from odtpack_simulator.memory.memory_plan import plan_memory
from odtpack_simulator.memory.process_memory import child_environment
from tests.kits import kotlin_kit
from tests.kits.harness import Packages, Task, contents, goes_on_in_segments, needs
from tests.kits.kotlin_kit import OPTIONS, command, run, save_batch, train
from tests.kits.test_segments import HOSTILE, built, built_kinds, pages_of, write_hostile

pytestmark = needs(kotlin_kit.unavailable())
KINDS: dict[str, dict[str, Any]] = {
    "float32": {}, "int8": {"base": "int8"}, "int4": {"base": "int4"}, "nf4": {"base": "nf4"},
    "no arena": {"base": "int4", "sessions": "small"}, "kept": {"base": "int4", "keep_products": 4},
}  # fmt: skip
STEPS = 7
LONG = 192
LARGER = Shape("larger", 3, 256, 4, 2, 704, 2000)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A decoder of three blocks, by how its base is stored."""
    return built_kinds(KINDS, tmp_path_factory.mktemp("segments"))


def three_lengths(folder: Path) -> list[dict[str, Any]]:
    """Batches of sequences of three lengths, two of them of two."""
    rng = np.random.default_rng(1)
    found = []
    for number, size in enumerate(((2, 24), (1, 40), (2, 7))):
        ids = rng.integers(0, SHAPES["small"].words, size)
        found.append(save_batch(folder / str(number), input_ids=ids, labels=ids))
    return found


@pytest.fixture
def batches(tmp_path: Path) -> list[dict[str, Any]]:
    return three_lengths(tmp_path)


@pytest.mark.parametrize("name", KINDS)
def test_a_training_gives_the_bits_of_python(
    name: str, packages: Packages, batches: list[dict[str, Any]], tmp_path: Path
) -> None:
    task = {"package": packages[name], "batches": batches, "steps": STEPS, "rate": 0.01}
    kotlin, python = (
        train({**task, "evaluate": True, "save": tmp_path / f"{kit}.ckpt"}, kit)
        for kit in ("kotlin", "python")
    )
    assert kotlin["losses"] == python["losses"]
    assert len(set(kotlin["losses"])) == STEPS
    assert kotlin["losses"][6] < kotlin["losses"][0]
    assert kotlin["evaluation"] == python["evaluation"]
    assert contents(tmp_path / "kotlin.ckpt") == contents(tmp_path / "python.ckpt")


def test_a_training_begun_in_one_goes_on_in_the_other(
    packages: Packages, batches: list[dict[str, Any]], tmp_path: Path
) -> None:
    goes_on_in_segments(train, "kotlin", packages["int4"], batches, tmp_path)


def test_one_model_for_inference_is_refused(packages: Packages, tmp_path: Path) -> None:
    code, message = run("export", packages["int4"], tmp_path / "model.onnx").split("\n", 1)
    assert code == "segments-unsupported"
    assert "odtpack adapter export" in message
    assert not (tmp_path / "model.onnx").exists()


def test_segments_that_contradict_themselves_are_refused(
    packages: Packages, tmp_path: Path
) -> None:
    for what in (*HOSTILE, "nothing"):
        write_hostile(packages["int4"], tmp_path / what.replace(" ", "-"), what)
    found = dict(line.split(" ", 1) for line in run("damaged", tmp_path).splitlines())
    assert found.pop("nothing") == "loaded"
    assert found == dict.fromkeys((what.replace(" ", "-") for what in HOSTILE), "segments-invalid")


def test_weights_stay_clean_pages_of_their_file(packages: Packages, tmp_path: Path) -> None:
    """Nothing is copied: not a byte of the mapping is the process's own."""
    package = packages["float32"]
    subprocess.run(["sync", package / "segments.weights"], check=True)
    ids = np.random.default_rng(2).integers(0, SHAPES["small"].words, (1, 32))
    data = save_batch(tmp_path, input_ids=ids, labels=ids)
    task = {"package": package, "data": data, "steps": 10**6}
    child = subprocess.Popen(command("train", json.dumps(task, default=str)))
    try:
        size = (package / "segments.weights").stat().st_size
        deadline = time.monotonic() + 60
        figures = Counter[str]()
        while figures["Rss"] < 0.9 * size and time.monotonic() < deadline:
            time.sleep(0.2)
            figures = pages_of(child.pid, package / "segments.weights")
    finally:
        child.kill()
        child.wait()
    assert figures["Rss"] >= 0.9 * size
    clean = figures["Shared_Clean"] + figures["Private_Clean"]
    assert (clean, figures["Anonymous"]) == (figures["Rss"], 0)


def test_the_plan_is_what_an_app_needs(tmp_path: Path) -> None:
    """In a first life with an evaluation and a save, and a second one that resumes."""
    package = built(write_model(LARGER, tmp_path / "model"), tmp_path / "package", base="int4")
    opened = Package.open(package)
    use = session_use(opened.manifest, "kotlin")
    planned, measured = [], []
    for size in ((1, 16), (8, 192)):
        ids = np.random.default_rng(2).integers(0, LARGER.words, size)
        data = save_batch(tmp_path, input_ids=ids, labels=ids)
        task = {"package": package, "data": data, "steps": 10, "evaluate": True}
        saved = tmp_path / "saved.ckpt"
        lives = {**task, "save": saved}, {**task, "checkpoint": saved}
        measured.append(max(map(_need, lives)))
        shapes = dict.fromkeys(data, size)
        plan = plan_memory(opened, shapes, use, threads=1)
        planned.append(plan.peak.nbytes)
    # Classes and compiled methods, with any batch.
    java = measured[0] - planned[0]
    assert 0 < java < 16 * 2**20
    assert measured[1] - java == pytest.approx(planned[1], rel=0.05)


def _need(task: Task) -> int:
    """Anonymous memory of a training at its peak, above that of Java without ONNX Runtime."""
    # The heap of Java stands from the start, and what is freed goes back at once, as on phones.
    options = (*OPTIONS, "-Xms512m", "-XX:+AlwaysPreTouch")
    words = command("train", json.dumps(task, default=str), options=options)
    environment = {**os.environ, **child_environment()}
    # The kernel's mark of the peak, in which pages of files count: they come, and then stay.
    peaks = {"VmHWM": 0, "RssFile": 0}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as child:
        while child.poll() is None:
            for line in Path(f"/proc/{child.pid}/status").read_text().splitlines():
                name, _, figure = line.partition(":")
                if name in peaks:
                    peaks[name] = max(peaks[name], int(figure.split()[0]) * 1024)
            time.sleep(0.05)
        printed = child.stdout.read()
    assert child.returncode == 0
    found = json.loads(printed)
    # Memory does not grow with the steps.
    assert found["resident"][-1] - found["resident"][4] < 4 * 2**20
    return int(peaks["VmHWM"] - peaks["RssFile"] - found["before"])
