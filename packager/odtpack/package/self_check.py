"""Makes the first training steps of a package, so that a device can compare its own losses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from decimal import ROUND_UP, Context, Decimal
from pathlib import Path

import numpy as np

from odtpack.errors import OdtpackError
from odtpack_runtime.apart import worker as apart
from odtpack_runtime.apart.child import forget_log
from odtpack_runtime.checkpoint.state import CheckpointState
from odtpack_runtime.package.manifest import Manifest, SelfCheckInfo
from odtpack_runtime.package.records import SelfCheckInput
from odtpack_runtime.package.self_check import first_losses, made_up_batch, run_first_that_fits
from odtpack_runtime.package.trust import STANDARD_DOMAINS
from odtpack_runtime.session.options import session_options
from odtpack_runtime.training.module import Module
from odtpack_runtime.training.optimizer import Optimizer

_RATES = (0.001, 0.01, 0.1)
"""Learning rates: the first that moves the loss enough to tell training from standing still."""
_ENOUGH = 10  # times the tolerance
_TOLERANCE = 1e-4
"""Part of a loss, or of 1: a hundred times what platforms differ by, far less than errors make."""
_TOLERANCE_OF_FLOAT16 = 5e-3
_PERTURBATION = 2.0**-22
"""Part by which each element of a parameter is made larger or smaller, by a drawn sign: batch
normalization takes a common factor out again."""
_DRAWS = 3
_SPREAD = 8
"""How many times the largest effect of some perturbations losses may differ by, where that exceeds
the tolerance. A sum of n terms in another order differs by 2^-24 sqrt(n / 6) of itself (a random
walk of roundings: Higham, Accuracy and Stability of Numerical Algorithms, 4.2): with the 1,500
terms of a wide layer that is 4 times what the perturbed weights change. And another draw of the
same kind may exceed the largest of three: twice that."""
_SAMPLES, _SAMPLES_OF_STATISTICS = 2, 8
_LARGEST_BYTES = 256 * 2**20
_DIGITS = 6
_MEASURE = "odtpack.package.self_check:measure"
_NOT_THE_SIZES = {
    # The files were just written: the disk is to blame, and not the models.
    "checkpoint-unreadable", "checkpoint-not-found", "model-not-readable",
    "models-crash", "models-stall",
}  # fmt: skip


def with_self_check(manifest: Manifest, files: Mapping[str, Path]) -> Manifest:
    """Return a manifest with a self-check, or with the reason why there is none."""
    # The figures come from a run, so they are not part of what a recipe's digest promises.
    info = _reason_without(manifest)
    if info is None:
        limits = apart.Limits.of(files.values())
        arguments = {
            "manifest": manifest.to_json(), "files": {key: str(path) for key, path in files.items()}
        }  # fmt: skip
        try:
            try:
                found = apart.call(_MEASURE, limits, **arguments)
            except OdtpackError as error:
                if error.code != "model-not-loadable":
                    raise
                # To ONNX Runtime a failed read may be the same.
                found = apart.call(_MEASURE, limits, **arguments)
            info = SelfCheckInfo.read(found)
        except OdtpackError as error:
            if error.code in _NOT_THE_SIZES:
                if error.code.startswith("models-"):
                    error.hint = "--no-self-check builds the package without running its models"
                raise
            info = _none(f"the models do not run on made-up data ({error.code})")
    return dataclasses.replace(manifest, self_check=info).sealed()


def measure(manifest: str, files: Mapping[str, str]) -> dict[str, object]:
    """Train as the self-check will; to be called apart, as models may do anything."""
    paths = {key: Path(path) for key, path in files.items()}
    found = _measured(Manifest.from_json(manifest.encode(), "manifest.json"), paths)
    return found.as_dict(defaults=False)


def _none(reason: str) -> SelfCheckInfo:
    return SelfCheckInfo(reason=reason)


def _reason_without(manifest: Manifest) -> SelfCheckInfo | None:
    """The self-check of a package that can have none, with the reason; None if it can."""
    if manifest.segments is not None:
        return _none("it is trained segment by segment")
    if any(item.dtype == "string" for item in manifest.inputs):
        return _none("an input is text")
    used = {domain for domains in manifest.operators.by_model().values() for domain in domains}
    if used - {"", *STANDARD_DOMAINS}:
        return _none("it needs operators of the user's")
    if manifest.privacy is not None:
        return _none("the noise of private training differs each time")
    if not any(item.role == "trainable" for item in manifest.parameters):
        return _none("nothing is trained")
    if sum(item.size_bytes or 0 for item in manifest.parameters) > _LARGEST_BYTES:
        return _none("the parameters are too large to be trained while the package is built")
    return None


def _measured(manifest: Manifest, files: Mapping[str, Path]) -> SelfCheckInfo:
    trial = _Trial(manifest, files)
    samples = _SAMPLES_OF_STATISTICS if trial.has_statistics else _SAMPLES
    result: SelfCheckInfo = run_first_that_fits(manifest, samples, trial.run)
    return result


class _Trial:
    """The package's models with their first values, ready to begin several times."""

    def __init__(self, manifest: Manifest, files: Mapping[str, Path]) -> None:
        assert manifest.session is not None  # noqa: S101 - every package for ONNX Runtime has one
        self._manifest, self._files = manifest, files
        self._state = CheckpointState.load_checkpoint(files["checkpoint"])
        self._module = Module(
            files["training_model"],
            self._state,
            files["eval_model"],
            session_options=session_options(manifest.session, threads=1),
        )
        self._first = {name: value.data.copy() for name, value in self._state.parameters}
        self.has_statistics = any(item.role == "state" for item in manifest.parameters)
        narrow = any((p.model_dtype or p.dtype) == "float16" for p in manifest.parameters)
        self._tolerance = _TOLERANCE_OF_FLOAT16 if narrow else _TOLERANCE

    def run(self, chosen: Sequence[SelfCheckInput]) -> SelfCheckInfo:
        """Return the check with inputs of these sizes."""
        forget_log()
        best: tuple[float, SelfCheckInfo] | None = None
        # Batch normalization of a few samples amplifies any difference: less with small steps.
        for rate in _RATES[: 1 if self.has_statistics else None]:
            losses = self._losses(chosen, rate)
            if not all(map(math.isfinite, losses)):
                break
            tolerances = [self._tolerance * max(1.0, abs(loss)) for loss in losses]
            if self.has_statistics:
                others = [self._losses(chosen, rate, draw) for draw in range(_DRAWS)]
                apart = np.abs(np.subtract(losses, others)).max(axis=0)
                apart[:-1] = np.maximum.accumulate(apart[:-1])  # once apart they stay apart
                tolerances = np.maximum(tolerances, _SPREAD * apart).tolist()
                if not all(map(math.isfinite, tolerances)):
                    break
            tolerances = [_rounded_up(tolerance) for tolerance in tolerances]
            moved = abs(losses[0] - losses[4]) / max(tolerances[:5])
            info = SelfCheckInfo(
                inputs=tuple(chosen),
                learning_rate=rate,
                losses=tuple(_rounded(loss) for loss in losses[:-1]),
                evaluation_loss=_rounded(losses[-1]),
                tolerances=tuple(tolerances),
            )
            if best is None or moved > best[0]:
                best = moved, info
            if moved >= _ENOUGH:
                break
        return best[1] if best is not None else _none("its loss on made-up data is not finite")

    def _losses(
        self, chosen: Sequence[SelfCheckInput], rate: float, draw: int | None = None
    ) -> list[float]:
        """Train from the first values, or from those of a perturbation that is drawn."""
        random = None if draw is None else np.random.default_rng(draw)
        for name, value in self._state.parameters:
            first = self._first[name]
            if random is not None and value.requires_grad:
                signs = random.choice((-1.0, 1.0), first.shape)
                first = (first * (1 + _PERTURBATION * signs)).astype(first.dtype)
            np.copyto(value.data, first)
        self._state.optimizer = None
        self._module.lazy_reset_grad()
        optimizer = Optimizer(self._files["optimizer_model"], self._module)
        batch = made_up_batch(self._manifest.inputs, chosen)
        return first_losses(self._module, optimizer, batch, rate)


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _rounded_up(value: float) -> float:
    """One significant digit, no less than the value."""
    return float(Context(prec=1, rounding=ROUND_UP).create_decimal(Decimal(value)))
