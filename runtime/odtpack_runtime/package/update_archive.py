"""The update archive: a zip of the files that changed. docs/formats/update.md describes it.

Nothing that an archive says is trusted: its directory and its index are read up to a bound,
the two must agree, and what a file unpacks to is cut off at the size that the index gives it.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Annotated, Any, BinaryIO, Final, Literal, NoReturn, cast

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.records import InvalidRecordError, Part, Rule, parse_json
from odtpack_runtime.package.listed_files import MANIFEST_NAME, folded_path, path_problem
from odtpack_runtime.package.manifest_base import SHA256, Name
from odtpack_runtime.package.manifest_files import PackageFile

INDEX_NAME: Final = "odtpack-update.json"
VERSION: Final = 1
MAX_FILES: Final = 256
CHUNK: Final = 2**16
_MOST_BYTES_AT_ONCE: Final = 2**18
"""More than the directory of so many files and the end of the archive take."""
_MOST_CHARACTERS: Final = 300
"""Of an error, which may hold a name from the archive."""
_BROKEN: Final = (
    zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError, OverflowError,
)  # fmt: skip
"""What zipfile and zlib raise when an archive is damaged, or of a kind that they do not read."""


@dataclass(frozen=True, kw_only=True)
class UpdateIndex(Part):
    """What an update archive says of the package that it makes.

    Attributes:
        format: What this is.
        version: Of the format.
        base: SHA-256 in hex of the manifest of the package that it starts from.
        manifest: Name of the new package's manifest, one of ``files``.
        files: Every file of the new package. Those that the archive does not hold are files
            of the base, of any name, with the same bytes.
    """

    format: Literal["odtpack-update"]
    version: Literal[1]
    base: SHA256
    manifest: Name
    files: Annotated[tuple[PackageFile, ...], Rule(maxItems=MAX_FILES)]

    def check(self, path: tuple[str | int, ...]) -> None:
        """Check the names: plain ones, each once on every system, the manifest among them."""
        for file in self.files:
            if problem := update_path_problem(file.path):
                raise InvalidRecordError(f"the name {file.path!r} {problem}", path)
        names = {folded_path(file.path) for file in self.files}
        if len(names) < len(self.files):
            raise InvalidRecordError("two of its files have one name on some systems", path)
        listed = any(file.path == self.manifest for file in self.files)
        if not listed or not self.manifest.endswith(MANIFEST_NAME):
            raise InvalidRecordError(f"{self.manifest!r} is not the manifest among its files", path)

    @property
    def manifest_sha256(self) -> str:
        """SHA-256 in hex of the new package's manifest."""
        return next(file.sha256 for file in self.files if file.path == self.manifest)


def update_path_problem(path: str) -> str | None:
    """Return what keeps a file of this name out of an update, None if nothing does."""
    if "/" in path:
        return "leads out of the package's own folder"
    if folded_path(path) == folded_path(INDEX_NAME):
        return "is that of the index"
    return path_problem(path)


class UpdateArchive:
    """An open update archive whose index and directory hold together.

    Args:
        stream: The file, seekable.
        where: Its name, for messages.

    Raises:
        OdtpackError: ``delta-damaged``, ``delta-version``.
    """

    def __init__(self, stream: BinaryIO, where: str) -> None:
        self._where = where
        try:
            self._archive = zipfile.ZipFile(cast(BinaryIO, _Bounded(stream)))
        except _BROKEN as error:
            self.fail(f"it cannot be read as a zip file: {error}")
        members = self._archive.infolist()
        self._members = {member.filename: member for member in members}
        if len(self._members) < len(members):
            self.fail("it holds two files of one name")
        index = self._members.pop(INDEX_NAME, None)
        if index is None:
            self.fail(f"it holds no {INDEX_NAME}")
        self.index = self._read_index(index)
        files = {file.path: file for file in self.index.files}
        for name, member in self._members.items():
            if name not in files:
                self.fail(f"it holds {name!r}, which its index does not list")
            if member.file_size != files[name].size_bytes:
                self.fail(f"its index and its directory disagree about the size of '{name}'")

    def holds(self, name: str) -> bool:
        """Whether a file of the new package is in the archive, and not in the base."""
        return name in self._members

    def read(self, file: PackageFile) -> Iterator[bytes]:
        """Yield the bytes of a file that the archive holds, in pieces and checked.

        Raises:
            OdtpackError: ``delta-damaged`` if they are not those that the index describes.
                Then all but the last pieces may have been given out.
        """
        digest = hashlib.sha256()
        for piece in self._pieces(self._members[file.path]):
            digest.update(piece)
            yield piece
        if digest.hexdigest() != file.sha256:
            self.fail(f"'{file.path}' is not the file that the index describes")

    def fail(self, problem: str) -> NoReturn:
        """Raise the error for a file that is not an update archive, or no longer."""
        raise OdtpackError(
            "delta-damaged",
            f"This is not a whole update: {problem[:_MOST_CHARACTERS]}.",
            where=self._where,
            hint="copy the file again, or make it again with odtpack delta OLD NEW",
        )

    def _pieces(self, member: zipfile.ZipInfo) -> Iterator[bytes]:
        """Yield what a member unpacks to in portions, and no more than the directory says."""
        # zipfile unpacks all but these two as far as they go at once.
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            self.fail(f"'{member.filename}' is compressed in a way that updates do not use")
        try:
            with self._archive.open(member) as stream:
                while piece := stream.read(CHUNK):
                    yield piece
        except _BROKEN as error:
            self.fail(f"'{member.filename}' cannot be unpacked: {error}")

    def _read_index(self, member: zipfile.ZipInfo) -> UpdateIndex:
        if member.file_size > _MOST_BYTES_AT_ONCE:
            self.fail("its index is too large")
        try:
            content = parse_json(b"".join(self._pieces(member)))
            version = content.get("version") if isinstance(content, dict) else None
            if type(version) is int and version > VERSION:
                raise OdtpackError(
                    "delta-version",
                    f"The update has version {version}, and this odtpack reads {VERSION}.",
                    where=self._where,
                    hint="update odtpack, or make the update with the same version",
                )
            return UpdateIndex.read(content)
        except InvalidRecordError as error:
            self.fail(f"in its index, {error}")


class _Bounded:
    """A file of which no more than a bounded part is read at once.

    Whatever size an archive gives its directory, zipfile reads it in one call.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def read(self, size: int = -1) -> bytes:
        left = os.fstat(self._stream.fileno()).st_size - self._stream.tell()
        if (left if size < 0 else min(left, size)) > _MOST_BYTES_AT_ONCE:
            raise zipfile.BadZipFile("its directory is too large")
        return self._stream.read(size)
