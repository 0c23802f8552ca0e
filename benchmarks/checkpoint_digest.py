"""What the digest of a checkpoint costs when it is saved and when it is loaded.

Saves alternate with and without hashing, so that whatever else the disk does falls on both.

    python -m benchmarks.checkpoint_digest --folder /path/on/the/disk
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np

from odtpack_runtime.checkpoint import digest
from odtpack_runtime.checkpoint.format import CheckpointData, OptimizerState, read_checkpoint
from odtpack_runtime.checkpoint.writer import write_checkpoint

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
    with mock.patch.object(digest.Hasher, "start", return_value=hashlib.sha256().digest):
        yield


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compare(path: Path, data: CheckpointData, rounds: int) -> tuple[float, float, float]:
    """Medians in seconds: saved without hashing, saved, loaded."""
    plain, hashed = [], []
    for _ in range(rounds):
        with without_hashing():
            plain.append(seconds(lambda: write_checkpoint(path, data)))
        hashed.append(seconds(lambda: write_checkpoint(path, data)))
    loads = [seconds(lambda: read_checkpoint(path)) for _ in range(5)]
    return statistics.median(plain), statistics.median(hashed), statistics.median(loads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--one-core", action="store_true", help="leave the process one core")
    arguments = parser.parse_args()
    if arguments.one_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print(f"{'MB':>8}{'plain ms':>12}{'digest ms':>12}{'cost':>8}{'load ms':>10}")
    for megabytes in MEGABYTES:
        data = content(megabytes)
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            plain, hashed, load = compare(Path(folder) / "ck", data, arguments.rounds)
        print(
            f"{megabytes:>8g}{plain * 1e3:>12.2f}{hashed * 1e3:>12.2f}{hashed / plain - 1:>8.1%}"
            f"{load * 1e3:>10.2f}"
        )


if __name__ == "__main__":
    main()
