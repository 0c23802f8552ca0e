"""Check the detached Ed25519 signature (RFC 8032) of a manifest."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from odtpack_runtime.errors import OdtpackError

SIGNATURE_BYTES = 64
_MOST_KEY_BYTES = 64 * 2**10


KeyFiles = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A file with a public key, or several of them, any of which will do."""


def check_signature(data: bytes, signature: bytes, public_key: KeyFiles, where: str) -> Path:
    """Check a signature."""
    # `public_key`: File with the public key: PEM, SubjectPublicKeyInfo, Ed25519. Of several one
    # must be right: while keys are changed an app trusts the old and the new one.
    # Returns the file of the key that is right.
    several = public_key if isinstance(public_key, Sequence) else [public_key]
    paths = [Path(public_key)] if isinstance(public_key, str) else [Path(key) for key in several]
    for path in paths:
        if _is_signed_with(path, data, signature):
            return path
    names = " or ".join(map(str, paths))
    raise OdtpackError(
        "signature-wrong",
        f"The manifest was not signed with the key that belongs to {names}, or was changed since.",
        where=where,
    )


def _is_signed_with(path: Path, data: bytes, signature: bytes) -> bool:
    try:
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ImportError as error:
        raise cryptography_missing() from error
    try:
        key = load_pem_public_key(read_key_file(path))
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise key_error(path, "public", str(error)) from error
    if not isinstance(key, Ed25519PublicKey):
        raise key_error(path, "public", "it uses another algorithm")
    try:
        key.verify(signature, data)
    except InvalidSignature:
        return False
    return True


def read_key_file(path: Path) -> bytes:
    """Read a small file that holds a key."""
    try:
        with path.open("rb") as stream:
            data = stream.read(_MOST_KEY_BYTES + 1)
    except OSError as error:
        raise OdtpackError(
            "key-not-readable", f"The key {path} cannot be read: {error.strerror or error}."
        ) from error
    if len(data) > _MOST_KEY_BYTES:
        raise key_error(path, "PEM", f"it has more than {_MOST_KEY_BYTES} bytes")
    return data


def key_error(path: Path, kind: str, reason: str) -> OdtpackError:
    """Return the error for a file that is not a key of the wanted kind."""
    first = reason.splitlines()[0].rstrip(".") if reason else "it cannot be read"
    return OdtpackError("bad-key", f"{path} is not an Ed25519 {kind} key in a PEM file: {first}.")


def cryptography_missing() -> OdtpackError:
    """Return the error for a system without the library that signs and checks."""
    return OdtpackError(
        "cryptography-missing", "Signatures need the package cryptography, which is not installed."
    )
