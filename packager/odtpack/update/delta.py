"""Makes the delta between two packages: one file that holds what the newer one has anew."""

from __future__ import annotations

import os
import tempfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from odtpack.errors import OdtpackError
from odtpack.update.binary_diff import Bytes, steps
from odtpack_runtime.delta import file_digest, signature_name
from odtpack_runtime.delta_format import (
    CHUNK,
    COPY_STEP,
    MAX_ENTRIES,
    Codec,
    DeltaReader,
    Entry,
    Header,
    Kind,
    path_problem,
    read_range,
    rebuild,
)
from odtpack_runtime.files.atomic import atomic_write
from odtpack_runtime.package.manifest import ExtraFile
from odtpack_runtime.package.package import Package


@dataclass(frozen=True, slots=True)
class DeltaSummary:
    """What a delta holds.

    Attributes:
        path: The file.
        size_bytes: Its size.
        package_bytes: Size of the new package, its manifest included.
        entries: The new package's files.
    """

    path: Path
    size_bytes: int
    package_bytes: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class _Member:
    """A file of a package: its path, and what it is in any package."""

    path: Path
    kind: tuple[object, ...]


def write_delta(
    old: str | os.PathLike[str], new: str | os.PathLike[str], out: str | os.PathLike[str]
) -> DeltaSummary:
    """Write the delta that makes one package from another.

    Equal packages give equal bytes, with the same version of zlib.

    Args:
        old: Package that the delta starts from: its folder or its manifest.
        new: Package that it makes.
        out: The delta, replaced if there is one.

    Returns:
        What the delta holds.

    Raises:
        OdtpackError: One of them is not a complete package; a file's name is not a plain one
            (``delta-path``); ``file-not-written``.
    """
    before, after = _members(Path(old)), _members(Path(new))
    if len(after) > MAX_ENTRIES:
        raise OdtpackError(
            "delta-too-many-files",
            f"The package has {len(after)} files, and a delta holds {MAX_ENTRIES}.",
            where=str(new),
        )
    digests = {name: file_digest(member.path) for name, member in before.items()}
    by_digest = {digest: name for name, digest in sorted(digests.items(), reverse=True)}
    by_kind = {member.kind: name for name, member in before.items()}
    with ExitStack() as stack:
        entries: list[Entry] = []
        payloads: list[BinaryIO | None] = []
        for name, member in sorted(after.items()):
            digest = file_digest(member.path)
            source = by_digest.get(digest)
            if source is not None:
                entries.append(_entry(name, Kind.COPY, source, member.path, digest))
                payloads.append(None)
                continue
            source = name if name in before else by_kind.get(member.kind)
            entry, payload = _smallest(
                stack, name, member.path, digest, source, before[source].path if source else None
            )
            entries.append(entry)
            payloads.append(payload)
        header = Header(_manifest_digest(before), _manifest_digest(after), tuple(entries))
        with atomic_write(out) as stream:
            stream.write(header.to_bytes())
            for stored in payloads:
                for piece in () if stored is None else read_range(stored, 0, 2**62):
                    stream.write(piece)
            stream.flush()
            _prove(stream, header, before, str(out))
            size = stream.tell()
    return DeltaSummary(Path(out), size, sum(entry.size for entry in entries), header.entries)


def _members(path: Path) -> dict[str, _Member]:
    """The files of a checked package by name: those listed, the manifest and its signature."""
    package = Package.open(path)
    files = package.manifest.files
    members = {
        file.path: _Member(package.path / file.path, (role,))
        for role, file in files.named().items()
    }
    for file in files.extra:
        members[file.path] = _Member(package.path / file.path, _kind(file))
    name = package.manifest_name
    members[name] = _Member(package.path / name, ("manifest",))
    signature = package.path / signature_name(name)
    if signature.is_file() and not signature.is_symlink():
        members[signature.name] = _Member(signature, ("signature",))
    for name in members:
        if problem := path_problem(name):
            raise OdtpackError(
                "delta-path", f"The package has a file {name!r}, which {problem}.", where=str(path)
            )
    return members


