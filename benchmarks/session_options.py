"""Step time and peak memory of our packages under ONNX Runtime's session options.

    python -m benchmarks.session_options --workload transformer --rounds 3

Each setting in a fresh process, on one thread, the settings in turns.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from pathlib import Path

import onnx
from rich.console import Console
from rich.table import Table

from benchmarks import processes
from benchmarks.compare_peer import Sample
from benchmarks.workloads import OPTIMIZERS, WORKLOADS
from tests import packaging_tools

LEVELS = ("ENABLE_BASIC", "ENABLE_EXTENDED", "ENABLE_ALL")
_MEBIBYTE = 2**20


def main() -> None:
    """Measure what the command line asks for; print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.session_options")
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS))
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--malloc", choices=list(processes.MALLOC), default="default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    settings = [
        {"level": level, "arena": arena, "pattern": pattern}
        for level, (arena, pattern) in itertools.product(
            LEVELS, ((True, True), (True, False), (False, True), (False, False))
        )
    ]
    result = Table(title=f"{given.optimizer}, malloc {given.malloc}, one thread")
    for heading in ("workload", "level", "arena", "pattern"):
        result.add_column(heading)
    for heading in ("step ms (lowest)", "peak MB (lowest-highest)"):
        result.add_column(heading, justify="right")
    for name in given.workload or WORKLOADS:
        with tempfile.TemporaryDirectory() as scratch:
            model, data = WORKLOADS[name].write(Path(scratch))
            folder = packaging_tools.generate(
                onnx.load(model),
                Path(scratch) / "package",
                packaging_tools.OPTIMIZERS[given.optimizer],
            )
            samples: list[list[Sample]] = [[] for _ in settings]
            for number in range(given.rounds):
                for setting, found in zip(settings, samples, strict=True):
                    answer = processes.measure(
                        "train",
                        malloc=given.malloc,
                        folder=folder,
                        inputs=data,
                        steps=given.steps,
                        warm_up=5,
                        options=setting,
                    )
                    found.append(Sample.of(answer))
                print(f"{name}: round {number + 1} of {given.rounds}", file=sys.stderr, flush=True)
        for setting, found in zip(settings, samples, strict=True):
            times = [sample.step_ms for sample in found]
            peaks = [sample.peak_bytes / _MEBIBYTE for sample in found]
            result.add_row(
                name,
                setting["level"].removeprefix("ENABLE_"),
                "on" if setting["arena"] else "off",
                "on" if setting["pattern"] else "off",
                f"{statistics.median(times):.2f} ({min(times):.2f})",
                f"{statistics.median(peaks):.0f} ({min(peaks):.0f}-{max(peaks):.0f})",
            )
        result.add_section()
    Console(width=110).print(result)


if __name__ == "__main__":
    main()
