"""Where a package comes from: who signed it, and which release it is."""

from __future__ import annotations

import os
from pathlib import Path

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.package.listed_files import signature_path
from odtpack_runtime.package.manifest import Manifest
from odtpack_runtime.package.manifest_signature import (
    SIGNATURE_BYTES,
    KeyFiles,
    check_signature,
)


def check_release(manifest: Manifest, minimum: int, where: str) -> None:
    """Refuse a package that is older than it may be.

    Raises:
        OdtpackError: ``package-downgrade``.
    """
    if manifest.release is None or manifest.release < minimum:
        found = "has no release number" if manifest.release is None else f"is {manifest.release}"
        raise OdtpackError(
            "package-downgrade",
            f"The package's release must be {minimum} or later, and it {found}.",
            where=where,
        )


def check_signed(
    manifest: Path, data: bytes, public_key: KeyFiles | None, required: bool
) -> Path | None:
    """Check the signature that lies beside a manifest.

    Args:
        manifest: Path of the manifest.
        data: Its bytes.
        public_key: As for :func:`check_signature`; None checks only that it is one.
        required: Whether there must be one, also where no key is passed.

    Returns:
        File of the key that it is valid for; None without a key.

    Raises:
        OdtpackError: ``not-signed``, ``signature-wrong``, and as :func:`check_signature`.
    """
    path = signature_path(manifest)
    if not os.path.lexists(path):
        if public_key is None and not required:
            return None
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
        return None
    return check_signature(data, signature, public_key, str(path))