def _kind(file: ExtraFile) -> tuple[object, ...]:
    return (file.role, file.of, file.style, file.platform)


def _manifest_digest(members: dict[str, _Member]) -> bytes:
    (manifest,) = (m.path for m in members.values() if m.kind == ("manifest",))
    return bytes.fromhex(file_digest(manifest))


def _entry(name: str, kind: Kind, source: str, path: Path, digest: str) -> Entry:
    return Entry(name, kind, Codec.STORED, source, path.stat().st_size, bytes.fromhex(digest), 0, 0)


def _smallest(
    stack: ExitStack, name: str, path: Path, digest: str, source: str | None, base: Path | None
) -> tuple[Entry, BinaryIO]:
    """A file whole or as a patch, whichever takes fewer bytes."""
    size = path.stat().st_size
    new = _map(path)
    best = None
    if source is not None and base is not None:
        old = _map(base)
        found = list(steps(old, new))

        def patch() -> Iterator[bytes]:
            for step in found:
                fresh = step.fresh_to - step.fresh_from
                yield COPY_STEP.pack(step.offset, step.length, fresh)
                yield from _slices(new, step.fresh_from, step.fresh_to)

        copied = sum(step.length for step in found)
        # Beyond the size of its source a patch is refused by the reader: see its bounds.
        if 0 < copied <= len(old):
            best = (Kind.PATCH, source, _store(stack, patch))
    # Compressing the whole file seldom saves nine tenths of it, and takes long.
    if best is None or best[2].size > size // 10:
        whole = _store(stack, lambda: _slices(new, 0, size))
        if best is None or whole.size <= best[2].size:
            best = (Kind.WHOLE, "", whole)
    kind, chosen, stored = best
    entry = Entry(
        name, kind, stored.codec, chosen, size, bytes.fromhex(digest), stored.size, stored.unpacked
    )
    return entry, stored.file


def _map(path: Path) -> Bytes:
    if not path.stat().st_size:
        return np.empty(0, np.uint8)
    return np.memmap(path, np.uint8, mode="r")


def _slices(data: Bytes, start: int, stop: int) -> Iterator[bytes]:
    for at in range(start, stop, CHUNK):
        yield data[at : min(at + CHUNK, stop)].tobytes()


@dataclass(frozen=True, slots=True)
class _Stored:
    file: BinaryIO
    codec: Codec
    size: int
    unpacked: int


def _store(stack: ExitStack, pieces: Callable[[], Iterable[bytes]]) -> _Stored:
    """Put a payload into a temporary file, compressed if that is smaller."""
    packed = cast(BinaryIO, stack.enter_context(tempfile.TemporaryFile()))  # noqa: SIM115
    packer = zlib.compressobj(9)
    unpacked = 0
    for piece in pieces():
        unpacked += len(piece)
        packed.write(packer.compress(piece))
    packed.write(packer.flush())
    if packed.tell() < unpacked:
        return _Stored(packed, Codec.ZLIB, packed.tell(), unpacked)
    packed.seek(0)
    packed.truncate()
    for piece in pieces():
        packed.write(piece)
    return _Stored(packed, Codec.STORED, unpacked, unpacked)


def _prove(stream: BinaryIO, header: Header, before: dict[str, _Member], where: str) -> None:
    """Rebuild every file from the delta as written: what cannot be applied is not given out."""
    reader = DeltaReader(stream, where)
    if reader.header != header:
        reader.fail("it was not written as it should be")
    for entry in header.entries:
        with ExitStack() as stack:
            source = None
            if entry.kind is not Kind.WHOLE:
                source = stack.enter_context(before[entry.source].path.open("rb"))
            deque(rebuild(reader, entry, source), maxlen=0)
    stream.seek(0, os.SEEK_END)
