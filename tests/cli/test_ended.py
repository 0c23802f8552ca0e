"""SIGTERM and SIGINT end every command within two seconds, also while libraries compute.

A command that is stopped says so, leaves nothing over, and keeps what it has trained.
"""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from odtpack.build import build_package
from odtpack.package import write
from odtpack_runtime import CheckpointState
from odtpack_runtime.files.scratch import scratch_folder, sweep
from tests.trust.test_endless import loop, model

LIMIT = 2.0
SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143}


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Processes that a test starts hear SIGINT, also where a shell started pytest with ``&``."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which one step takes minutes, its package, and data for it."""
    folder = tmp_path_factory.mktemp("ended")
    (folder / "slow.onnx").write_bytes(loop(2**24))
    with pytest.MonkeyPatch.context() as patch:  # a build runs what it wrote
        patch.setattr(write, "checked", lambda manifest, *_, **__: manifest)
        build_package(folder / "slow.onnx", folder / "package", loss="mse")
    np.savez(folder / "data.npz", allow_pickle=False, x=np.ones((64, 2), np.float32),
             target=np.ones((64, 2), np.float32))  # fmt: skip
    # A million nodes keep the checker and shape inference, which hold Python's lock, busy.
    nodes = " ".join(f"v{i + 1} = Neg(v{i})" for i in range(400_000))
    (folder / "large.onnx").write_bytes(model(f"v0 = Neg(h) {nodes} y = Neg(v400000)"))
    return folder


COMMANDS = {
    "build": ("build", "slow.onnx", "--out", "{out}", "--loss", "mse"),
    "train": ("train", "package", "--data", "data.npz", "--out", "{out}.ckpt"),
    "simulate": ("simulate", "package", "--data", "data.npz", "--device", "pixel-8a"),
    "verify": ("verify", "package"),
    "inspect": ("inspect", "large.onnx"),
    "ops check": ("ops", "check", "large.onnx"),
}


@contextmanager
def running(
    command: Sequence[object],
    temporary: Path,
    reached: Callable[[], bool],
    cwd: Path | None = None,
    start_new_session: bool = False,
) -> Iterator[subprocess.Popen[str]]:
    """A command that has reached something, and does not outlive the block."""
    with subprocess.Popen(
        [sys.executable, "-m", "odtpack", *map(str, command)], cwd=cwd, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(temporary)},
        start_new_session=start_new_session,
    ) as process:  # fmt: skip
        until = time.monotonic() + 300
        try:
            while not reached():
                assert process.poll() is None, process.stderr and process.stderr.read()
                assert time.monotonic() < until, "it does not begin"
                time.sleep(0.05)
            yield process
        finally:
            process.kill()


def ended(
    process: subprocess.Popen[str], number: signal.Signals, timeout: float = 120,
    send: Callable[[int, int], None] = os.kill,
) -> str:  # fmt: skip
    """Send a signal; return what the command says as it ends."""
    send(process.pid, number)
    _, text = process.communicate(timeout=timeout)  # returns when its children have ended, too
    assert process.returncode == SIGNALS[number], text
    word = "interrupted" if number == signal.SIGINT else "terminated"
    assert text.count("error[") == 1
    assert f"error[{word}]: stopped" in text
    assert "Traceback" not in text
    return text


def processes(mark: Path) -> dict[str, float]:
    """Processes with a folder in their environment, and the seconds that each has computed."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(mark).encode() in (entry / "environ").read_bytes():
                state, *fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if state != "Z":  # its own time, and that of children that have ended
                    found[entry.name] = sum(map(int, fields[10:14])) / os.sysconf("SC_CLK_TCK")
        except OSError:
            pass
    return found


def computed_by_children() -> float:
    """Seconds that ended processes of this one, and theirs, have computed."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_signal_ends_it(command, number, files, tmp_path):
    words = [word.format(out=tmp_path / "out") for word in COMMANDS[command]]
    before, used = computed_by_children(), 0.0

    def computes() -> bool:  # two of the seconds are imports
        nonlocal used
        used = sum(processes(tmp_path).values())
        return used > 5

    with running(words, tmp_path, computes, files) as process:
        ended(process, number, 60)
    assert computed_by_children() - before - used < LIMIT
    assert not processes(tmp_path)
    assert list(tmp_path.glob("odtpack-*")) == []


