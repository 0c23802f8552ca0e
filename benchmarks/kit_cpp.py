"""Step time of the C++ kit beside Python's, in turns, as processor time on one thread.

``python -m benchmarks.kit_cpp [--rounds 7]`` prints a line for each network: milliseconds of a
step, optimizer included, in Python and in C++, and the median of the ratios of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from odtpack.build import build_package
from odtpack_runtime import CheckpointState, Module, Optimizer
from odtpack_runtime.session.options import default_session_options
from tests import zoo
from tests.kits import cpp_kit

NETWORKS: dict[str, tuple[Any, int, int]] = {
    "mlp": (lambda: zoo.mlp((784, 256, 10)), 32, 300),
    "cnn": (lambda: zoo.cnn(size=28, width=(16, 32), classes=10), 32, 40),
    "transformer": (zoo.transformer_encoder, 4, 20),
}


def batch_of(package: Path, samples: int) -> dict[str, np.ndarray[Any, Any]]:
    """A batch of noise; classes and words are all 0 to 1."""
    rng = np.random.default_rng(0)
    batch = {}
    for entry in json.loads((package / "manifest.json").read_text())["inputs"]:
        shape = [size if isinstance(size, int) else samples for size in entry["shape"]]
        integer = "int" in entry["dtype"]
        array = rng.integers(0, 2, shape) if integer else rng.standard_normal(shape)
        batch[entry["name"]] = array.astype(entry["dtype"])
    return batch


class InPython:
    """The same steps in this process."""

    def __init__(self, package: Path, batch: dict[str, np.ndarray[Any, Any]]) -> None:
        model = package / "training_model.onnx"
        options = default_session_options(model, threads=1)
        state = CheckpointState.load_checkpoint(package / "checkpoint")
        self._module = Module(model, state, session_options=options)
        self._optimizer = Optimizer(package / "optimizer_model.onnx", self._module)
        self._batch = list(batch.values())

    def seconds(self, count: int) -> float:
        """Processor seconds of a step."""
        start = time.process_time()
        for _ in range(count):
            self._module(*self._batch)
            self._optimizer.step()
            self._module.lazy_reset_grad()
        return (time.process_time() - start) / count


def child(package: str, samples: str, count: str) -> None:
    """Print the seconds of a step in Python, in a process of its own, as the kit has one."""
    work = InPython(Path(package), batch_of(Path(package), int(samples)))
    print(work.seconds(int(count)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    for name, (model, samples, count) in NETWORKS.items():
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            build_package(model(), folder / "package", loss="cross_entropy")
            batch = cpp_kit.save_batch(folder, batch_of(folder / "package", samples))
            job = {"package": "package", "steps": [batch], "count": count, "threads": 1}
            python, kit = [], []
            for _ in range(rounds):
                command = [sys.executable, "-m", "benchmarks.kit_cpp", "child",
                           str(folder / "package"), str(samples), str(count)]  # fmt: skip
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                python.append(float(done.stdout))
                kit.append(cpp_kit.measure(job, folder)["processor_seconds"] / count)
        ratio = statistics.median(k / p for k, p in zip(kit, python, strict=True))
        times = f"{statistics.median(python) * 1e3:.3f} {statistics.median(kit) * 1e3:.3f}"
        print(f"{name}: Python and C++ {times} ms, ratio {ratio:.3f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(*sys.argv[2:])
    else:
        main()
