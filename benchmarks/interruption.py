"""Kill trainings at random points and compare their ends, bit by bit, with undisturbed ones.

python -m benchmarks.interruption --kills 200
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx.parser

from benchmarks.memory_prediction import job_of
from odtpack.build import build_package
from odtpack.optimizers import SGD, AdamW, Optimizer
from odtpack_runtime.package.package import Package
from odtpack_runtime.training.schedules import ScheduleSpec
from odtpack_simulator.replay.interruption import interrupt
from odtpack_simulator.replay.job import Job
from tests import zoo
from tests.packaging_tools import statistic_names

SAVE_EVERY = 7
COSINE = ScheduleSpec("cosine", {"warmup_steps": 9, "floor": 0.05})


def dropout_mlp() -> onnx.ModelProto:
    """Two layers with a dropout between them that trains."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        net (float[batch, 40] input) => (float[batch, 10] output) {
            hidden = MatMul (input, w)
            bent = Relu (hidden)
            ratio = Constant <value_float = 0.3> ()
            training = Constant <value = bool {1}> ()
            thinned = Dropout (bent, ratio, training)
            output = MatMul (thinned, v)
        }"""
    )
    random = np.random.default_rng(1)
    for name, shape in {"w": (40, 64), "v": (64, 10)}.items():
        value = random.standard_normal(shape, dtype=np.float32) / 6
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return model


@dataclass(frozen=True)
class Workload:
    """A training: model, optimizer, and what else a recipe says."""

    title: str
    model: Callable[[], onnx.ModelProto]
    optimizer: Optimizer
    batch_size: int
    accumulation_steps: int = 1
    schedule: ScheduleSpec | None = None
    pieces: int = 1
    epochs: int = 3
    steps: int = 60


WORKLOADS = (
    Workload("CNN, SGD", lambda: zoo.cnn(size=12, width=(4, 8), hidden=32), SGD(), 4),
    Workload(
        "transformer, AdamW, cosine",
        lambda: zoo.transformer_encoder(vocab=50, d=32, layers=2, heads=2, T=12, ff=64),
        AdamW(), 4, schedule=COSINE,
    ),
    Workload(
        "MLP with dropout, AdamW, cosine, 3 batches a step, 2 pieces",
        dropout_mlp, AdamW(), 4, accumulation_steps=3, schedule=COSINE, pieces=2,
    ),
    Workload(
        "MobileNetV2 with batch norm in training mode, SGD",
        lambda: zoo.mobilenet_v2(size=32, width_mult=0.35, batch_norm="train"), SGD(), 2, steps=40,
    ),
)  # fmt: skip


def make_job(workload: Workload, folder: Path) -> Job:
    """Build the package and random data for about as many steps as the workload says."""
    model = workload.model()
    build_package(
        model, folder / "package", loss="cross_entropy", optimizer=workload.optimizer,
        schedule=workload.schedule, freeze=statistic_names(model),
        accumulation_steps=workload.accumulation_steps,
    )  # fmt: skip
    package = Package.open(folder / "package")
    each = workload.batch_size * workload.accumulation_steps
    samples = workload.steps // workload.epochs * each * 5 // 4 + 1
    job = job_of(
        package, model, samples, folder, batch_size=workload.batch_size, epochs=workload.epochs,
        seed=4, accumulation_steps=workload.accumulation_steps, learning_rate=3e-3,
        pieces=workload.pieces,
    )  # fmt: skip
    if workload.schedule is None:
        return job
    rates = workload.schedule.schedule(job.steps)
    return dataclasses.replace(job, rate_kind=rates.kind, rate_settings=rates.settings())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="over all models together")
    arguments = parser.parse_args()
    start = time.perf_counter()
    titles = ("steps", "at steps", "in saves", "resumed", "warnings", "repeated", "equal")
    width = max(len(workload.title) for workload in WORKLOADS)
    print(f"{'model':{width}}", *(f"{title:>9}" for title in titles))
    kills = resumed = 0
    differs = []
    for index, workload in enumerate(WORKLOADS):
        share = arguments.kills // len(WORKLOADS) + (index < arguments.kills % len(WORKLOADS))
        with tempfile.TemporaryDirectory(prefix="odtpack-bench-") as scratch:
            job = make_job(workload, Path(scratch))
            # Two of three interruptions are kills.
            info = interrupt(job, seed=index, count=share * 3 // 2, save_every=SAVE_EVERY)
        kinds = collections.Counter(each.at for each in info.interruptions)
        warnings = kinds["memory warning"]
        again = kinds.total() - warnings
        repeated = sum(each.repeated_steps for each in info.interruptions)
        equal = "yes" if info.equal else "NO"
        cells = (job.steps, kinds["step"], kinds["save"], again, warnings, repeated, equal)
        print(f"{workload.title:{width}}", *(f"{each:>9}" for each in cells), flush=True)
        print(f"    {info.detail}")
        kills += kinds["step"] + kinds["save"]
        resumed += again
        if not info.equal:
            differs.append(workload.title)
    print(
        f"{kills} kills, {resumed} resumed; all ends equal to the undisturbed ones, bit by bit: "
        f"{'NO: ' + ', '.join(differs) if differs else 'yes'} "
        f"({time.perf_counter() - start:.0f} s)"
    )
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main())
