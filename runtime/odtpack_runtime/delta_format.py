"""The delta file: data model, reader and writer. docs/formats/delta.md describes the bytes.

A delta says how each file of one package, the base, becomes a file of another. Nothing that
it says is trusted: numbers are checked against each other and against the size of the file
before anything is allocated or read, and what it unpacks to is cut off at what it declared.
Only the standard library is imported, so that a device needs nothing more.
"""

from __future__ import annotations

import hashlib
import os
import struct
import unicodedata
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO, NoReturn

from odtpack_runtime.errors import OdtpackError

MAGIC = b"ODTDELTA"
VERSION = 1
MAX_ENTRIES = 256
MAX_PATH_BYTES = 255
MAX_SIZE = 2**48
MAX_EXPANSION = 1032
"""Bytes that one byte of deflate can become at most."""
CHUNK = 2**20

_FIXED = struct.Struct("<8sHHIQ32s32s")
_ENTRY = struct.Struct("<BBHHQ32sQQ")
_DIGEST = hashlib.sha256().digest_size
_MAX_HEADER = _FIXED.size + MAX_ENTRIES * (_ENTRY.size + 2 * MAX_PATH_BYTES) + _DIGEST
COPY_STEP = struct.Struct("<QQQ")
"""A step of a patch: offset and length of a range of the source, length of new bytes."""


class Kind(IntEnum):
    """How a file of the new package is made."""

    COPY = 0
    """It is a file of the base."""
    WHOLE = 1
    """The delta holds it."""
    PATCH = 2
    """The delta holds steps: ranges of a file of the base, and new bytes."""


class Codec(IntEnum):
    """How the bytes that a delta holds of a file are stored."""

    STORED = 0
    ZLIB = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of the new package.

    Attributes:
        path: Its name.
        kind: How it is made.
        codec: How its payload is stored.
        source: Name of a file of the base; empty for a whole file.
        size: Bytes of the file.
        sha256: Digest of the file, 32 bytes.
        stored: Bytes of the payload in the delta.
        unpacked: Bytes of the payload after unpacking.
    """

    path: str
    kind: Kind
    codec: Codec
    source: str
    size: int
    sha256: bytes
    stored: int
    unpacked: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a delta says before its payloads.

    Attributes:
        old: SHA-256 of the base's manifest, 32 bytes.
        new: SHA-256 of the new package's manifest.
        entries: The new package's files, its manifest among them, sorted by name.
    """

    old: bytes
    new: bytes
    entries: tuple[Entry, ...]

    @property
    def manifest(self) -> Entry:
        """The entry of the new package's manifest."""
        return next(entry for entry in self.entries if entry.path.endswith("manifest.json"))

    def to_bytes(self) -> bytes:
        """Return the bytes that stand before the payloads."""
        table = b""
        for entry in self.entries:
            path, source = entry.path.encode(), entry.source.encode()
            table += _ENTRY.pack(
                entry.kind, entry.codec, len(path), len(source), entry.size, entry.sha256,
                entry.stored, entry.unpacked,
            ) + path + source  # fmt: skip
        length = _FIXED.size + len(table) + _DIGEST
        total = length + sum(entry.stored for entry in self.entries)
        head = _FIXED.pack(
            MAGIC, VERSION, len(self.entries), length, total, self.old, self.new
        )  # fmt: skip
        return head + table + hashlib.sha256(head + table).digest()


