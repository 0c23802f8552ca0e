"""How well the memory plan predicts the peak of a real training, and how well a limit is judged.

    python -m benchmarks.memory_prediction [--no-limits]

For each of the zoo's networks: the prediction before anything ran, the peak measured in a child
process, and whether trainings under limits around that peak end as the prediction says.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from odtpack.artifacts import OptimType
from odtpack_runtime.package.package import Package
from odtpack_simulator.device.app import memory_fit
from odtpack_simulator.memory.memory_plan import plan_memory
from odtpack_simulator.replay.job import Job
from odtpack_simulator.replay.replay import run_training_child
from scripts.harness import head, options, row, scratch
from tests import zoo
from tests.packaging_tools import batch, generate
from tests.simulator.packages import job_on

OPTIMIZERS = (OptimType.SGD, OptimType.AdamW)
LIMITS = (0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25)
STEPS = 4  # then a fifth of the samples is one batch for the evaluation

WORKLOADS: dict[str, tuple[Callable[[], onnx.ModelProto], int]] = {
    "MLP 784-500-10, batch 64": (zoo.mlp, 64),
    "CNN 1x28x28, batch 32": (lambda: zoo.cnn(hidden=128), 32),
    "MobileNetV2 96x96, batch 8": (zoo.mobilenet_v2, 8),
    "MobileNetV2 with batch norm": (lambda: zoo.mobilenet_v2(batch_norm="train"), 8),
    "transformer d256 L4 T128, batch 8": (zoo.transformer_encoder, 8),
}


def make_job(model: onnx.ModelProto, size: int, optimizer: OptimType, folder: Path) -> Job:
    """A package, and a training of three full batches on random data."""
    package = Package.open(generate(model, folder / "package", optimizer))
    samples = size * STEPS * 5 // 4
    return job_of(package, model, samples, folder, batch_size=size, epochs=1, learning_rate=1e-3)


def job_of(
    package: Package, model: onnx.ModelProto, samples: int, folder: Path, **settings: Any
) -> Job:
    """A training of a package on random data, which are written to a folder."""
    data = dict(zip(("input", "labels"), batch(model, samples), strict=True))
    return job_on(package, folder, data, **{"seed": 0} | settings)[0]


def shapes(job: Job) -> dict[str, tuple[int, ...]]:
    """Shape of one batch of each input."""
    size = job.schedule.batch_size
    return {name: (size, *np.load(file, "r").shape[1:]) for name, file in job.data.items()}


def main() -> None:
    limits = () if options(__doc__, no_limits=False).no_limits else LIMITS
    errors: list[float] = []
    verdicts = {"right": 0, "under": 0, "refused": 0}
    print(head("workload", "optimizer", "predicted:", "measured:", "error:"))
    for (name, (factory, size)), optimizer in itertools.product(WORKLOADS.items(), OPTIMIZERS):
        with scratch() as folder:
            job = make_job(factory(), size, optimizer, folder)
            package = Package.open(folder / "package")
            predicted = plan_memory(package, shapes(job)).peak.nbytes
            measured = run_training_child(job).peak_bytes
            assert measured is not None, "memory is measured on Linux only"
            errors.append(predicted / measured - 1)
            cells = (f"{predicted / 1e6:.2f} MB", f"{measured / 1e6:.2f} MB")
            print(row(name, optimizer.name, *cells, f"{errors[-1]:+.1%}"), flush=True)
            for limit in (int(share * measured) for share in limits):
                fits = run_training_child(dataclasses.replace(job, limit_bytes=limit)).outcome
                said = memory_fit(predicted, limit)
                right = (fits == "completed") == (said == "fits")
                verdicts["right" if right else "under" if said == "fits" else "refused"] += 1
    print(f"median error {100 * statistics.median(map(abs, errors)):.1f} %, "
          f"largest {100 * max(map(abs, errors)):.1f} %")  # fmt: skip
    if limits:
        print(
            f"{sum(verdicts.values())} limits: {verdicts['under']} times it said that training "
            f"fits and it did not, {verdicts['refused']} times that it does not and it did"
        )


if __name__ == "__main__":
    main()
