"""What tests/faults kills at each of its calls of the file system, and how to see what it left."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from odtpack import artifacts
from odtpack.build import build_package
from odtpack.update import release
from odtpack_runtime import CheckpointState, OdtpackError
from odtpack_runtime.files import folder_update
from odtpack_runtime.package.package import Package, check_nothing_else
from tests import zoo

_MODEL = zoo.mlp((6, 4, 3))


def _build(folder: Path, beta1: float = 0.8) -> None:
    from odtpack.optimizers import AdamW

    build_package(_MODEL, folder / "package", loss="cross_entropy", optimizer=AdamW(beta1=beta1))


def _build_old(folder: Path) -> None:
    build_package(_MODEL, folder / "package", loss="cross_entropy", nominal=True)


def _build_without_swap(folder: Path) -> None:
    folder_update._exchange = lambda first, second: False
    _build(folder)


def _build_here(folder: Path) -> None:
    with contextlib.chdir(folder / "package"):
        _build(folder)


def _artifacts(folder: Path, loss: artifacts.LossType = artifacts.LossType.MSELoss) -> None:
    artifacts.generate_artifacts(
        _MODEL, requires_grad=[tensor.name for tensor in _MODEL.graph.initializer], loss=loss,
        optimizer=artifacts.OptimType.SGD, artifact_directory=folder / "package", prefix="digits_",
    )  # fmt: skip


def _artifacts_old(folder: Path) -> None:
    _artifacts(folder, artifacts.LossType.CrossEntropyLoss)
    (folder / "package" / "thesis.txt").write_text("years of work")


def _save(folder: Path, step: int = 2) -> None:
    state = CheckpointState.load_checkpoint(folder / "package" / "checkpoint")
    state.properties["step"] = step
    CheckpointState.save_checkpoint(state, folder / "trained.ckpt")


def _save_old(folder: Path) -> None:
    _build_old(folder)
    _save(folder, 1)


def _sign(folder: Path) -> None:
    release.sign_package(folder / "package", folder / "new.pem")


def _sign_old(folder: Path) -> None:
    _build_old(folder)
    for name in ("old", "new"):
        release.new_key(folder / f"{name}.pem")
    release.sign_package(folder / "package", folder / "old.pem")


ACTIONS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "build": (lambda folder: None, _build),
    "build over a package": (_build_old, _build),
    "build over a package without a swap": (_build_old, _build_without_swap),
    "build in the current folder": (_build_old, _build_here),
    "artifacts beside other files": (_artifacts_old, _artifacts),
    "save a checkpoint": (_save_old, _save),
    "sign": (_sign_old, _sign),
}


def state(folder: Path) -> str:
    """What a folder holds: a digest of its package, checked, and of the files beside it.

    A write that was interrupted is reported by whoever reads, and finished by the next write.
    """
    seen = hashlib.sha256()
    try:
        try:
            package = Package.open(folder / "package")
        except OdtpackError as error:
            if error.code != "update-unfinished":
                raise
            folder_update.finish_update(folder / "package")
            package = Package.open(folder / "package")
        _tidy(folder / "package")
        if not (folder / "package" / "thesis.txt").exists():
            check_nothing_else(package.path, package.manifest_name, package.manifest)
        seen.update(package.manifest_sha256.encode())
    except OdtpackError as error:
        if error.code != "package-not-found":
            return f"{error.code}: {error.what}"
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden and path.suffix != ".pem":
            seen.update(f"{path.relative_to(folder)}:".encode() + path.read_bytes())
    return seen.hexdigest()


def _tidy(folder: Path) -> None:
    """Remove what the next build or signature would remove."""
    for path in folder.iterdir():
        if folder_update.is_stage(path.name):
            shutil.rmtree(path)
        elif path.match(".manifest.sig.*.tmp"):
            path.unlink()
