"""Verifies a package, step by step."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnxruntime

from odtpack_runtime.apart import worker as apart
from odtpack_runtime.apart.child import alive, forget_log
from odtpack_runtime.checkpoint.state import CheckpointState
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.scratch import scratch_folder
from odtpack_runtime.package.contradictions import contradiction
from odtpack_runtime.package.generator import decoder_runs
from odtpack_runtime.package.inference_template import write_inference_model
from odtpack_runtime.package.manifest import Manifest
from odtpack_runtime.package.manifest_signature import KeyFiles
from odtpack_runtime.package.onnx_files import likely_sizes
from odtpack_runtime.package.package import (
    Package,
    check_nothing_else,
    check_paths,
    find_manifest,
    read_manifest,
    signature_path,
)
from odtpack_runtime.package.records import SelfCheckInput
from odtpack_runtime.package.self_check import made_up_batch, search_batch, self_check
from odtpack_runtime.package.trust import Limits, check_operators, check_release, check_signed
from odtpack_runtime.package.verify_models import check_checkpoints, check_models
from odtpack_runtime.session.session import open_session
from odtpack_runtime.training.loop import loss_of, train_step
from odtpack_runtime.training.module import Module
from odtpack_runtime.training.optimizer import Optimizer

# Run every model of a package once on made-up data, in a process of its own.

_SAMPLES = 2


@dataclass(frozen=True)
class StepFigures:
    """What the steps on made-up data gave."""

    onnxruntime: str  # version that ran them
    training_loss: float | None  # loss of the first training step; None if it is not finite
    # loss of the same batch after the optimizer steps, in evaluation mode
    evaluation_loss: float | None
    shapes: dict[str, list[int]]  # shape of each input


def run_steps_apart(package: Package) -> StepFigures:
    """Run :func:`run_steps` in a process of its own, as a hostile model may do anything."""
    # Raises OdtpackError: What run_steps raised; `models-crash` if the process ended without a
    # word, `models-stall` if it was silent for longer than its limit.
    files = [package.path / file.path for file in package.manifest.files.all()]
    try:
        found = apart.call(
            "odtpack_runtime.package.verify:figures_of",
            apart.Limits.of(files),
            manifest=str(package.path / package.manifest_name),
        )
    except OdtpackError as error:
        error.where = error.where or str(package.path)
        raise
    return StepFigures(**found)


def figures_of(manifest: str) -> dict[str, Any]:
    """:func:`run_steps` of the package of a manifest, as JSON has it."""
    return asdict(run_steps(Package.open(Path(manifest))))


def run_steps(package: Package) -> StepFigures:
    """Load every model, and make a training, an optimizer and an evaluation step."""
    # A package with a self-check has to pass that.
    info = package.manifest.self_check
    if info is not None and info.reason is None:
        result = self_check(package)
        shapes = {item.name: list(item.shape) for item in info.inputs}
        figures = StepFigures(
            onnxruntime.__version__, result.losses[0], result.evaluation_loss, shapes
        )
    else:
        state = CheckpointState.load_checkpoint(package.checkpoint)
        figures = search_batch(
            package.manifest.inputs,
            _SAMPLES,
            partial(_steps, package),
            partial(likely_sizes, package.eval_model, state),
        )
    _load_converted(package)
    _load_exported(package)
    if any(file.role == "decoder_model" for file in package.manifest.files.extra):
        decoder_runs(str(package.path / package.manifest_name))
    return figures


def _steps(package: Package, chosen: Sequence[SelfCheckInput]) -> StepFigures:
    forget_log()
    batch = made_up_batch(package.manifest.inputs, chosen)
    state = CheckpointState.load_checkpoint(package.checkpoint)
    module = Module(package.training_model, state, package.eval_model)
    optimizer = Optimizer(package.optimizer_model, module)
    alive()
    loss = train_step(module, optimizer, [batch])
    alive()
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
            alive()


def _load_exported(package: Package) -> None:
    """Load what the inference template becomes: the manifest says what each parameter is in it."""
    file = package.manifest.files.inference_template
    if file is None:
        return
    state = CheckpointState.load_checkpoint(package.checkpoint)
    arrays = {**state.arrays(trainable=True), **state.arrays(trainable=False)}
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    with scratch_folder("verify") as folder:
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


# Verify a package: that it is whole, unaltered, true to its manifest, and that it trains.


@dataclass(frozen=True)
class Verification:
    """What was verified."""

    path: str  # the package's folder, absolute
    manifest_sha256: str  # of its manifest: what the package is, to the byte
    recipe_digest: str | None  # of what it was built from, if the manifest has one
    files: int  # number of files that the manifest lists
    size_bytes: int  # their size together, with the manifest's
    # `valid` for the key that was passed; `unchecked` if there is a signature and no key was passed
    signature: Literal["valid", "unchecked", "none"]
    steps: StepFigures
    signed_with: str | None  # file of the key that the signature is valid for
    release: int | None  # number of the release, if it has one
    checked: list[str]  # what was checked, in order, a phrase each


def verify_package(
    path: str | os.PathLike[str],
    *,
    public_key: KeyFiles | None = None,
    require_signature: bool = False,
    minimum_release: int | None = None,
    limits: Limits | None = None,
) -> Verification:
    """Verify a package.

    In this order, so that nothing is parsed before it is known to be what was signed and
    listed, and nothing is hashed that is too large or not listed: the signature; the manifest;
    its release and the limits of what it declares; paths, and that there are no other files;
    sizes and hashes; what models and checkpoints hold against what the manifest says; in a process
    of its own, a training, an optimizer and an evaluation step on made-up data.

    Args:
        path: The folder, or its manifest file.
        public_key: File with the public key (PEM, Ed25519) that the package must be signed
            with, or several, with one of which it must be.
        require_signature: Refuse a package without a signature also where no key is passed.
        minimum_release: Refuse an older release, and a package without a number.
        limits: Refuse a package that asks for more; for packages from somebody else.

    Returns:
        What was verified.

    Raises:
        OdtpackError: The first thing that is wrong. ``not-signed``, ``signature-wrong``,
            ``package-downgrade``, ``package-limits``, and
            what :meth:`Package.open`, :func:`check_nothing_else`, :func:`check_models`,
            :func:`check_checkpoints` and :func:`run_steps` raise.
    """
    manifest_path = find_manifest(path)
    data = read_manifest(manifest_path)
    key = check_signed(manifest_path, data, public_key, require_signature)
    root = manifest_path.parent.resolve()
    manifest = Manifest.from_json(data, str(manifest_path))
    if minimum_release is not None:
        check_release(manifest, minimum_release, str(root))
    if limits is not None:
        limits.check(manifest, str(root))
    check_paths(root, manifest.files.all(), manifest_path.name)
    check_nothing_else(root, manifest_path.name, manifest)
    package = Package.open(manifest_path)
    if package.manifest_sha256 != hashlib.sha256(data).hexdigest():
        raise OdtpackError(
            "package-changed",
            "The package was changed while it was verified.",
            where=str(package.path),
            hint="verify it again when nothing writes to it",
        )
    if limits is not None:
        check_operators(package, limits.domains)
    check_models(package)
    check_checkpoints(package)
    files = package.manifest.files.all()
    steps = run_steps_apart(package)
    present = os.path.lexists(signature_path(manifest_path))
    return Verification(
        str(package.path),
        package.manifest_sha256,
        package.manifest.recipe_digest,
        len(files),
        len(data) + sum(file.size_bytes for file in files),
        "valid" if key is not None else "unchecked" if present else "none",
        steps,
        None if key is None else str(key),
        manifest.release,
        _checked(manifest, key, minimum_release, limits),
    )


def _checked(
    manifest: Manifest, key: Path | None, minimum_release: int | None, limits: Limits | None
) -> list[str]:
    """What was checked, a phrase each."""
    check = manifest.self_check
    reason = None if check is None else check.reason
    known = check is not None and reason is None
    files = len(manifest.files.all())
    return [
        *([f"the manifest's signature, with {key.name}"] if key is not None else []),
        *([f"the release, {minimum_release} or later"] if minimum_release is not None else []),
        *(["limits of disk, memory, sizes and operator domains"] if limits is not None else []),
        "the manifest: its schema and its digest, session options and self-check included",
        f"path, size and SHA-256 of {files} files, and that there are no others",
        "inputs, outputs, operators and options of every model against the manifest",
        *(
            [f"the weights of {len(manifest.segments.segments)} segments, and what models take"]
            if manifest.segments is not None
            else []
        ),
        "names, shapes, types and digests of the checkpoint's tensors",
        "training steps against the losses of the self-check"
        if known
        else "a training, an optimizer and an evaluation step on made-up data"
        + (f", not against known losses: {reason}" if reason else ""),
    ]
