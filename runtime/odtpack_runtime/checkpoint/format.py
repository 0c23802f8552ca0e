"""Reads the checkpoint format and checks its digests."""

from __future__ import annotations

import hashlib
import io
import math
import os
import re
import struct
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from odtpack_runtime.checkpoint.flatbuffer import Source, Table, Vector
from odtpack_runtime.checkpoint.parameters import Array, allocate
from odtpack_runtime.errors import OdtpackError, WrongTypeError, unreadable
from odtpack_runtime.files.atomic import file_identity, locked, open_regular

# The digest of a checkpoint: whether it still holds what was saved, and if not, what differs.
#
# Each tensor carries the SHA-256 of its elements in its ``doc_string``, and the root table that of
# the whole in its field ``digest``, both as ``sha256:`` and 64 hex digits. ONNX Runtime's own
# training passes over them, and writes none: a file without either was not written here, and is
# not checked. The whole is a SHA-256 over an outline, all numbers little-endian, text as its
# number of bytes (uint32) and UTF-8, lists as their length (uint32) and their entries, in the
# order of the file::
#
#     outline   "odtpack.checkpoint.1", is_nominal_state uint8, [tensor] trainable, [tensor] frozen,
#               [group], [int property], [float property], [text property]
#     tensor    name, data_type int32, [int64] dims, 32 bytes SHA-256 of the elements
#     group     name, step int64, initial_learning_rate float32, [state]
#     state     param_name, [tensor] momentums
#     property  name, value: int64, float32 or text
#
# Where a file leaves out a field its default counts, and a negative zero counts as zero, because
# a writer may take it for the default.
#
# It protects against damage, not against forgery: a program that can change a file can change its
# digest.

PREFIX = "sha256:"
TEXT_BYTES = len(PREFIX) + 64
_NAMED = 3  # damaged tensors that a message names
_APART = 2**16  # bytes from which on a thread costs less than it saves
_STACK = 2**18  # bytes of its stack: the default of 8 MiB counts where address space is limited


Digest = bytes | Callable[[], bytes]
"""A SHA-256, or what waits for it."""


class Hasher(ThreadPoolExecutor):
    """Hashes tensors in a second thread, while the first reads or writes the next one."""

    def __init__(self) -> None:
        super().__init__(max_workers=1)

    def digest(self, data: memoryview) -> Digest:
        """Return the 32 bytes of the SHA-256 of few data; start to hash many."""
        return hashlib.sha256(data).digest() if len(data) < _APART else self.start(data)

    def start(self, data: memoryview) -> Callable[[], bytes]:
        """Start to hash, and return what waits for the 32 bytes of the SHA-256."""
        if len(data) < _APART:
            return hashlib.sha256(data).digest
        usual = threading.stack_size(_STACK)
        try:
            later = self.submit(hashlib.sha256, data)
        except RuntimeError:  # no memory for a thread
            return hashlib.sha256(data).digest
        finally:
            threading.stack_size(usual)
        return lambda: later.result().digest()


class Outline:
    """What the digest of a whole checkpoint is made from, piece by piece."""

    # Pieces are hashed at once up to the first one that is waited for.

    def __init__(self, *, nominal: bool) -> None:
        self._found = hashlib.sha256(b"odtpack.checkpoint.1")
        self._waiting: list[Digest] = []
        self.numbers("B", nominal)

    def numbers(self, form: str, *values: float) -> None:
        """Add numbers in a format of ``struct``, without its sign of byte order."""
        self._add(struct.pack(f"<{form}", *(value + 0 for value in values)))

    def text(self, value: str) -> None:
        """Add a text."""
        data = value.encode()
        self.numbers("I", len(data))
        self._add(data)

    def tensor(self, name: str, code: int, dims: tuple[int, ...], digest: Digest) -> None:
        """Add a tensor: its element type's number in ONNX, and its elements' digest."""
        text, rank = name.encode(), len(dims)
        self._add(struct.pack(f"<I{len(text)}siI{rank}q", len(text), text, code, rank, *dims))
        self._add(digest)

    def property(self, name: str, value: float | str) -> None:
        """Add a property."""
        self.text(name)
        if isinstance(value, str):
            self.text(value)
        else:
            self.numbers("f" if isinstance(value, float) else "q", value)

    def digest(self) -> bytes:
        """Wait for the tensors' digests and return that of the whole."""
        found = self._found.copy()
        for piece in self._waiting:
            found.update(_bytes(piece))
        return found.digest()

    def _add(self, piece: Digest) -> None:
        if isinstance(piece, bytes) and not self._waiting:
            self._found.update(piece)
        else:
            self._waiting.append(piece)