class DeltaReader:
    """An open delta whose header holds together.

    Args:
        stream: The file, seekable.
        where: Its name, for messages.

    Raises:
        OdtpackError: ``delta-damaged``, ``delta-version``.
    """

    def __init__(self, stream: BinaryIO, where: str) -> None:
        self._stream = stream
        self._where = where
        size = stream.seek(0, os.SEEK_END)
        stream.seek(0)
        fixed = stream.read(_FIXED.size)
        if fixed[: len(MAGIC)] != MAGIC:
            self.fail("it does not begin like one")
        if len(fixed) < _FIXED.size:
            self.fail("it is cut off")
        _, version, count, length, total, old, new = _FIXED.unpack(fixed)
        if version != VERSION:
            raise OdtpackError(
                "delta-version",
                f"The delta has version {version}, and this odtpack reads {VERSION}.",
                where=where,
            )
        if total != size:
            self.fail(f"it has {size} bytes and says {total}")
        if not _FIXED.size + _DIGEST <= length <= min(_MAX_HEADER, size):
            self.fail(f"its header cannot have {length} bytes")
        rest = stream.read(length - _FIXED.size)
        table, digest = rest[:-_DIGEST], rest[-_DIGEST:]
        if hashlib.sha256(fixed + table).digest() != digest:
            self.fail("its header is not what its digest says")
        entries = self._entries(table, count)
        self.header = Header(old, new, entries)
        self._check(size - length)
        starts: dict[str, int] = {}
        at = length
        for entry in entries:
            starts[entry.path] = at
            at += entry.stored
        self._starts = starts

    def payload(self, entry: Entry) -> Iterator[bytes]:
        """Yield the unpacked payload of an entry in pieces, no more than it declares.

        Raises:
            OdtpackError: ``delta-damaged`` if it is not of the declared size.
        """
        given = 0
        pieces = self._unpack(entry) if entry.codec is Codec.ZLIB else self._stored(entry)
        for piece in pieces:
            given += len(piece)
            if given > entry.unpacked:
                self.fail(f"'{entry.path}' unpacks to more than it declares")
            yield piece
        if given != entry.unpacked:
            self.fail(f"'{entry.path}' does not unpack to what it declares")

    def _stored(self, entry: Entry) -> Iterator[bytes]:
        left = entry.stored
        self._stream.seek(self._starts[entry.path])
        while left:
            piece = self._stream.read(min(CHUNK, left))
            if not piece:
                self.fail("it is cut off")
            left -= len(piece)
            yield piece

    def _unpack(self, entry: Entry) -> Iterator[bytes]:
        unpacker = zlib.decompressobj()
        try:
            for piece in self._stored(entry):
                packed = piece
                # Output is asked for in portions: a small piece may hold very much.
                while packed and not unpacker.eof:
                    yield unpacker.decompress(packed, CHUNK)
                    packed = unpacker.unconsumed_tail
                if packed or unpacker.unused_data:
                    self.fail(f"bytes follow the end of '{entry.path}'")
            while not unpacker.eof and (last := unpacker.decompress(b"", CHUNK)):
                yield last
        except zlib.error:
            self.fail(f"'{entry.path}' cannot be unpacked")
        if not unpacker.eof:
            self.fail(f"'{entry.path}' cannot be unpacked")

    def fail(self, problem: str) -> NoReturn:
        """Raise the error for a file that is not a delta, or no longer."""
        raise OdtpackError(
            "delta-damaged", f"This is not a complete delta: {problem}.", where=self._where
        )

    def _entries(self, table: bytes, count: int) -> tuple[Entry, ...]:
        entries = []
        at = 0
        if not 0 < count <= MAX_ENTRIES:
            self.fail(f"it cannot have {count} entries")
        for _ in range(count):
            if len(table) - at < _ENTRY.size:
                self.fail("its table of files is cut off")
            kind, codec, path, source, size, digest, stored, unpacked = _ENTRY.unpack_from(
                table, at
            )
            at += _ENTRY.size
            names = table[at : at + path + source]
            at += path + source
            if len(names) < path + source:
                self.fail("its table of files is cut off")
            try:
                entries.append(
                    Entry(
                        names[:path].decode(), Kind(kind), Codec(codec), names[path:].decode(),
                        size, digest, stored, unpacked,
                    )
                )  # fmt: skip
            except ValueError:  # of an encoding, a kind or a codec
                self.fail("an entry names something that does not exist")
        if at != len(table):
            self.fail("its table of files is longer than its entries")
        return tuple(entries)

    def _check(self, payload_bytes: int) -> None:
        entries = self.header.entries
        paths = [entry.path for entry in entries]
        if paths != sorted(set(paths)):
            self.fail("its files are not sorted, or one occurs twice")
        if len({folded(path) for path in paths}) < len(paths):
            self.fail("two of its files have one name on some systems")
        for entry in entries:
            for path in (entry.path, *([entry.source] if entry.kind is not Kind.WHOLE else [])):
                problem = path_problem(path)
                if problem:
                    self.fail(f"the name {path!r} {problem}")
            self._check_sizes(entry)
        manifests = [entry for entry in entries if entry.path.endswith("manifest.json")]
        if len(manifests) != 1 or manifests[0].sha256 != self.header.new:
            self.fail("it does not hold one manifest, that of the new package")
        if sum(entry.stored for entry in entries) != payload_bytes:
            self.fail("its payloads do not fill it")

    def _check_sizes(self, entry: Entry) -> None:
        if max(entry.size, entry.unpacked, entry.stored) > MAX_SIZE:
            self.fail(f"'{entry.path}' is larger than any file")
        if entry.codec is Codec.STORED and entry.stored != entry.unpacked:
            self.fail(f"'{entry.path}' is stored as it is, in another size")
        if entry.unpacked > MAX_EXPANSION * entry.stored:
            self.fail(f"'{entry.path}' cannot unpack to {entry.unpacked} bytes")
        wrong = {
            Kind.COPY: bool(entry.unpacked or entry.codec),
            Kind.WHOLE: entry.unpacked != entry.size or bool(entry.source),
            Kind.PATCH: entry.unpacked < COPY_STEP.size,
        }
        if wrong[entry.kind]:
            self.fail(f"what it says about '{entry.path}' does not fit together")


