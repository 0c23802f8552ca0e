"""What the digest of a checkpoint costs when it is saved and when it is loaded.

A save ends when file and folder are on the disk (fsync), as it must to survive a power cut. Saves
alternate with and without hashing, so that whatever else the disk does falls on both; the same
without fsync, which ends in the system's memory, shows what of it is the disk's.

    python -m benchmarks.checkpoint_digest --folder /path/on/the/disk [--one-core] [--busy]
    python -m benchmarks.checkpoint_digest --kits

The second is what the training kits hash a second: processor time of programs that load a file
with digests, less that of programs that load one without, as onnxruntime-training writes it.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import numpy as np

from odtpack_runtime.checkpoint import format as checkpoint_format
from odtpack_runtime.checkpoint.format import CheckpointData, OptimizerState, read_checkpoint
from odtpack_runtime.checkpoint.writer import write_checkpoint
from tests.kits import cpp_kit, javascript, kotlin_kit, swift_kit
from tests.runtime.checkpoint_samples import Foreign

MEGABYTES = (0.25, 2.0, 16.0, 64.0, 256.0)


def content(megabytes: float) -> CheckpointData:
    """A third of it parameters, two thirds AdamW's moments, in 24 tensors of each."""
    random = np.random.default_rng(0)
    size = max(int(megabytes * 1e6 / 4 / 3 / 24), 1)
    arrays = {f"layer{i}.weight": random.random(size, np.float32) for i in range(24)}
    moments = {name: [array + 1, array + 2] for name, array in arrays.items()}
    return CheckpointData(arrays, {}, optimizer=OptimizerState(1, 1e-3, moments, kind="adamw"))


@contextmanager
def without_hashing() -> Iterator[None]:
    """No element is hashed, and nothing waits for it."""
    with mock.patch.object(checkpoint_format.Hasher, "start", return_value=hashlib.sha256().digest):
        yield


@contextmanager
def without_disk() -> Iterator[None]:
    """Nothing waits for the disk."""
    with mock.patch.object(os, "fsync"):
        yield


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds, and those of the processor, all threads."""
    wall, processor = time.perf_counter(), time.process_time()
    call()
    return (time.perf_counter() - wall) * 1e3, (time.process_time() - processor) * 1e3


WAYS: dict[str, tuple[Callable[[], AbstractContextManager[None]], ...]] = {
    "in memory": (without_disk, without_hashing),
    "in memory, digest": (without_disk,),
    "saved": (without_hashing,),
    "saved, digest": (),
}


def compare(path: Path, data: CheckpointData, rounds: int) -> dict[str, tuple[float, float]]:
    """Medians of both times, of each way to save, in turns, and of loading."""
    found = defaultdict(list)
    for number in range(rounds):
        for way in list(WAYS)[:: 1 if number % 2 else -1]:
            os.sync()  # the disk has nothing left to write of the one before
            with ExitStack() as stack:
                for each in WAYS[way]:
                    stack.enter_context(each())
                found[way].append(timed(lambda: write_checkpoint(path, data)))
    write_checkpoint(path, data)
    found["loaded"] = [timed(lambda: read_checkpoint(path)) for _ in range(5)]
    medians = {}
    for way in (*WAYS, "loaded"):
        wall, processor = zip(*found[way], strict=True)
        medians[way] = statistics.median(wall), statistics.median(processor)
    return medians


def spin() -> None:
    while True:
        pass


KITS: dict[str, tuple[Callable[[], str | None], Callable[[Path], list[str]]]] = {
    "C++": (cpp_kit.unavailable, lambda path: cpp_kit.command("trust", "load", path)),
    "Kotlin": (
        kotlin_kit.unavailable,
        lambda path: kotlin_kit.command("load", path, options=("-XX:+UseSerialGC",)),
    ),
    "Node.js": (
        javascript.unavailable,
        lambda path: [str(javascript.NODE), str(javascript.SCRIPTS / "trust.mjs"),
                      str(javascript.KIT), "load", str(path)],
    ),
    "Swift": (
        swift_kit.unavailable,
        lambda path: swift_kit.command(swift_kit.built(), "load", path),
    ),
}  # fmt: skip
"""Why a kit cannot be run, and what loads a checkpoint with it."""


def speeds(rounds: int, megabytes: float = 300.0) -> None:
    """Print how many megabytes a second each kit hashes, the median of some rounds."""
    with tempfile.TemporaryDirectory() as folder:
        data = content(megabytes)
        data.optimizer = None
        write_checkpoint(Path(folder) / "checked", data)
        f = Foreign()
        tensors = [f.tensor(name, array.shape, raw=array.tobytes())
                   for name, array in data.trainable.items()]  # fmt: skip
        (Path(folder) / "unchecked").write_bytes(f.finish(tensors))
        hashed = sum(array.nbytes for array in data.trainable.values()) / 1e6
        for kit, (unavailable, command) in KITS.items():
            if reason := unavailable():
                print(f"{kit}: {reason}")
                continue
            found = []
            for _ in range(rounds):
                took = {name: _processor(command(Path(folder) / name), name)
                        for name in ("unchecked", "checked")}  # fmt: skip
                found.append(hashed / (took["checked"] - took["unchecked"]))
            print(f"{kit}: {statistics.median(found):.0f} MB/s", flush=True)


def _processor(command: list[str], expected: str) -> float:
    """Seconds of processor time of a program that says how it loaded a file."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if expected not in done.stdout.replace('"', " ").split():
        raise RuntimeError(f"it said {done.stdout}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--megabytes", type=float, nargs="+", default=MEGABYTES)
    parser.add_argument("--one-core", action="store_true", help="leave the process one core")
    parser.add_argument("--busy", action="store_true", help="keep every core busy besides")
    parser.add_argument("--kits", action="store_true", help="what the training kits hash a second")
    arguments = parser.parse_args()
    if arguments.kits:
        speeds(arguments.rounds)
        return
    others = [multiprocessing.Process(target=spin, daemon=True) for _ in os.sched_getaffinity(0)]
    for other in others if arguments.busy else []:
        other.start()
    if arguments.one_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print("milliseconds, and in brackets those of the processor")
    print(f"{'MB':>6}" + "".join(f"{way:>24}" for way in [*WAYS, "loaded"]) + f"{'cost':>9}")
    for megabytes in arguments.megabytes:
        data = content(megabytes)
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            found = compare(Path(folder) / "ck", data, arguments.rounds)
        cells = "".join(f"{f'{wall:.2f} ({cpu:.2f})':>24}" for wall, cpu in found.values())
        cost = found["saved, digest"][0] / found["saved"][0] - 1
        print(f"{megabytes:>6g}{cells}{cost:>9.1%}", flush=True)


if __name__ == "__main__":
    main()
