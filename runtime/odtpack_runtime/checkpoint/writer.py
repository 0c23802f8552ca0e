"""The checkpoint file: writer. The format is described in ``checkpoint_format``.

A file is written in one pass and without a copy of the tensors: first the
tables, strings and dimensions, built in memory by the flatbuffers package, then
the tensors' bytes straight from their arrays. Flatbuffer offsets point forward,
so the tables can name places after them; the offset of each ``raw_data`` is
filled in once the size of the tables is known. The digests come last: they are
computed in a second thread while the tensors are written.

Above :data:`EXTERNAL_DATA_THRESHOLD` the tensors go to ``<path>.data``, as the
reference writes it. A pair of files cannot change its names at one instant, so
the data file holds two regions in turn: new data goes where the current
checkpoint has none, then the checkpoint that refers to it replaces the old one.
Killed at any moment, the old pair is still whole. A previous checkpoint that is
kept has the other region, under a second name of the same data file: while the
next save writes there, only the current one is whole.
"""

from __future__ import annotations

import io
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Literal

import flatbuffers
import numpy as np

from odtpack_runtime.checkpoint.flatbuffer import Source, Table
from odtpack_runtime.checkpoint.format import (
    DTYPE_CODES,
    DTYPES,
    GROUP_NAME,
    IDENTIFIER,
    MAX_RANK,
    OPTIMIZER_PROPERTY,
    TEXT_BYTES,
    VERSION,
    CheckpointData,
    Hasher,
    OptimizerState,
    Outline,
    PropertyValue,
    check_property,
    digest_text,
    read_once,
)
from odtpack_runtime.checkpoint.parameters import Array, round_up
from odtpack_runtime.errors import OdtpackError, unreadable
from odtpack_runtime.files import atomic

EXTERNAL_DATA_THRESHOLD = 1800 * 2**20
"""Bytes of tensor data up to which a checkpoint is one file; a flatbuffer ends below 2 GiB."""

_PAYLOAD_ALIGNMENT = 16
_AT_ONCE = 2**23  # bytes that are written before the disk begins with them
_DOC_STRING, _RAW_DATA = 1, 4  # field numbers in Tensor
_DIGEST = 4  # field number in Checkpoint


def write_checkpoint(
    path: str | os.PathLike[str],
    data: CheckpointData,
    *,
    open_file: Callable[..., AbstractContextManager[BinaryIO]] = atomic.atomic_write,
    previous: Literal["none", "replaced"] = "none",
    whole: atomic.Identity | None = None,
) -> atomic.Identity:
    """Write a checkpoint, whole or not at all; a file of that name is replaced."""
    # Equal data give equal bytes.
    # `open_file`: opens the destination for a write that is whole or not at all; whoever tests what
    # an interrupted write leaves passes one that stops half-way.
    # `previous`: what becomes of the save before, previous_path: with `replaced` the file that is
    # written over takes its place, if it reads as whole.
    # `whole`: A file that is known to; any other is read before it takes that place.
    # Returns the identity of the new file.
    target = Path(path)
    save = _Save(target, data, open_file, keep=previous == "replaced", known=whole)
    try:
        atomic.refuse_link(target)
        return save.outside() if _nbytes(data) > EXTERNAL_DATA_THRESHOLD else save.inside()
    except OSError as error:
        raise atomic.not_written(target, error) from error


_Region = tuple[int, int]
"""Where the elements of a checkpoint begin and end in its data file."""


