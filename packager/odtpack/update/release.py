"""A package on its way to devices: signed, and copied into the resources of an app."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Final

from odtpack.ort.session_runs import TRAINING_MODELS
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.atomic import write_whole
from odtpack_runtime.files.folder_update import finish_update, is_stage, update_folder
from odtpack_runtime.package.manifest import PackageFile, PackageFiles
from odtpack_runtime.package.package import (
    MANIFEST_NAME,
    SIGNATURE_NAME,
    Package,
    changed_meanwhile,
    is_as_listed,
    package_in,
    read_manifest,
    signature_path,
    unreadable_file,
)
from odtpack_runtime.package.trust import cryptography_missing, key_error, read_key_file

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


def new_key(path: str | os.PathLike[str]) -> Path:
    """Make a key pair, and return the path of the public key."""
    # The private key is PEM, PKCS #8, not encrypted, readable by its owner only. The public key,
    # PEM, SubjectPublicKeyInfo, goes beside it. A lost key cannot be had back: none is replaced.
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError as error:
        raise cryptography_missing() from error
    private, public = Path(path), Path(path).with_suffix(".pub")
    if private == public:
        what = f"{str(path)!r} ends in .pub, which is for the public key"
        hint = f"odtpack sign --new-key {quote(str(Path(path).with_suffix('.pem')))}"
        raise OdtpackError("bad-key-name", what, hint=hint)
    for file in (private, public):
        if os.path.lexists(file):
            what = f"there is already a file {str(file)!r}, and a key is never overwritten"
            raise OdtpackError("key-exists", what)
    key = Ed25519PrivateKey.generate()
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    shown = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    write_whole(public, shown)
    write_whole(private, secret, mode=0o600)
    return public


def sign_package(
    path: str | os.PathLike[str], key: str | os.PathLike[str], *, release: int | None = None
) -> Path:
    """Sign a package's manifest, and return the path of the signature; one that is there goes."""
    # The files are checked first: what is damaged is not signed. The signature is 64 bytes, RFC
    # 8032, beside the manifest. `release`: number of the release, which the manifest will hold; it
    # grows from release to release. None leaves the manifest as it is.
    secret = _private_key(Path(key))
    finish_update(path if Path(path).is_dir() else Path(path).parent)
    package = Package.open(path)
    manifest = package.path / package.manifest_name
    target = signature_path(manifest)
    if release is None or release == package.manifest.release:
        data = read_manifest(manifest)
        if hashlib.sha256(data).hexdigest() != package.manifest_sha256:  # what was checked
            raise changed_meanwhile(package.path)
        write_whole(target, secret.sign(data))
        return target
    if release < (package.manifest.release or 0):
        what = f"the package is release {package.manifest.release}, and cannot become {release}"
        hint = f"odtpack sign {quote(str(path))} --release {(package.manifest.release or 0) + 1}"
        raise OdtpackError("package-downgrade", what, hint=hint)
    text = dataclasses.replace(package.manifest, release=release).to_json().encode()
    with update_folder(package.path, last=manifest.name) as stage:
        (stage / manifest.name).write_bytes(text)
        (stage / target.name).write_bytes(secret.sign(text))
    return target


def _private_key(path: Path) -> Ed25519PrivateKey:
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError as error:
        raise cryptography_missing() from error
    try:
        key = load_pem_private_key(read_key_file(path), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise key_error(path, "private", str(error)) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise key_error(path, "private", "it uses another algorithm")
    return key


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
        what = "the package cannot be installed where it was built"
        raise OdtpackError("installed-into-itself", what, where=str(folder))
    opened.require_one_folder()
    files = _needed(opened, ort)
    entries = files.all()
    texts = _manifest(opened, files)
    names = (*(entry.path for entry in entries), *texts)
    before, found = _present(folder), package_in(folder)
    old = () if found is None else found.files.all()
    # A name of both packages is replaced in any state; what else goes must be as one wrote it.
    known = {MANIFEST_NAME, SIGNATURE_NAME, *({entry.path for entry in old} & {*names})}
    others = [entry for entry in (*old, *entries) if entry.path not in known]
    foreign = sorted(before - known - {each.path for each in others if is_as_listed(folder, each)})
    if foreign:
        what = f"the folder {str(folder)!r} holds {foreign[0]!r}, which is not a file of a package"
        hint = "choose a folder of its own for the package"
        raise OdtpackError("folder-not-empty", what, hint=hint)
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


def _is_installed(folder: Path, texts: dict[str, bytes], entries: Sequence[PackageFile]) -> bool:
    """Whether every file is there as it should be; one that cannot be read is written again."""
    try:
        return all(
            (folder / name).is_file() and (folder / name).read_bytes() == text
            for name, text in texts.items()
        ) and all(is_as_listed(folder, entry) for entry in entries)
    except OSError:
        return False
