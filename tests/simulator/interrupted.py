"""Trainings to interrupt."""

from pathlib import Path

import numpy as np

from odtpack.build import build_package
from odtpack_simulator.replay.job import Job
from tests.simulator.graphs import weighted
from tests.simulator.packages import Case

COSINE = {
    "rate_kind": "cosine",
    "rate_settings": {"warmup_steps": 3, "total_steps": 14, "floor": 0.1},
}


def long_job(mlp: Case, folder: Path, **changes: object) -> Job:
    """14 steps of two batches, in two pieces, whose rate follows a cosine."""
    options = {"batch_size": 7, "epochs": 1, "accumulation_steps": 2, "pieces": 2, **COSINE}
    job = mlp.job(folder, **(options | changes))
    assert job.schedule.steps == 14
    return job


def small_job(
    folder: Path, shape: tuple[int, ...], weights: dict[str, tuple[int, ...]], nodes: str
) -> Job:
    """A training of a small network that ends in the product with ``w``, on 40 samples."""
    dims = ", ".join(map(str, shape))
    text = f"net (float[batch, {dims}] input) => (float[batch, 3] output) {{ {nodes} }}"
    random = np.random.default_rng(0)
    shapes = {**weights, "w": (4 if weights else shape[0], 3)}
    arrays = {n: random.random(each, dtype=np.float32) + 0.1 for n, each in shapes.items()}
    model = weighted(text, arrays)
    build_package(
        model, folder / "package", loss="cross_entropy", freeze=["mean", "var"] * bool(weights)
    )
    inputs = random.standard_normal((40, *shape), np.float32)
    case = Case("small", folder, 4, inputs, random.integers(0, 3, 40))
    for name, array in (("input", inputs), ("labels", case.labels)):
        np.save(folder / f"{name}.npy", array)
    (folder / "child").mkdir()
    return case.job(folder / "child")


def dropout_job(folder: Path, seed: str) -> Job:
    """A network whose dropout trains."""
    nodes = f"""ratio = Constant <value_float = 0.5> ()
        training = Constant <value = bool {{1}}> ()
        thinned = Dropout {seed} (input, ratio, training)
        output = MatMul (thinned, w)"""
    return small_job(folder, (6,), {}, nodes)
