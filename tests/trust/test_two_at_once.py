"""Two processes on one package or checkpoint, and threads that share a module."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from odtpack.build import build_package
from odtpack_runtime import CheckpointState, Module, Optimizer
from odtpack_runtime.checkpoint.format import read_checkpoint
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.lock import locked
from odtpack_runtime.package.package import Package
from tests import zoo

posix = pytest.mark.skipif(os.name != "posix", reason="flock")


def exits(commands: Iterable[list[str]]) -> list[int]:
    """How commands end that run at the same time."""
    processes = [subprocess.Popen(command) for command in commands]
    try:
        return [process.wait(300) for process in processes]
    finally:
        for process in processes:
            process.kill()


SAVER = """
import sys
import numpy as np
from odtpack_runtime.checkpoint import writer
from odtpack_runtime.checkpoint.format import CheckpointData
writer.EXTERNAL_DATA_THRESHOLD = int(sys.argv[3])
for step in range(150):
    value = int(sys.argv[2]) * 1000 + step
    array = np.full(20_000, value, np.float32)
    content = CheckpointData({"w": array}, {}, properties={"value": value})
    writer.write_checkpoint(sys.argv[1], content, previous="replaced")
"""


@posix
@pytest.mark.parametrize("threshold", [2**30, 64], ids=["one file", "external data"])
def test_two_processes_save_one_checkpoint(tmp_path: Path, threshold: int) -> None:
    path = tmp_path / "checkpoint"
    words = [sys.executable, "-c", SAVER, str(path)]
    assert exits([*words, str(i), str(threshold)] for i in (1, 2)) == [0, 0]
    for name in (path, tmp_path / "checkpoint.previous"):
        data = read_checkpoint(name)
        assert data.checked
        assert set(data.trainable["w"]) == {data.properties["value"]}
    assert data.properties["value"] != read_checkpoint(path).properties["value"]


HOLDER = """
import sys, time
from pathlib import Path
from odtpack_runtime.files.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@posix
def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        entered = threading.Event()

        def enter() -> None:
            with locked(tmp_path):
                entered.set()

        waiting = threading.Thread(target=enter, daemon=True)
        waiting.start()
        try:
            assert not entered.wait(0.3)
        finally:
            process.send_signal(signal.SIGKILL)
            waiting.join(30)
    assert entered.is_set()
    assert list(tmp_path.iterdir()) == []


OPENER = """
import sys
from odtpack_runtime.files import folder_update
target = sys.argv[1]
folder_update._exchange = lambda first, second: False  # as where folders cannot be swapped
for step in range(60):
    with folder_update.update_folder(target, last="last") as stage:
        for name in ("a", "b", "last"):
            (stage / name).write_text(sys.argv[2] + str(step))
    folder_update.finish_update(target)
"""


@posix
def test_two_processes_update_one_folder(tmp_path: Path) -> None:
    target = tmp_path / "package"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    words = [sys.executable, "-c", OPENER, str(target)]
    assert exits([*words, name] for name in ("x", "y")) == [0, 0]
    assert sorted(path.name for path in target.iterdir()) == ["a", "b", "last", "notes.txt"]
    assert len({(target / name).read_text() for name in ("a", "b", "last")}) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["package"]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    folder = tmp_path_factory.mktemp("built") / "package"
    build_package(zoo.mlp((6, 32, 3)), folder, loss="cross_entropy")
    return Package.open(folder)


def batch(seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.standard_normal((16, 6), np.float32), random.integers(0, 3, 16)


def test_threads_that_call_one_module_take_turns(package: Package) -> None:
    state = CheckpointState.load_checkpoint(package.checkpoint)
    module = Module(package.training_model, state, package.eval_model).eval()
    alone = [float(module(*batch(seed))[0]) for seed in range(40)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda seed: float(module(*batch(seed))[0]), range(40)))
    assert together == alone


def test_a_thread_that_saves_sees_the_state_between_steps(package: Package, tmp_path: Path) -> None:
    """Plain gradient descent on known data: each save must be one of the states in between."""
    state = CheckpointState.load_checkpoint(package.checkpoint)
    module = Module(package.training_model, state)
    optimizer = Optimizer(package.optimizer_model, module)
    states: dict[int, bytes] = {}
    stop = threading.Event()
    found: list[tuple[int, bytes]] = []
    problems: list[OdtpackError] = []

    def contents(loaded: CheckpointState) -> bytes:
        return b"".join(p.data.tobytes() for _, p in loaded.parameters)

    def save() -> None:
        while not stop.is_set():
            CheckpointState.save_checkpoint(state, tmp_path / "c", True)
            try:
                loaded = CheckpointState.load_checkpoint(tmp_path / "c")
            except OdtpackError as error:
                problems.append(error)
                return
            assert loaded.optimizer is not None
            found.append((loaded.optimizer.step, contents(loaded)))

    saver = threading.Thread(target=save, daemon=True)
    states[0] = contents(state)
    saver.start()
    start = time.monotonic()
    try:
        while len(found) < 20 and time.monotonic() < start + 60 and not problems:
            module(*batch(optimizer.step_count))
            optimizer.step()
            states[optimizer.step_count] = contents(state)
            module.lazy_reset_grad()
    finally:
        stop.set()
        saver.join(60)
    assert not saver.is_alive()
    assert problems == []
    assert len(found) >= 20
    for step, content in found:
        assert content == states[step]
