"""Small packages of every kind of network, with data, for the tests of the simulator."""

import dataclasses
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from odtpack.artifacts import OptimType
from odtpack_runtime.package.package import Package
from odtpack_simulator.replay.job import Job, SamplePlan
from tests import zoo
from tests.packaging_tools import batch, generate
from tests.simulator.graphs import weighted
from tests.training.tables import tables

CLASSES = 10


def recurrent() -> onnx.ModelProto:
    """An LSTM in both directions, whose gradients loop over its steps, and a GRU."""
    text = """recurrent (float[batch, 12, 8] input) => (float[batch, 10] output) {
            x = Transpose <perm = [1, 0, 2]> (input)
            sizes = Shape (input)
            at = Constant <value_ints = [0]> ()
            batch = Gather (sizes, at)
            two = Constant <value_ints = [2]> ()
            hidden = Constant <value_ints = [24]> ()
            state = Concat <axis = 0> (two, batch, hidden)
            zero = ConstantOfShape (state)
            both = LSTM <direction = "bidirectional", hidden_size = 24> (x, w1, r1, b1,,zero, zero)
            swapped = Transpose <perm = [0, 2, 1, 3]> (both)
            shape = Constant <value_ints = [12, -1, 48]> ()
            joined = Reshape (swapped, shape)
            states, last = GRU <hidden_size = 20, linear_before_reset = 1> (joined, w2, r2, b2)
            found = Squeeze (last, at)
            output = Gemm (found, w3, b3)
        }"""
    shapes = {"w1": (2, 96, 8), "r1": (2, 96, 24), "b1": (2, 192), "w2": (1, 60, 48),
              "r2": (1, 60, 20), "b2": (1, 120), "w3": (20, 10), "b3": (10,)}  # fmt: skip
    return weighted(text, shapes, 1 / 3)


def turns() -> onnx.ModelProto:
    """A loop over the steps of its input, inside of one of a constant number of turns."""
    text = """turns (float[batch, 12, 64] input) => (float[batch, 10] output) {
            sizes = Shape (input)
            axis = Constant <value_int = 1> ()
            steps = Gather (sizes, axis)
            thrice = Constant <value_int = 3> ()
            first = ReduceMean <axes = [1], keepdims = 0> (input)
            last, sums = Loop (thrice, , first) <body = round (int64 i, bool on, float[batch, 64] h)
                => (bool go, float[batch, 64] k, float[batch, 64] sum) {
                go = Identity (on)
                k = Loop (steps, , h) <body = step (int64 j, bool more, float[batch, 64] s)
                    => (bool next, float[batch, 64] t) {
                    next = Identity (more)
                    x = Gather <axis = 1> (input, j)
                    m = MatMul (s, w1)
                    n = Add (m, x)
                    t = Tanh (n)
                }>
                sum = Add (h, k)
            }>
            mean = ReduceMean <axes = [0], keepdims = 0> (sums)
            found = Add (mean, last)
            output = Gemm (found, w2, b2)
        }"""
    return weighted(text, {"w1": (64, 64), "w2": (64, 10), "b2": (10,)}, 1 / 8)


def volumes() -> onnx.ModelProto:
    """Convolutions and a maximum over three axes, whose gradients are transposed convolutions."""
    text = """volumes (float[batch, 1, 16, 16, 16] input) => (float[batch, 10] output) {
            c1 = Conv <pads = [1, 1, 1, 1, 1, 1]> (input, w1, b1)
            r1 = Relu (c1)
            p1 = MaxPool <kernel_shape = [2, 2, 2], strides = [2, 2, 2]> (r1)
            c2 = Conv <pads = [1, 1, 1, 1, 1, 1]> (p1, w2, b2)
            r2 = Relu (c2)
            p2 = AveragePool <kernel_shape = [2, 2, 2], strides = [2, 2, 2]> (r2)
            found = Flatten (p2)
            output = Gemm (found, w3, b3)
        }"""
    shapes = {"w1": (16, 1, 3, 3, 3), "b1": (16,), "w2": (32, 16, 3, 3, 3), "b2": (32,),
              "w3": (2048, 10), "b3": (10,)}  # fmt: skip
    return weighted(text, shapes, 1 / 8)


