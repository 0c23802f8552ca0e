"""Open a package: a folder with a manifest, three models and a checkpoint."""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from odtpack_runtime.checkpoint.layout import Array
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.folder_update import check_finished
from odtpack_runtime.package.listed_files import (
    MANIFEST_NAME,
    check_file,
    check_paths,
    read_manifest,
)
from odtpack_runtime.package.manifest import Manifest
from odtpack_runtime.training.data import load_dataset


@dataclass(frozen=True, slots=True)
class Package:
    """A package whose files are those that its manifest describes.

    Attributes:
        path: The folder, absolute.
        manifest_name: Name of the manifest's file in it.
        manifest_sha256: SHA-256 of that file in hex: what this package is, to the byte.
        manifest: The manifest.
        training_model: Path of the training model, absolute; so are the others.
        eval_model: Path of the evaluation model.
        optimizer_model: Path of the optimizer model.
        step_model: Path of the training model that updates the parameters; None if there is none.
        checkpoint: Path of the checkpoint.
        nominal_checkpoint: Path of the checkpoint without values; None if there is none.
    """

    path: Path
    manifest_name: str
    manifest_sha256: str
    manifest: Manifest
    training_model: Path
    eval_model: Path
    optimizer_model: Path
    step_model: Path | None
    checkpoint: Path
    nominal_checkpoint: Path | None

    def __repr__(self) -> str:
        manifest = self.manifest
        sizes = [(item.role, math.prod(item.shape)) for item in manifest.parameters]
        trained = sum(size for role, size in sizes if role == "trainable")
        elements = f"{trained:,} of {sum(size for _, size in sizes):,} elements train"
        return f"Package({self.path.name}, {manifest.loss}, {manifest.optimizer.kind}, {elements})"

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Package:
        """Read a package's manifest and check its files against it.

        Args:
            path: The folder, or its manifest file. A folder whose files carry a
                prefix may call the manifest ``<prefix>manifest.json``.

        Raises:
            OdtpackError: ``package-not-found``, ``package-ambiguous`` (several
                manifests), ``manifest-invalid``, ``manifest-version``;
                ``package-path`` for a path that leaves the folder, by ``..`` or a
                link, or does not name one file on every system;
                ``package-incomplete`` or ``package-changed`` for a file that is
                missing or is not the one the manifest describes;
                ``update-unfinished`` for a build or signature that was killed:
                the command that wrote finishes it. Files that the manifest does not
                list are let be, and nothing is changed.
        """
        manifest_path = find_manifest(path)
        root = manifest_path.parent.resolve()
        data = read_manifest(manifest_path)
        manifest = Manifest.from_json(data, str(manifest_path))
        check_paths(root, manifest.files.all(), manifest_path.name)
        found = {name: check_file(root, file) for name, file in manifest.files.named().items()}
        for file in manifest.files.extra:
            check_file(root, file)
        return cls(
            root,
            manifest_path.name,
            hashlib.sha256(data).hexdigest(),
            manifest,
            training_model=found["training_model"],
            eval_model=found["eval_model"],
            optimizer_model=found["optimizer_model"],
            step_model=found.get("step_model"),
            checkpoint=found["checkpoint"],
            nominal_checkpoint=found.get("nominal_checkpoint"),
        )

    def require_stock(self) -> None:
        """Refuse a package that ONNX Runtime as it is cannot train.

        Raises:
            OdtpackError: ``package-target``: it was built for onnxruntime-training.
        """
        if self.manifest.target is not None:
            raise OdtpackError(
                "package-target",
                "The package was built for onnxruntime-training, whose operators this ONNX Runtime "
                "does not have.",
                where=str(self.path),
            )

    def require_one_model(self, task: str) -> None:
        """Refuse a package of segments.

        Args:
            task: What works with one training model only, as a sentence begins.

        Raises:
            OdtpackError: ``segments-unsupported``.
        """
        if self.manifest.segments is not None:
            raise OdtpackError(
                "segments-unsupported",
                f"{task} needs a package with one training model, and this one is trained segment "
                "by segment.",
                where=str(self.path),
                hint="build it without --segments",
            )

    def load_data(self, path: str | os.PathLike[str]) -> dict[str, Array]:
        """Load the arrays that the models take, and check them and their labels.

        Raises:
            OdtpackError: As :func:`~odtpack_runtime.training.data.load_dataset`.
        """
        return load_dataset(
            path,
            self.manifest.input_specs(),
            class_count=self.manifest.class_count,
            ignored_label=self.manifest.ignored_label,
        )

    def ort_model(
        self,
        of: str,
        style: Literal["fixed", "runtime"] = "fixed",
        platform: Literal["arm", "amd64"] | None = None,
    ) -> Path:
        """Return the path of a model in ORT format, for :class:`Module` and :class:`Optimizer`.

        Args:
            of: ``training_model``, ``eval_model``, ``optimizer_model`` or ``inference_model``.
            style: How it was optimized.
            platform: Processors it was optimized for; None for the one that runs on all.

        Raises:
            OdtpackError: ``no-ort-model`` if the package does not hold it.
        """
        for file in self.manifest.files.extra:
            if (file.role, file.of, file.style, file.platform) == (
                *("ort_model", of, style, platform),
            ):
                return self.path / file.path
        asked = f"--style {style}" + (f" --platform {platform}" if platform else "")
        raise OdtpackError(
            "no-ort-model",
            f"The package holds no {of} in ORT format of style {style}"
            + (f" for {platform}." if platform else " for all processors."),
            where=str(self.path),
            hint=f"odtpack ort {self.path} {asked}",
        )


def find_manifest(path: str | os.PathLike[str]) -> Path:
    """Return a package's manifest file.

    Raises:
        OdtpackError: ``package-not-found``, ``package-ambiguous``, ``update-unfinished``.
    """
    path = Path(path)
    check_finished(path if path.is_dir() else path.parent)
    if path.is_file():
        return path
    candidates = [path / MANIFEST_NAME]
    if not candidates[0].is_file():
        candidates = sorted(path.glob(f"*{MANIFEST_NAME}")) if path.is_dir() else []
    if not candidates:
        raise OdtpackError(
            "package-not-found",
            f"{path} is not a package: it has no {MANIFEST_NAME}.",
            where=str(path),
        )
    if len(candidates) > 1:
        raise OdtpackError(
            "package-ambiguous",
            f"{path} holds several packages: {', '.join(file.name for file in candidates)}.",
            where=str(path),
            hint=f"pass one of them, for example {candidates[0]}",
        )
    return candidates[0]
