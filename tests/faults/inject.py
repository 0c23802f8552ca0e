"""Faults by preloaded library: which system call of a process goes wrong, and how.

:func:`compile_library` makes the library with the system's C compiler. A process that was started
with :func:`environment` has it in front of the C library, and so have its children; a
:class:`Control` in any of them says what is to go wrong.
"""

import ctypes
import errno
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("inject.c")
LARGE = 64 * 1024
"""Bytes from which on an allocation counts: Python alone makes thousands of smaller ones."""

READ, WRITE, OPEN, RENAME, SYNC, MAP, REMOVE, MAKE, ALLOCATE, CHANGE, CLOCK, LINK = (
    2**bit for bit in range(12)
)
FILES = READ | WRITE | OPEN | RENAME | SYNC | MAP | REMOVE | MAKE | CHANGE | LINK
CHANGES = WRITE | OPEN | RENAME | SYNC | REMOVE | MAKE | CHANGE | LINK


@dataclass(frozen=True)
class Fault:
    """What goes wrong.

    Attributes:
        name: For tables.
        kinds: Calls that count.
        mode: 1 fails, 2 is a kill before the call, 3 does half of it, 4 does half and is
            killed, 5 is late.
        error: ``errno`` of a call that fails.
        sticky: All calls from the n-th on fail, as on a full disk, and not only that one.
        harmless: The action has to end as if nothing had been.
    """

    name: str
    kinds: int
    mode: int = 1
    error: int = 0
    sticky: bool = False
    harmless: bool = False


FAULTS = (
    Fault("killed", CHANGES, 2),
    Fault("torn write, killed", WRITE, 4),
    Fault("EIO", FILES, 1, errno.EIO),
    Fault("disk full (ENOSPC)", WRITE | SYNC | MAKE, 1, errno.ENOSPC, sticky=True),
    Fault("read-only (EROFS)", CHANGES & ~SYNC & ~OPEN, 1, errno.EROFS, sticky=True),
    Fault("EACCES", OPEN | RENAME | REMOVE | MAKE | CHANGE | LINK, 1, errno.EACCES),
    Fault("EXDEV", RENAME | LINK, 1, errno.EXDEV),
    Fault("no hard links (EPERM)", LINK, 1, errno.EPERM, sticky=True),
    Fault("EINTR", READ | WRITE | OPEN | SYNC, 1, errno.EINTR, harmless=True),
    Fault("ENOMEM", ALLOCATE | MAP, 1, errno.ENOMEM),
    Fault("short read or write", READ | WRITE, 3, harmless=True),
    Fault("late", FILES, 5, harmless=True),
    Fault("clock back", CLOCK, 1, sticky=True, harmless=True),
)


class _Block(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in (
            "armed", "kinds", "at", "mode", "error", "sticky", "counter", "hits", "large"
        )),
        ("root", ctypes.c_char * 1024),
    ]  # fmt: skip


class Control:
    """The block of memory that all processes share.

    Args:
        path: Its file, :func:`environment`'s; made if it does not exist.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(ctypes.sizeof(_Block)))
        with path.open("r+b") as stream:
            self._memory = mmap.mmap(stream.fileno(), ctypes.sizeof(_Block))
        self.block = _Block.from_buffer(self._memory)

    def plan(self, root: Path, fault: Fault, at: int) -> None:
        """Say what the n-th call below a folder is to do; 0 only counts. Arms nothing yet."""
        block = self.block
        block.armed = 0
        block.kinds, block.at, block.mode = fault.kinds, at, fault.mode
        block.error, block.sticky, block.large = fault.error, fault.sticky, LARGE
        block.counter = block.hits = 0
        block.root = os.fsencode(root)


def compile_library(folder: Path) -> Path:
    """Compile the library; return its path.

    Raises:
        FileNotFoundError: There is no C compiler.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or os.uname().sysname != "Linux":
        raise FileNotFoundError("no C compiler")
    target = folder / "libinject.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-w", "-o", target, SOURCE, "-ldl"]
    subprocess.run(command, check=True)
    return target


def environment(library: Path, control: Path) -> dict[str, str]:
    """The environment of a process in which faults can be made."""
    return {**os.environ, "LD_PRELOAD": str(library), "ODTPACK_FAULTS": str(control)}


def run_faults(
    library: Path, action: str, folder: Path, every: int = 1, faults: Iterable[str] = ()
) -> Iterator[dict[str, Any]]:
    """Make the faults of one action in a process of its own; yield what came of each.

    Raises:
        RuntimeError: The process ended otherwise than it should; with what it wrote.
    """
    control = folder / "control"
    Control(control)
    chosen = [word for fault in faults for word in ("--fault", fault)]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.faults.run", action, str(folder / "faults")),
                *("--every", str(every), *chosen),
            ],
            env=environment(library, control), stdout=subprocess.PIPE, stderr=errors, text=True,
        ) as process,
    ):  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            yield json.loads(line)
        process.wait()
        errors.seek(0)
        problem = errors.read()
    if process.returncode:
        raise RuntimeError(f"{action}: exit {process.returncode}\n{problem[-2000:]}")