MODELS: dict[str, tuple[Callable[[], onnx.ModelProto], OptimType, int]] = {
    "mlp": (zoo.mlp, OptimType.AdamW, 64),
    "cnn": (zoo.cnn, OptimType.SGD, 8),
    "mobilenet": (partial(zoo.mobilenet_v2, size=64, width_mult=0.5), OptimType.AdamW, 8),
    "batchnorm": (partial(zoo.mobilenet_v2, size=32, width_mult=0.35, batch_norm="train", stages=4),
                  OptimType.SGD, 4),
    "transformer": (zoo.transformer_encoder, OptimType.AdamW, 1),
    "recurrent": (recurrent, OptimType.AdamW, 64),
    "turns": (turns, OptimType.SGD, 64),
    "tables": (tables, OptimType.SGD, 64),
    "volumes": (volumes, OptimType.AdamW, 16),
}  # fmt: skip
"""Model, optimizer and batch size by name."""


@dataclass(frozen=True)
class Case:
    """A package with data."""

    name: str
    folder: Path
    batch_size: int
    inputs: np.ndarray
    labels: np.ndarray

    @property
    def package(self) -> Package:
        return Package.open(self.folder / "package")

    @property
    def data(self) -> Path:
        return self.folder / "data.npz"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "input": (self.batch_size, *self.inputs.shape[1:]),
            "labels": (self.batch_size, *self.labels.shape[1:]),
        }

    def shapes_of(self, size: int) -> dict[str, tuple[int, ...]]:
        """Shapes of a batch of another size."""
        return {name: (size, *shape[1:]) for name, shape in self.shapes.items()}

    def job(self, folder: Path, **changes: object) -> Job:
        """A training of this package in a child that may write to ``folder``."""
        data = {name: str(self.folder / f"{name}.npy") for name in ("input", "labels")}
        return job_of(self.package, folder, self.schedule, **({"data": data} | changes))

    @property
    def schedule(self) -> SamplePlan:
        return SamplePlan(len(self.inputs), self.batch_size, 1, 3)


def change(job: Job, **changes: Any) -> Job:
    """The job with other values of its fields or of its schedule's."""
    order = {name: changes.pop(name) for name in SamplePlan.__slots__ if name in changes}
    schedule = dataclasses.replace(job.schedule, **order)
    return dataclasses.replace(job, schedule=schedule, **changes)


def job_of(package: Package, folder: Path, schedule: SamplePlan, **changes: object) -> Job:
    """A training on data that the changes name, in a child that writes to ``folder``."""
    models = ("training_model", "eval_model", "optimizer_model", "checkpoint")
    files = {name: str(getattr(package, name)) for name in models}
    job = Job(
        "train", **files, folder=str(folder), data={}, schedule=schedule, learning_rate=0.01,
        threads=1,
    )  # fmt: skip
    return change(job, **changes)


def job_on(
    package: Package, folder: Path, data: dict[str, np.ndarray], batch_size: int, **changes: object
) -> tuple[Job, dict[str, tuple[int, ...]]]:
    """The same on arrays, which it writes to the folder, and the shapes of a batch of them."""
    for name, array in data.items():
        np.save(folder / f"{name}.npy", array)
    files = {name: str(folder / f"{name}.npy") for name in data}
    schedule = SamplePlan(len(next(iter(data.values()))), batch_size, 1, 3)
    shapes = {name: (batch_size, *array.shape[1:]) for name, array in data.items()}
    return job_of(package, folder, schedule, **({"data": files} | changes)), shapes


Cases = Callable[[str], Case]
"""Gives the case of a name."""


def make_case(name: str, folder: Path, steps: int = 3) -> Case:
    """Build a package and data for a few steps."""
    factory, optimizer, batch_size = MODELS[name]
    model = factory()
    generate(model, folder / "package", optimizer, additional_output_names=["output"])
    inputs, labels = batch(model, batch_size * steps * 5 // 4 + 1)
    np.save(folder / "input.npy", inputs)
    np.save(folder / "labels.npy", labels)
    np.savez(folder / "data.npz", input=inputs, labels=labels)
    return Case(name, folder, batch_size, inputs, labels)


def without_arena(case: Case, folder: Path) -> Case:
    """The same package with the session options of ``small``, in another folder."""
    shutil.copytree(case.folder, folder)
    manifest = case.package.manifest
    session = dataclasses.replace(manifest.session, arena=False, shared_allocator=False)
    changed = dataclasses.replace(manifest, session=session).to_json()
    (folder / "package" / "manifest.json").write_text(changed)
    return dataclasses.replace(case, folder=folder)