@pytest.mark.parametrize("seconds", [0.5, 1, 1.5, 2, 2.5, 3, 4])
def test_ctrl_c_ends_a_build_at_any_moment(seconds, tmp_path):
    """A terminal sends it to all processes of the group; the first one passes it on as well."""
    (tmp_path / "slow.onnx").write_bytes(loop(2**24))
    words = [word.format(out=tmp_path / "out") for word in COMMANDS["build"]]

    def reached() -> bool:
        found = processes(tmp_path)
        return len(found) > 1 and sum(found.values()) >= seconds

    with running(words, tmp_path, reached, tmp_path, start_new_session=True) as process:
        ended(process, signal.SIGINT, 60, os.killpg)
    assert not processes(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["slow.onnx"]


def test_an_error_that_an_interrupt_became_is_no_bug(shared, run, tmp_path, monkeypatch):
    """As the class of an enumeration makes of it that is imported meanwhile."""

    def build(*_: object, **__: object) -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
        except KeyboardInterrupt as error:
            raise RuntimeError("Error calling __set_name__") from error

    monkeypatch.setattr("odtpack.build.build", build)
    outcome = run("build", shared.model, "--out", tmp_path / "out", "--loss", "cross_entropy")
    assert outcome.code == 130
    assert "error[interrupted]" in outcome.err
    assert outcome.err.count("error[") == 1


def test_a_killed_simulation_leaves_nothing_behind_after_the_next_run(files, tmp_path, monkeypatch):
    def begun() -> bool:
        return bool(list(tmp_path.glob("odtpack-simulate-*/files/*")))

    with running(COMMANDS["simulate"], tmp_path, begun, files) as process:
        process.kill()
        process.wait()
    until = time.monotonic() + 10
    while processes(tmp_path) and time.monotonic() < until:
        time.sleep(0.05)
    assert not processes(tmp_path)
    assert len(list(tmp_path.glob("odtpack-simulate-*"))) == 1
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    foreign = tmp_path / "odtpack-something"
    foreign.mkdir()
    # A process that is dying has no environment any more, and still its locks for a moment.
    while list(tmp_path.glob("odtpack-simulate-*")) and time.monotonic() < until:
        with scratch_folder("test"):
            time.sleep(0.05)
    with scratch_folder("test") as mine:
        assert not list(tmp_path.glob("odtpack-simulate-*"))
        sweep()
        assert Path(mine).is_dir()  # its owner lives
    assert {path.name for path in tmp_path.iterdir()} == {"odtpack-something"}


@pytest.mark.parametrize("number", SIGNALS)
def test_train_keeps_the_epochs_that_are_over(shared, tmp_path, number):
    out, temporary = tmp_path / "out.ckpt", tmp_path / "tmp"
    temporary.mkdir()
    command = ["train", shared.package, "--data", shared.data, "--epochs", 10**6, "--out", out]
    with running(command, temporary, out.exists) as process:
        ended(process, number)
    state = CheckpointState.load_checkpoint(out)
    assert dict(state.properties)["odtpack.epochs"] >= 1
    started = CheckpointState.load_checkpoint(shared.package / "checkpoint")
    name = next(name for name, _ in started.parameters)
    assert not np.array_equal(state.parameters[name].data, started.parameters[name].data)
    # That of the epoch before is there if there was one.
    left = {path.name for path in tmp_path.iterdir() if path != temporary}
    assert left - {"out.ckpt.previous"} == {"out.ckpt"}
    assert list(temporary.glob("*odtpack*")) == []


def test_a_simulation_that_is_terminated_leaves_nothing_over(shared, tmp_path):
    command = ["simulate", shared.package, "--data", shared.data, "--device", "pixel-8a",
               "--epochs", 10**5]  # fmt: skip

    def begun() -> bool:
        return any(tmp_path.glob("odtpack-simulate-*/*"))

    with running(command, tmp_path, begun) as process:
        ended(process, signal.SIGTERM)
    assert list(tmp_path.glob("*odtpack*")) == []
