"""Writes the artifacts of a forward model: graphs, optimizer, checkpoint, manifest, ORT format."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import onnx_ir as ir

from odtpack import targets
from odtpack.errors import OdtpackError, shortened
from odtpack.option import options_of
from odtpack.ort import kernel_needs
from odtpack.ort.files import with_ort_files, write_ort_files
from odtpack.ort.ort_needs import oldest_of_files
from odtpack.ort.session_runs import TRAINING_MODELS
from odtpack.package.digest import model_digest, recipe_digest
from odtpack.package.emit import Made, listed_files, write_package
from odtpack.package.optimizer_update import OptimizerStep, resolve_update
from odtpack.package.segments.build import build_segments, check_options
from odtpack.package.training import Graphs, Task, build_graphs
from odtpack.spec import AdapterSpec, BuildSpec
from odtpack_runtime.files.digest import file_sha256
from odtpack_runtime.files.folder_update import finish_update, is_stage, update_folder
from odtpack_runtime.package.manifest import Manifest

MANIFEST = "manifest.json"

_WORTH_A_STEP_MODEL: Final = 1 << 18
"""Trainable elements from which on a package has a step model by itself: a MiB of gradients."""


# Options whose effect is in the digest in its resolved form: in the model, the names of the
# parameters, the loss, the optimizer model or the problem that the memory compiler solves.
_RESOLVED: Final = {
    *("model", "head", "train", "freeze", "untie", "loss", "loss_options", "optimizer"),
    *("optimizer_options", "clip_norm", "clip_value", "privacy_clip", "privacy_noise", "groups"),
    *("decay_vectors", "schedule", "prediction", "base", "onnxruntime", "adapter"),
    *(f"adapter_{each.name}" for each in options_of(AdapterSpec)),
    *("memory_budget", "memory_batch", "memory_sizes"),
}


def write_artifacts(
    task: Task, folder: Path, remark: Callable[[str], None] | None = None
) -> Manifest | None:
    """Differentiate a loaded model and write everything that is asked for.

    Args:
        task: The model, and what is asked for.
        folder: Destination; created if needed.
        remark: Takes a sentence about each activation that a memory budget had recomputed.

    Returns:
        The manifest; None without an optimizer.

    Raises:
        OdtpackError: Bad input, or a folder that cannot be written. Nothing has been
            written then.
    """
    spec, backend = task.spec, task.backend
    if spec.ort_format and not backend.is_stock:
        raise OdtpackError(
            "target-cannot",
            "the ORT format is written by this ONNX Runtime, which does not know the operators "
            "of onnxruntime-training",
            hint="convert with onnxruntime-training: "
            "python -m onnxruntime.tools.convert_onnx_models_to_ort FOLDER",
        )
    if spec.segments:
        check_options(task)
    backend.require_opset(task.model.graph.opset_imports[""])
    if task.memory is not None and task.memory.budget is not None:
        from odtpack.package.memory_budget import build_within, sentences

        graphs = build_within(task.memory, task, _made)
        if graphs.memory is not None and remark is not None:
            for sentence in sentences(graphs.memory):
                remark(sentence)
    else:
        graphs = build_segments(task) if spec.segments else build_graphs(task)
    if spec.onnxruntime is not None:
        targets.require(spec.onnxruntime, graphs.opset)
    made = _made(task, graphs)
    if made is not None:
        made = dataclasses.replace(
            made, step_model=_step_model(made.step, graphs), digest=_digest(graphs, made)
        )
    models = () if made is None else (made.optimizer, made.step_model)
    oldest = backend.oldest_runtime(
        [*graphs.models, *(model for model in models if model is not None)]
    )
    if made is not None:
        made = dataclasses.replace(made, oldest=oldest)
    if spec.onnxruntime is not None and backend.is_stock:
        kernel_needs.require(spec.onnxruntime, oldest)
    if spec.ort_format is None:
        return write_package(graphs, made, folder)
    # ONNX Runtime may refuse the conversion: only what it took as a whole reaches the folder.
    name = f"{task.prefix}{MANIFEST}"
    with update_folder(folder, last=name, obsolete=listed_files(folder, name)) as stage:
        manifest = write_package(graphs, made, stage)
        paths = {key: stage / f"{task.prefix}{key}.onnx" for key in TRAINING_MODELS}
        present = {key: path for key, path in paths.items() if path.exists()}
        files = write_ort_files(
            present, spec.ort_format, stage, task.prefix, task.custom_op_library
        )
        needed = oldest_of_files(stage / file.path for file in files if file.role == "ort_model")
        if spec.onnxruntime is not None:
            kernel_needs.require(spec.onnxruntime, needed)
        if manifest is not None:
            least = kernel_needs.newest([oldest, needed]).name
            manifest = with_ort_files(manifest, files, least)
            (stage / name).write_bytes(manifest.to_json().encode())
    return manifest


def _made(task: Task, graphs: Graphs) -> Made | None:
    """The optimizer and its model; None without an optimizer."""
    step = resolve_update(task, graphs)
    return None if step is None else Made(step, task.backend.optimizer_model(step, graphs))


def _digest(graphs: Graphs, made: Made) -> str:
    """What decided the build: what is resolved, and the options that are not."""
    task, library = graphs.task, graphs.task.custom_op_library
    plain = (each.name for each in options_of(BuildSpec) if each.name not in _RESOLVED)
    return recipe_digest(
        task.model,
        parameters={parameter.name: parameter.role for parameter in graphs.parameters},
        loss=graphs.loss,
        prediction=graphs.returns_prediction,
        spec={name: getattr(task.spec, name) for name in plain},
        newest_opset=targets.newest_opset(task.spec.onnxruntime),
        memory=task.memory,
        adapter=task.adapter,
        attached=task.attached,
        input_gradients=task.input_gradients,
        prefix=task.prefix,
        update=made.step.describe(),
        optimizer=model_digest(made.optimizer),
        custom_op_library=None if library is None else file_sha256(library),
    )


def _step_model(step: OptimizerStep, graphs: Graphs) -> ir.Model | None:
    """The step model, if the package is to have one and the step allows it."""
    choice = graphs.task.spec.step_model
    trained = sum(p.tensor.size for p in graphs.parameters if p.role == "trainable")
    if (
        graphs.segments is not None
        or choice == "never"
        or (choice == "auto" and trained < _WORTH_A_STEP_MODEL)
    ):
        return None
    return step.step_model(graphs)


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
            f"the folder {str(path)!r} is not empty and is not a package",
            hint="choose an empty or a new folder (--out DIR)",
        )
    return path
