"""Bring a package up to date: apply a delta.

Needs the standard library only, so it runs where the app runs::

    from odtpack_runtime.delta import apply_delta

    apply_delta("package", "update.odtdelta")

A trained checkpoint is not part of a package. ``odtpack diff OLD NEW`` says whether it goes on
with the new package, and :func:`odtpack_runtime.checkpoint.carry_over.carry_over` takes it there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from odtpack_runtime.delta_format import (
    DeltaReader,
    Entry,
    Header,
    Kind,
    open_error,
    path_problem,
    rebuild,
)
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.folder_update import finish_update, update_folder

MAX_MANIFEST_BYTES = 64 * 2**20
MANIFEST_NAME = "manifest.json"

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ListedFile:
    """Size in bytes and SHA-256 in hex of a file that a manifest lists."""

    size: int
    sha256: str


def apply_delta(
    package: str | os.PathLike[str],
    delta: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
) -> Path:
    """Make the new package of a delta from the package that it starts from.

    The package must be that package to the byte, and the result is the new one to the byte.
    A process killed at any moment leaves the old package or the new one. Applying a delta a
    second time in place does nothing, so an app may simply try again.

    Args:
        package: The package: its folder, or its manifest.
        delta: File of ``odtpack delta``.
        out: Where the new package goes: a folder that does not exist or is empty. Without it
            the new package takes the place of the old one; files in the folder that are not
            of the package stay.

    Returns:
        The folder of the new package, absolute.

    Raises:
        OdtpackError: ``delta-not-found``, ``delta-unreadable``, ``delta-damaged``,
            ``delta-version``; ``delta-base`` if the package is another one than the delta
            starts from; ``package-not-found``, ``package-incomplete``, ``package-changed``,
            ``package-path``; ``package-not-written``, ``folder-not-empty``. The package is
            then as it was.
    """
    delta = Path(delta)
    root = _folder_of(Path(package))
    try:
        stream = delta.open("rb")
    except OSError as error:
        raise open_error(delta, error) from error
    with stream:
        reader = DeltaReader(stream, str(delta))
        header = reader.header
        manifest = _find(Path(package), root, header.old)
        if manifest is None:
            if out is None and (done := _find(Path(package), root, header.new)) is not None:
                check_files(root, listed_files(_read(done), str(done)))
                return root
            raise _wrong_base(root, delta)
        listed = listed_files(_read(manifest), str(manifest))
        check_files(root, listed)
        _check_sources(reader, {*listed, manifest.name})
        target = root if out is None else _check_out(Path(out))
        old = {*listed, manifest.name, signature_name(manifest.name)}
        if out is None:
            _check_names(root, header, old)
        _check_space(target, header)
        obsolete = old if out is None else ()
        with update_folder(target, last=header.manifest.path, obsolete=obsolete) as stage:
            # The manifest first: it says early whether the rest is worth the work.
            _write_file(reader, header.manifest, root, stage)
            _check_listing(reader, header, stage)
            for entry in header.entries:
                if entry is not header.manifest:
                    _write_file(reader, entry, root, stage)
    return target.resolve()


def signature_name(manifest: str) -> str:
    """Return the name of the detached signature of a manifest."""
    return f"{manifest.removesuffix(MANIFEST_NAME)}manifest.sig"


def listed_files(data: bytes, where: str) -> dict[str, ListedFile]:
    """Return the files that a manifest lists, by name.

    Only the list is looked at: :class:`odtpack_runtime.package.manifest.Manifest` checks the rest.

    Raises:
        OdtpackError: ``manifest-invalid``, ``package-path``.
    """
    try:
        entries: list[Any] = []
        for value in json.loads(data, object_pairs_hook=_unique_keys)["files"].values():
            entries += value if isinstance(value, list) else [] if value is None else [value]
        files = {}
        for entry in entries:
            path, size, digest = entry["path"], entry["size_bytes"], entry["sha256"]
            if not isinstance(path, str) or type(size) is not int or size < 0:
                raise ValueError(f"{path!r} has no name or size")
            if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
                raise ValueError(f"{path!r} has no SHA-256")
            if path in files:
                raise ValueError(f"{path!r} is listed twice")
            files[path] = ListedFile(size, digest)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise OdtpackError(
            "manifest-invalid",
            f"The manifest does not list its files: {error or type(error).__name__}.",
            where=where,
        ) from error
    for path in files:
        if problem := path_problem(path):
            raise OdtpackError(
                "package-path",
                f"The manifest names the file {path!r}, which {problem}.",
                where=where,
            )
    return files


def check_files(root: Path, files: dict[str, ListedFile]) -> None:
    """Check that the files of a package are those that its manifest lists.

    Raises:
        OdtpackError: ``package-path`` for a link, ``package-incomplete``, ``package-changed``.
    """
    for name, file in files.items():
        path = root / name
        if path.is_symlink() or not path.is_file():
            raise OdtpackError(
                "package-path" if path.is_symlink() else "package-incomplete",
                f"The package's file '{name}' is "
                + ("a link." if path.is_symlink() else "missing."),
                where=str(root),
                hint="copy the whole folder, or build the package again",
            )
        if path.stat().st_size == file.size and file_digest(path) == file.sha256:
            continue
        raise OdtpackError(
            "package-changed",
            f"'{name}' is not the file that the manifest describes.",
            where=str(root),
        )


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _folder_of(package: Path) -> Path:
    folder = package.parent if package.is_file() else package
    finish_update(folder)
    if folder.is_dir():
        return folder.resolve()
    raise OdtpackError(
        "package-not-found",
        f"There is no package {package}.",
        where=str(package),
        hint="pass the folder of the package that the delta starts from",
    )


def _find(package: Path, root: Path, digest: bytes) -> Path | None:
    """Return the manifest with this digest, None if there is none."""
    if package.is_file():
        candidates = [root / package.name]
    else:
        candidates = sorted(root.glob(f"*{MANIFEST_NAME}"))
    for path in candidates:
        if path.is_file() and not path.is_symlink() and file_digest(path) == digest.hex():
            return path
    return None


def _read(manifest: Path) -> bytes:
    if manifest.stat().st_size > MAX_MANIFEST_BYTES:
        raise OdtpackError(
            "manifest-invalid",
            f"The manifest has more than {MAX_MANIFEST_BYTES} bytes.",
            where=str(manifest),
            hint="do not use this package: it was not written by odtpack",
        )
    return manifest.read_bytes()


def _wrong_base(root: Path, delta: Path) -> OdtpackError:
    found = any(root.glob(f"*{MANIFEST_NAME}"))
    return OdtpackError(
        "delta-base" if found else "package-not-found",
        "The package is not the one that the delta starts from."
        if found
        else f"{root} is not a package: it has no {MANIFEST_NAME}.",
        where=str(delta) if found else str(root),
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


def _check_space(target: Path, header: Header) -> None:
    """Refuse early what would fill the disk, such as a small delta of very much nothing."""
    needed = sum(entry.size for entry in header.entries)
    for folder in target.resolve().parents:
        if folder.is_dir():
            if needed > (free := shutil.disk_usage(folder).free):
                raise OdtpackError(
                    "package-not-written",
                    f"The new package takes {needed} bytes, and {free} are free.",
                    where=str(target),
                    hint="make room, or write the new package elsewhere (--out DIR)",
                )
            return


def _check_sources(reader: DeltaReader, known: Collection[str]) -> None:
    for entry in reader.header.entries:
        if entry.kind is not Kind.WHOLE and entry.source not in known:
            reader.fail(f"'{entry.path}' is made from '{entry.source}', no file of the package")


def _check_names(root: Path, header: Header, old: Collection[str]) -> None:
    """Refuse to write over files of the folder that are not of the package."""
    for entry in header.entries:
        if entry.path not in old and os.path.lexists(root / entry.path):
            raise OdtpackError(
                "folder-not-empty",
                f"The new package has a file '{entry.path}', and the folder holds one of that "
                "name that is not of the old package.",
                where=str(root),
                hint="move it away, or write the new package elsewhere (--out DIR)",
            )


def _write_file(reader: DeltaReader, entry: Entry, root: Path, stage: Path) -> None:
    with (stage / entry.path).open("xb") as target:
        if entry.kind is Kind.WHOLE:
            _pour(reader, entry, None, target)
            return
        with (root / entry.source).open("rb") as source:
            _pour(reader, entry, source, target)


def _pour(reader: DeltaReader, entry: Entry, source: BinaryIO | None, target: BinaryIO) -> None:
    for piece in rebuild(reader, entry, source):
        target.write(piece)


def _check_listing(reader: DeltaReader, header: Header, stage: Path) -> None:
    """Check that the delta makes the files that the new manifest lists, and no others."""
    name = header.manifest.path
    listed = listed_files(_read(stage / name), name)
    made = {
        entry.path: ListedFile(entry.size, entry.sha256.hex())
        for entry in header.entries
        if entry.path not in (name, signature_name(name))
    }
    if made != listed:
        odd = min(path for path in {*made, *listed} if made.get(path) != listed.get(path))
        reader.fail(f"its manifest and its table of files disagree about '{odd}'")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice in one object")
    return found
