"""Run every model of a package once on made-up data: ``python -m ... PACKAGE``.

A process of its own, because ONNX Runtime may crash on a hostile model. It prints one line
of JSON: what ran, or the error.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from odtpack_runtime.checkpoint.state import CheckpointState
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.package.checks.contradictions import contradiction
from odtpack_runtime.package.inference_template import write_inference_model
from odtpack_runtime.package.manifest_device import SelfCheckInput
from odtpack_runtime.package.package import Package
from odtpack_runtime.package.self_check import (
    made_up_batch,
    run_first_that_fits,
    self_check,
)
from odtpack_runtime.session.session import first_line, open_session
from odtpack_runtime.training.loop import loss_of, train_step
from odtpack_runtime.training.module import Module
from odtpack_runtime.training.optimizer import Optimizer

STALL_SECONDS = 600.0
_SAMPLES = 2


@dataclass(frozen=True)
class StepFigures:
    """What the steps on made-up data gave.

    Attributes:
        onnxruntime: Version that ran them.
        training_loss: Loss of the first training step; None if it is not finite.
        evaluation_loss: Loss of the same batch after the optimizer steps, in evaluation mode.
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
        ) from error
    try:
        message = json.loads(done.stdout)
    except ValueError as error:
        raise OdtpackError(
            "models-crash",
            f"ONNX Runtime {onnxruntime.__version__} crashed on the models of the package "
            f"(exit code {done.returncode}).",
            where=str(package.path),
        ) from error
    if "error" in message:
        raise OdtpackError(**message["error"])
    return StepFigures(**message["figures"])


def run_steps(package: Package) -> StepFigures:
    """Load every model, and make a training, an optimizer and an evaluation step.

    A package with a self-check has to pass that.

    Raises:
        OdtpackError: A model does not load, does not go with the checkpoint, or does not
            run with any of the sizes that were tried; ``self-check-failed``.
    """
    info = package.manifest.self_check
    if info is not None and info.reason is None:
        result = self_check(package)
        shapes = {item.name: list(item.shape) for item in info.inputs}
        figures = StepFigures(
            onnxruntime.__version__, result.losses[0], result.evaluation_loss, shapes
        )
    else:
        figures = run_first_that_fits(package.manifest, _SAMPLES, partial(_steps, package))
    _load_converted(package)
    _load_exported(package)
    return figures


def _steps(package: Package, chosen: Sequence[SelfCheckInput]) -> StepFigures:
    batch = made_up_batch(package.manifest.inputs, chosen)
    state = CheckpointState.load_checkpoint(package.checkpoint)
    module = Module(package.training_model, state, package.eval_model)
    optimizer = Optimizer(package.optimizer_model, module)
    loss = train_step(module, optimizer, [batch])
    module.eval()
    return StepFigures(
        onnxruntime.__version__,
        _finite(loss),
        _finite(loss_of(module(*batch))),
        {item.name: list(item.shape) for item in chosen},
    )


def _load_converted(package: Package) -> None:
    """Load the models in ORT format that were made for this machine or for all."""
    here = "arm" if platform.machine().lower() in ("arm64", "aarch64") else "amd64"
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    for file in package.manifest.files.extra:
        if file.role == "ort_model" and file.platform in (None, here):
            open_session(package.path / file.path, options)


def _load_exported(package: Package) -> None:
    """Load what the inference template becomes: the manifest says what each parameter is in it.

    Raises:
        OdtpackError: ``manifest-contradicts`` if it does not load.
    """
    file = package.manifest.files.inference_template
    if file is None:
        return
    state = CheckpointState.load_checkpoint(package.checkpoint)
    arrays = {**state.arrays(trainable=True), **state.arrays(trainable=False)}
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    with tempfile.TemporaryDirectory(prefix="odtpack-") as folder:
        exported = Path(folder) / "model.onnx"
        write_inference_model(package, arrays, exported)
        try:
            open_session(exported, options)
        except OdtpackError as error:
            template = package.path / file.path
            raise contradiction(
                template, "the types of parameters", "others", "those of an exported model"
            ) from error


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def main(arguments: Sequence[str]) -> int:
    """Run the steps of one package and print the outcome."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is not a message
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
