"""Verify a package: that it is whole, unaltered, true to its manifest, and that it trains."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.package.listed_files import check_nothing_else, read_manifest, signature_path
from odtpack_runtime.package.manifest_signature import SIGNATURE_BYTES, check_signature
from odtpack_runtime.package.package import Package, find_manifest
from odtpack_runtime.package.verify_models import check_checkpoints, check_models
from odtpack_runtime.package.verify_steps import StepFigures, run_steps_apart


@dataclass(frozen=True)
class Verification:
    """What was verified.

    Attributes:
        path: The package's folder, absolute.
        manifest_sha256: SHA-256 of its manifest: what the package is, to the byte.
        recipe_digest: Digest of what it was built from, if the manifest has one.
        files: Number of files that the manifest lists.
        size_bytes: Their size together, with the manifest's.
        signature: ``valid`` for the key that was passed; ``unchecked`` if there is a
            signature and no key was passed; ``none`` if there is none.
        steps: What the steps on made-up data gave.
    """

    path: str
    manifest_sha256: str
    recipe_digest: str | None
    files: int
    size_bytes: int
    signature: Literal["valid", "unchecked", "none"]
    steps: StepFigures


def verify_package(
    path: str | os.PathLike[str],
    *,
    public_key: str | os.PathLike[str] | None = None,
    require_signature: bool = False,
) -> Verification:
    """Verify a package.

    In this order, so that nothing is parsed before it is known to be what was signed and
    listed: the signature; the manifest; paths, sizes and hashes of all files; that there are
    no others; what models and checkpoints hold against what the manifest says; in a process
    of its own, a training, an optimizer and an evaluation step on made-up data.

    Args:
        path: The folder, or its manifest file.
        public_key: File with the public key (PEM, Ed25519) that the package must be signed
            with.
        require_signature: Refuse a package without a signature also where no key is passed.

    Returns:
        What was verified.

    Raises:
        OdtpackError: The first thing that is wrong. ``not-signed``, ``signature-wrong``, and
            what :meth:`Package.open`, :func:`check_nothing_else`, :func:`check_models`,
            :func:`check_checkpoints` and :func:`run_steps` raise.
    """
    manifest_path = find_manifest(path)
    data = read_manifest(manifest_path)
    signature = _check_signature(manifest_path, data, public_key, require_signature)
    package = Package.open(manifest_path)
    if package.manifest_sha256 != hashlib.sha256(data).hexdigest():
        raise OdtpackError(
            "package-changed",
            "The package was changed while it was verified.",
            where=str(package.path),
            hint="verify it again when nothing writes to it",
        )
    check_nothing_else(package.path, package.manifest_name, package.manifest)
    check_models(package)
    check_checkpoints(package)
    files = package.manifest.files.all()
    return Verification(
        str(package.path),
        package.manifest_sha256,
        package.manifest.recipe_digest,
        len(files),
        len(data) + sum(file.size_bytes for file in files),
        signature,
        run_steps_apart(package),
    )


def _check_signature(
    manifest: Path, data: bytes, public_key: str | os.PathLike[str] | None, required: bool
) -> Literal["valid", "unchecked", "none"]:
    path = signature_path(manifest)
    if not os.path.lexists(path):
        if public_key is None and not required:
            return "none"
        raise OdtpackError(
            "not-signed",
            f"The package has no signature: there is no {path.name}.",
            where=str(manifest.parent),
            hint=f"odtpack sign {manifest.parent} --key key.pem",
        )
    signature = b""
    if path.is_file() and not path.is_symlink():
        with path.open("rb") as stream:
            signature = stream.read(SIGNATURE_BYTES + 1)
    if len(signature) != SIGNATURE_BYTES:
        raise OdtpackError(
            "signature-wrong",
            f"{path.name} is not a signature: it must be a file of {SIGNATURE_BYTES} bytes.",
            where=str(path),
            hint=f"odtpack sign {manifest.parent} --key key.pem",
        )
    if public_key is None:
        return "unchecked"
    check_signature(data, signature, public_key, str(path))
    return "valid"
