"""Writes the artifacts of a forward model: graphs, optimizer, checkpoint, manifest, ORT format."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import onnx_ir as ir

from odtpack import optimizers, targets
from odtpack.choices import Sessions, StepModel
from odtpack.errors import OdtpackError, shortened
from odtpack.ort import kernel_needs
from odtpack.ort.choices import OrtFormat
from odtpack.ort.files import with_ort_files, write_ort_files
from odtpack.ort.ort_needs import oldest_of_files
from odtpack.ort.session_runs import TRAINING_MODELS
from odtpack.package.backend import STOCK, Backend
from odtpack.package.digest import model_digest, recipe_digest
from odtpack.package.emit import listed_files, write_package
from odtpack.package.optimizer_update import PLAIN_UPDATE, OptimizerStep, Update, resolve_update
from odtpack.package.segments.build import build_segments, check_options
from odtpack.package.training import Graphs, TrainingGraphSpec, build_graphs
from odtpack_runtime.files.digest import file_sha256
from odtpack_runtime.files.folder_update import finish_update, is_stage, update_folder
from odtpack_runtime.package.manifest import Manifest

MANIFEST = "manifest.json"

_WORTH_A_STEP_MODEL: Final = 1 << 18
"""Trainable elements from which on a package has a step model by itself: a MiB of gradients."""


@dataclasses.dataclass(frozen=True)
class FilesSpec:
    """Which files are written besides the models and the checkpoint.

    Attributes:
        prefix: Start of every file name.
        ort_format: Variants of the models in ORT format, and the operators that a reduced
            build needs.
        custom_op_library: Shared library with custom operators, for the conversion.
        nominal: Whether to write a checkpoint without values, too.
        self_check: Whether to run the first steps, for devices to compare theirs with.
        sessions: How the package's sessions come by their memory.
        step_model: Whether to write a training model that also updates the parameters.
    """

    prefix: str = ""
    ort_format: OrtFormat | None = None
    custom_op_library: Path | None = None
    nominal: bool = False
    self_check: bool = True
    sessions: Sessions = "fast"
    step_model: StepModel = "auto"


def write_artifacts(
    model: ir.Model,
    recipe: TrainingGraphSpec,
    optimizer: optimizers.Optimizer | OptimizerStep | None,
    folder: Path,
    files: FilesSpec = FilesSpec(),
    *,
    update: Update = PLAIN_UPDATE,
    onnxruntime: str | None = None,
    backend: Backend = STOCK,
    remark: Callable[[str], None] | None = None,
) -> Manifest | None:
    """Differentiate a loaded model and write everything that a recipe asks for.

    Args:
        model: Model as :func:`odtpack.model.loading.load_model` returns it.
        recipe: What to train and how.
        optimizer: Formula, or what writes an optimizer model, or None.
        folder: Destination; created if needed.
        files: Which files to write.
        update: Clipping, parameter groups and schedule around a formula.
        onnxruntime: Version of ONNX Runtime that must load the package; any if None.
        backend: What is to run the package.
        remark: Takes a sentence about each thing that a memory budget had computed again.

    Returns:
        The manifest; None without an optimizer.

    Raises:
        OdtpackError: Bad input, or a folder that cannot be written. Nothing has been
            written then.
    """
    if files.ort_format and not backend.is_stock:
        raise OdtpackError(
            "target-cannot",
            "the ORT format is written by this ONNX Runtime, which does not know the operators "
            "of onnxruntime-training",
            hint="convert with onnxruntime-training: "
            "python -m onnxruntime.tools.convert_onnx_models_to_ort FOLDER",
        )
    if recipe.segments:
        check_options(recipe, backend, ort_format=files.ort_format is not None)
    backend.require_opset(model.graph.opset_imports[""])

    def make_optimizer(graphs: Graphs) -> tuple[OptimizerStep, ir.Model] | None:
        if optimizer is None:
            return None
        step = (
            resolve_update(optimizer, update, graphs)
            if isinstance(optimizer, optimizers.Optimizer)
            else optimizer
        )
        return step, backend.optimizer_model(step, graphs)

    if recipe.memory is not None and recipe.memory.budget is not None:
        from odtpack.package.memory_budget import build_within, sentences

        graphs = build_within(
            recipe.memory,
            lambda memory: build_graphs(model, dataclasses.replace(recipe, memory=memory), backend),
            lambda graphs, scratch: write_package(
                graphs, make_optimizer(graphs), scratch, self_check=False
            ),
        )
        if graphs.memory is not None and remark is not None:
            for sentence in sentences(graphs.memory):
                remark(sentence)
    elif recipe.segments:
        graphs = build_segments(model, recipe, backend)
    else:
        graphs = build_graphs(model, recipe, backend)
    if onnxruntime is not None:
        targets.require(onnxruntime, graphs.opset)
    pair = make_optimizer(graphs)
    step = None if pair is None else _step_model(pair[0], graphs, files.step_model)
    library = files.custom_op_library
    digest = recipe_digest(
        model,
        parameters={parameter.name: parameter.role for parameter in graphs.parameters},
        loss=graphs.loss,
        # What is resolved above, or had no effect, does not decide.
        recipe=dataclasses.replace(
            recipe, train=(), frozen=(), loss=None, prediction=graphs.returns_prediction
        ),
        runtime=backend.runtime,
        update=None if pair is None else pair[0].describe(),
        optimizer=None if pair is None else model_digest(pair[1]),
        files=dataclasses.replace(files, custom_op_library=None),
        custom_op_library=None if library is None else file_sha256(library),
    )
    oldest = backend.oldest_runtime(
        [
            *graphs.models,
            *(() if pair is None else pair[1:]),
            *(() if step is None else (step,)),
        ]
    )
    if onnxruntime is not None and backend.is_stock:
        kernel_needs.require(onnxruntime, oldest)
    write = functools.partial(
        write_package, graphs, pair, prefix=files.prefix, nominal=files.nominal,
        recipe_digest=digest, self_check=files.self_check, oldest=oldest, sessions=files.sessions,
        step=step,
    )  # fmt: skip
    if files.ort_format is None:
        return write(folder=folder)
    # ONNX Runtime may refuse the conversion: only what it took as a whole reaches the folder.
    prefix = files.prefix
    name = f"{prefix}{MANIFEST}"
    with update_folder(folder, last=name, obsolete=listed_files(folder, name)) as stage:
        manifest = write(folder=stage)
        models = {key: stage / f"{prefix}{key}.onnx" for key in TRAINING_MODELS}
        present = {key: path for key, path in models.items() if path.exists()}
        made = write_ort_files(present, files.ort_format, stage, prefix, library)
        needed = oldest_of_files(stage / file.path for file in made if file.role == "ort_model")
        if onnxruntime is not None:
            kernel_needs.require(onnxruntime, needed)
        if manifest is not None:
            least = kernel_needs.newest([oldest, needed]).name
            manifest = with_ort_files(manifest, made, least)
            (stage / name).write_bytes(manifest.to_json().encode())
    return manifest


def _step_model(update: OptimizerStep, graphs: Graphs, choice: StepModel) -> ir.Model | None:
    """The step model, if the package is to have one and the update allows it."""
    trained = sum(p.tensor.size for p in graphs.parameters if p.role == "trainable")
    if (
        graphs.segments is not None
        or choice == "never"
        or (choice == "auto" and trained < _WORTH_A_STEP_MODEL)
    ):
        return None
    return update.step_model(graphs)


def check_folder(folder: str | os.PathLike[str]) -> Path:
    """Refuse to mix a package with other things.

    Args:
        folder: Where a package is to go.

    Returns:
        The folder.

    Raises:
        OdtpackError: It is a file, or it holds files and no manifest, or its path is one that no
            file can have, or ONNX Runtime cannot open.
    """
    path = Path(folder)
    try:
        str(path.resolve()).encode()
        path.exists()
    except UnicodeEncodeError:
        raise OdtpackError(
            "package-not-written",
            f"the path {str(path)!r} is not UTF-8 text, and ONNX Runtime opens no other",
            hint="choose another folder (--out DIR)",
        ) from None
    except OSError as error:
        raise OdtpackError(
            "package-not-written",
            f"{shortened(str(path))!r} cannot be written: {error.strerror or error}",
            hint="choose another folder (--out DIR)",
        ) from error
    if path.exists() and not path.is_dir():
        raise OdtpackError(
            "package-not-written",
            f"{str(path)!r} is a file, and a package is a folder",
            hint="choose another folder (--out DIR)",
        )
    finish_update(path)
    found = [entry for entry in path.iterdir() if not is_stage(entry.name)] if path.is_dir() else []
    if found and not (path / MANIFEST).is_file():
        raise OdtpackError(
            "folder-not-empty",
            f"the folder {str(path)!r} holds files that are no package",
            hint="choose an empty or a new folder (--out DIR)",
        )
    return path
