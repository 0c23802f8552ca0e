"""Copies of a package what a phone needs into the resources of an app."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from odtpack.ort.session_runs import TRAINING_MODELS
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.atomic import file_sha256
from odtpack_runtime.files.folder_update import finish_update, is_stage, update_folder
from odtpack_runtime.package.manifest import Manifest, PackageFile, PackageFiles
from odtpack_runtime.package.package import MANIFEST_NAME, SIGNATURE_NAME, Package, unreadable_file

NEEDED: Final = (
    "training_model",
    "eval_model",
    "optimizer_model",
    "step_model",
    "checkpoint",
    "checkpoint_data",
    "inference_template",
)
"""Entries of a manifest's files that a phone needs."""

_NEEDED_ROLES: Final = ("segment_model", "segment_weights", "decoder_model", "decoder_weights")
"""Roles of further files that a phone needs."""

_ORT_SUFFIXES: Final = (".arm.ort", ".ort", ".arm.with_runtime_opt.ort", ".with_runtime_opt.ort")
"""Ends of a model's names in ORT format, what suits a phone best first."""

NO_COMPRESS: Final = ("onnx", "ort", "checkpoint", "checkpoint.data", "weights")
"""Ends of names that an Android app must not compress, so that they can be mapped."""


@dataclass(frozen=True)
class Installed:
    """What lies in an app's resources now."""

    folder: Path
    names: tuple[str, ...]  # of the files
    changed: bool  # whether any of them was written


def install(package: Path, folder: Path, *, ort: bool = False) -> Installed:
    """Copy the models, the checkpoint and the manifest of a package; nothing if they are there."""
    # The manifest lists no files but those that are copied. Where that is the package's own
    # manifest its signature is copied too. The folder has the old files or the new ones. It is new,
    # empty, or has an installed package. `ort`: the models in ORT format in place of ONNX models.
    opened = Package.open(package)
    if opened.path in (folder.resolve(), *folder.resolve().parents):
        raise OdtpackError(
            "installed-into-itself",
            "the package cannot be installed where it was built",
            where=str(folder),
        )
    files = _needed(opened, ort)
    entries = files.all()
    texts = _manifest(opened, files)
    names = (*(entry.path for entry in entries), *texts)
    before = _present(folder)
    foreign = sorted(before - _files_of(folder) - {*names, MANIFEST_NAME, SIGNATURE_NAME})
    if foreign:
        raise OdtpackError(
            "folder-not-empty",
            f"the folder {str(folder)!r} holds {foreign[0]!r}, which is not a file of a package",
            hint="choose a folder of its own for the package",
        )
    if before == set(names) and _is_installed(folder, texts, entries):
        return Installed(folder, names, changed=False)
    with update_folder(folder, last=MANIFEST_NAME, obsolete=before) as stage:
        for entry in entries:
            shutil.copyfile(opened.path / entry.path, stage / entry.path)
        for name, text in texts.items():
            (stage / name).write_bytes(text)
    return Installed(folder, names, changed=True)


def _needed(package: Package, ort: bool) -> PackageFiles:
    """The files to copy; in ORT format under the entries of the ONNX models."""
    files = package.manifest.files
    found = {name: getattr(files, name) for name in NEEDED}
    if ort:  # which has no step model: a kit steps with the optimizer model then
        found |= {name: _ort_model(package.path, found[name]) for name in TRAINING_MODELS}
        found["step_model"] = None
    extra = tuple(each for each in files.extra if each.role in _NEEDED_ROLES)
    return PackageFiles(**found, extra=extra)


def _ort_model(root: Path, model: PackageFile) -> PackageFile:
    stem = model.path.removesuffix(".onnx")
    for suffix in _ORT_SUFFIXES:
        path = root / f"{stem}{suffix}"
        if path.is_file() and not path.is_symlink():
            return PackageFile.describe(path)
    raise OdtpackError("no-ort-format", f"the package has no {stem}.ort", where=str(root))


def _manifest(package: Package, files: PackageFiles) -> dict[str, bytes]:
    """The package's own manifest and signature, unless it lists files that are not copied."""
    if files != package.manifest.files:
        reduced = dataclasses.replace(package.manifest, files=files)
        return {MANIFEST_NAME: reduced.to_json().encode()}
    found = {}
    for name in (MANIFEST_NAME, SIGNATURE_NAME):
        try:
            found[name] = (package.path / name).read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise unreadable_file(package.path, name, error) from error
    return found


def _present(folder: Path) -> set[str]:
    if folder.exists() and not folder.is_dir():
        raise OdtpackError("package-not-installed", f"{str(folder)!r} is a file")
    finish_update(folder)
    found = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return {name for name in found if not is_stage(name)}


def _files_of(folder: Path) -> set[str]:
    """Names of the files of the package that was installed in a folder."""
    path = folder / MANIFEST_NAME
    try:
        manifest = Manifest.from_json(path.read_bytes(), str(path))
        return {entry.path for entry in manifest.files.all()}
    except (OSError, OdtpackError):
        return set()


def _is_installed(folder: Path, texts: dict[str, bytes], entries: Sequence[PackageFile]) -> bool:
    """Whether every file is there as it should be; one that cannot be read is written again."""
    try:
        return all(
            (folder / name).is_file() and (folder / name).read_bytes() == text
            for name, text in texts.items()
        ) and all(_is(folder, entry) for entry in entries)
    except OSError:
        return False


def _is(folder: Path, entry: PackageFile) -> bool:
    """Whether a file is there and is the one described."""
    path = folder / entry.path
    if path.is_symlink() or not path.is_file() or path.stat().st_size != entry.size_bytes:
        return False
    return file_sha256(path) == entry.sha256
