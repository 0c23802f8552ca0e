"""A command that is stopped says so, leaves nothing over, and keeps what it has trained."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from odtpack_runtime import CheckpointState
from tests.cli.conftest import Run, Shared


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Processes that a test starts hear SIGINT, also where a shell started pytest with ``&``."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@contextmanager
def running(
    command: list[object], temporary: Path, reached: Callable[[], bool]
) -> Iterator[subprocess.Popen[str]]:
    """A command that has reached something, and does not outlive the block."""
    with subprocess.Popen(
        [sys.executable, "-m", "odtpack", *map(str, command)],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(temporary)},
    ) as process:  # fmt: skip
        until = time.monotonic() + 300
        try:
            while not reached():
                assert process.poll() is None, process.stderr and process.stderr.read()
                assert time.monotonic() < until, "it does not begin"
                time.sleep(0.01)
            yield process
        finally:
            process.kill()


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_train_keeps_the_epochs_that_are_over(
    shared: Shared, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    out, temporary = tmp_path / "out.ckpt", tmp_path / "tmp"
    temporary.mkdir()
    command = ["train", shared.package, "--data", shared.data, "--epochs", 10**6, "--out", out]
    with running(command, temporary, out.exists) as process:
        process.send_signal(number)
        _, text = process.communicate(timeout=120)
    assert process.returncode == code, text
    word = "interrupted" if number == signal.SIGINT else "terminated"
    assert f"error[{word}]: stopped" in text
    assert "Traceback" not in text
    state = CheckpointState.load_checkpoint(out)
    assert dict(state.properties)["odtpack.epochs"] >= 1
    started = CheckpointState.load_checkpoint(shared.package / "checkpoint")
    name = next(name for name, _ in started.parameters)
    assert not np.array_equal(state.parameters[name].data, started.parameters[name].data)
    # That of the epoch before is there if there was one.
    left = {path.name for path in tmp_path.iterdir() if path != temporary}
    assert left - {"out.ckpt.previous"} == {"out.ckpt"}
    assert list(temporary.glob("*odtpack*")) == []


def test_a_simulation_that_is_terminated_leaves_nothing_over(
    shared: Shared, tmp_path: Path
) -> None:
    command = ["simulate", shared.package, "--data", shared.data, "--device", "pixel-8a",
               "--epochs", 10**5]  # fmt: skip
    with running(
        command, tmp_path, lambda: any(tmp_path.glob("odtpack-simulate-*/*"))
    ) as process:  # fmt: skip
        process.terminate()
        _, text = process.communicate(timeout=120)  # returns when its children have ended, too
    assert process.returncode == 143, text
    assert "error[terminated]" in text
    assert list(tmp_path.glob("*odtpack*")) == []


def test_init_quotes_the_name_in_the_next_command(run: Run, shared: Shared, tmp_path: Path) -> None:
    recipe = tmp_path / "my recipe.toml"
    outcome = run("init", shared.model, "--out", recipe)
    (line,) = [line for line in outcome.err.splitlines() if line.startswith("next: ")]
    assert shlex.split(line.removeprefix("next: ")) == ["odtpack", "build", "--recipe", str(recipe)]


def test_all_errors_of_a_profile_are_shown(run: Run, tmp_path: Path) -> None:
    profile = tmp_path / "mine.toml"
    profile.write_text('schema_version = 1\nname = "Bad Name"\ntitle = "T"\nvendor = "V"\n'
                       'os = "beos"\nvalidated = "perhaps"\ncolour = 1\n')  # fmt: skip
    outcome = run("devices", "check", profile)
    assert outcome.code == 2
    for words in ("colour: unknown key", "name (line 2): ", "os (line 5): 'beos'",
                  "validated (line 6): "):  # fmt: skip
        assert words in outcome.err
