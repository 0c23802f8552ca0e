"""Apply an update in place and be killed at the k-th call of the file system, for every k.

``python -m tests.packages.kill_apply PACKAGE UPDATE WORK [no-swap]``. Each attempt is a fork of
this process on a copy of the package in WORK, in which the k-th call of
:mod:`tests.packages.killer` kills, or a write, half of which still happens. After each kill a
line of JSON says what the folder holds, before and after the next attempt to apply the update.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from odtpack_runtime.files import folder_update
from odtpack_runtime.package import apply_update
from tests.packages.killer import Killer


def tear_pieces(killer: Killer) -> None:
    """Have every piece of a new file written in two halves, with a call between them."""
    whole = apply_update._content

    def content(*arguments: Any) -> Iterator[bytes]:
        for piece in whole(*arguments):
            half = len(piece) // 2
            yield piece[:half]
            killer.tick()
            yield piece[half:]

    apply_update._content = content


def held(package: Path) -> dict[str, str]:
    """Digests of what lies in a folder; empty if there is none."""
    if not package.is_dir():
        return {}
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(package.iterdir())
        if path.is_file()
    }


def main(package: Path, update: Path, work: Path, swap: bool) -> None:
    """Kill at every call until an attempt ends well."""
    if not swap:
        folder_update._exchange = lambda first, second: False
    at = 0
    while True:
        at += 1
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(package, work / "package")
        child = os.fork()
        if child == 0:
            killer = Killer(at)
            killer.install()
            tear_pieces(killer)
            apply_update.apply_update(work / "package", update)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status)
        if not killed and os.waitstatus_to_exitcode(status):
            sys.exit(f"attempt {at} failed")
        folder_update.finish_update(work / "package")  # as whoever opens the package does
        left = held(work / "package")
        apply_update.apply_update(work / "package", update)
        after = held(work / "package")
        beside = sorted(path.name for path in work.iterdir())
        print(json.dumps({"killed": killed, "left": left, "after": after, "beside": beside}))
        if not killed:
            return


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), swap="no-swap" not in sys.argv)
