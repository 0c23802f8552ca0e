"""A file in which values between segments wait for the way back, in place of memory."""

from __future__ import annotations

import os
import tempfile
import weakref
from pathlib import Path

import numpy as np

from odtpack_runtime.checkpoint.layout import Array
from odtpack_runtime.errors import OdtpackError


class ActivationFile:
    """Arrays in a temporary file, which is gone with the process, however that ends.

    Args:
        folder: Where the file is made; it must exist.

    Raises:
        OdtpackError: ``file-not-written``.
    """

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
        """Write a contiguous array.

        Raises:
            OdtpackError: ``file-not-written``, for example because the disk is full.
        """
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
        """Read what was written by that name into an array of its size.

        Raises:
            OdtpackError: ``file-not-written`` if it cannot be read back.
        """
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
