"""One call at a time: a second one is refused, it does not wait."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from odtpack_runtime.errors import OdtpackError


class OneCall:
    """Held by whatever computes with a state or changes it, as ``with state.lock``."""

    # The thread that holds it may enter again. Another one gets an error at once: a call that
    # waited would see a state that its caller did not expect.

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        """Begin a call."""
        if not self._lock.acquire(blocking=False):
            raise OdtpackError(
                "busy",
                "A call of this session is still running.",
                hint="wait for it, or keep one thread for all calls of a session",
            )

    def __exit__(self, *_: object) -> None:
        """End it."""
        self._lock.release()

    @contextlib.contextmanager
    def after_all(self) -> Iterator[None]:
        """Wait for the running call, to close what it uses."""
        with self._lock:
            yield
