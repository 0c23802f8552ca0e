"""Kill programs that save without a pause, again and again, and look at what is left.

Every save writes its number into a property and into each element of each parameter: a file that is
whole holds one number. Every second program keeps the save before.

    python -m tests.kits.kills             # 200 for each kit that is built, half with a data file
    python -m tests.kits.kills --kills 20
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from odtpack_runtime.checkpoint.format import CheckpointData, read_checkpoint
from odtpack_runtime.checkpoint.writer import write_checkpoint
from tests.kits import cpp_kit, javascript, kotlin_kit, swift_kit

Command = Callable[[Path, int, str], list[str]]
"""What saves the states of equal numbers that follow a file's, until it is killed, and prints each
number: path, bytes above which elements lie in a data file, and ``keep`` or ``replace``."""


@dataclass
class Kills:
    """What became of the saves.

    Attributes:
        kills: Programs that were killed.
        torn: Kills that hit a save in the middle: its temporary file was left.
        lost: Kills after which the file was not whole, or older than a save that was done.
    """

    kills: int = 0
    torn: int = 0
    lost: int = 0


def kill_saves(command: Command, path: Path, external_above: int, kills: int) -> Kills:
    """Kill a kit's program in its saves.

    Args:
        command: Starts the program.
        path: The checkpoint; written here first.
        external_above: Bytes of elements above which they lie in a data file.
        kills: How often.
    """
    rng = random.Random(5)
    arrays = {f"p{i}": np.zeros(30_000, np.float32) for i in range(6)}
    write_checkpoint(path, CheckpointData(arrays, {}, properties={"number": 0}))
    found, last = Kills(), 0
    for kill in range(kills):
        words = command(path, external_above, ("keep", "replace")[kill % 2])
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            first = process.stdout.readline()
            time.sleep(rng.uniform(0, 0.03))
            if kill % 4 > 1:  # of a program that hashes for longer than it writes few are hit else
                _wait_for_temporary(path)
            process.send_signal(signal.SIGKILL)
            done = [int(line) for line in (first + process.stdout.read()).split("\n")[:-1]]
        assert done[:1] == [last + 1], done  # the program went on from what was left
        data = read_checkpoint(path)
        number = data.properties["number"]
        assert isinstance(number, int)
        whole = all((array == number).all() for array in data.trainable.values())
        found.kills += 1
        found.lost += not whole or number < done[-1]
        found.torn += any(path.parent.glob(f".{path.name}.*.tmp"))
        last = number
    return found


def _wait_for_temporary(path: Path) -> None:
    """Until a save is in the middle, or a second has passed."""
    until = time.monotonic() + 1
    while time.monotonic() < until and not any(path.parent.glob(f".{path.name}.*.tmp")):
        pass


KITS: dict[str, tuple[Callable[[], str | None], Command]] = {
    "C++": (cpp_kit.unavailable, lambda path, above, before: [
        str(cpp_kit.built("saves")), str(path), str(above), before]),
    "Kotlin": (kotlin_kit.unavailable, lambda path, above, before: kotlin_kit.command(
        "saves", path, above, before)),
    "Node.js": (javascript.unavailable, lambda path, above, before: [
        str(javascript.NODE), str(javascript.SCRIPTS / "saves.mjs"), str(javascript.KIT),
        str(path), str(above), before]),
    "Swift": (swift_kit.unavailable, lambda path, above, before: swift_kit.command(
        swift_kit.built(), "saves", path, above, before)),
}  # fmt: skip
"""Why a kit cannot be run, and its program."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="for each kit")
    arguments = parser.parse_args()
    lost = 0
    print(f"{'kit':8}  {'kills':>5}  {'in a save':>9}  {'lost':>4}")
    for name, (unavailable, command) in KITS.items():
        if reason := unavailable():
            print(f"{name:8}  {reason}")
            continue
        total = Kills()
        with tempfile.TemporaryDirectory(prefix="odtpack-kills-") as scratch:
            for above in (2**30, 1000):
                path = Path(scratch) / f"state-{above}"
                found = kill_saves(command, path, above, arguments.kills // 2)
                total = Kills(*map(sum, zip(_counts(total), _counts(found), strict=True)))
        print(f"{name:8}  {total.kills:>5}  {total.torn:>9}  {total.lost:>4}", flush=True)
        lost += total.lost
    return 1 if lost else 0


def _counts(kills: Kills) -> tuple[int, int, int]:
    return kills.kills, kills.torn, kills.lost


if __name__ == "__main__":
    sys.exit(main())
