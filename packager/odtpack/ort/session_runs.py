"""Every way in which the models of a package are run, samples to run them with, and their arena.

Of what ONNX Runtime's arena holds a part is not in use: where a freed chunk is too small for the
next request, or a larger one is taken for it. How much that is hangs on two settings, and on every
request in an order that is known (:mod:`odtpack_simulator.memory.arena`). So settings are
tried on the plan, and the manifest has the best.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Final

import numpy as np
import onnx

from odtpack.choices import Format, Mode, Platform, Style
from odtpack.errors import OdtpackError
from odtpack.ort.format import LEVELS, convert_model
from odtpack_runtime.checkpoint.parameters import nominal_error
from odtpack_runtime.checkpoint.state import CheckpointState
from odtpack_runtime.package.checks import read_model
from odtpack_runtime.package.package import Package
from odtpack_runtime.package.records import SessionInfo
from odtpack_runtime.session.graph_signature import BUFFER_SUFFIX, RESET_NAME
from odtpack_simulator.memory.arena import Arenas, SessionUse, sharing_of
from odtpack_simulator.memory.memory_plan import plan_arenas

TRAINING_MODELS = ("training_model", "eval_model", "optimizer_model")
INFERENCE_MODEL = "inference_model"


@dataclass(frozen=True)
class SessionRun:
    """One way in which a session runs one model."""

    # Which model: ``training_model``, ``eval_model``, ``optimizer_model`` or ``inference_model``.
    model: str
    path: Path  # the file that is loaded, ``.onnx`` or ``.ort``
    platform: str | None  # processors that it is optimized for; None for all
    level: str | None  # optimization level, key of :data:`LEVELS`; None in ORT format
    source: Path  # the model in ONNX format
    replay: bool | None = None  # whether recorded optimizations are applied; None if there are none

    def __str__(self) -> str:
        """Return it as reports name it."""
        how = [f"level {self.level}"] if self.level is not None else []
        if self.replay is not None:
            how.append(f"recorded optimizations {'applied' if self.replay else 'ignored'}")
        how += [f"for {self.platform}"] if self.platform is not None else []
        return f"{self.path.name}{' (' + ', '.join(how) + ')' if how else ''}"


def runs_of(
    package: Package,
    mode: Mode,
    format_: Format | None,
    platforms: Sequence[Platform],
    inference: dict[str, Path],
    scratch: Path,
) -> list[SessionRun]:
    """Return every way in which sessions run the models of a package."""
    extra = package.manifest.files.extra
    onnx = onnx_models(package) | inference
    models = [
        *(TRAINING_MODELS if mode is not Mode.INFER else ()),
        *((INFERENCE_MODEL,) if mode is not Mode.TRAIN else ()),
    ]
    held = [file for file in extra if file.role == "ort_model"]
    if format_ is None:
        format_ = Format.ORT if held else Format.ONNX
    if format_ is Format.ONNX:
        return [
            SessionRun(model, onnx[model], platform, level, onnx[model])
            for model in models
            for platform in platforms or tuple(Platform)
            for level in LEVELS
        ]
    runs: list[SessionRun] = []
    for model in models:
        files = [
            file
            for file in held
            if file.of == model and (not platforms or file.platform in (None, *platforms))
        ]
        if not files and model == INFERENCE_MODEL:
            for platform in platforms or (None,):
                out = scratch / f"{model}{f'.{platform}' if platform else ''}.ort"
                convert_model(onnx[model], out, platform=platform)
                runs.append(SessionRun(model, out, platform, None, onnx[model]))
        elif not files:
            raise OdtpackError(
                "no-ort-model",
                f"the package holds no {model} in ORT format"
                + (f" for {', '.join(platforms)}" if platforms else ""),
                where=str(package.path),
                hint=f"odtpack ort {quote(str(package.path))}, or pass --format onnx",
            )
        for file in files:
            path = package.path / file.path
            runs += runs_of_file(model, path, file.platform, onnx[model], file.style)
    return runs


def runs_of_file(
    model: str, path: Path, platform: str | None, source: Path, style: str | None
) -> list[SessionRun]:
    """Return the ways in which a session runs a file in ORT format."""
    replays = (False, True) if style == Style.RUNTIME else (None,)
    return [SessionRun(model, path, platform, None, source, replay) for replay in replays]


def onnx_models(package: Package) -> dict[str, Path]:
    """Return the paths of a package's models in ONNX format by name; few have the last one."""
    models = {key: getattr(package, key) for key in TRAINING_MODELS}
    for file in package.manifest.files.extra:
        if file.role == INFERENCE_MODEL:
            models[INFERENCE_MODEL] = package.path / file.path
    return models


def final_graph(run: SessionRun, out: Path, custom_op_library: Path | None = None) -> Path:
    """Return a file in ORT format with the graph that runs."""
    if run.level is None and not run.replay:
        return run.path
    convert_model(
        run.source,
        out,
        level=run.level,
        platform=run.platform,
        # What a session makes of recorded optimizations cannot be saved; this applies the same.
        runtime=None if run.level is not None else "apply",
        custom_op_library=custom_op_library,
    )
    return out


Array = np.ndarray[Any, np.dtype[Any]]

