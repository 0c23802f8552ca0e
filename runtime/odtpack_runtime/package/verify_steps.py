"""Run every model of a package once on made-up data: ``python -m ... PACKAGE``.

A process of its own, because ONNX Runtime may crash on a hostile model. It prints one line
of JSON: what ran, or the error.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from odtpack_runtime.checkpoint.layout import Array
from odtpack_runtime.checkpoint.state import CheckpointState
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.package.manifest import InputInfo, Manifest
from odtpack_runtime.package.package import Package
from odtpack_runtime.session.session import first_line, open_session
from odtpack_runtime.training.module import Module
from odtpack_runtime.training.optimizer import Optimizer

STALL_SECONDS = 600.0
_BATCH = 2
_OTHER_SIZES = (2, 8, 32, 224)
"""What a size that may vary is taken to be, until the models run: images need room."""


@dataclass(frozen=True)
class StepFigures:
    """What the steps on made-up data gave.

    Attributes:
        onnxruntime: Version that ran them.
        training_loss: Loss of the training step; None if it is not finite.
        evaluation_loss: Loss of the same batch after the optimizer step, in evaluation mode.
        shapes: Shape of each input.
    """

    onnxruntime: str
    training_loss: float | None
    evaluation_loss: float | None
    shapes: dict[str, list[int]]


def run_steps_apart(package: Package) -> StepFigures:
    """Run :func:`run_steps` in a process of its own.

    Raises:
        OdtpackError: What :func:`run_steps` raised; ``models-crash`` if the process ended
            without a word, ``models-stall`` if it took longer than :data:`STALL_SECONDS`.
    """
    manifest = package.path / package.manifest_name
    search = [path for path in sys.path if path]
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "odtpack_runtime.package.verify_steps", str(manifest)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            timeout=STALL_SECONDS,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(search)},
        )
    except subprocess.TimeoutExpired as error:
        raise OdtpackError(
            "models-stall",
            f"The models did not get through one step in {STALL_SECONDS:g} seconds.",
            where=str(package.path),
            hint="build the package again, or look for a loop that does not end",
        ) from error
    try:
        message = json.loads(done.stdout)
    except ValueError as error:
        raise OdtpackError(
            "models-crash",
            f"ONNX Runtime {onnxruntime.__version__} crashed on the models of the package "
            f"(exit code {done.returncode}).",
            where=str(package.path),
            hint="do not use this package: build it again",
        ) from error
    if "error" in message:
        raise OdtpackError(**message["error"])
    return StepFigures(**message["figures"])


def run_steps(package: Package) -> StepFigures:
    """Load every model, and make a training, an optimizer and an evaluation step.

    Raises:
        OdtpackError: A model does not load, does not go with the checkpoint, or does not
            run with any of the sizes that were tried.
    """
    failed: OdtpackError | None = None
    for batch in _batches(package.manifest):
        try:
            figures = _steps(package, batch)
            break
        except OdtpackError as error:
            if error.code != "run-failed":
                raise
            failed = failed or error
    else:
        assert failed is not None  # noqa: S101 - there are batches
        raise failed
    _load_converted(package)
    return figures


def _steps(package: Package, batch: Sequence[Array]) -> StepFigures:
    manifest = package.manifest
    state = CheckpointState.load_checkpoint(package.checkpoint)
    module = Module(package.training_model, state, package.eval_model)
    optimizer = Optimizer(package.optimizer_model, module)
    loss = _loss(module(*batch))
    optimizer.step()
    module.lazy_reset_grad()
    module.eval()
    names = [spec.name for spec in manifest.input_specs()]
    return StepFigures(
        onnxruntime.__version__,
        _finite(loss),
        _finite(_loss(module(*batch))),
        {name: list(array.shape) for name, array in zip(names, batch, strict=True)},
    )


def _load_converted(package: Package) -> None:
    """Load the models in ORT format that were made for this machine or for all."""
    here = "arm" if platform.machine().lower() in ("arm64", "aarch64") else "amd64"
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    for file in package.manifest.files.extra:
        if file.role == "ort_model" and file.platform in (None, here):
            open_session(package.path / file.path, options)


def _loss(results: Any) -> float:
    return float(np.ravel(results[0] if isinstance(results, tuple) else results)[0])


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _batches(manifest: Manifest) -> Iterator[list[Array]]:
    """Batches of made-up data, the likeliest to fit first."""
    seen = set()
    for other, low in itertools.product(_OTHER_SIZES, (False, True)):
        batch = _batch(manifest.inputs, other, low=low)
        key = (low, *(array.shape for array in batch))
        if key not in seen:
            seen.add(key)
            yield batch


def _batch(inputs: Sequence[InputInfo], other: int, *, low: bool) -> list[Array]:
    """Make one batch.

    Args:
        inputs: What is wanted.
        other: Size of every axis that may vary but that of the samples.
        low: Whole numbers are all 0, for indices into something that has one entry.
    """
    samples = {item.shape[0] for item in inputs if item.shape and isinstance(item.shape[0], str)}
    generator = np.random.default_rng(0)
    batch = []
    for item in inputs:
        sizes = [
            dim if isinstance(dim, int) else _BATCH if dim in samples or not axis else other
            for axis, dim in enumerate(item.shape)
        ]
        batch.append(_array(item, sizes, generator, low=low))
    return batch


def _array(
    item: InputInfo, sizes: Sequence[int], generator: np.random.Generator, *, low: bool
) -> Array:
    if item.dtype == "string":
        return np.full(sizes, "a", dtype=object)
    dtype = np.dtype(item.dtype)
    if dtype.kind == "f":
        return generator.random(sizes).astype(dtype)
    limit = item.class_count or 2
    return np.asarray(generator.integers(0, 1 if low else limit, sizes)).astype(dtype)


def main(arguments: Sequence[str]) -> int:
    """Run the steps of one package and print the outcome."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no message
    try:
        figures = run_steps(Package.open(Path(arguments[0])))
        message: dict[str, Any] = {"figures": asdict(figures)}
    except OdtpackError as error:
        parts = {"code": error.code, "what": error.what, "where": error.where, "hint": error.hint}
        message = {"error": parts}
    except Exception as error:  # a manifest can ask for inputs that no memory holds
        parts = {
            "code": "models-crash",
            "what": f"A step on made-up data failed: {type(error).__name__}: {first_line(error)}",
            "where": arguments[0],
            "hint": "do not use this package: build it again",
        }
        message = {"error": parts}
    channel.write(json.dumps(message))
    channel.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
