"""Kills the process that it is installed in at the k-th call that changes the file system.

Such a call is opening a file to write, fsync, rename, swap, link, remove, making or removing a
folder, or changing a mode. Writes are no events of Python: whoever installs a killer has them
counted with :meth:`Killer.tick`.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from odtpack_runtime.files import folder_update

_EVENTS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.truncate", "os.link"}


class Killer:
    """Counts calls and kills this process at one of them."""

    def __init__(self, at: int) -> None:
        self._left = at

    def install(self) -> None:
        sys.addaudithook(self._audit)
        for owner, name in ((os, "fsync"), (folder_update, "_exchange")):
            setattr(owner, name, self._counted(getattr(owner, name)))

    def tick(self, before: Callable[[], object] = lambda: None) -> None:
        """Count a call, and if it is the last one do what half of it does, and kill."""
        self._left -= 1
        if self._left == 0:
            before()
            os.kill(os.getpid(), signal.SIGKILL)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT
        if event in _EVENTS or (event == "open" and int(arguments[2] or 0) & writes):
            self.tick()

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            self.tick()
            return call(*arguments)

        return counted