class _Save:
    """One save: the file, its data file, and the names of the save before."""

    def __init__(
        self,
        target: Path,
        data: CheckpointData,
        open_file: Callable[..., AbstractContextManager[BinaryIO]],
        *,
        keep: bool,
        known: atomic.Identity | None,
    ) -> None:
        self._target, self._data, self._open_file = target, data, open_file
        self._keep, self._known = keep, known
        self._data_path = Path(f"{target}.data")
        self._before = previous_path(target)
        self._before_data = Path(f"{self._before}.data")
        self._written: atomic.Identity | None = None

    def inside(self) -> atomic.Identity:
        """Write one file that holds everything."""
        self._look()
        with self._tidied(), Hasher() as hasher, self._open() as stream:
            head = _Head(self._data, hasher, external_from=None)
            head.write(stream)
            head.write_payload(stream)
            head.write_digests(stream)
            written = self._finish(stream)
        if self._current is not None or self._kept is not None:
            found = atomic.file_identity(self._data_path)
            with suppress(OSError), atomic.locked(self._data_path):
                # Another process may have saved meanwhile, or have made the file anew for a save.
                if self._in_place() and _is_one_file(found, atomic.file_identity(self._data_path)):
                    self._data_path.unlink()
        return written

    def outside(self) -> atomic.Identity:
        """Write the elements into the data file, and then the file that refers to them."""
        atomic.refuse_link(self._data_path)
        try:
            with self._locked_data() as fresh:
                size = self._data_path.stat().st_size
                try:
                    self._look()  # under the lock: another process may have written
                    self._check_links()
                    return self._write_outside()
                except BaseException:
                    if not self._in_place():
                        with suppress(OSError):
                            self._data_path.unlink() if fresh else os.truncate(
                                self._data_path, size
                            )
                    raise
        except OSError as error:
            raise atomic.not_written(self._data_path, error) from error

    def _write_outside(self) -> atomic.Identity:
        nbytes = _nbytes(self._data)
        start = _free_region([self._current, self._kept], nbytes)
        with Hasher() as hasher, self._data_path.open("r+b") as stream:
            head = _Head(self._data, hasher, external_from=start)
            stream.seek(start)
            _write_all(stream, map(_bytes, head.payload))
            stream.flush()
            os.fsync(stream.fileno())
            atomic.sync_folder(self._data_path.parent)
            with self._tidied(), self._open() as main:
                head.write(main)
                head.write_digests(main)
                written = self._finish(main)
            before = self._current if self._rotates else self._kept
            with suppress(OSError):  # nobody reads what is behind the end
                stream.truncate(max(start + nbytes, before[1] if before else 0))
        return written

    def _look(self) -> None:
        """Find out what is there, and what of it must stay whole until the new file is."""
        self._current = _external_region(self._target)
        self._rotates = self._keep and self._is_whole()
        shared = _is_same_file(self._before_data, self._data_path)
        self._kept = _external_region(self._before) if shared and not self._rotates else None

    def _is_whole(self) -> bool:
        """Whether the file that is replaced may become the save before."""
        found = atomic.file_identity(self._target)
        if found is None:
            return False
        if self._current is not None:
            data = atomic.file_identity(self._data_path)
            if data is None or data[2] < self._current[1]:
                return False
        if found == self._known:
            return True
        try:
            read_once(self._target)
        except OdtpackError:
            return False
        return True

    @contextmanager
    def _locked_data(self) -> Iterator[bool]:
        """Lock the data file; yield whether it is new and still empty."""
        while True:
            fresh = False
            with suppress(FileExistsError):
                made = os.open(self._data_path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
                atomic.take_mode(made, self._target, least=0o600)  # each save opens it again
                os.close(made)
                fresh = True
            found = atomic.file_identity(self._data_path)
            with atomic.locked(self._data_path):
                here = atomic.file_identity(self._data_path)
                if here is None or not _is_one_file(found, here):
                    continue  # who had the lock removed the file
                yield fresh and here[2] == 0
                return

    def _open(self) -> AbstractContextManager[BinaryIO]:
        more = {"previous": self._before} if self._rotates else {}
        return self._open_file(self._target, **more)

    def _finish(self, stream: BinaryIO) -> atomic.Identity:
        """Finish the file, which is about to take its name."""
        stream.flush()
        self._written = atomic.identity_of(os.fstat(stream.fileno()))
        if self._rotates and self._current is not None:
            self._share_data()
        return self._written

    def _in_place(self) -> bool:
        return self._written is not None and atomic.file_identity(self._target) == self._written

    def _check_links(self) -> None:
        """Refuse, before anything is written, to keep data that can have no second name."""
        if not self._rotates or self._current is None:
            return
        if not _is_same_file(self._before_data, self._data_path):
            link = atomic.temporary_name(self._target)
            try:
                os.link(self._data_path, link)
                link.unlink()
            except OSError as error:
                if error.errno not in atomic.NO_LINKS:
                    raise
                raise OdtpackError(
                    "file-not-written",
                    f"{self._target} could not be written: the previous save cannot be kept, "
                    f"because its data are in a separate file and this file system has no hard "
                    f"links: {error.strerror}.",
                    where=str(self._data_path),
                    hint="save without keeping the previous, or to a file system with hard links",
                ) from error

    def _share_data(self) -> None:
        """Give the data of the file that becomes the save before the name that it refers to."""
        if _is_same_file(self._before_data, self._data_path):
            return
        link = atomic.temporary_name(self._target)
        try:
            os.link(self._data_path, link)
            link.replace(self._before_data)
        finally:
            link.unlink(missing_ok=True)

    @contextmanager
    def _tidied(self) -> Iterator[None]:
        """Leave no data file under the name of the save before that it does not refer to."""
        had = self._before_data.exists()
        try:
            yield
        except BaseException:
            moved = self._in_place() or _is_same_file(self._before, self._target)
            if not had and not moved:
                with suppress(OSError):
                    self._before_data.unlink(missing_ok=True)
            raise
        if self._rotates and self._current is None:
            with suppress(OSError):
                self._before_data.unlink(missing_ok=True)


def previous_path(path: str | os.PathLike[str]) -> Path:
    """Return where the checkpoint before the one at ``path`` is kept."""
    return Path(f"{path}.previous")


class _Head:
    """Everything of a checkpoint file but the tensors' bytes; the digests at its very end."""

    def __init__(self, data: CheckpointData, hasher: Hasher, *, external_from: int | None) -> None:
        self._builder = flatbuffers.Builder(4096)
        # Tensor tables that still have to learn where their bytes are, by their offset from the end
        # of the finished head.
        self._pending: list[tuple[int, Array]] = []
        self._digests: list[tuple[int, Callable[[], bytes]]] = []
        self._hasher = hasher
        self._outline = Outline(nominal=data.nominal)
        self._nominal = data.nominal
        self._external_at = external_from
        self._no_bytes = self._vector(1, ())
        trainable = self._tensors(data.trainable)
        frozen = self._tensors(data.frozen)
        module = self._table(
            (0, "UOffsetTRelative", trainable, 0),
            (1, "UOffsetTRelative", frozen, 0),
            (2, "Bool", data.nominal, False),
            (3, "Bool", external_from is not None, False),
        )
        groups = self._groups(data.optimizer)
        properties = data.properties
        if data.optimizer is not None and data.optimizer.kind is not None:
            properties = {**properties, OPTIMIZER_PROPERTY: data.optimizer.kind}
        bag = self._bag(properties)
        root = self._table(
            (0, "Int32", VERSION, 0),
            (1, "UOffsetTRelative", module, 0),
            (2, "UOffsetTRelative", groups, 0),
            (3, "UOffsetTRelative", bag, 0),
            (_DIGEST, "UOffsetTRelative", self._no_bytes, 0),
        )
        self._builder.Finish(root, IDENTIFIER)
        self._bytes = bytearray(self._builder.Output())
        self._gaps: list[int] = []
        self._digests.append((root, self._outline.digest))
        self._place()

    @property
    def payload(self) -> list[Array]:
        """The arrays whose bytes stand outside the head, in order."""
        return [array for _, array in self._pending]

    def write(self, stream: BinaryIO) -> None:
        """Write the head."""
        stream.write(self._bytes)

    def write_payload(self, stream: BinaryIO) -> None:
        """Write the tensors' bytes after the head."""
        parts = (
            (memoryview(bytes(gap) + struct.pack("<I", array.nbytes)), _bytes(array))
            for gap, array in zip(self._gaps, self.payload, strict=True)
        )
        _write_all(stream, chain.from_iterable(parts))

    def write_digests(self, stream: BinaryIO) -> None:
        """Write the digests at the end of the file."""
        stream.write(bytes(self._last_gap))
        for _, digest in self._digests:
            text = digest_text(digest()).encode()
            stream.write(struct.pack("<I", len(text)) + text + b"\0")

    def _place(self) -> None:
        """Let the tables refer to what follows the head."""
        # Read back with the reader: it knows where a field of a finished table stands.
        source = Source(io.BytesIO(self._bytes), "checkpoint", "checkpoint")

        def refer(table: int, field: int, position: int) -> None:
            slot = Table(source, len(self._bytes) - table).slot(field)
            struct.pack_into("<I", self._bytes, slot, position - slot)

        end = len(self._bytes)
        for table, array in () if self._external_at is not None else self._pending:
            position = round_up(end + 4, _PAYLOAD_ALIGNMENT)
            refer(table, _RAW_DATA, position - 4)
            self._gaps.append(position - 4 - end)
            end = position + array.nbytes
        self._last_gap = -end % 4
        end += self._last_gap
        *tensors, (root, _) = self._digests
        for table, _ in tensors:
            refer(table, _DOC_STRING, end)
            end += 4 + TEXT_BYTES + 1
        refer(root, _DIGEST, end)

    def _tensors(self, tensors: Mapping[str, Array]) -> int:
        self._outline.numbers("I", len(tensors))
        return self._vector(4, [self._tensor(name, array) for name, array in tensors.items()])

    def _tensor(self, name: str, array: Array) -> int:
        code = DTYPE_CODES.get(array.dtype)
        if code is None:
            what = f"'{name}' has elements of type {array.dtype}, which a checkpoint cannot hold."
            hint = f"use one of {', '.join(str(dtype) for dtype in DTYPE_CODES)}"
            raise OdtpackError("checkpoint-dtype", what, hint=hint)
        label = self._builder.CreateSharedString(name)
        shape = () if self._nominal else array.shape
        dims = self._builder.CreateNumpyVector(np.array(shape, np.int64))
        digest = self._hasher.start(memoryview(b"") if self._nominal else _bytes(array))
        self._outline.tensor(name, code, shape, digest)
        kept = not self._nominal and array.nbytes > 0
        raw, offset = self._no_bytes, -1
        if kept and self._external_at is not None:
            # raw_data stays absent: the reference looks no further if it is present.
            raw, offset = 0, self._external_at
            self._external_at += array.nbytes
        table = self._table(
            (0, "UOffsetTRelative", label, 0),
            (_DOC_STRING, "UOffsetTRelative", 0 if self._nominal else self._no_bytes, 0),
            (2, "UOffsetTRelative", dims, 0),
            (3, "Int32", code, 0),
            (_RAW_DATA, "UOffsetTRelative", raw, 0),
            (6, "Int64", offset, -1),
        )
        if kept:
            self._pending.append((table, array))
        if not self._nominal:
            self._digests.append((table, digest))
        return table

    def _groups(self, state: OptimizerState | None) -> int:
        members = (state.groups or (tuple(state.moments),)) if state else ()
        self._outline.numbers("I", len(members))
        groups = [self._group(i, names, state) for i, names in enumerate(members) if state]
        return self._vector(4, groups)

    def _group(self, index: int, names: Sequence[str], state: OptimizerState) -> int:
        entries = []
        kept = [name for name in names if name in state.moments]  # nothing is kept for others
        self._outline.text(GROUP_NAME.format(index))
        self._outline.numbers("qfI", state.step, state.learning_rate, len(kept))
        for name in kept:
            self._outline.text(name)
            label = self._builder.CreateSharedString(name)
            moments = enumerate(state.moments[name])
            tensors = self._tensors({f"momentum{i}": moment for i, moment in moments})
            entries.append(
                self._table((0, "UOffsetTRelative", label, 0), (1, "UOffsetTRelative", tensors, 0))
            )
        states = self._vector(4, entries)
        group_name = self._builder.CreateSharedString(GROUP_NAME.format(index))
        return self._table(
            (0, "UOffsetTRelative", group_name, 0),
            (1, "Int64", state.step, 0),
            (2, "Float32", state.learning_rate, 0.0),
            (3, "UOffsetTRelative", states, 0),
        )

    def _bag(self, properties: Mapping[str, PropertyValue]) -> int:
        clean = {name: check_property(name, properties[name]) for name in sorted(properties)}
        vectors = []
        for kind in (int, float, str):
            values = [(name, value) for name, value in clean.items() if isinstance(value, kind)]
            self._outline.numbers("I", len(values))
            vectors.append(self._vector(4, [self._property(*item) for item in values]))
        if not clean:
            return 0
        return self._table(*((i, "UOffsetTRelative", v, 0) for i, v in enumerate(vectors)))

    def _property(self, name: str, value: PropertyValue) -> int:
        self._outline.property(name, value)
        label = (0, "UOffsetTRelative", self._builder.CreateString(name), 0)
        if isinstance(value, str):
            text = self._builder.CreateString(value)
            return self._table(label, (1, "UOffsetTRelative", text, 0))
        kind = "Float32" if isinstance(value, float) else "Int64"
        return self._table(label, (1, kind, value, 0))

    def _table(self, *fields: tuple[int, str, float, float]) -> int:
        """Write a table of fields, each (number, kind, value, default: then left out)."""
        self._builder.StartObject(fields[-1][0] + 1)
        for number, kind, value, default in fields:
            getattr(self._builder, f"Prepend{kind}Slot")(number, value, default)
        return int(self._builder.EndObject())

    def _vector(self, width: int, offsets: Sequence[int]) -> int:
        self._builder.StartVector(width, len(offsets), 4)
        for offset in reversed(offsets):
            self._builder.PrependUOffsetTRelative(offset)
        return int(self._builder.EndVector())


def _write_all(stream: BinaryIO, parts: Iterable[memoryview]) -> None:
    """Write parts; the disk writes the first while the last are copied and hashed."""
    asked = stream.tell()
    for part in parts:
        for at in range(0, len(part), _AT_ONCE):
            stream.write(part[at : at + _AT_ONCE])
            if stream.tell() - asked >= _AT_ONCE:
                asked = atomic.start_writing(stream, asked)
    atomic.start_writing(stream, asked)


def _nbytes(data: CheckpointData) -> int:
    if data.nominal:
        return 0
    moments = data.optimizer.moments.values() if data.optimizer else ()
    arrays = [*data.trainable.values(), *data.frozen.values(), *chain.from_iterable(moments)]
    return sum(array.nbytes for array in arrays)


def _bytes(array: Array) -> memoryview:
    """View an array's elements, in row-major order, as bytes; copies only if it must."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _free_region(taken: Iterable[_Region | None], nbytes: int) -> int:
    """Return the first place for ``nbytes`` that touches none of the regions in use."""
    start = 0
    for first, end in sorted(region for region in taken if region is not None):
        if start + nbytes <= first:
            break
        start = max(start, end)
    return start


def _external_region(path: Path) -> _Region | None:
    """Return what the checkpoint at ``path`` uses of its data file, if anything."""
    try:
        with atomic.open_regular(path) as stream:
            root = Source(stream, "checkpoint", str(path)).root(IDENTIFIER)
            module = root.table(1)
            if module is None or not module.boolean(3):
                return None
            tensors = [*module.tables(0), *module.tables(1)]
            for group in root.tables(2):
                for entry in group.tables(3):
                    tensors += entry.tables(1)
            first, end = None, 0
            for tensor in tensors:
                offset = tensor.integer(6, "q", default=-1)
                if offset < 0:
                    continue
                width = DTYPES[tensor.integer(3, "i")].itemsize
                first = offset if first is None else min(first, offset)
                end = max(end, offset + math.prod(tensor.integers(2, MAX_RANK)) * width)
            return None if first is None else (first, end)
    except (FileNotFoundError, NotADirectoryError, LookupError):  # nothing to preserve
        return None
    except OSError as error:
        raise unreadable("file-not-written", path, error) from error
    except OdtpackError as error:
        if isinstance(error.__cause__, OSError):
            raise
        return None  # it is not whole


def _is_same_file(first: Path, second: Path) -> bool:
    return _is_one_file(atomic.file_identity(first), atomic.file_identity(second))


def _is_one_file(one: atomic.Identity | None, other: atomic.Identity | None) -> bool:
    return one is not None and other is not None and one[:2] == other[:2]
