"""Stop a training at a chosen point, so that its parent can kill it exactly there.

The child stands still between two steps, or inside the write of a checkpoint whose
temporary file holds a part of it, notifies its parent, and waits for SIGKILL. Nothing is
cleaned up: no exception is raised and no ``finally`` runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.atomic import atomic_write

OpenFile = Callable[[Path], AbstractContextManager[BinaryIO]]

PATIENCE_SECONDS = 120.0  # How long a child waits to be killed before it gives up


def wait_to_be_killed(send: Callable[..., None], *, step: int, written: int | None) -> NoReturn:
    """Report to the parent where the training stands, and wait."""
    send("paused", step=step, written=written)
    time.sleep(PATIENCE_SECONDS)
    raise OdtpackError("not-killed", "The training stopped to be killed, and was not.")


def stopping_write(after_bytes: int, stop: Callable[[int], NoReturn]) -> OpenFile:
    """Return what opens a file whose write stops once so many bytes are on their way to disk."""
    # The temporary file then holds exactly so many bytes. A file that is shorter is written whole,
    # and the write stops before it takes its name.
    # `stop`: Called with the number of bytes written; does not return.
    # Returns: The `open_file` of write_checkpoint.

    @contextmanager
    def torn(path: Path) -> Iterator[BinaryIO]:
        with atomic_write(path) as stream:
            yield cast(BinaryIO, _Torn(stream, after_bytes, stop))
            stream.flush()
            stop(stream.tell())

    return torn


class _Torn:
    """A file whose write stops after a number of bytes."""

    def __init__(self, stream: Any, after_bytes: int, stop: Callable[[int], NoReturn]) -> None:
        self._stream, self._left, self._stop = stream, after_bytes, stop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, data: Any) -> int:
        part = memoryview(data).cast("B")
        if len(part) >= self._left:
            self._stream.write(part[: self._left])
            self._stream.flush()
            self._stop(self._stream.tell())
        self._left -= len(part)
        return int(self._stream.write(part))
