"""Verify a package: that it is whole, unaltered, true to its manifest, and that it trains."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.package.listed_files import (
    check_nothing_else,
    check_paths,
    read_manifest,
    signature_path,
)
from odtpack_runtime.package.manifest import Manifest
from odtpack_runtime.package.manifest_signature import KeyFiles
from odtpack_runtime.package.package import Package, find_manifest
from odtpack_runtime.package.trust.limits import Limits
from odtpack_runtime.package.trust.operators import check_operators
from odtpack_runtime.package.trust.origin import check_release, check_signed
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
        signed_with: File of the key that the signature is valid for.
        release: Number of the release, if it has one.
        checked: What was checked, in order, a phrase each.
    """

    path: str
    manifest_sha256: str
    recipe_digest: str | None
    files: int
    size_bytes: int
    signature: Literal["valid", "unchecked", "none"]
    steps: StepFigures
    signed_with: str | None
    release: int | None
    checked: list[str]


def verify_package(
    path: str | os.PathLike[str],
    *,
    public_key: KeyFiles | None = None,
    require_signature: bool = False,
    minimum_release: int | None = None,
    limits: Limits | None = None,
) -> Verification:
    """Verify a package.

    In this order, so that nothing is parsed before it is known to be what was signed and
    listed, and nothing is hashed that is too large or not listed: the signature; the manifest;
    its release and the limits of what it declares; paths, and that there are no other files;
    sizes and hashes; what models and checkpoints hold against what the manifest says; in a process
    of its own, a training, an optimizer and an evaluation step on made-up data.

    Args:
        path: The folder, or its manifest file.
        public_key: File with the public key (PEM, Ed25519) that the package must be signed
            with, or several, with one of which it must be.
        require_signature: Refuse a package without a signature also where no key is passed.
        minimum_release: Refuse an older release, and a package without a number.
        limits: Refuse a package that asks for more; for packages from somebody else.

    Returns:
        What was verified.

    Raises:
        OdtpackError: The first thing that is wrong. ``not-signed``, ``signature-wrong``,
            ``package-downgrade``, ``package-limits``, and
            what :meth:`Package.open`, :func:`check_nothing_else`, :func:`check_models`,
            :func:`check_checkpoints` and :func:`run_steps` raise.
    """
    manifest_path = find_manifest(path)
    data = read_manifest(manifest_path)
    key = check_signed(manifest_path, data, public_key, require_signature)
    root = manifest_path.parent.resolve()
    manifest = Manifest.from_json(data, str(manifest_path))
    if minimum_release is not None:
        check_release(manifest, minimum_release, str(root))
    if limits is not None:
        limits.check(manifest, str(root))
    check_paths(root, manifest.files.all(), manifest_path.name)
    check_nothing_else(root, manifest_path.name, manifest)
    package = Package.open(manifest_path)
    if package.manifest_sha256 != hashlib.sha256(data).hexdigest():
        raise OdtpackError(
            "package-changed",
            "The package was changed while it was verified.",
            where=str(package.path),
            hint="verify it again when nothing writes to it",
        )
    if limits is not None:
        check_operators(package, limits.domains)
    check_models(package)
    check_checkpoints(package)
    files = package.manifest.files.all()
    steps = run_steps_apart(package)
    present = os.path.lexists(signature_path(manifest_path))
    return Verification(
        str(package.path),
        package.manifest_sha256,
        package.manifest.recipe_digest,
        len(files),
        len(data) + sum(file.size_bytes for file in files),
        "valid" if key is not None else "unchecked" if present else "none",
        steps,
        None if key is None else str(key),
        manifest.release,
        _checked(manifest, key, minimum_release, limits),
    )


def _checked(
    manifest: Manifest, key: Path | None, minimum_release: int | None, limits: Limits | None
) -> list[str]:
    """What was checked, a phrase each."""
    check = manifest.self_check
    reason = None if check is None else check.reason
    known = check is not None and reason is None
    files = len(manifest.files.all())
    return [
        *([f"the manifest's signature, with {key.name}"] if key is not None else []),
        *([f"the release, {minimum_release} or later"] if minimum_release is not None else []),
        *(["limits of disk, memory, sizes and operator domains"] if limits is not None else []),
        "the manifest: its schema and its digest, session options and self-check included",
        f"path, size and SHA-256 of {files} files, and that there are no others",
        "inputs, outputs, operators and options of every model against the manifest",
        *(
            [f"the weights of {len(manifest.segments.segments)} segments, and what models take"]
            if manifest.segments is not None
            else []
        ),
        "names, shapes, types and digests of the checkpoint's tensors",
        "training steps against the losses of the self-check"
        if known
        else "a training, an optimizer and an evaluation step on made-up data"
        + (f", not against known losses: {reason}" if reason else ""),
    ]
