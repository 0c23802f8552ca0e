"""Artifacts of onnxruntime-training: which files belong together, and whether they do.

A folder holds ``{prefix}training_model.onnx``, ``{prefix}eval_model.onnx``,
``{prefix}optimizer_model.onnx``, ``{prefix}checkpoint`` and perhaps
``{prefix}nominal_checkpoint``. What a graph's inputs are follows from their names: those of
the checkpoint are parameters.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx

from odtpack.errors import OdtpackError
from odtpack.model.source import Source, check_texts, open_model
from odtpack.ort_training.backend import ACCUMULATOR
from odtpack.package.training import RESET
from odtpack.passes.gradient_buffers import BUFFER_SUFFIX, OUTPUT_SUFFIX
from odtpack_runtime.checkpoint.format import CheckpointData, read_checkpoint
from odtpack_runtime.files.atomic import file_sha256
from odtpack_runtime.package.manifest import Manifest
from odtpack_runtime.package.package import MANIFEST_NAME, read_manifest

MODELS = ("training_model", "eval_model", "optimizer_model")
_HINTS = {  # where one is missing
    **dict.fromkeys(MODELS, "copy the whole folder"),
    "optimizer_model": "generate the artifacts with an optimizer, or build a package from the "
    "forward model",
    "checkpoint": "pass it with --checkpoint FILE",
}


@dataclasses.dataclass(frozen=True)
class Artifacts:
    """Artifacts that belong together."""

    training: Source  # training model
    evaluation: Source  # evaluation model
    optimizer: Source  # optimizer model
    checkpoint: CheckpointData  # parameters, and what training left
    checkpoint_path: Path  # where it was read
    nominal: bool  # whether a nominal checkpoint lies beside
    # of a package for onnxruntime-training; None if another tool wrote it
    manifest: Manifest | None

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        """All parameters by name."""
        return {**self.checkpoint.trainable, **self.checkpoint.frozen}


def open_artifacts(
    folder: Path, *, prefix: str | None = None, checkpoint: Path | None = None
) -> Artifacts:
    """Open a folder of artifacts."""
    prefix = _prefix(folder) if prefix is None else prefix
    paths = {key: folder / f"{prefix}{key}.onnx" for key in MODELS}
    source = checkpoint or folder / f"{prefix}checkpoint"
    for what, path in (*paths.items(), ("checkpoint", source)):
        if not path.is_file():
            missing = f"{path.name} is missing: the {what.replace('_', ' ')}"
            raise OdtpackError("artifacts-incomplete", missing, hint=_HINTS[what])
    sources = {key: open_model(path) for key, path in paths.items()}
    for opened in sources.values():
        check_texts(opened.proto, opened.where)
    artifacts = Artifacts(
        sources["training_model"],
        sources["eval_model"],
        sources["optimizer_model"],
        read_checkpoint(source),
        source,
        (folder / f"{prefix}nominal_checkpoint").is_file(),
        _manifest(folder / f"{prefix}{MANIFEST_NAME}", paths["eval_model"]),
    )
    _check_training_model(artifacts.training.proto, paths["training_model"])
    if artifacts.checkpoint.nominal:
        raise OdtpackError(
            "checkpoint-nominal",
            "the checkpoint is nominal: it names the parameters and does not hold their values",
            where=str(source),
            hint="pass a complete one with --checkpoint FILE",
        )
    _check_parameters(artifacts, paths)
    _check_models(artifacts)
    return artifacts


def _manifest(path: Path, evaluation: Path) -> Manifest | None:
    """The manifest of a package for onnxruntime-training, if it describes this model."""
    if not path.is_file():
        return None
    try:
        manifest = Manifest.from_json(read_manifest(path), str(path))
    except OdtpackError:  # some other file of that name
        return None
    described = manifest.files.eval_model.sha256
    return manifest if manifest.target and file_sha256(evaluation) == described else None


def _prefix(folder: Path) -> str:
    """The start of the file names, if there is exactly one."""
    if not folder.is_dir():
        what = "{!r} is not a folder" if folder.exists() else "there is no folder {!r}"
        raise OdtpackError("artifacts-not-found", what.format(str(folder)))
    ending = "training_model.onnx"
    found = sorted(path.name.removesuffix(ending) for path in folder.glob(f"*{ending}"))
    if len(found) == 1:
        return found[0]
    if not found:
        raise OdtpackError(
            "artifacts-not-found",
            f"{str(folder)!r} holds no training_model.onnx",
            hint="pass the folder that onnxruntime-training's generate_artifacts wrote; a forward "
            "model is built with odtpack build",
        )
    raise OdtpackError(
        "artifacts-ambiguous",
        f"{str(folder)!r} holds the artifacts of {len(found)} models",
        hint=f"choose one with --prefix: {', '.join(repr(name) for name in found)}",
    )


def _check_training_model(model: onnx.ModelProto, path: Path) -> None:
    names = {value.name for value in model.graph.input}
    if any(node.op_type == ACCUMULATOR for node in model.graph.node) and RESET in names:
        return
    if RESET in names:
        raise OdtpackError(
            "not-artifacts",
            "the training model holds plain operators: odtpack built it",
            where=str(path),
        )
    if any(name.endswith(BUFFER_SUFFIX) for name in names):
        raise OdtpackError(
            "not-artifacts",
            "the training model is not one of onnxruntime-training 1.19: it accumulates gradients "
            f"without {ACCUMULATOR}",
            where=str(path),
            hint="build a package from the forward model",
        )
    raise OdtpackError(
        "nothing-to-train",
        "the training model computes no gradients",
        where=str(path),
        hint="the artifacts were generated without requires_grad; build a package from the "
        "forward model",
    )


def _check_parameters(artifacts: Artifacts, paths: dict[str, Path]) -> None:
    """Checkpoint and models have the same parameters."""

    def mismatch(what: str, hint: str | None = None) -> OdtpackError:
        where = str(artifacts.checkpoint_path)
        return OdtpackError("checkpoint-mismatch", what, where=where, hint=hint)

    parameters = artifacts.parameters
    training = {value.name: value for value in artifacts.training.proto.graph.input}
    evaluation = {value.name: value for value in artifacts.evaluation.proto.graph.input}
    trained = {n.removesuffix(BUFFER_SUFFIX) for n in training if n.endswith(BUFFER_SUFFIX)}
    for name in sorted(trained - set(parameters)):
        raise mismatch(
            f"the training model computes the gradient of {name!r}, which the checkpoint does "
            "not hold",
            hint="pass a checkpoint of this model; gradients of inputs cannot be imported",
        )
    for name, array in parameters.items():
        for key, inputs in (("training_model", training), ("eval_model", evaluation)):
            if name not in inputs:
                raise mismatch(
                    f"the checkpoint holds {name!r}, which {paths[key].name} does not take"
                )
            wanted = _tensor(inputs[name])
            if wanted != (str(array.dtype), array.shape):
                dtype, shape = wanted
                raise mismatch(
                    f"{name!r} is {array.dtype}{list(array.shape)} in the checkpoint and "
                    f"{dtype}{list(shape)} in {paths[key].name}"
                )
    for name in sorted(trained ^ set(artifacts.checkpoint.trainable)):
        here, there = ("trains", "freezes") if name in trained else ("freezes", "trains")
        raise mismatch(f"the training model {here} {name!r}, and the checkpoint {there} it")


def _tensor(value: onnx.ValueInfoProto) -> tuple[str, tuple[int | str, ...]]:
    tensor = value.type.tensor_type
    try:
        dtype = str(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    except KeyError:
        dtype = "unknown"
    return dtype, tuple(
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in tensor.shape.dim
    )


def _check_models(artifacts: Artifacts) -> None:
    """Training and evaluation model take and return the same."""
    parameters = artifacts.parameters
    training, evaluation = artifacts.training.proto.graph, artifacts.evaluation.proto.graph
    known = {RESET, *parameters}
    inputs, others = (
        [
            (value.name, *_tensor(value))
            for value in graph.input
            if value.name not in known and not value.name.endswith(BUFFER_SUFFIX)
        ]
        for graph in (training, evaluation)
    )
    outputs, more = (
        [value.name for value in graph.output if not value.name.endswith(OUTPUT_SUFFIX)]
        for graph in (training, evaluation)
    )
    # The evaluation model may return more, such as the prediction.
    if inputs != others or not outputs or more[: len(outputs)] != outputs:
        raise OdtpackError(
            "artifacts-mixed",
            "training and evaluation model do not take the same inputs and return the same outputs",
        )
