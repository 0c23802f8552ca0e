"""Makes the first training steps of a package, so that a device can compare its own losses."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from decimal import ROUND_UP, Context, Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from odtpack.errors import OdtpackError
from odtpack.graph.graphs import Dims
from odtpack.graph.inference import contradiction
from odtpack.package.task import Remark, silent
from odtpack_runtime.apart import worker as apart
from odtpack_runtime.apart.child import alive, forget_log
from odtpack_runtime.checkpoint.parameters import Array
from odtpack_runtime.checkpoint.state import CheckpointState
from odtpack_runtime.errors import out_of_memory
from odtpack_runtime.export.inference_model import export_inference_model
from odtpack_runtime.files.scratch import scratch_folder
from odtpack_runtime.package.checks import likely_sizes, read_model
from odtpack_runtime.package.manifest import InputInfo, Manifest, SelfCheckInfo
from odtpack_runtime.package.records import SelfCheckInput
from odtpack_runtime.package.self_check import (
    NO_SIZES,
    cannot_teach,
    first_losses,
    made_up_batch,
    run_first_that_fits,
    search_batch,
)
from odtpack_runtime.session.graph_signature import LOSS_SCALE_NAMES
from odtpack_runtime.session.options import session_info, session_options
from odtpack_runtime.session.session import open_session, owned_ortvalue, run_failed
from odtpack_runtime.training.loop import evaluate, train_step
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
MEASURE = "odtpack.package.self_check:measure"
_ORT = re.compile(
    r"^.*?(?:\[ONNXRuntimeError\] : \d+ : \w+ : (?:Load model from \S+ failed:\s*)?"
    r"|Non-zero status code returned while )"
)
_PLACE = re.compile(r"/\S+:\d+ onnxruntime::[^)]*\) ")  # in ONNX Runtime's source
_NOTHING: Mapping[str, Any] = {"losses": None, "idle": None}


def checked(
    manifest: Manifest | None,
    files: Mapping[str, Path],
    *,
    inputs: Sequence[Mapping[str, object]],
    prediction: tuple[str, Dims | None],
    losses: bool,
    drawn: str | None = None,
    foreign: Collection[str] = (),
    library: Path | None = None,
    remark: Remark = silent,
) -> Manifest | None:
    """Load and run the models that were written; return the manifest with its self-check."""
    # A step in training, one of the optimizer and an evaluation: a package that exists runs. The
    # losses come from a run, so they are not part of what a recipe's digest promises.
    # `manifest` lies beside the files; None if there is no optimizer. `inputs`: as it has them.
    # `prediction`: what the loss reads first: its name and dimensions. `losses`: whether to record
    # some for devices. `drawn`: an operator of the training model that draws numbers. `foreign`:
    # domains of the user's operators, which `library` holds.
    info = None
    if manifest is not None and losses and (reason := _reason_without(manifest, drawn, foreign)):
        info = SelfCheckInfo(reason=reason)
    if foreign and library is None:
        remark(f"the models were not run: no library with {', '.join(sorted(foreign))} is given")
    else:
        start = time.monotonic()
        weights = files.get("checkpoint_data", files["checkpoint"]).stat().st_size
        try:
            wanted = losses and manifest is not None and info is None
            more = {"inputs": list(inputs), "prediction": list(prediction), "losses": wanted}
            found = _run(manifest, files, library, more)
        except OdtpackError as error:
            too_large = error.code == "models-memory" and weights > _LARGEST_BYTES
            if error.code not in ("model-not-loadable", "run-failed") and not too_large:
                raise
            said = _PLACE.sub("", _ORT.sub("", error.what))
            if not too_large and (
                error.code == "model-not-loadable" or not _takes_certain_sizes(files, inputs)
            ):
                what = f"ONNX Runtime {onnxruntime.__version__} does not run the model: {said}"
                raise OdtpackError("models-do-not-run", what) from error
            found = _NOTHING
            problem = "a step needs more memory than this machine has"
            if not too_large:
                info = SelfCheckInfo(reason=NO_SIZES)
                problem = "they run with none of the input sizes that were tried; the last error: "
                problem += said
            remark(f"no step was made with the models: {problem}")
        if weights > _LARGEST_BYTES and found is not _NOTHING:
            seconds = time.monotonic() - start
            remark(f"the models were run as a check, in {seconds:.3g} s")
        if found["losses"] is not None:
            info = SelfCheckInfo.read(found["losses"])
        if found["idle"] is not None:
            remark(f"{found['idle']}, for made-up samples: the model cannot learn from this loss")
    if manifest is None or not losses:
        return manifest
    return dataclasses.replace(manifest, self_check=info).sealed()


def _takes_certain_sizes(files: Mapping[str, Path], inputs: Sequence[Mapping[str, object]]) -> bool:
    """Whether a model that fails may run with sizes of its inputs that were not tried."""
    shapes = [InputInfo.read(dict(each)).shape for each in inputs]
    if all(isinstance(dim, int) for shape in shapes for dim in shape[1:]):
        return False
    model = read_model(files["eval_model"])
    return contradiction(ir.from_proto(model)) is None


def _run(
    manifest: Manifest | None,
    files: Mapping[str, Path],
    library: Path | None,
    more: Mapping[str, object],
) -> Any:
    arguments = {
        "manifest": manifest and manifest.to_json(), "library": library and str(library.resolve()),
        "files": {key: str(path) for key, path in files.items()}, **more,
    }  # fmt: skip
    run = partial(apart.call, MEASURE, apart.Limits.of(files.values()), **arguments)
    try:
        return run()
    except OdtpackError as error:
        # To ONNX Runtime a failed read may be a model that cannot be loaded.
        if error.code != "model-not-loadable":
            raise
        return run()


def measure(
    manifest: str | None,
    files: Mapping[str, str],
    library: str | None,
    inputs: Sequence[Mapping[str, Any]],
    prediction: tuple[str, Sequence[int | str | None] | None],
    losses: bool,
) -> dict[str, object]:
    """Train as the self-check will, or one step; to be called apart, as models may do anything."""
    paths = {key: Path(path) for key, path in files.items()}
    trial = _Trial(
        None if manifest is None else Manifest.from_json(manifest.encode(), "manifest.json"),
        paths,
        library,
        [InputInfo.read(each) for each in inputs],
        prediction,
    )
    found = None
    if losses:
        samples = _SAMPLES_OF_STATISTICS if trial.has_statistics else _SAMPLES
        found = trial.first_that_fits(samples, trial.run).as_dict(defaults=False)
    else:
        trial.first_that_fits(1, trial.step)
    idle = trial.idle()
    if "step_model" in paths:
        trial.step_on()
    return {"losses": found, "idle": idle}


def _reason_without(manifest: Manifest, drawn: str | None, foreign: Collection[str]) -> str | None:
    """Why a package can have no self-check; None if it can."""
    if manifest.segments is not None:
        return "it is trained segment by segment"
    if any(item.dtype == "string" for item in manifest.inputs):
        return "an input is text"
    if foreign:
        return "it needs operators of the user's"
    if manifest.privacy is not None:
        return "the noise of private training differs each time"
    if drawn is not None:
        return f"what {drawn} draws in training differs each time"
    if not any(item.role == "trainable" for item in manifest.parameters):
        return "nothing is trained"
    if sum(item.size_bytes or 0 for item in manifest.parameters) > _LARGEST_BYTES:
        return "the parameters are too large to be trained while the package is built"
    return None


class _Trial:
    """The package's models with their first values, ready to begin several times."""

    def __init__(
        self,
        manifest: Manifest | None,
        files: Mapping[str, Path],
        library: str | None,
        inputs: Sequence[InputInfo],
        prediction: tuple[str, Sequence[int | str | None] | None],
    ) -> None:
        self._files, self._inputs, self._prediction = files, inputs, prediction
        session = None if manifest is None else manifest.session
        self._options = session_options(session or session_info(files["training_model"]), threads=1)
        if library is not None:
            try:
                self._options.register_custom_ops_library(library)
            except Exception as error:  # ONNX Runtime's exceptions have no common base
                what = f"ONNX Runtime cannot load custom_op_library {library!r}: {error}"
                raise OdtpackError("library-not-found", what) from error
        self._state = CheckpointState.load_checkpoint(files["checkpoint"])
        # An imported checkpoint holds the state of an optimizer, from which a device goes on.
        self._begun = copy.deepcopy(self._state.optimizer)
        try:
            self._module = self._opened()
        except OdtpackError as error:
            if error.code == "model-not-loadable":
                open_session(files["eval_model"], self._options)  # its nodes are the user's
            raise
        if self._state.is_nominal:
            count = self._module.get_parameters_size(False)
            values = np.resize(np.linspace(-0.1, 0.1, 101, dtype=self._module.flat.dtype), count)
            self._module.copy_buffer_to_parameters(owned_ortvalue(values), False)
        known = {dim for each in inputs if each.role == "data" for dim in each.shape if dim}
        targets = [each.shape for each in inputs if each.role != "data"]
        self._follows = any(
            not isinstance(dim, int) and dim not in known and (axis or dim)
            for shape in targets
            for axis, dim in enumerate(shape)
        )
        self._forward: onnxruntime.InferenceSession | None = None
        self._first: dict[str, Array] = {}
        parameters = () if manifest is None else manifest.parameters
        self.has_statistics = any(item.role == "state" for item in parameters)
        self._fits: Sequence[SelfCheckInput] = ()  # what the models ran with last
        narrow = any(
            (p.model_dtype or p.dtype) == "float16" or p.name in LOSS_SCALE_NAMES
            for p in parameters
        )
        self._tolerance = _TOLERANCE_OF_FLOAT16 if narrow else _TOLERANCE

    def _opened(self, step_model: Path | None = None) -> Module:
        files = self._files
        return Module(
            files["training_model"], self._state, files["eval_model"],
            session_options=self._options, step_model_uri=step_model,
        )  # fmt: skip

    def first_that_fits(self, samples: int, run: Callable[[Sequence[SelfCheckInput]], Any]) -> Any:
        """Return what a function makes of the first batch with which it runs."""
        inputs = self._inputs
        sizes = partial(likely_sizes, self._files["eval_model"], self._state)
        try:
            return search_batch(inputs, samples, lambda each: run(self._followed(each)), sizes)
        except OdtpackError as error:
            if error.code != "run-failed" or out_of_memory(error):
                raise
            level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            self._options.graph_optimization_level = level  # with it nodes have the user's names
            self._module = self._opened().eval()
            run_first_that_fits(
                inputs, 1, lambda chosen: self._module(*made_up_batch(inputs, chosen))
            )
            raise

    def _predicted(self, batch: Sequence[Array]) -> Array:
        """What the loss reads first, of a batch."""
        if self._forward is None:
            with scratch_folder("forward") as folder:
                path = Path(folder) / "forward.onnx"
                values = self._state.arrays(trainable=True) | self._state.arrays(trainable=False)
                export_inference_model(
                    self._files["eval_model"], values, path, [self._prediction[0]]
                )
                self._forward = open_session(path, self._options)
        taken = {node.name for node in self._forward.get_inputs()}
        pairs = zip(self._inputs, batch, strict=True)
        try:
            return np.asarray(
                self._forward.run(None, {i.name: a for i, a in pairs if i.name in taken})[0]
            )
        except Exception as error:  # ONNX Runtime's exceptions have no common base
            raise run_failed(error) from error

    def _followed(self, chosen: Sequence[SelfCheckInput]) -> Sequence[SelfCheckInput]:
        """Give targets the sizes of the prediction, where only a run of it tells them."""
        dims = self._prediction[1]
        if not self._follows or dims is None:
            return chosen
        found = self._predicted(made_up_batch(self._inputs, chosen))
        if found.ndim != len(dims):
            raise OdtpackError(
                "shape-conflict",
                f"{self._prediction[0]!r} has {found.ndim} axes in a run, and {len(dims)} by its "
                "declaration",
                hint="correct the shapes that the model declares, or leave them out",
            )
        sizes = {dim: size for dim, size in zip(dims, found.shape, strict=True) if dim is not None}
        followed = []
        for item, wanted in zip(self._inputs, chosen, strict=True):
            # An axis without a name is that of the prediction, or of it without its classes.
            whole, classless = list(found.shape), [*found.shape[:1], *found.shape[2:]]
            alike = whole if len(item.shape) == len(dims) else classless
            alike = alike if len(alike) == len(item.shape) else list(wanted.shape)
            shape = tuple(
                dim if isinstance(dim, int) else alike[axis] if dim is None
                else sizes.get(dim, wanted.shape[axis])
                for axis, dim in enumerate(item.shape)
            )  # fmt: skip
            new = wanted if item.role == "data" else dataclasses.replace(wanted, shape=shape)
            followed.append(new)
        return followed

    def step(self, chosen: Sequence[SelfCheckInput]) -> None:
        """Make a step, and evaluate."""
        batch = made_up_batch(self._inputs, chosen)
        if "optimizer_model" in self._files:
            optimizer = Optimizer(self._files["optimizer_model"], self._module)
            train_step(self._module, optimizer, [batch])
        else:
            self._module(*batch)
        alive()
        evaluate(self._module, [batch])
        self._fits = chosen

    def idle(self) -> str | None:
        """What shows, after the steps that were made, that the loss teaches nothing."""
        batch = made_up_batch(self._inputs, self._fits)
        found = cannot_teach(self._module, batch, self._inputs)
        if found is None or "another order" not in found:
            return found
        # Samples that the model cannot tell apart say nothing about the order of their targets.
        try:
            rows = np.atleast_1d(self._predicted(batch))
        except OdtpackError:  # the loss reads an input
            return found
        return None if np.ptp(rows, axis=0).max() < 0.1 * np.abs(rows).max() else found

    def step_on(self) -> None:
        """Make a step with the step model."""
        self._module.close()
        with self._opened(self._files["step_model"]) as module:
            optimizer = Optimizer(self._files["optimizer_model"], module)
            optimizer.step_on(*made_up_batch(self._inputs, self._fits))

    def run(self, chosen: Sequence[SelfCheckInput]) -> SelfCheckInfo:
        """Return the check with inputs of these sizes."""
        forget_log()
        self._fits = chosen
        self._first = self._first or {n: v.data.copy() for n, v in self._state.parameters}
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
            up = Context(prec=1, rounding=ROUND_UP)  # one significant digit, no less than the value
            tolerances = [float(up.create_decimal(Decimal(each))) for each in tolerances]
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
        if best is None:
            return SelfCheckInfo(reason="its loss on made-up data is not finite")
        return best[1]

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
        self._state.optimizer = copy.deepcopy(self._begun)
        self._module.lazy_reset_grad()
        optimizer = Optimizer(self._files["optimizer_model"], self._module)
        batch = made_up_batch(self._inputs, chosen)
        return first_losses(self._module, optimizer, batch, rate)


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