def _bytes(digest: Digest) -> bytes:
    return digest if isinstance(digest, bytes) else digest()


def digest_text(digest: bytes) -> str:
    """Return a digest as a file holds it."""
    return PREFIX + digest.hex()


# The checkpoint file: data model and reader.
#
# A checkpoint is a flatbuffer with the identifier ``ODTC`` and this schema, the
# one of ONNX Runtime's on-device training, version 2 (field numbers in order)::
#
#     Checkpoint      { version:int32; module_state:ModuleState;
#                       optimizer_groups:[OptimizerGroup]; property_bag:PropertyBag;
#                       digest:string }
#     ModuleState     { requires_grad_params:[Tensor]; frozen_params:[Tensor];
#                       is_nominal_state:bool; has_external_data:bool }
#     OptimizerGroup  { group_name:string; step:int64; initial_learning_rate:float;
#                       optimizer_states:[ParameterOptimizerState] }
#     ParameterOptimizerState { param_name:string; momentums:[Tensor] }
#     PropertyBag     { ints:[IntProperty]; floats:[FloatProperty]; strings:[StringProperty] }
#     IntProperty     { name:string; value:int64 }   FloatProperty { name; value:float }
#     StringProperty  { name:string; value:string }
#     Tensor          { name:string; doc_string:string; dims:[int64]; data_type:int32;
#                       raw_data:[uint8]; string_data:[string]; external_data_offset:int64 = -1 }
#
# All numbers are little-endian. ``raw_data`` is the tensor's elements in row-major
# order. With ``has_external_data`` the elements of a tensor whose
# ``external_data_offset`` is not negative lie at that offset of the file
# ``<checkpoint>.data`` instead, which must not be a link. In a nominal state
# tensors have a name and a type, and neither dimensions nor data. State
# parameters (running statistics) are stored among ``frozen_params``. Optimizer
# groups are named ``group0``, ``group1`` and so on, and stand at the same step and
# learning rate; the reference knows one. The moments of a parameter are named
# ``momentum0``, ``momentum1``, and have its shape with some axes of length 1. The
# property ``odtpack.optimizer`` of a file with optimizer groups is the kind of the
# optimizer, and is not a property of the state.
#
# The reader trusts nothing: see :mod:`odtpack_runtime.checkpoint.flatbuffer`. On top of
# that it requires known element types, sizes that agree with the dimensions,
# unique names, tables that are referred to once, and tensors that together are no larger
# than the file, so that a small file cannot ask for much memory. A file without a
# digest is what the reference wrote: one that holds digests to which nothing refers
# is damaged. The flatbuffer bindings that ship inside
# ``onnxruntime.tools`` are not used: they verify nothing, and importing that
# package imports PyTorch wherever it is installed.

IDENTIFIER = b"ODTC"
VERSION = 2
GROUP_NAME = "group{}"
_NOTHING = np.empty(0, np.uint8)
_NO_BYTES = Vector(0, 0)
OPTIMIZER_PROPERTY = "odtpack.optimizer"
"""Property of a file, not of a state: kind of the optimizer whose state the file holds."""
MAX_RANK = 32
MAX_ELEMENTS = 2**48
"""Also of a tensor with a zero dimension, whose other dimensions numpy multiplies nonetheless."""

_MOST_ATTEMPTS = 8
"""Readings of a file that is replaced again and again, before its writer has to wait."""

PropertyValue = int | float | str

# onnx.TensorProto.DataType of every type that numpy can hold as it is stored.
DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name)
    for code, name in (
        (1, "float32"), (2, "uint8"), (3, "int8"), (4, "uint16"), (5, "int16"), (6, "int32"),
        (7, "int64"), (9, "bool"), (10, "float16"), (11, "float64"), (12, "uint32"),
        (13, "uint64"),
    )
}  # fmt: skip
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(slots=True)
class OptimizerState:
    """What an optimizer carries from step to step."""

    step: int  # number of steps made
    learning_rate: float  # the learning rate at the time of saving (a float32)
    # for each trainable parameter its moments, arrays of the parameter's shape (some axes may have
    # length 1 instead) and type: two for AdamW, none for SGD
    moments: dict[str, list[Array]]
    # names of the parameters of each group; empty if there is one
    groups: tuple[tuple[str, ...], ...] = ()
    # kind of the optimizer, such as `adamw`; None if the file does not say, as those of the
    # reference
    kind: str | None = None


