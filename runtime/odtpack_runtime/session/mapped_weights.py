"""Weights and activations in mapped files, and memory given back to the system."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np

from odtpack_runtime.checkpoint.parameters import Array, address
from odtpack_runtime.errors import OdtpackError, unreadable
from odtpack_runtime.package.records import WeightInfo

# Memory that was freed, and that the C allocator keeps for itself.


def give_back_freed_memory() -> None:
    """Let the C allocator return freed memory to the system, where it can."""
    # Opening a session frees much of what it allocated, in pieces that glibc keeps: of a ViT's
    # package 21 MB stay resident without this. The kits for C++ and Swift do the same.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


# A file in which values between segments wait for the way back, in place of memory.


class ActivationFile:
    """Arrays in a temporary file, which is gone with the process, however that ends."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._places: dict[str, int] = {}
        self._end = 0
        try:
            self._stream = tempfile.TemporaryFile(buffering=0, dir=self._folder)  # noqa: SIM115
        except OSError as error:
            raise self._failed(error) from error
        weakref.finalize(self, self._stream.close)

    def clear(self) -> None:
        """Forget all arrays; the next ones take their place."""
        self._places.clear()
        self._end = 0

    def write(self, name: str, array: Array) -> None:
        """Write a contiguous array."""
        self._places[name] = self._end
        self._stream.seek(self._end)
        rest = array.reshape(-1).view(np.uint8).data
        try:
            while rest:
                rest = rest[self._stream.write(rest) :]
        except OSError as error:
            raise self._failed(error) from error
        self._end += array.nbytes

    def read(self, name: str, array: Array) -> None:
        """Read what was written by that name into an array of its size."""
        self._stream.seek(self._places[name])
        rest = array.reshape(-1).view(np.uint8).data
        try:
            while rest:
                count = self._stream.readinto(rest)
                if not count:
                    raise OSError(None, "it is shorter than what was written")
                rest = rest[count:]
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> OdtpackError:
        return OdtpackError(
            "file-not-written",
            f"A file for activations in {self._folder} could not be used: "
            f"{error.strerror or error}.",
            where=str(self._folder),
            hint="choose a folder that exists and has space, or keep them in memory",
        )


# The frozen weights of a network in segments, mapped from their file.

_MOST_RESIDENT: Final = 16 * 2**20
"""Bytes of weights that a run of a segment may keep in memory until its end."""
_INTERVAL: Final = 0.005  # seconds
Pages = tuple[int, int]
"""Start and length of a part of a file, the start on a page's."""


class MappedWeights:
    """Weights where they lie in a file, read-only."""

    # makes the context in which pages are given back, in whichever thread does it: a meter of
    # memory looks before and after
    releasing: ClassVar[Callable[[], AbstractContextManager[None]]] = nullcontext

    def __init__(self, path: Path | None, tensors: Sequence[WeightInfo]) -> None:
        self._tensors = {each.name: each for each in tensors}
        self._map: mmap.mmap | None = None
        self._start = 0
        if path is None or not tensors:
            return
        try:
            with path.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                if size:
                    self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            hint = "check its permissions, and the disk"
            raise unreadable("model-not-readable", path, error, hint) from error
        last = tensors[-1]
        if last.offset + last.nbytes > size:
            raise segments_invalid(
                f"the weight '{last.name}' ends after the file of weights", str(path)
            )
        if self._map is not None:
            self._start = address(np.frombuffer(self._map, np.uint8))

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> WeightInfo:
        return self._tensors[name]

    def bind(self, binding: Any, name: str, weight: str) -> None:
        """Let a model's input ``name`` be a weight."""
        info = self._tensors[weight]
        kind = np.dtype(info.dtype).type
        binding.bind_input(name, "cpu", 0, kind, list(info.shape), self._start + info.offset)

    def range_of(self, names: Sequence[str]) -> Pages | None:
        """Return the pages of the file that weights take, with what lies between them."""
        places = [self._tensors[name] for name in names]
        if not places or self._map is None:
            return None
        start = min(each.offset for each in places) // mmap.PAGESIZE * mmap.PAGESIZE
        end = max(each.offset + each.nbytes for each in places)
        return start, end - start

    @contextmanager
    def in_use(self, pages: Pages | None) -> Iterator[None]:
        """Give pages back to the system after a ``with`` block, in which a run reads them."""
        # Of many, those that were read are given back during the run as well: the matrix of a large
        # vocabulary is read from one end to the other.
        if pages is None or pages[1] <= _MOST_RESIDENT:
            yield
            self._release(pages)
            return
        done = threading.Event()

        def release() -> None:
            while not done.wait(_INTERVAL):
                self._release(pages)

        thread = threading.Thread(target=release, name="odtpack-release-pages", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self._release(pages)

    def _release(self, pages: Pages | None) -> None:
        """Let the system drop pages; the next read gets them from the file again."""
        advice = getattr(mmap, "MADV_DONTNEED", None)
        if self._map is not None and pages is not None and advice is not None:
            with MappedWeights.releasing():
                self._map.madvise(advice, *pages)


def segments_invalid(problem: str, where: str) -> OdtpackError:
    """Return the error for segments that contradict themselves or their files."""
    what = f"The package's segments are not valid: {problem}."
    return OdtpackError("segments-invalid", what, where=where)
