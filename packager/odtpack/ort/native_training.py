"""Trains a package on an ONNX Runtime library, and compares with the Python runtime.

The library may be a minimal build that holds nothing but what a configuration names: if it
trains the package, the configuration was enough.

``python -m odtpack.ort.native_training JOB`` is the process that loads the library.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from odtpack.ort.native_runtime import Array, NativeError, NativeRuntime

if TYPE_CHECKING:
    from odtpack_runtime.package.package import Package

LIBRARY_VARIABLE: Final = "ODTPACK_MINIMAL_ORT"
"""Environment variable that names the library of a minimal build."""

STEPS: Final = 3
RATE: Final = 1e-3
_SECONDS: Final = 600
_REFUSED: Final = 3
"""Exit code of a job whose library was loaded, and refused a model."""
_OPTIMIZERS: Final = ("adamw", "adam", "sgd", "lion")
_TOLERANCE: Final = 1e-4
"""Relative; kernels of two releases sum in different orders."""


class LibraryRefusedError(Exception):
    """A library of ONNX Runtime does not load or run a model; its message."""


@dataclass(frozen=True)
class NativeResult:
    """How a library trained a package.

    Attributes:
        version: The library's version.
        losses: Loss of each step there, and of the evaluation model after the last.
        expected: The same of this Python's ONNX Runtime on the package's models.
    """

    version: str
    losses: tuple[float, ...]
    expected: tuple[float, ...]

    @property
    def agrees(self) -> bool:
        """Whether the losses are equal but for rounding."""
        return bool(np.allclose(self.losses, self.expected, rtol=_TOLERANCE, atol=1e-6))


def train_natively(
    package: Package,
    models: Mapping[str, Path],
    library: Path,
    scratch: Path,
    data: Path | None = None,
) -> NativeResult:
    """Train a package for a few steps on a library and on this Python's ONNX Runtime.

    Args:
        package: The package.
        models: Its models in ORT format by ``training_model``, ``eval_model`` and
            ``optimizer_model``.
        library: The library.
        scratch: Folder for what the two processes exchange.
        data: Samples to train with; made-up ones if None.

    Raises:
        LibraryRefusedError: The library lacks what a model needs.
        OdtpackError: ``native-run-failed`` if it is not a library that can be loaded here, or
            does not end; ``native-optimizer`` if the package's optimizer is not one of flat
            float32 vectors, all alike.
    """
    from odtpack.errors import OdtpackError
    from odtpack.ort.sample_feeds import SampleFeeds

    optimizer = package.manifest.optimizer.kind
    kinds = {item.dtype for item in package.manifest.parameters if item.role == "trainable"}
    if optimizer not in _OPTIMIZERS or package.manifest.groups or kinds != {"float32"}:
        raise OdtpackError(
            "native-optimizer",
            f"training on a library is written for {', '.join(_OPTIMIZERS)} on float32 parameters "
            "without groups",
            where=str(package.path),
            hint=f"unset {LIBRARY_VARIABLE}",
        )
    sample = SampleFeeds(package, data)
    feeds = sample("training_model", package.training_model)
    # Names of tensors may not be names of files.
    numbered = {f"a{index}": array for index, array in enumerate(feeds.values())}
    np.savez(scratch / "feeds.npz", allow_pickle=False, **numbered)
    job = {
        "library": str(library.resolve()),
        "models": {key: str(path) for key, path in models.items()},
        "feeds": str(scratch / "feeds.npz"),
        "names": list(feeds),
        "trainable": list(sample.trainable),
    }
    (scratch / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-m", "odtpack.ort.native_training", str(scratch / "job.json")]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise _failed(library, f"it did not end in {_SECONDS} s") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"]
        # A build without exceptions aborts where others say what they lack.
        if done.returncode == _REFUSED or done.returncode < 0:
            raise LibraryRefusedError(lines[-1])
        raise _failed(library, lines[-1])
    result = json.loads(done.stdout)
    expected = _train_here(package, [feeds[item.name] for item in package.manifest.inputs])
    return NativeResult(result["version"], tuple(result["losses"]), expected)


def _failed(library: Path, why: str) -> Exception:
    from odtpack.errors import OdtpackError

    return OdtpackError(
        "native-run-failed", f"the library cannot train the package: {why}", where=str(library)
    )


def _train_here(package: Package, batch: Sequence[Array]) -> tuple[float, ...]:
    from odtpack_runtime import CheckpointState, Module, Optimizer

    state = CheckpointState.load_checkpoint(package.checkpoint)
    module = Module(package.training_model, state, package.eval_model)
    optimizer = Optimizer(package.optimizer_model, module)
    optimizer.set_learning_rate(RATE)
    losses = []
    for _ in range(STEPS):
        losses.append(_loss(module(*batch)))
        optimizer.step()
        module.lazy_reset_grad()
    return (*losses, _loss(module.eval()(*batch)))


def _loss(result: Any) -> float:
    return float(result[0] if isinstance(result, tuple) else result)


def train(
    runtime: NativeRuntime,
    models: Mapping[str, Path],
    feeds: dict[str, Array],
    trainable: Sequence[str],
) -> list[float]:
    """Make :data:`STEPS` steps, and evaluate.

    Args:
        runtime: The library.
        models: As for :func:`train_natively`.
        feeds: Inputs of the training model by name; parameters are replaced.
        trainable: Names of the trained parameters.

    Returns:
        Loss of each step, and of the evaluation model after the last.
    """
    training = runtime.open(models["training_model"])
    update = runtime.open(models["optimizer_model"])
    evaluation = runtime.open(models["eval_model"])
    suffix = ".out"
    kept: dict[str, dict[str, Array]] = {name: {} for name in trainable}
    losses = []
    for step in range(1, STEPS + 1):
        results = training.run(feeds)
        losses.append(float(results[training.outputs[0]]))
        for name, value in results.items():
            if name.endswith(".update.out"):
                feeds[name.removesuffix(".update.out")] = value
        gradients = {name: results[f"{name}_grad.accumulation.out"] for name in trainable}
        norm = np.sqrt(sum(float(np.vdot(g, g)) for g in gradients.values()))
        for name, gradient in gradients.items():
            dtype = gradient.dtype
            zeros = np.zeros(gradient.size, dtype)
            made = update.run(
                {
                    **dict.fromkeys(update.inputs, zeros),
                    **kept[name],
                    "learning_rate": np.full(1, RATE, np.float32),
                    "step": np.full(1, step, np.int64),
                    "gradient_norm": np.full(1, norm, dtype),
                    "params": feeds[name].reshape(-1),
                    "gradients": gradient.reshape(-1),
                }
            )
            feeds[name] = made.pop(f"params{suffix}").reshape(gradient.shape)
            kept[name] = {key.removesuffix(suffix): value for key, value in made.items()}
    losses.append(float(evaluation.run(feeds)[evaluation.outputs[0]]))
    return losses


def main(job_file: str) -> int:
    """Do a job: load the library, train, write version and losses as JSON."""
    job = json.loads(Path(job_file).read_bytes())
    with np.load(job["feeds"], allow_pickle=False) as stored:
        feeds = {name: stored[f"a{index}"] for index, name in enumerate(job["names"])}
    try:
        runtime = NativeRuntime(Path(job["library"]))
    except NativeError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    try:
        models = {key: Path(path) for key, path in job["models"].items()}
        losses = train(runtime, models, feeds, job["trainable"])
    except NativeError as error:
        sys.stderr.write(f"{error}\n")
        return _REFUSED
    json.dump({"version": runtime.version, "losses": losses}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
