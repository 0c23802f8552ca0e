"""Write the update archive between two packages: the files that the newer one has anew."""

from __future__ import annotations

import json
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from odtpack.errors import OdtpackError
from odtpack_runtime.files.atomic import atomic_write
from odtpack_runtime.package.listed_files import signature_path
from odtpack_runtime.package.manifest_files import PackageFile
from odtpack_runtime.package.package import Package
from odtpack_runtime.package.update_archive import (
    CHUNK,
    INDEX_NAME,
    MAX_FILES,
    VERSION,
    UpdateArchive,
    UpdateIndex,
    update_path_problem,
)

_LARGE = 2**31 - 1
"""From this size on a zip file needs its 64-bit form."""


@dataclass(frozen=True, slots=True)
class UpdateSummary:
    """What an update archive holds.

    Attributes:
        path: The file.
        size_bytes: Its size.
        package_bytes: Size of the new package, its manifest included.
        index: The new package's files.
        stored_bytes: Size in the archive of each file that it holds, by name.
    """

    path: Path
    size_bytes: int
    package_bytes: int
    index: UpdateIndex
    stored_bytes: dict[str, int]


def write_update(
    old: str | os.PathLike[str], new: str | os.PathLike[str], out: str | os.PathLike[str]
) -> UpdateSummary:
    """Write the update that makes one package from another.

    Equal packages give equal bytes, with the same version of zlib.

    Args:
        old: Package that the update starts from: its folder or its manifest.
        new: Package that it makes.
        out: The update, replaced if there is one.

    Returns:
        What the update holds.

    Raises:
        OdtpackError: One of them is not a whole package; ``delta-path`` for a file whose name
            an update cannot hold; ``delta-too-many-files``; ``file-not-written``.
    """
    before, after = Package.open(old), Package.open(new)
    files = sorted(_files(after), key=lambda file: file.path)
    if len(files) > MAX_FILES:
        raise OdtpackError(
            "delta-too-many-files",
            f"The package has {len(files)} files, and an update holds {MAX_FILES}.",
            where=str(new),
        )
    for file in files:
        if problem := update_path_problem(file.path):
            raise OdtpackError(
                "delta-path",
                f"The package has a file {file.path!r}, whose name {problem}.",
                where=str(new),
                hint="an update is for packages whose files lie in one folder",
            )
    index = UpdateIndex(
        format="odtpack-update",
        version=VERSION,
        base=before.manifest_sha256,
        manifest=after.manifest_name,
        files=tuple(files),
    )
    known = {(file.size_bytes, file.sha256) for file in before.manifest.files.all()}
    fresh = [file.path for file in files if (file.size_bytes, file.sha256) not in known]
    text = json.dumps(index.as_dict(), ensure_ascii=False, separators=(",", ":"))
    with atomic_write(out) as stream:
        with zipfile.ZipFile(stream, "w") as archive:
            archive.writestr(_member(INDEX_NAME), text)
            for name in fresh:
                _add(archive, after.path / name)
            stored = {name: archive.getinfo(name).compress_size for name in fresh}
        size = stream.tell()
        _check(stream, index, str(out))
    return UpdateSummary(Path(out), size, sum(file.size_bytes for file in files), index, stored)


def _files(package: Package) -> list[PackageFile]:
    """Every file of a package: those listed, the manifest and its signature."""
    manifest = package.path / package.manifest_name
    signature = signature_path(manifest)
    own = [manifest]
    if signature.is_file() and not signature.is_symlink():
        own.append(signature)
    return [
        PackageFile(path=file.path, size_bytes=file.size_bytes, sha256=file.sha256)
        for file in (*package.manifest.files.all(), *map(PackageFile.describe, own))
    ]


def _member(name: str) -> zipfile.ZipInfo:
    """An entry that says nothing of when and where it was made."""
    member = zipfile.ZipInfo(name)
    member.compress_type = zipfile.ZIP_DEFLATED
    member.create_system = 3
    member.external_attr = 0o644 << 16
    return member


def _add(archive: zipfile.ZipFile, path: Path) -> None:
    large = path.stat().st_size >= _LARGE
    with (
        path.open("rb") as source,
        archive.open(_member(path.name), "w", force_zip64=large) as target,
    ):
        while piece := source.read(CHUNK):
            target.write(piece)


def _check(stream: BinaryIO, index: UpdateIndex, where: str) -> None:
    """Read what was written: what cannot be applied is not given out."""
    archive = UpdateArchive(stream, where)
    for file in index.files:
        if archive.holds(file.path):
            for _ in archive.read(file):
                pass
