"""Open a package: a folder with a manifest, three models and a checkpoint."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.manifest import Manifest, PackageFile

MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Package:
    """A package whose files are those that its manifest describes.

    Attributes:
        path: The folder, absolute.
        manifest: The manifest.
        training_model: Path of the training model, absolute; so are the others.
        eval_model: Path of the evaluation model.
        optimizer_model: Path of the optimizer model.
        checkpoint: Path of the checkpoint.
        nominal_checkpoint: Path of the checkpoint without values; None if there is none.
    """

    path: Path
    manifest: Manifest
    training_model: Path
    eval_model: Path
    optimizer_model: Path
    checkpoint: Path
    nominal_checkpoint: Path | None

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Package:
        """Read a package's manifest and check its files against it.

        Args:
            path: The folder, or its manifest file. A folder whose files carry a
                prefix may call the manifest ``<prefix>manifest.json``.

        Raises:
            OdtpackError: ``package-not-found``, ``package-ambiguous`` (several
                manifests), ``manifest-invalid``, ``manifest-version``;
                ``package-path`` for a path that leaves the folder, by ``..`` or
                a link; ``package-incomplete`` or ``package-changed`` for a file
                that is missing or is not the one the manifest describes.
        """
        manifest_path = _find_manifest(Path(path))
        root = manifest_path.parent.resolve()
        try:
            with manifest_path.open("rb") as stream:
                data = stream.read(MAX_MANIFEST_BYTES + 1)
        except OSError as error:
            raise OdtpackError(
                "package-not-found",
                f"{manifest_path} cannot be read: {error.strerror or error}.",
                where=str(manifest_path),
            ) from error
        if len(data) > MAX_MANIFEST_BYTES:
            raise OdtpackError(
                "manifest-invalid",
                f"The manifest has more than {MAX_MANIFEST_BYTES} bytes.",
                where=str(manifest_path),
            )
        manifest = Manifest.from_json(data, str(manifest_path))
        files = manifest.files
        nominal = files.nominal_checkpoint
        if files.checkpoint_data is not None:
            _check_file(root, files.checkpoint_data)
        return cls(
            root,
            manifest,
            training_model=_check_file(root, files.training_model),
            eval_model=_check_file(root, files.eval_model),
            optimizer_model=_check_file(root, files.optimizer_model),
            checkpoint=_check_file(root, files.checkpoint),
            nominal_checkpoint=None if nominal is None else _check_file(root, nominal),
        )


def _find_manifest(path: Path) -> Path:
    if path.is_file():
        return path
    candidates = [path / MANIFEST_NAME]
    if not candidates[0].is_file():
        candidates = sorted(path.glob(f"*{MANIFEST_NAME}")) if path.is_dir() else []
    if not candidates:
        raise OdtpackError(
            "package-not-found",
            f"{path} is no package: it has no {MANIFEST_NAME}.",
            where=str(path),
            hint="odtpack build model.onnx --out package --loss cross_entropy",
        )
    if len(candidates) > 1:
        raise OdtpackError(
            "package-ambiguous",
            f"{path} holds several packages: {', '.join(file.name for file in candidates)}.",
            where=str(path),
            hint=f"pass one of them, for example {candidates[0]}",
        )
    return candidates[0]


def _check_file(root: Path, entry: PackageFile) -> Path:
    """Return the absolute path of a file of a package, once it is the one described."""
    relative = PurePosixPath(entry.path)
    outside = relative.is_absolute() or ".." in relative.parts or set(entry.path) & set("\\:\0")
    path = root / relative
    if outside or any(part.is_symlink() for part in (path, *path.parents) if root in part.parents):
        raise OdtpackError(
            "package-path",
            f"The manifest names the file '{entry.path}', which does not lie inside the package.",
            where=str(root),
            hint="do not use this package: it was tampered with, or not written by odtpack",
        )
    if not path.is_file():
        raise OdtpackError(
            "package-incomplete",
            f"The package lacks its file '{entry.path}'.",
            where=str(root),
            hint="copy the whole folder, or build the package again",
        )
    size = path.stat().st_size
    if size == entry.size_bytes:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest == entry.sha256:
            return path
    raise OdtpackError(
        "package-changed",
        f"'{entry.path}' is not the file that the manifest describes: "
        + (
            "its content differs."
            if size == entry.size_bytes
            else f"it has {size} bytes and not {entry.size_bytes}."
        ),
        where=str(root),
        hint="copy or build the package again; save training progress outside the package",
    )