def folded(path: str) -> str:
    """Return a name as a system that ignores case and the form of accents compares it."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())


def path_problem(path: str) -> str | None:
    """Return what is wrong with the name of a file in a package's folder, None if nothing is."""
    if not path or path in (".", "..") or set(path) & set("/\\:\0"):
        return "is not a plain name of a file in the folder"
    if any(unicodedata.category(character) in ("Cc", "Cf", "Cs") for character in path):
        return "holds control characters"
    if len(path.encode()) > MAX_PATH_BYTES:
        return f"has more than {MAX_PATH_BYTES} bytes"
    return None


def rebuild(reader: DeltaReader, entry: Entry, source: BinaryIO | None) -> Iterator[bytes]:
    """Yield the bytes of a file of the new package in pieces.

    Args:
        reader: The delta.
        entry: The file.
        source: The file of the base that the entry names; None for a whole file.

    Raises:
        OdtpackError: ``delta-damaged``: a patch does not fit its source, or the result has
            another size or digest than the entry says. Then all but the last pieces may have
            been given out.
    """
    digest = hashlib.sha256()
    left = entry.size
    for piece in _pieces(reader, entry, source):
        left -= len(piece)
        if left < 0:
            reader.fail(f"'{entry.path}' becomes larger than it declares")
        digest.update(piece)
        yield piece
    if left or digest.digest() != entry.sha256:
        reader.fail(f"'{entry.path}' does not become the file that it declares")


def _pieces(reader: DeltaReader, entry: Entry, source: BinaryIO | None) -> Iterator[bytes]:
    if entry.kind is Kind.WHOLE:
        yield from reader.payload(entry)
        return
    if source is None:
        raise ValueError("a copy or a patch needs its source")
    end = source.seek(0, os.SEEK_END)
    if entry.kind is Kind.COPY:
        yield from read_range(source, 0, end)
        return
    # Legitimate patches stay below this: what repeats often is better stored whole.
    if entry.size > end + entry.unpacked:
        reader.fail(f"'{entry.path}' becomes larger than its parts")
    yield from _follow(reader, entry, source, end)


def _follow(reader: DeltaReader, entry: Entry, source: BinaryIO, end: int) -> Iterator[bytes]:
    """Follow the steps of a patch, which arrive in pieces."""
    step, fresh = b"", 0
    for piece in reader.payload(entry):
        view = memoryview(piece)
        while view:
            if fresh:
                taken = view[:fresh]
                fresh -= len(taken)
                view = view[len(taken) :]
                yield bytes(taken)
                continue
            missing = COPY_STEP.size - len(step)
            step += view[:missing]
            view = view[missing:]
            if len(step) < COPY_STEP.size:
                break
            offset, length, fresh = COPY_STEP.unpack(step)
            step = b""
            if not length + fresh or offset + length > end:
                reader.fail(f"a step of '{entry.path}' leads out of its source, or nowhere")
            yield from read_range(source, offset, length)
    if step or fresh:
        reader.fail(f"the steps of '{entry.path}' are cut off")


def read_range(source: BinaryIO, offset: int, length: int) -> Iterator[bytes]:
    """Yield a range of a file in pieces; fewer bytes if the file ends."""
    source.seek(offset)
    while length and (piece := source.read(min(CHUNK, length))):
        length -= len(piece)
        yield piece


def open_error(path: Path, error: OSError) -> OdtpackError:
    """Return the error for a file that the system does not open."""
    if isinstance(error, FileNotFoundError):
        return OdtpackError("delta-not-found", f"There is no file {path}.", where=str(path))
    return OdtpackError(
        "delta-unreadable", f"{path} cannot be read: {error.strerror or error}.", where=str(path)
    )
