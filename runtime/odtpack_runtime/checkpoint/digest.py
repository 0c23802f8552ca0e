"""The digest of a checkpoint: whether it still holds what was saved, and if not, what differs.

Each tensor carries the SHA-256 of its elements in its ``doc_string``, and the root table that of
the whole in its field ``digest``, both as ``sha256:`` and 64 hex digits. ONNX Runtime's own
training passes over them, and writes none: a file without either was not written here, and is
not checked. The whole is a SHA-256 over an outline, all numbers little-endian, text as its
number of bytes (uint32) and UTF-8, lists as their length (uint32) and their entries, in the
order of the file::

    outline   "odtpack.checkpoint.1", is_nominal_state uint8, [tensor] trainable, [tensor] frozen,
              [group], [int property], [float property], [text property]
    tensor    name, data_type int32, [int64] dims, 32 bytes SHA-256 of the elements
    group     name, step int64, initial_learning_rate float32, [state]
    state     param_name, [tensor] momentums
    property  name, value: int64, float32 or text

Where a file leaves out a field its default counts, and a negative zero counts as zero, because
a writer may take it for the default.

It protects against damage, not against forgery: a program that can change a file can change its
digest.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

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
    """What the digest of a whole checkpoint is made from, piece by piece.

    Pieces are hashed at once up to the first one that is waited for.
    """

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
        self.text(name)
        self.numbers(f"iI{len(dims)}q", code, len(dims), *dims)
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


class Check:
    """Compares what a file holds with the digests that it carries.

    Args:
        nominal: Whether its tensors have names and types only.
    """

    def __init__(self, *, nominal: bool) -> None:
        self.outline = Outline(nominal=nominal)
        self._tensors: list[tuple[str, str, Digest]] = []

    def tensor(self, title: str, said: str, digest: Digest) -> None:
        """Add a tensor's name for messages, its doc_string, and the digest of its elements."""
        self._tensors.append((title, said, digest))

    def difference(self, said: str) -> str | None:
        """Return what differs from what was saved; empty if nothing, None without digests.

        Args:
            said: The file's digest of the whole.
        """
        marked = any(text.startswith(PREFIX) for _, text, _ in self._tensors)
        if not said and not marked:
            return None
        if said == digest_text(self.outline.digest()):
            return ""
        odd = [f"'{name}'" for name, text, get in self._tensors if text != digest_text(_bytes(get))]
        if not odd or not marked:
            return "its names, shapes, optimizer state or properties"
        more = f" and {len(odd) - _NAMED} more" if len(odd) > _NAMED else ""
        return ", ".join(odd[:_NAMED]) + more


def digest_text(digest: bytes) -> str:
    """Return a digest as a file holds it."""
    return PREFIX + digest.hex()
