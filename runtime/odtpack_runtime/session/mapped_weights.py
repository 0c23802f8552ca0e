"""The frozen weights of a network in segments, mapped from their file."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np

from odtpack_runtime.checkpoint.layout import address
from odtpack_runtime.errors import OdtpackError, unreadable
from odtpack_runtime.package.manifest_device import WeightInfo

_MOST_RESIDENT: Final = 16 * 2**20
"""Bytes of weights that a run of a segment may keep in memory until its end."""
_INTERVAL: Final = 0.005  # seconds
Pages = tuple[int, int]
"""Start and length of a part of a file, the start on a page's."""


class MappedWeights:
    """Weights where they lie in a file, read-only.

    Args:
        path: The file; None if there are no weights.
        tensors: What lies where in it.

    Raises:
        OdtpackError: ``segments-invalid`` if the file is too short, ``model-not-readable``.

    Attributes:
        releasing: Makes the context in which pages are given back, in whichever thread does it: a
            meter of memory looks before and after.
    """

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
        """Give pages back to the system after a ``with`` block, in which a run reads them.

        Of many, those that were read are given back during the run as well: the matrix of a large
        vocabulary is read from one end to the other.
        """
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
    return OdtpackError(
        "segments-invalid", f"The package's segments are not valid: {problem}.", where=where
    )
