"""SIGTERM and SIGINT end every command within two seconds, also while libraries compute.

Seconds are those of the processor, which other work on the machine does not make longer.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest

from odtpack.build import build_package
from odtpack.package import write
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
    nodes = [onnx.helper.make_node("Neg", ["h"], ["v0"])]
    nodes += [onnx.helper.make_node("Neg", [f"v{i}"], [f"v{i + 1}"]) for i in range(400_000)]
    nodes.append(onnx.helper.make_node("Neg", ["v400000"], ["y"]))
    (folder / "large.onnx").write_bytes(model(nodes, {}))
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
def running(command: str, files: Path, out: Path) -> Iterator[subprocess.Popen[str]]:
    words = [word.format(out=out / "out") for word in COMMANDS[command]]
    environment = {**os.environ, "TMPDIR": str(out)}
    with subprocess.Popen(
        [sys.executable, "-m", "odtpack", *words], cwd=files, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env=environment,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


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
def test_a_signal_ends_it(
    command: str, number: signal.Signals, files: Path, tmp_path: Path
) -> None:
    before = computed_by_children()
    with running(command, files, tmp_path) as process:
        while (used := sum(processes(tmp_path).values())) < 5:  # two of them are imports
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.05)
        process.send_signal(number)
        _, text = process.communicate(timeout=60)
    assert process.returncode == SIGNALS[number], text
    assert computed_by_children() - before - used < LIMIT
    word = "interrupted" if number == signal.SIGINT else "terminated"
    assert text.count(f"error[{word}]") == 1
    assert "Traceback" not in text
    assert not processes(tmp_path)
    assert list(tmp_path.glob("odtpack-*")) == []


def test_a_killed_simulation_leaves_nothing_behind_after_the_next_run(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running("simulate", files, tmp_path) as process:
        until = time.monotonic() + 60
        while not list(tmp_path.glob("odtpack-simulate-*/files/*")):
            assert time.monotonic() < until
            time.sleep(0.05)
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
