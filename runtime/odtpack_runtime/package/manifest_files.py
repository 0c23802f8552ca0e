"""The files of a package, as its manifest lists them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from odtpack_runtime.files.digest import file_sha256
from odtpack_runtime.files.records import Part
from odtpack_runtime.package.manifest_base import SHA256, Name, NonNegativeInt


@dataclass(frozen=True, kw_only=True)
class PackageFile(Part):
    """One file of a package: path relative to the manifest with ``/``, size, SHA-256 in hex."""

    path: Name
    size_bytes: NonNegativeInt
    sha256: SHA256

    @classmethod
    def describe(cls, path: Path) -> PackageFile:
        """Return the entry of a file that lies in the package's folder.

        Raises:
            OSError: It cannot be read.
        """
        return PackageFile(path=path.name, size_bytes=path.stat().st_size, sha256=file_sha256(path))


@dataclass(frozen=True, kw_only=True)
class ExtraFile(PackageFile):
    """A file that was made from the others, or says how they were made.

    Attributes:
        role: What it is.
        of: The entry of ``files`` that it was made from, or None.
        style: ORT format: optimized ahead of time for good, or with optimizations left to
            the runtime.
        platform: ORT format: processors that it was optimized for; None for all.
    """

    role: Literal[
        "ort_model",
        "inference_model",
        "operators_config",
        "operators_and_types_config",
        "recipe",
        "segment_model",
        "segment_weights",
    ]
    of: Name | None = None
    style: Literal["fixed", "runtime"] | None = None
    platform: Literal["arm", "amd64"] | None = None


@dataclass(frozen=True, kw_only=True)
class PackageFiles(Part):
    """The files of a package, each of them once; the manifest and its signature are not.

    A nominal checkpoint is there if it was asked for, and the checkpoint has a second file
    if its tensors exceed what one file may hold. ``inference_template`` is the forward model
    without its parameters, which :mod:`odtpack_runtime.package.inference_template` appends to it.
    ``step_model`` is the training model that also updates the parameters, in packages that have
    one; a runtime may train with the training and the optimizer model all the same.
    """

    training_model: PackageFile
    eval_model: PackageFile
    optimizer_model: PackageFile
    checkpoint: PackageFile
    checkpoint_data: PackageFile | None = None
    step_model: PackageFile | None = None
    inference_template: PackageFile | None = None
    nominal_checkpoint: PackageFile | None = None
    extra: tuple[ExtraFile, ...] = ()

    def named(self) -> dict[str, PackageFile]:
        """Return the files that have an entry of their own, by its name."""
        entries = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: file for name, file in entries.items() if isinstance(file, PackageFile)}

    def all(self) -> tuple[PackageFile, ...]:
        """Return every file."""
        return (*self.named().values(), *self.extra)