@dataclass(slots=True)
class CheckpointData:
    """The contents of one checkpoint file, in the order of the file."""

    trainable: dict[str, Array]  # parameters that require a gradient, by name
    frozen: dict[str, Array]  # all other parameters, state such as running statistics included
    # true if the file names parameters without their values; every array is then empty, shape
    # `(0,)`, and only its dtype counts
    nominal: bool = False
    optimizer: OptimizerState | None = None  # state of the optimizer, if the file holds any
    # values the user attached: int64, float32 or text
    properties: dict[str, PropertyValue] = field(default_factory=dict)
    # Whether the file carried a digest of all this, which was right: those of ONNX Runtime's own
    # training carry none. None for what was not read from a file.
    checked: bool | None = None

    def without_values(self) -> CheckpointData:
        """Names and types of the parameters alone."""
        trainable, frozen = (
            {name: np.empty(0, array.dtype) for name, array in arrays.items()}
            for arrays in (self.trainable, self.frozen)
        )
        return CheckpointData(trainable, frozen, nominal=True)


def check_property(name: object, value: object) -> PropertyValue:
    """Return a property's value as the format keeps it."""
    # Integers and bools become `int` (int64), other real numbers `float` (rounded to float32), text
    # and UTF-8 bytes `str`.
    if not isinstance(name, str) or not name:
        what = f"A property needs a name, and {name!r} is not one."
        raise WrongTypeError("property-type", what, hint="use a str")
    where = f"property '{name}'"
    try:
        name.encode()
        if isinstance(value, str | bytes):
            # A plain str also of a kind of str such as numpy's.
            text = str.__str__(value) if isinstance(value, str) else value.decode()
            text.encode()
            return text
    except UnicodeError as error:
        raise OdtpackError("property-not-text", f"{where} is not UTF-8 text.") from error
    if isinstance(value, bool | np.bool_ | int | np.integer):
        number = int(value)
        if not -(2**63) <= number < 2**63:
            raise OdtpackError("property-out-of-range", f"{where}: {number} is not an int64.")
        return number
    if isinstance(value, float | np.floating):
        with np.errstate(over="ignore"):
            real = float(np.float32(value))
        if math.isinf(real) and not math.isinf(float(value)):
            raise OdtpackError("property-out-of-range", f"{where}: {value} is not a float32.")
        return real
    raise WrongTypeError("property-type", f"{where} cannot be a {type(value).__name__}.")


def read_checkpoint(path: str | os.PathLike[str]) -> CheckpointData:
    """Read a checkpoint file, and ``<path>.data`` if it refers to it."""
    # One that is replaced meanwhile is read again: a file and its data file are two.
    if sys.byteorder != "little":
        what = "Checkpoints are little-endian and this machine is not."
        raise OdtpackError("big-endian-host", what)
    file = Path(path)
    for _ in range(_MOST_ATTEMPTS):
        seen = file_identity(file)
        try:
            return read_once(file)
        except OdtpackError:
            if file_identity(file) == seen:
                raise
    with locked(Path(f"{file}.data")):  # which whoever writes it holds
        return read_once(file)


def read_once(file: Path) -> CheckpointData:
    """Read a checkpoint as :func:`read_checkpoint`, also where it is replaced meanwhile."""
    try:
        with open_regular(file) as stream, Hasher() as hasher:
            return _Reader(stream, str(file), Path(f"{file}.data"), hasher).read()
    except FileNotFoundError as error:
        what = f"There is no checkpoint {error.filename}."
        raise OdtpackError("checkpoint-not-found", what, where=str(file)) from error
    except OSError as error:
        raise unreadable("checkpoint-unreadable", file, error) from error


def parse_checkpoint(data: bytes, where: str = "checkpoint") -> CheckpointData:
    """Read a checkpoint from memory; one that refers to a data file is refused."""
    with Hasher() as hasher:
        return _Reader(io.BytesIO(data), where, None, hasher).read()


