"""Kill programs that save without a pause, again and again, and look at what is left.

Every save writes its number into a property and into each element of each parameter: a file that is
whole holds one number. Every second program keeps the save before, and every second file has data
beside it.


    python -m tests.kits.kills             # 200 for each kit that is built
    python -m tests.kits.kills --kills 1000 --kit Kotlin Swift
"""

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np

from odtpack.build import build_package
from odtpack_runtime.checkpoint.format import CheckpointData, OptimizerState, read_checkpoint
from odtpack_runtime.checkpoint.writer import write_checkpoint
from tests.kits import cpp_kit, csharp_kit, javascript, kotlin_kit, swift_kit
from tests.kits.cases import CASES

Command = Callable[[Path, int, str], list[str]]
"""What saves the states of equal numbers that follow a file's, until it is killed, and prints each
number: path, bytes above which elements lie in a data file, and ``keep`` or ``replace``."""


PACKAGES = ("cnn", "mobilenet_batch_norm", "transformer", "recommender", "gru", "adafactor",
            "groups", "frozen_int8")  # fmt: skip
"""Whose checkpoints are saved."""


def kill_saves(command, path, external_above, kills, state=None):
    """Kill a kit's program in its saves; count the ``kills``.

    Those that hit a save in the middle, whose temporary file was left, are ``torn``; ``lost`` are
    those after which the file was not whole, or older than a save that was done. The checkpoint is
    written here first: ``state`` in float32, six vectors by default.
    """
    rng = random.Random(5)
    if state is None:
        state = CheckpointData({f"p{i}": np.zeros(30_000, np.float32) for i in range(6)}, {})
    write_checkpoint(path, replace(state, properties={"number": 0}))
    found, last = Counter[str](), 0
    for kill in range(kills):
        words = command(path, external_above, ("keep", "replace")[kill % 2])
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
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
        arrays = [*data.trainable.values(), *data.frozen.values()]
        moments = chain.from_iterable(data.optimizer.moments.values() if data.optimizer else ())
        whole = (data.optimizer is None) == (state.optimizer is None)
        whole &= all((a == number).all() for a in arrays) and not any(m.any() for m in moments)
        found["kills"] += 1
        found["lost"] += not whole or number < done[-1]
        found["torn"] += any(path.parent.glob(f".{path.name}.*.tmp"))
        last = number
    return found


def loses_nothing(command: Command, folder: Path, external_above: int) -> None:
    """Check that 100 kills lose nothing; above the limit tensors lie in a file of their own."""
    found = kill_saves(command, folder / "state", external_above, 100)
    assert (found["kills"], found["lost"]) == (100, 0)
    if external_above > 1000:  # the tensors' own file has no temporary
        assert found["torn"] > 5  # it was the saves that were hit
    # The next save removes what a killed one left, and leaves no more than one of its own.
    assert len(list(folder.glob(".*.tmp"))) <= 1


def _wait_for_temporary(path: Path) -> None:
    """Until a save is in the middle, or a second has passed."""
    until = time.monotonic() + 1
    while time.monotonic() < until and not any(path.parent.glob(f".{path.name}.*.tmp")):
        pass


KITS: dict[str, tuple[Callable[[], str | None], Command]] = {
    name: (kit.unavailable, kit.saving)
    for name, kit in (("C++", cpp_kit), ("Kotlin", kotlin_kit), ("Node.js", javascript),
                      ("Swift", swift_kit), ("C#", csharp_kit))
}  # fmt: skip
"""Why a kit cannot be run, and its program."""


def states(folder: Path) -> dict[str, CheckpointData]:
    """What the checkpoints of eight packages hold: their tensors in float32, and moments."""
    found = {}
    for name in PACKAGES:
        case = CASES[name]
        build_package(case.model(), folder / name, **{"loss": "cross_entropy", **case.build})
        data = read_checkpoint(folder / name / "checkpoint")
        trainable, frozen = (
            {key: array for key, array in own.items() if array.dtype == np.float32}
            for own in (data.trainable, data.frozen)
        )
        moments = {key: [np.zeros_like(array)] * 2 for key, array in trainable.items()}
        found[name] = CheckpointData(trainable, frozen, optimizer=OptimizerState(1, 0.5, moments))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="for each kit")
    parser.add_argument("--kit", nargs="+", choices=KITS, default=list(KITS))
    arguments = parser.parse_args()
    lost = 0
    with tempfile.TemporaryDirectory(prefix="odtpack-kills-") as scratch:
        files = states(Path(scratch) / "packages")
        print(f"{'kit':8}  {'kills':>5}  {'in a save':>9}  {'lost':>4}", flush=True)
        for kit in arguments.kit:
            unavailable, command = KITS[kit]
            if reason := unavailable():
                print(f"{kit:8}  {reason}")
                continue
            total = Counter[str]()
            for index, (name, state) in enumerate(files.items()):
                path, above = Path(scratch) / f"{kit}-{name}", 2**30 if index % 2 == 0 else 64
                count = arguments.kills // len(files) + (index < arguments.kills % len(files))
                total.update(kill_saves(command, path, above, count, state))
            torn, lost_here = total["torn"], total["lost"]
            print(f"{kit:8}  {total['kills']:>5}  {torn:>9}  {lost_here:>4}", flush=True)
            lost += lost_here
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
