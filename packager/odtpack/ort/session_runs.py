"""The ways in which sessions run the models of a package, and the graphs that then run.

A model in ORT format of style ``fixed`` runs as it stands in its file. One of style ``runtime``
runs as it stands there, or with the recorded optimizations applied. A model in ONNX format is
optimized when it is loaded, at a level that the app chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from odtpack.choices import Format, Mode, Platform, Style
from odtpack.errors import OdtpackError
from odtpack.ort.format import LEVELS, convert_model, optimize_model, recorded_level
from odtpack_runtime.package.package import Package

TRAINING_MODELS = ("training_model", "eval_model", "optimizer_model")
INFERENCE_MODEL = "inference_model"


@dataclass(frozen=True)
class SessionRun:
    """One way in which a session runs one model.

    Attributes:
        model: Which model: ``training_model``, ``eval_model``, ``optimizer_model`` or
            ``inference_model``.
        path: The file that is loaded, ``.onnx`` or ``.ort``.
        platform: Processors that it is optimized for; None for all.
        level: Optimization level, key of :data:`LEVELS`; None in ORT format.
        source: The model in ONNX format.
        replay: Whether recorded optimizations are applied; None if there are none.
    """

    model: str
    path: Path
    platform: Platform | None
    level: str | None
    source: Path
    replay: bool | None = None

    def __str__(self) -> str:
        """Return it as reports name it."""
        how = [f"level {self.level}"] if self.level is not None else []
        how += (
            []
            if self.replay is None
            else [f"recorded optimizations {'applied' if self.replay else 'ignored'}"]
        )
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
    """Return every way in which sessions run the models of a package.

    Args:
        package: The package.
        mode: Which models.
        format_: Which files; None for ORT format if the package holds it, else ONNX.
        platforms: Which processors; all if empty.
        inference: Path by ``inference_model`` for a package without such a model.
        scratch: Folder for a model in ORT format that the package does not hold.

    Raises:
        OdtpackError: ``no-ort-model`` if ORT format is asked for, and the package holds none.
    """
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
                hint=f"odtpack ort {package.path}, or pass --format onnx",
            )
        for file in files:
            target = None if file.platform is None else Platform(file.platform)
            replays = (False, True) if file.style == Style.RUNTIME.value else (None,)
            runs += [
                SessionRun(model, package.path / file.path, target, None, onnx[model], replay)
                for replay in replays
            ]
    return runs


def onnx_models(package: Package) -> dict[str, Path]:
    """Return the paths of a package's models in ONNX format by name; few have the last one."""
    models = {key: getattr(package, key) for key in TRAINING_MODELS}
    for file in package.manifest.files.extra:
        if file.role == INFERENCE_MODEL:
            models[INFERENCE_MODEL] = package.path / file.path
    return models


def final_graph(run: SessionRun, out: Path, custom_op_library: Path | None = None) -> Path:
    """Return a file in ORT format with the graph that runs.

    Args:
        run: How a session runs a model.
        out: Where to write it if no file holds it yet.
        custom_op_library: Shared library with the model's custom operators.

    Raises:
        OdtpackError: ONNX Runtime cannot convert the model.
    """
    if run.level is None and not run.replay:
        return run.path
    optimize_model(
        run.source,
        out,
        level=run.level or recorded_level(run.source),
        platform=run.platform,
        # What a session makes of recorded optimizations cannot be saved; this applies the same.
        runtime=None if run.level is not None else "apply",
        custom_op_library=custom_op_library,
    )
    return out