class _Reader:
    def __init__(
        self, stream: BinaryIO, where: str, data_path: Path | None, hasher: Hasher
    ) -> None:
        self._source = Source(stream, "checkpoint", where)
        self._where = where
        self._data_path = data_path
        self._data: Source | None = None
        self._hasher = hasher
        self._nominal = False
        self._inline_left = self._source.size
        self._external_left = 0
        # Of each tensor its name for messages, its doc_string, and the digest of its elements.
        self._digests: list[tuple[str, str, Digest]] = []

    def read(self) -> CheckpointData:
        root = self._source.root(IDENTIFIER)
        version = root.integer(0, "i")
        if version != VERSION:
            raise OdtpackError(
                "checkpoint-version",
                f"{self._where} is a checkpoint of version {version}, and only version "
                f"{VERSION} can be read.",
                where=self._where,
            )
        module = root.table(1)
        if module is None:
            self._source.fail("it has no module state")
        self._nominal = module.boolean(2)
        self._outline = Outline(nominal=self._nominal)
        with ExitStack() as stack:
            if module.boolean(3):
                self._open_data(stack)
            trainable = self._tensors(module, 0)
            frozen = self._tensors(module, 1)
            both = trainable.keys() & frozen.keys()
            if both:
                self._source.fail(f"parameter '{min(both)}' is both trainable and frozen")
            optimizer = self._optimizer(root, trainable)
        properties = self._properties(root.table(3))
        kind = properties.pop(OPTIMIZER_PROPERTY, None)
        if optimizer is not None:
            if kind is not None and not isinstance(kind, str):
                self._source.fail(f"its property {OPTIMIZER_PROPERTY} is not text")
            optimizer.kind = kind
        if odd := self._difference(root.string(4)):
            self._source.fail(f"the stored data do not match their digests: {odd}")
        checked = odd is not None
        if not checked and self._lost_digests(properties):
            self._source.fail("it was written by odtpack, but its digest is missing")
        return CheckpointData(trainable, frozen, self._nominal, optimizer, properties, checked)

    def _difference(self, said: str) -> str | None:
        """Return what differs from what was saved; empty if nothing, None without digests."""
        marked = any(text.startswith(PREFIX) for _, text, _ in self._digests)
        if not said and not marked:
            return None
        if said == digest_text(self._outline.digest()):
            return ""
        odd = [f"'{name}'" for name, text, get in self._digests if text != digest_text(_bytes(get))]
        if not odd or not marked:
            return "its names, shapes, optimizer state or properties"
        more = f" and {len(odd) - _NAMED} more" if len(odd) > _NAMED else ""
        return ", ".join(odd[:_NAMED]) + more

    def _lost_digests(self, properties: dict[str, PropertyValue]) -> bool:
        """Whether digests stand in a file that refers to none: a few bytes may hide all of them."""
        known = [text for text in properties.values() if isinstance(text, str)]
        stored = sum(bool(re.fullmatch(f"{PREFIX}[0-9a-f]{{64}}", text)) for text in known)
        pattern = struct.pack("<I", TEXT_BYTES) + PREFIX.encode() + rb"[0-9a-f]{64}\0"
        return self._source.count(pattern, TEXT_BYTES + 5) > stored

    def _open_data(self, stack: ExitStack) -> None:
        if self._data_path is None:
            self._source.fail("it refers to a data file, which a checkpoint in memory cannot have")
        if self._data_path.is_symlink():  # it could lead to any file of the reader's
            self._source.fail("its data file is a link")
        stream = stack.enter_context(open_regular(self._data_path))
        self._data = Source(stream, "checkpoint", str(self._data_path), limit=None)
        self._external_left = self._data.size

    def _tensors(self, owner: Table, number: int, of: str = "") -> dict[str, Array]:
        tensors: dict[str, Array] = {}
        self._outline.numbers("I", owner.count(number))
        for table in owner.tables(number):
            name = table.string(0)
            if not name or name in tensors:
                self._source.fail(f"a parameter name, '{name}', is empty or occurs twice")
            tensors[name] = self._tensor(name, table, of)
        return tensors

    def _tensor(self, name: str, table: Table, of: str) -> Array:
        code = table.integer(3, "i")
        dtype = DTYPES.get(code)
        if dtype is None:
            what = f"'{name}' has elements of ONNX type {code}, which are not supported."
            raise OdtpackError("checkpoint-dtype", what, where=self._where)
        dims = self._dims(name, table)
        if table.vector(5, 4) is not None:
            self._source.fail(f"'{name}' holds strings")
        raw = table.vector(4, 1) or _NO_BYTES
        offset = table.integer(6, "q", default=-1)
        if self._nominal:
            if dims or raw.length or offset != -1:
                self._source.fail(f"'{name}' has a value, and the state is marked as nominal")
            self._outline.tensor(name, code, (), hashlib.sha256().digest())
            return np.empty(0, dtype)
        flat = self._bytes(name, raw, offset, math.prod(dims) * dtype.itemsize)
        if dtype == np.bool_ and flat.size and flat.max() > 1:
            self._source.fail(f"'{name}' holds bools that are neither 0 nor 1")
        digest = self._hasher.digest(flat.data)
        self._outline.tensor(name, code, dims, digest)
        self._digests.append((f"{name} of {of}" if of else name, table.string(1), digest))
        return flat.view(dtype).reshape(dims) if flat.size else np.empty(dims, dtype)

    def _dims(self, name: str, table: Table) -> tuple[int, ...]:
        dims = table.integers(2, MAX_RANK)
        if min(dims, default=0) < 0 or math.prod([dim or 1 for dim in dims]) > MAX_ELEMENTS:
            self._source.fail(f"'{name}' has the impossible shape {list(dims)}")
        return dims

    def _bytes(self, name: str, raw: Vector, offset: int, nbytes: int) -> Array:
        """Read a tensor's bytes: those of ``raw``, or from ``offset`` on in the data file."""
        if offset == -1:
            source, position = self._source, raw.position
            if raw.length != nbytes:
                source.fail(f"'{name}' has {raw.length} bytes and its shape asks for {nbytes}")
            self._inline_left -= nbytes
        else:
            if self._data is None or raw.length:
                self._source.fail(f"'{name}' refers to a data file that the checkpoint rules out")
            source, position = self._data, offset
            self._external_left -= nbytes
        if min(self._inline_left, self._external_left) < 0:
            self._source.fail("its tensors overlap")
        source.check(position, nbytes)
        if not nbytes:
            return _NOTHING
        flat = allocate(nbytes)  # aligned as a Module needs it, so that no copy is needed
        source.read_into(position, flat.data)
        return flat

    def _optimizer(self, root: Table, trainable: dict[str, Array]) -> OptimizerState | None:
        self._outline.numbers("I", root.count(2))
        groups: list[Table] = []
        for index, group in enumerate(root.tables(2)):
            groups.append(group)
            if group.string(0) != GROUP_NAME.format(index):
                self._source.fail(f"its optimizer groups are not called {GROUP_NAME.format(0)}, "
                                  f"{GROUP_NAME.format(1)}, ...")  # fmt: skip
        if not groups:
            return None
        step, rate = groups[0].integer(1, "q"), groups[0].real(2)
        if step < 0 or not math.isfinite(rate):
            self._source.fail(f"the optimizer stands at step {step} with learning rate {rate}")
        if any((group.integer(1, "q"), group.real(2)) != (step, rate) for group in groups):
            self._source.fail("its optimizer groups stand at different steps or learning rates")
        moments: dict[str, list[Array]] = {}
        members = [self._moments(i, group, trainable, moments) for i, group in enumerate(groups)]
        if moments and (
            moments.keys() != trainable.keys()
            or len({len(of_parameter) for of_parameter in moments.values()}) > 1
        ):
            self._source.fail("the optimizer state does not cover all trainable parameters alike")
        return OptimizerState(step, rate, moments, tuple(members) if len(members) > 1 else ())

    def _moments(
        self, index: int, group: Table, trainable: dict[str, Array],
        moments: dict[str, list[Array]],
    ) -> tuple[str, ...]:  # fmt: skip
        """Add the moments of a group's parameters to ``moments``; return their names."""
        names = []
        self._outline.text(GROUP_NAME.format(index))
        self._outline.numbers("qfI", group.integer(1, "q"), group.real(2), group.count(3))
        for entry in group.tables(3):
            name = entry.string(0)
            self._outline.text(name)
            if name in moments or name not in trainable:
                self._source.fail(
                    f"the optimizer state of '{name}' occurs twice or belongs to no parameter"
                )
            tensors = self._tensors(entry, 1, of=name)
            if list(tensors) != [f"momentum{index}" for index in range(len(tensors))]:
                self._source.fail(f"the moments of '{name}' are called {', '.join(tensors)}")
            shape = trainable[name].shape
            for moment in tensors.values():
                if (
                    moment.dtype != trainable[name].dtype
                    or moment.ndim != len(shape)
                    or any(m not in (1, p) for m, p in zip(moment.shape, shape, strict=True))
                ):
                    self._source.fail(f"a moment of '{name}' has another shape or type than it")
            moments[name] = list(tensors.values())
            names.append(name)
        return tuple(names)

    def _properties(self, bag: Table | None) -> dict[str, PropertyValue]:
        properties: dict[str, PropertyValue] = {}
        for number, read in enumerate(_READERS):
            self._outline.numbers("I", 0 if bag is None else bag.count(number))
            for table in () if bag is None else bag.tables(number):
                name, value = table.string(0), read(table, 1)
                if not name or name in properties:
                    self._source.fail(f"a property name, '{name}', is empty or occurs twice")
                properties[name] = value
                self._outline.property(name, value)
        return properties


_READERS: tuple[Callable[[Table, int], PropertyValue], ...] = (
    lambda table, number: table.integer(number, "q"),
    Table.real,
    Table.string,
)
"""Of a property's value, in the order of the vectors of the property bag."""
