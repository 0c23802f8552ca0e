"""Kill trainings at random points and compare their ends, bit by bit, with undisturbed ones.

python -m benchmarks.interruption --kills 200
"""

import collections
import dataclasses
import sys
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
from scripts.harness import head, options, row, scratch
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
    batch_size: int = 4
    accumulation_steps: int = 1
    schedule: ScheduleSpec | None = None
    pieces: int = 1
    epochs: int = 3
    steps: int = 60

    def job(self, folder: Path) -> Job:
        """Build the package, and random data for about as many steps."""
        model = self.model()
        build_package(
            model, folder / "package", loss="cross_entropy", optimizer=self.optimizer,
            schedule=self.schedule, freeze=statistic_names(model),
            accumulation_steps=self.accumulation_steps,
        )  # fmt: skip
        each = self.batch_size * self.accumulation_steps
        job = job_of(
            Package.open(folder / "package"), model, self.steps // self.epochs * each * 5 // 4 + 1,
            folder, batch_size=self.batch_size, epochs=self.epochs, seed=4, pieces=self.pieces,
            accumulation_steps=self.accumulation_steps, learning_rate=3e-3,
        )  # fmt: skip
        if self.schedule is None:
            return job
        rates = self.schedule.schedule(job.steps)
        return dataclasses.replace(job, rate_kind=rates.kind, rate_settings=rates.settings())


WORKLOADS = (
    Workload("CNN, SGD", lambda: zoo.cnn(size=12, width=(4, 8), hidden=32), SGD()),
    Workload(
        "transformer, AdamW, cosine",
        lambda: zoo.transformer_encoder(vocab=50, d=32, layers=2, heads=2, T=12, ff=64),
        AdamW(), schedule=COSINE,
    ),
    Workload(
        "MLP with dropout, AdamW, cosine, 3 batches a step, 2 pieces",
        dropout_mlp, AdamW(), accumulation_steps=3, schedule=COSINE, pieces=2,
    ),
    Workload(
        "MobileNetV2 with batch norm in training mode, SGD",
        lambda: zoo.mobilenet_v2(size=32, width_mult=0.35, batch_norm="train"), SGD(), 2, steps=40,
    ),
)  # fmt: skip


def main() -> int:
    kills = options(__doc__, kills=200).kills  # over all models together
    start = time.perf_counter()
    print(head("model", "steps:", "at steps:", "in saves:", "resumed:", "warnings:", "repeated:",
               "equal"))  # fmt: skip
    found: collections.Counter[str] = collections.Counter()
    details, differs = [], []
    for index, workload in enumerate(WORKLOADS):
        share = kills // len(WORKLOADS) + (index < kills % len(WORKLOADS))
        with scratch() as folder:
            job = workload.job(folder)
            # Two of three interruptions are kills.
            info = interrupt(job, seed=index, count=share * 3 // 2, save_every=SAVE_EVERY)
        kinds = collections.Counter(each.at for each in info.interruptions)
        found += kinds
        warnings = kinds["memory warning"]
        repeated = sum(each.repeated_steps for each in info.interruptions)
        print(row(workload.title, job.steps, kinds["step"], kinds["save"],
                  kinds.total() - warnings, warnings, repeated, "yes" if info.equal else "NO"),
              flush=True)  # fmt: skip
        if info.detail:
            details.append(f"{workload.title}: {info.detail}")
        if not info.equal:
            differs.append(workload.title)
    print("", *details, "", sep="\n")
    print(
        f"{found['step'] + found['save']} kills, {found.total() - found['memory warning']} "
        "resumed; all ends equal to the undisturbed ones, bit by bit: "
        f"{'NO: ' + ', '.join(differs) if differs else 'yes'} ({time.perf_counter() - start:.0f} s)"
    )
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main())
