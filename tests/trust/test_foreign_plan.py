"""A plan that came with a package is carried out by nobody, whatever it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from odtpack.build import build_package
from odtpack.cli import main
from odtpack.update.install import install
from odtpack_runtime import CheckpointState, Module
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.package.package import Package
from odtpack_runtime.package.verify import verify_package
from tests import zoo


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """An honest package, in which the user trains, with what an attacker added to its archive."""
    folder = tmp_path / "package"
    build_package(zoo.mlp((6, 4, 3)), folder, loss="cross_entropy")
    (folder / "trained.ckpt").write_bytes((folder / "checkpoint").read_bytes())
    random = np.random.default_rng(0)
    np.savez(
        tmp_path / "data.npz",
        input=random.standard_normal((20, 6)).astype(np.float32),
        labels=random.integers(0, 3, 20),
    )
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


def train(package: Path) -> None:
    data, out = package.parent / "data.npz", package.parent / "out.ckpt"
    assert main(["train", str(package), "--data", str(data), "--out", str(out)]) == 0


def module(package: Path) -> None:
    opened = Package.open(package)
    state = CheckpointState.load_checkpoint(opened.checkpoint)
    Module(opened.training_model, state, opened.eval_model)


def refused(package: Path) -> None:
    with pytest.raises(OdtpackError) as caught:
        verify_package(package)
    assert caught.value.code == "package-unlisted"


READERS: dict[str, Callable[[Path], object]] = {
    "open": Package.open,
    "verify": refused,
    "odtpack verify": lambda package: main(["verify", str(package)]),
    "inspect": lambda package: main(["inspect", str(package)]),
    "diff": lambda package: main(["diff", str(package), str(package)]),
    "train": train,
    "install": lambda package: install(package, package.parent / "app"),
    "Module": module,
}


@pytest.mark.parametrize("reader", READERS)
def test_whoever_opens_a_package_changes_nothing(
    package: Path, reader: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = held(package)
    READERS[reader](package)
    assert held(package) == before
    if reader in ("open", "Module", "install"):
        assert "is ignored" in caplog.text
