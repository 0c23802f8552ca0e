"""Step time of the Kotlin kit on the JVM beside Python's, in turns, on one thread.

``python -m benchmarks.kit_kotlin [--rounds 5]`` prints a line for each network: milliseconds of
processor time of a step, optimizer included, in Python and in Kotlin, and the median of the ratios
of the rounds. Both run the same version of ONNX Runtime; the first half of the steps warms up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from odtpack.build import build_package
from tests import zoo
from tests.kits import kotlin_kit

NETWORKS: dict[str, tuple[Any, int, int]] = {
    "mlp": (lambda: zoo.mlp((784, 256, 10)), 32, 4000),
    "cnn": (lambda: zoo.cnn(size=28, width=(16, 32), classes=10), 32, 100),
    "transformer": (zoo.transformer_encoder, 4, 30),
}


def batch_of(package: Path, samples: int) -> dict[str, np.ndarray[Any, Any]]:
    """A batch of noise; classes and words are 0 or 1."""
    rng = np.random.default_rng(0)
    batch = {}
    for entry in json.loads((package / "manifest.json").read_text())["inputs"]:
        shape = [size if isinstance(size, int) else samples for size in entry["shape"]]
        integer = "int" in entry["dtype"]
        array = rng.integers(0, 2, shape) if integer else rng.standard_normal(shape)
        batch[entry["name"]] = array.astype(entry["dtype"])
    return batch


def milliseconds(times: list[float]) -> float:
    """The mean of the steps that are warm."""
    return statistics.fmean(times[len(times) // 2 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    for name, (model, samples, steps) in NETWORKS.items():
        with tempfile.TemporaryDirectory() as scratch:
            package = Path(scratch) / "package"
            build_package(model(), package, loss="cross_entropy")
            batch = kotlin_kit.save_batch(Path(scratch), **batch_of(package, samples))
            task = json.dumps({"package": str(package), "data": batch, "steps": steps})
            python, kit = [], []
            for _ in range(rounds):
                found = json.loads(kotlin_kit.python("tests.kits.python_training", task))
                python.append(milliseconds(found["times"]))
                found = json.loads(kotlin_kit.run("train", task, options=("-XX:+UseSerialGC",)))
                kit.append(milliseconds(found["times"]))
        ratio = statistics.median(k / p for k, p in zip(kit, python, strict=True))
        times = f"{statistics.median(python):.3f} {statistics.median(kit):.3f}"
        print(f"{name}: Python and Kotlin {times} ms, ratio {ratio:.3f}", flush=True)


if __name__ == "__main__":
    main()
