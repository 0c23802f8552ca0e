"""What the system or float32 refuses is one clear error, and never a bug."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from odtpack.artifacts import generate_artifacts
from odtpack.errors import OdtpackError
from tests.cli.conftest import Run, Shared

LONG = "a" * 6000


@pytest.mark.parametrize("long", [LONG, "a/" * 3000])
def test_paths_that_are_too_long(run: Run, shared: Shared, tmp_path: Path, long: str) -> None:
    build = ("build", shared.model, "--loss", "cross_entropy", "--out")
    for command, code in (
        ((*build, tmp_path / long), "package-not-written"),
        (("build", tmp_path / long, "--loss", "mse", "--out", tmp_path / "x"), "system-refused"),
        (("inspect", tmp_path / long), "system-refused"),
        (("verify", tmp_path / long), "system-refused"),
        (("train", tmp_path / long, "--data", shared.data), "system-refused"),
        (("train", shared.package, "--data", tmp_path / long), None),
    ):
        outcome = run(*command)
        assert outcome.code == 2
        assert "error[internal]" not in outcome.err
        assert code is None or f"error[{code}]" in outcome.err


def started(shared: Shared, close: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = ['exec "$@" ' + close, "sh", sys.executable, "-m", "odtpack", *map(str, words)]
    return subprocess.run(["sh", "-c", *command], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("close", [">&-", ">/dev/full"])
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_results_that_cannot_be_written(shared: Shared, close: str, more: tuple[str, ...]) -> None:
    done = started(shared, close, "inspect", shared.model, *more)
    assert done.returncode == 2
    assert done.stderr.count("error[system-refused]") == 1
    assert "Exception" not in done.stderr
    assert "internal" not in done.stderr


@pytest.mark.parametrize("close", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_commands_without_results_need_no_streams(
    shared: Shared, close: str, tmp_path: Path
) -> None:
    out = tmp_path / "package"
    words = ("build", shared.model, "--loss", "cross_entropy", "--out", out)
    done = started(shared, close, *words)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in out.iterdir()} == {p.name for p in shared.package.iterdir()}
    assert (out / "checkpoint").read_bytes() == (shared.package / "checkpoint").read_bytes()


@pytest.mark.parametrize(
    "option", [("--weight-decay", "1e308"), ("--clip-norm", "1e39"), ("--clip-value", "3.5e38")]
)
def test_numbers_that_float32_does_not_hold(
    run: Run, shared: Shared, tmp_path: Path, option: tuple[str, str]
) -> None:
    out = tmp_path / "package"
    outcome = run("build", shared.model, "--loss", "cross_entropy", "--out", out, *option)
    assert outcome.code == 2
    assert "error[bad-hyperparameter]" in outcome.err
    assert not out.exists()


def test_a_path_that_is_not_utf8(run: Run, shared: Shared, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"p\xff")
    outcome = run("build", shared.model, "--loss", "cross_entropy", "--out", folder)
    assert outcome.code == 2
    assert "error[package-not-written]" in outcome.err
    assert not folder.exists()
    folder.symlink_to(shared.package, target_is_directory=True)  # what it leads to has a good name
    assert run("verify", folder).code == 0
    folder.unlink()
    subprocess.run(["cp", "-r", shared.package, folder], check=True)
    outcome = run("verify", folder)
    assert outcome.code == 2
    assert "error[model-not-readable]" in outcome.err
    assert "not UTF-8" in outcome.err


@pytest.mark.parametrize(
    "changed",
    [
        {"model": b"\x08\x08"},
        {"requires_grad": b"conv1.weight"},
        {"artifact_directory": b"x"},
        {"prefix": b"x"},
        {"ort_format": b"x"},
        {"nominal_checkpoint": b"x"},
        {"custom_op_library": b"x"},
        {"target": b"x"},
        {"loss": b"x"},
        {"optimizer": b"x"},
    ],
)
def test_artifacts_given_bytes(shared: Shared, tmp_path: Path, changed: dict[str, bytes]) -> None:
    arguments = {
        "model": onnx.load(shared.model),
        "requires_grad": ["conv2.weight"],
        "artifact_directory": str(tmp_path / "out"),
        **changed,
    }
    with pytest.raises(OdtpackError):
        generate_artifacts(**arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