_SIZE = 2  # size of every axis that a model leaves open


class SampleFeeds:
    """Inputs of the models of a package."""

    # package: The package; its parameters come from its checkpoint. data: An ``.npz`` file with
    # samples; made-up values if None: numbers from a fixed seed, zeros where whole numbers are
    # asked for, every open axis of size 2.

    def __init__(self, package: Package, data: Path | None = None) -> None:
        self._user = _user_inputs(package, data)
        state = CheckpointState.load_checkpoint(package.checkpoint)
        if state.is_nominal:
            raise nominal_error("a model cannot be run without its parameters' values")
        self.trainable = state.arrays(trainable=True)
        self._parameters = {**self.trainable, **state.arrays(trainable=False)}

    def __call__(self, model: str, source: Path) -> dict[str, Array]:
        """Return the inputs of a model by name."""
        if model == "optimizer_model":
            graph = read_model(source).graph
            return {value.name: _ones(value.type.tensor_type) for value in graph.input}
        feeds = self._user | self._parameters
        if model == "training_model":
            feeds |= {n + BUFFER_SUFFIX: np.zeros_like(a) for n, a in self.trainable.items()}
            feeds[RESET_NAME] = np.ones(1, np.bool_)
        return feeds


def _user_inputs(package: Package, data: Path | None) -> dict[str, Array]:
    batch = package.manifest.fixed_batch or _SIZE
    if data is not None:
        arrays = package.load_data(data)
        held = min(len(array) for array in arrays.values())
        if held < batch and batch != _SIZE:
            raise OdtpackError(
                "data-length",
                f"the models take batches of {batch} samples, and the data have {held}",
                where=str(data),
                hint=f"pass at least {batch} samples",
            )
        return {name: array[:batch] for name, array in arrays.items()}
    random = np.random.default_rng(0)
    made: dict[str, Array] = {}
    for spec in package.manifest.input_specs():
        shape = tuple(size if isinstance(size, int) else _SIZE for size in spec.shape)
        if spec.dtype == object:
            made[spec.name] = np.full(shape, "text", object)
        elif spec.dtype.kind == "f":
            made[spec.name] = random.random(shape).astype(spec.dtype)
        else:
            made[spec.name] = np.zeros(shape, spec.dtype)
    return made


def _ones(described: onnx.TypeProto.Tensor) -> Array:
    shape = [dim.dim_value if dim.HasField("dim_value") else _SIZE for dim in described.shape.dim]
    return np.ones(shape, onnx.helper.tensor_dtype_to_np_dtype(described.elem_type))


_INITIAL_CHUNKS: Final = (None, *(2**20 * size for size in (2, 3, 4, 6, 8, 12, 16, 24, 32)))
"""ONNX Runtime's own is a MiB. What is reserved takes no memory before it is written to, but for an
index of a 32nd of it."""

_DEAD_BYTES: Final = (None, 2**20, 2**18, 2**16)

_BALLASTS: Final = (2**12, 2**16, 2**18)
"""What the requests of a kit may differ by from those that are planned. Where so little makes the
arena open another region, its settings suit the plan and not the kits."""


def fitted(
    package: Package, shapes: Mapping[str, Sequence[int]], *, step_model: bool
) -> SessionInfo:
    """Return a package's session options with the arena that holds least."""
    manifest = package.manifest
    assert manifest.session is not None  # noqa: S101 - it says that sessions share an arena
    sizes = {i.name: shapes.get(i.name, i.shape) for i in manifest.inputs}

    use = SessionUse(sharing_of(manifest.session), step_model)
    plans = plan_arenas(package, sizes, use)  # type: ignore[arg-type]

    def tried(session: SessionInfo) -> Iterator[tuple[int, ...]]:
        """The most in all variants, and in that of the plan: peak, and what training holds."""
        # Where something else is the peak. What is known so far, phase after phase.
        most = planned = (0, 0)
        lives = (True, False), (True, True), (False, False)  # evaluates, is resumed
        variants = [*((0, *life) for life in lives), *((each, True, False) for each in _BALLASTS)]
        for ballast, evaluates, resumed in variants:
            peak = steps = 0
            for keeps in (True, False):  # the first is mostly the larger
                arenas = Arenas(plans.sharing, session, ballast, [keeps])
                for phase in plans.phases(arenas, evaluates=evaluates, resumed=resumed):
                    peak = max(peak, phase.nbytes - ballast)
                    if phase.name == "training step":
                        steps = max(steps, phase.nbytes - ballast)
                    if evaluates and not ballast:
                        planned = max(planned, (peak, steps))
                    most = max(most, (peak, steps))
                    yield *most, *planned

    # No phase takes any of these figures down: what is complete and still lowest is the best.
    choices = [
        dataclasses.replace(
            manifest.session, initial_chunk_size_bytes=first, max_dead_bytes_per_chunk=dead
        )
        for first, dead in itertools.product(_INITIAL_CHUNKS, _DEAD_BYTES)
    ]
    trials = [tried(session) for session in choices]
    queue: list[tuple[tuple[int, ...], int]] = [((), index) for index in range(len(choices))]
    while (found := next(trials[index := queue[0][1]], None)) is not None:
        heapq.heapreplace(queue, (found, index))
    return choices[index]
