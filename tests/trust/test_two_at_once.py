"""Two processes on one package or checkpoint, and threads that share a module."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from odtpack.build import build_package
from odtpack.cli import main
from odtpack.update.release import install
from odtpack_runtime import CheckpointState, Module, Optimizer
from odtpack_runtime.checkpoint.format import read_checkpoint
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.atomic import locked
from odtpack_runtime.package.package import Package
from odtpack_runtime.package.verify import verify_package
from tests import zoo
from tests.packaging_tools import built_package, open_training
from tests.programs import started
from tests.refused import refused

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
def test_two_processes_save_one_checkpoint(tmp_path, threshold):
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
from odtpack_runtime.files.atomic import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@posix
def test_a_lock_ends_with_its_process(tmp_path):
    with started(HOLDER, tmp_path) as process:
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
def test_two_processes_update_one_folder(tmp_path):
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
    return built_package(zoo.mlp((6, 32, 3)), folder)


LARGE = 200_000
"""Samples of a step that takes long enough for another call to come in the middle."""


def batch(seed: int, size: int = 16) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.standard_normal((size, 6), np.float32), random.integers(0, 3, size)


def contents(state: CheckpointState) -> bytes:
    return b"".join(p.data.tobytes() for _, p in state.parameters)


def test_a_second_call_during_a_step_is_busy_and_changes_nothing(package, tmp_path):
    zeros = np.zeros(6 * 32 + 32 + 32 * 3 + 3, np.float32)  # all parameters
    calls = {
        "step": lambda module, optimizer: module(*batch(0)),
        "optimizer": lambda module, optimizer: optimizer.step(),
        "step on": lambda module, optimizer: optimizer.step_on(*batch(0)),
        "reset": lambda module, optimizer: module.lazy_reset_grad(),
        "rate": lambda module, optimizer: optimizer.set_learning_rate(1.0),
        "read": lambda module, optimizer: module.get_contiguous_parameters(),
        "write": lambda module, _: module.copy_buffer_to_parameters(zeros),
        "save": lambda module, _: CheckpointState.save_checkpoint(module.state, tmp_path / "saved"),
        "load": lambda module, _: module.state.load_parameters(package.checkpoint),
        "export": lambda module, _: module.export_model_for_inferencing(tmp_path / "m", ["output"]),
    }
    feeds = batch(0, LARGE)
    for name, call in calls.items():
        kept = []
        for disturbed in (False, True):
            state, module, optimizer = open_training(package.path)
            codes: list[str | None] = []
            began = threading.Event()

            def train(module: Module = module, began: threading.Event = began) -> None:
                with module.state.lock:  # as a call does; it has begun, then
                    began.set()
                    module(*feeds)

            thread = threading.Thread(target=train)
            thread.start()
            began.wait(30)
            if disturbed:
                try:
                    call(module, optimizer)
                except OdtpackError as error:
                    codes.append(error.code)
            thread.join(60)
            assert codes == (["busy"] if disturbed else []), name
            optimizer.step()
            kept.append(contents(state))
        assert kept[0] == kept[1], name
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("_", range(5))
def test_close_during_a_step_waits_and_ends_the_training(package, _):
    state, module, optimizer = open_training(package.path)
    states: list[bytes] = []
    codes: list[str] = []
    begun = threading.Event()
    feeds = batch(0, LARGE)

    def train() -> None:
        try:
            while True:
                begun.set()
                optimizer.step_on(*feeds)
                states.append(contents(state))
        except OdtpackError as error:
            codes.append(error.code)

    thread = threading.Thread(target=train)
    states.append(contents(state))
    thread.start()
    begun.wait(30)
    time.sleep(0.05)
    module.close()
    after = contents(state)
    module.close()
    thread.join(60)
    assert codes == ["closed"]
    assert after == states[-1] == contents(state)


def test_after_close_every_call_is_closed_and_the_state_can_be_saved(package, tmp_path):
    state, module, optimizer = open_training(package.path)
    with module:
        optimizer.step_on(*batch(0))
    for call in (
        lambda: module(*batch(0)), lambda: module.eval()(*batch(0)), optimizer.step,
        lambda: optimizer.step_on(*batch(0)), lambda: optimizer.set_learning_rate(0.1),
        module.lazy_reset_grad, module.get_contiguous_parameters,
        lambda: module.copy_buffer_to_parameters(np.zeros(1, np.float32)),
        lambda: module.export_model_for_inferencing(tmp_path / "m.onnx", ["output"]),
        lambda: Optimizer(package.optimizer_model, module),
    ):  # fmt: skip
        with refused("closed"):
            call()
    assert module.train().input_names() == ["input", "labels"]
    assert (optimizer.step_count, module.skipped_steps) == (1, 0)
    CheckpointState.save_checkpoint(state, tmp_path / "saved", include_optimizer_state=True)
    assert contents(CheckpointState.load_checkpoint(tmp_path / "saved")) == contents(state)


def when_free(call: Callable[[], object]) -> None:
    """What an app does whose threads share a session without a lock of their own."""
    while True:
        try:
            call()
            return
        except OdtpackError as error:
            if error.code != "busy":
                raise
            time.sleep(0.001)


def test_a_thread_that_saves_sees_the_state_between_steps(package, tmp_path):
    """Plain gradient descent on known data: each save must be one of the states in between."""
    state, module, optimizer = open_training(package.path)
    states: dict[int, bytes] = {}
    stop = threading.Event()
    found: list[tuple[int, bytes]] = []
    problems: list[OdtpackError] = []

    def save() -> None:
        while not stop.is_set():
            when_free(lambda: CheckpointState.save_checkpoint(state, tmp_path / "c", True))
            try:
                loaded = CheckpointState.load_checkpoint(tmp_path / "c")
            except OdtpackError as error:
                problems.append(error)
                return
            found.append((loaded.optimizer.step, contents(loaded)))

    saver = threading.Thread(target=save, daemon=True)
    states[0] = contents(state)
    saver.start()
    start = time.monotonic()
    try:
        while len(found) < 20 and time.monotonic() < start + 60 and not problems:
            feeds = batch(optimizer.step_count)
            when_free(lambda feeds=feeds: module(*feeds))
            when_free(optimizer.step)
            states[optimizer.step_count] = contents(state)
            when_free(module.lazy_reset_grad)
    finally:
        stop.set()
        saver.join(60)
    assert not saver.is_alive()
    assert problems == []
    assert len(found) >= 20
    for step, content in found:
        assert content == states[step]


# A plan that came with a package is carried out by nobody, whatever it says.


@pytest.fixture
def planned(tmp_path: Path) -> Path:
    """An honest package, in which the user trains, with what an attacker added to its archive."""
    folder = tmp_path / "package"
    build_package(zoo.mlp((6, 4, 3)), folder, loss="cross_entropy")
    (folder / "trained.ckpt").write_bytes((folder / "checkpoint").read_bytes())
    data, labels = batch(0)
    np.savez(tmp_path / "data.npz", input=data, labels=labels)
    names = ["trained.ckpt", "checkpoint"]
    for inside in (".odtpack-update", ".odtpack-update-0123456789ab"):
        plan = {
            "folder": str(folder), "stage": inside, "last": "manifest.json", "remove": names,
            "move": ["eval_model.onnx"],
        }  # fmt: skip
        (folder / inside).mkdir()
        (folder / inside / "plan.json").write_text(json.dumps(plan))
        (folder / inside / "eval_model.onnx").write_bytes(b"evil")
    (folder / ".package.odtpack-plan").write_text(json.dumps(plan))
    return folder


def held(folder: Path) -> dict[Path, tuple[bytes, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def train(planned: Path) -> None:
    data, out = planned.parent / "data.npz", planned.parent / "out.ckpt"
    assert main(["train", str(planned), "--data", str(data), "--out", str(out)]) == 0


def verify_refuses(planned: Path) -> None:
    with refused("package-unlisted"):
        verify_package(planned)


READERS: dict[str, Callable[[Path], object]] = {
    "open": Package.open,
    "verify": verify_refuses,
    "odtpack verify": lambda planned: main(["verify", str(planned)]),
    "inspect": lambda planned: main(["inspect", str(planned)]),
    "diff": lambda planned: main(["diff", str(planned), str(planned)]),
    "train": train,
    "install": lambda planned: install(planned, planned.parent / "app"),
    "Module": lambda planned: open_training(Package.open(planned).path),
}


@pytest.mark.parametrize("reader", READERS)
def test_whoever_opens_a_package_changes_nothing(planned, reader, caplog):
    before = held(planned)
    READERS[reader](planned)
    assert held(planned) == before
    if reader in ("open", "Module", "install"):
        assert "is ignored" in caplog.text
