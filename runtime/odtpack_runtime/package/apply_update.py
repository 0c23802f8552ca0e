"""Bring a package up to date: apply an update archive.

::

    from odtpack_runtime.package.apply_update import apply_update

    apply_update("package", "update.zip")

A trained checkpoint is not part of a package. ``odtpack diff OLD NEW`` says whether it goes on
with the new package, and :func:`odtpack_runtime.checkpoint.carry_over.carry_over` takes it there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from odtpack_runtime.errors import OdtpackError, unreadable
from odtpack_runtime.files.digest import file_sha256
from odtpack_runtime.files.folder_update import finish_update, remove_stages, update_folder
from odtpack_runtime.package.listed_files import (
    MANIFEST_NAME,
    check_file,
    signature_path,
    unreadable_file,
)
from odtpack_runtime.package.manifest import Manifest
from odtpack_runtime.package.manifest_files import PackageFile
from odtpack_runtime.package.manifest_signature import KeyFiles
from odtpack_runtime.package.package import Package
from odtpack_runtime.package.trust.origin import check_release, check_signed
from odtpack_runtime.package.update_archive import CHUNK, UpdateArchive, UpdateIndex


def apply_update(
    package: str | os.PathLike[str],
    update: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    public_key: KeyFiles | None = None,
    refuse_downgrade: bool = False,
) -> Path:
    """Make the new package of an update archive from the package that it starts from.

    The package must be that package to the byte, and the result is the new one to the byte.
    A process killed at any moment leaves the old package or the new one. Applying an update a
    second time in place does nothing, so an app may simply try again.

    Args:
        package: The package: its folder, or its manifest.
        update: File of ``odtpack delta``.
        out: Where the new package goes: a folder that does not exist or is empty. Without it
            the new package takes the place of the old one; files in the folder that are not
            of the package stay.
        public_key: File with the public key that the new package must be signed with, or
            several, with one of which it must be.
        refuse_downgrade: Refuse a new package of an older release than the package's, or
            without a number where that has one.

    Returns:
        The folder of the new package, absolute.

    Raises:
        OdtpackError: ``delta-not-found``, ``delta-unreadable``, ``delta-damaged``,
            ``delta-version``; ``delta-base`` if the package is another one than the update
            starts from; as :meth:`Package.open`; ``package-not-written``,
            ``folder-not-empty``; ``not-signed``, ``signature-wrong``, ``package-downgrade``.
            The package is then as it was.
    """
    update = Path(update)
    root = _folder_of(Path(package))
    try:
        stream = update.open("rb")
    except OSError as error:
        raise _open_error(update, error) from error
    with stream:
        archive = UpdateArchive(stream, str(update))
        index = archive.index
        manifest = _find(Path(package), root, index.base)
        if manifest is None:
            if out is None and (done := _find(Path(package), root, index.manifest_sha256)):
                return Package.open(done).path
            raise _wrong_base(root, update)
        base = Package.open(manifest)
        files = {file.path for file in base.manifest.files.all()}
        old = {*files, manifest.name, signature_path(manifest).name}
        if out is None:
            target, obsolete = root, old
            _check_names(root, index, old)
        else:
            target, obsolete = _check_out(Path(out)), set[str]()
        _check_space(target, index)
        sources = {(file.size_bytes, file.sha256): file for file in base.manifest.files.all()}
        with update_folder(target, last=index.manifest, obsolete=obsolete) as stage:
            # The manifest first: it says early whether the rest is worth the work.
            for file in sorted(index.files, key=lambda file: file.path != index.manifest):
                with (stage / file.path).open("xb") as written:
                    written.writelines(_content(archive, file, sources, root))
                if file.path == index.manifest:
                    new = _check_listing(archive, stage)
                    if refuse_downgrade and base.manifest.release is not None:
                        check_release(new, base.manifest.release, str(update))
            if public_key is not None:
                made = stage / index.manifest
                check_signed(made, made.read_bytes(), public_key, required=True)
    return target.resolve()


def _content(
    archive: UpdateArchive,
    file: PackageFile,
    sources: dict[tuple[int, str], PackageFile],
    root: Path,
) -> Iterator[bytes]:
    """Yield a file of the new package, from the archive or from the base."""
    if archive.holds(file.path):
        yield from archive.read(file)
        return
    source = sources.get((file.size_bytes, file.sha256))
    if source is None:
        archive.fail(f"it lacks '{file.path}', and so does the package that it starts from")
    with check_file(root, source).open("rb") as stream:
        while piece := stream.read(CHUNK):
            yield piece


def _check_listing(archive: UpdateArchive, stage: Path) -> Manifest:
    """Check that the update makes the files that the new manifest lists, and no others."""
    index = archive.index
    manifest = Manifest.from_json((stage / index.manifest).read_bytes(), index.manifest)
    own = (index.manifest, signature_path(Path(index.manifest)).name)
    made = {f.path: (f.size_bytes, f.sha256) for f in index.files if f.path not in own}
    listed = {f.path: (f.size_bytes, f.sha256) for f in manifest.files.all()}
    if made != listed:
        odd = min(path for path in {*made, *listed} if made.get(path) != listed.get(path))
        archive.fail(f"its manifest and its index disagree about '{odd}'")
    return manifest


def _folder_of(package: Path) -> Path:
    folder = package.parent if package.is_file() else package
    finish_update(folder)
    if folder.is_dir():
        remove_stages(folder.resolve())
        return folder.resolve()
    raise OdtpackError(
        "package-not-found",
        f"There is no package {package}.",
        where=str(package),
        hint="pass the folder of the package that the update starts from",
    )


def _find(package: Path, root: Path, digest: str) -> Path | None:
    """Return the manifest with this digest, None if there is none."""
    one = package.is_file()
    for path in [root / package.name] if one else sorted(root.glob(f"*{MANIFEST_NAME}")):
        try:
            if path.is_file() and not path.is_symlink() and file_sha256(path) == digest:
                return path
        except OSError as error:
            raise unreadable_file(root, path.name, error) from error
    return None


def _open_error(path: Path, error: OSError) -> OdtpackError:
    if isinstance(error, FileNotFoundError):
        return OdtpackError(
            "delta-not-found",
            f"There is no file {path}.",
            where=str(path),
            hint="odtpack delta OLD NEW --out update.zip",
        )
    return unreadable("delta-unreadable", path, error, "pass a file that odtpack delta wrote")


def _wrong_base(root: Path, update: Path) -> OdtpackError:
    found = any(root.glob(f"*{MANIFEST_NAME}"))
    return OdtpackError(
        "delta-base" if found else "package-not-found",
        "The package is not the one that the update starts from."
        if found
        else f"{root} is not a package: it has no {MANIFEST_NAME}.",
        where=str(update) if found else str(root),
        hint="apply it to the package that was OLD in: odtpack delta OLD NEW",
    )


def _check_out(out: Path) -> Path:
    if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):
        raise OdtpackError(
            "folder-not-empty",
            f"{str(out)!r} holds something already.",
            where=str(out),
            hint="choose a new folder, or leave --out away to replace the package",
        )
    return out


def _check_space(target: Path, index: UpdateIndex) -> None:
    """Refuse early what would fill the disk, such as a small archive of very much nothing."""
    needed = sum(file.size_bytes for file in index.files)
    folder = next(folder for folder in target.resolve().parents if folder.is_dir())
    if needed > (free := shutil.disk_usage(folder).free):
        raise OdtpackError(
            "package-not-written",
            f"The new package takes {needed} bytes, and {free} are free.",
            where=str(target),
            hint="make room, or write the new package elsewhere (--out DIR)",
        )


def _check_names(root: Path, index: UpdateIndex, old: Collection[str]) -> None:
    """Refuse to write over files of the folder that are not of the package."""
    for file in index.files:
        if file.path not in old and os.path.lexists(root / file.path):
            raise OdtpackError(
                "folder-not-empty",
                f"The new package has a file '{file.path}', and the folder holds one of that "
                "name that is not of the old package.",
                where=str(root),
                hint="move it away, or write the new package elsewhere (--out DIR)",
            )
