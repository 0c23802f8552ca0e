"""The Kotlin kit with packages that are trained segment by segment."""

import json
import os
import subprocess
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks.decoder.model import SHAPES, Shape, write_model
from odtpack_runtime.package.package import Package
from odtpack_simulator.memory.arena import session_use
from odtpack_simulator.memory.memory_plan import plan_memory
from odtpack_simulator.memory.process_memory import child_environment
from tests.kits import kotlin_kit, test_segments
from tests.kits.harness import Task, needs
from tests.kits.kotlin_kit import OPTIONS, command, save_batch
from tests.kits.test_segments import built, pages_of

packages = test_segments.packages
pytestmark = needs(kotlin_kit.unavailable())
LARGER = Shape("larger", 3, 256, 4, 2, 704, 2000)


def test_weights_stay_clean_pages_of_their_file(packages, tmp_path):
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


def test_the_plan_is_what_an_app_needs(tmp_path):
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
