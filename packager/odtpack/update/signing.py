"""Sign packages: an Ed25519 signature of the manifest, which names every other file's hash."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

from odtpack.errors import OdtpackError
from odtpack_runtime.files.atomic import write_whole
from odtpack_runtime.files.folder_update import finish_update, update_folder
from odtpack_runtime.package.package import Package, read_manifest, signature_path
from odtpack_runtime.package.trust import (
    cryptography_missing,
    key_error,
    read_key_file,
)

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
        raise OdtpackError(
            "bad-key-name",
            f"{str(path)!r} ends in .pub, which is for the public key",
            hint=f"odtpack sign --new-key {Path(path).with_suffix('.pem')}",
        )
    for file in (private, public):
        if os.path.lexists(file):
            raise OdtpackError(
                "key-exists",
                f"there is already a file {str(file)!r}, and a key is never overwritten",
            )
    key = Ed25519PrivateKey.generate()
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
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
        write_whole(target, secret.sign(read_manifest(manifest)))
        return target
    if release < (package.manifest.release or 0):
        raise OdtpackError(
            "package-downgrade",
            f"the package is release {package.manifest.release}, and cannot become {release}",
            hint=f"odtpack sign {path} --release {(package.manifest.release or 0) + 1}",
        )
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
