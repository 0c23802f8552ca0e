"""From a forward model to a package on disk: what the command line and the demo call.

``artifacts.generate_artifacts`` is the reference's call with the reference's arguments;
:func:`build_package` takes patterns in place of names and an optimizer with its
hyperparameters. Both end in :func:`odtpack.package.write.write_artifacts`.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import get_args

import onnx_ir as ir

from odtpack import choices, optimizers, targets
from odtpack.adapters import AdapterSpec, Inserted, insert_adapter
from odtpack.arguments import check_choice, check_names, check_type
from odtpack.choices import STORAGES, BaseKind, Storage
from odtpack.errors import OdtpackError
from odtpack.gc_pause import paused_collector
from odtpack.losses import Loss, make_loss
from odtpack.memory.spec import read_memory
from odtpack.model.loading import CACHE, ModelLike, load_model
from odtpack.model.shared_tensors import shared_tensors
from odtpack.ort.choices import OrtFormat
from odtpack.ort_training.backend import backend_for
from odtpack.package.optimizer_update import PLAIN_UPDATE, Update
from odtpack.package.patterns import resolve, unreached
from odtpack.package.training import TrainingGraphSpec
from odtpack.package.write import FilesSpec, check_folder, write_artifacts
from odtpack.quantized import quantize_base
from odtpack_runtime.apart.worker import worker
from odtpack_runtime.package.manifest import AdapterInfo, Manifest


@paused_collector()
def build_package(
    model: ModelLike,
    folder: str | os.PathLike[str],
    *,
    loss: str | None,
    loss_options: Mapping[str, object] | None = None,
    optimizer: optimizers.Optimizer | None = None,
    update: Update = PLAIN_UPDATE,
    accumulation_steps: int = 1,
    train: Sequence[str] = (),
    freeze: Sequence[str] = (),
    untie: Sequence[str] = (),
    adapter: AdapterSpec | None = None,
    loss_inputs: Sequence[str] = (),
    outputs: Sequence[str] = (),
    prediction: bool = True,
    frozen_storage: Storage | None = None,
    base: BaseKind | None = None,
    ort_format: OrtFormat | None = None,
    nominal: bool = False,
    self_check: bool = True,
    memory_budget: str | None = None,
    memory_batch: int | None = None,
    memory_sizes: Sequence[str] = (),
    onnxruntime: str | None = None,
    remark: Callable[[str], None] | None = None,
    runtime: choices.Runtime = choices.STOCK,
    sessions: choices.Sessions = "fast",
    step_model: choices.StepModel = "auto",
    segments: bool = False,
) -> Manifest:
    """Build a package.

    Args:
        model: Forward model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``.
        folder: Where the package goes: a folder that does not exist, is empty, or holds
            a package, whose files are replaced.
        loss: Name in :data:`odtpack.losses.LOSSES`; None if the model's first output is
            the loss.
        loss_options: Options of the loss by name, see docs/losses.md.
        optimizer: Formula and hyperparameters; AdamW with its defaults if None.
        update: Clipping, parameter groups and schedule around the optimizer.
        accumulation_steps: Batches whose gradients make one optimizer step.
        train: Patterns of the parameters to train, see :func:`odtpack.package.patterns.resolve`.
        freeze: Patterns of the parameters to freeze.
        untie: Patterns of tensors that several places of the model read, of which each place
            gets its own, see :func:`odtpack.model.shared_tensors.untie`.
        adapter: What is trained in place of the model's parameters. Those that ``train`` matches
            are trained besides, and everything else is frozen.
        loss_inputs: Names of the values that the loss reads, see
            :class:`odtpack.package.training.TrainingGraphSpec`; the first outputs if empty.
        outputs: Names of further values that the training and evaluation models return.
        prediction: Let the evaluation model also return what the loss compares with labels, so
            that the accuracy can be computed. Training is not touched by it.
        frozen_storage: How large frozen weights are stored, see :mod:`odtpack.package.storage`.
        base: How frozen matrices are stored inside the models, see :mod:`odtpack.quantized`. It
            needs an adapter, or patterns of what is trained.
        ort_format: Also write each model in ORT format, in these variants, and the
            operators that a reduced build needs.
        nominal: Also write a checkpoint without values.
        self_check: Run the first steps, for devices to compare theirs with.
        memory_budget: Memory that training may take at its peak, ``"60 MB"``; what costs next to
            no time is done without one.
        memory_batch: Samples at once that the budget is for; 8 if None.
        memory_sizes: Sizes of other open axes that it is for, ``"tokens=128"``; 64 if not named.
        onnxruntime: Version of ONNX Runtime that must load the package, ``"1.20"``; any if None.
        remark: Takes a sentence about each parameter that is not frozen and still will not
            train, and about each that several places train as one.
        runtime: What is to run the package.
        sessions: How its sessions come by their memory, see :data:`odtpack.choices.SESSIONS`.
        step_model: Whether to write a training model that also updates the parameters, see
            :mod:`odtpack.step.model`.
        segments: Cut the network into models that run one after the other, see
            :mod:`odtpack.package.segments`.

    Returns:
        The manifest as written.

    Raises:
        OdtpackError: Bad input, or a folder that cannot be written or holds other things.
            Nothing has been written then.
    """
    check_type("folder", folder, (str, os.PathLike), "'package'")
    check_type("loss", loss, (str, NoneType), "'cross_entropy'")
    check_type("loss_options", loss_options, (Mapping, NoneType), "{'reduction': 'sum'}")
    check_type("optimizer", optimizer, (optimizers.Optimizer, NoneType), "odtpack.optimizers.SGD()")
    check_type("update", update, Update, "odtpack.package.optimizer_update.Update()")
    check_type("adapter", adapter, (AdapterSpec, NoneType), "AdapterSpec('lora', ('*.q_proj',))")
    check_type("accumulation_steps", accumulation_steps, int, "4")
    check_type("ort_format", ort_format, (OrtFormat, NoneType), "odtpack.ort.choices.OrtFormat()")
    check_type("nominal", nominal, bool, "True")
    check_type("segments", segments, bool, "True")
    check_type("onnxruntime", onnxruntime, (str, NoneType), "'1.20'")
    check_choice("frozen_storage", frozen_storage, (*STORAGES, None))
    check_choice("base", base, (*get_args(BaseKind), None))
    check_choice("runtime", runtime, get_args(choices.Runtime))
    check_choice("sessions", sessions, get_args(choices.Sessions))
    check_choice("step_model", step_model, get_args(choices.StepModel))
    for name, names in {
        "train": train, "freeze": freeze, "loss_inputs": loss_inputs, "outputs": outputs,
        "memory_sizes": memory_sizes,
    }.items():  # fmt: skip
        check_names(name, names)
    memory = read_memory(memory_budget, memory_batch, memory_sizes, runtime)
    destination = check_folder(folder)
    if loss is None and loss_options:
        raise OdtpackError(
            "option-not-used",
            f"the option {next(iter(loss_options))!r} is given for a loss, and there is none",
            hint="leave it out, or name a loss",
        )
    chosen = None if loss is None else make_loss(loss, loss_options)
    try:
        loaded = load_model(model, named=(*train, *freeze), untie=untie)
        cache = loaded.meta.get(CACHE, ())
        if base is not None:
            if adapter is None and not train:
                raise OdtpackError(
                    "base-not-used",
                    f"everything is trained, and nothing is left to store as {base}",
                    hint="train an adapter (--adapter lora), or name what is trained (--train)",
                )
            newest = targets.newest_opset(onnxruntime)
            loaded = quantize_base(loaded, base, train, newest)
        inserted = None if adapter is None else insert_adapter(loaded, adapter)
        if inserted is not None:
            loaded = inserted.model
            train = (*train, *map(glob.escape, inserted.parameters))
        read = tuple(loss_inputs) or _first_outputs(loaded, chosen)
        trained, frozen = resolve(loaded, train, freeze, read)
        if remark is not None:
            for sentence in _remarks(loaded, cache, trained, chosen, read):
                remark(sentence)
        if not trained:
            raise OdtpackError(
                "nothing-to-train",
                "no parameter is left to train"
                if freeze
                else "the model has no parameter that a gradient reaches",
                hint="odtpack inspect MODEL.onnx lists the parameters",
            )
        recipe = TrainingGraphSpec(
            trained,
            frozen,
            chosen,
            tuple(loss_inputs),
            tuple(outputs),
            accumulation_steps,
            newest_opset=targets.newest_opset(onnxruntime),
            frozen_storage=frozen_storage,
            prediction=prediction,
            memory=memory,
            adapter=None if inserted is None else _adapter_info(inserted),
            segments=segments,
        )
        # What runs the models gets ready while they are made.
        start = runtime == choices.STOCK and self_check
        with worker(remark and (lambda line: remark(f"ONNX Runtime says: {line}")), start=start):
            manifest = write_artifacts(
                loaded,
                recipe,
                optimizer or optimizers.AdamW(),
                destination,
                FilesSpec(
                    ort_format=ort_format,
                    nominal=nominal,
                    self_check=self_check,
                    sessions=sessions,
                    step_model=step_model,
                ),
                update=update,
                onnxruntime=onnxruntime,
                backend=backend_for(runtime),
                remark=remark,
            )
    except OdtpackError as error:
        if error.where is None and isinstance(model, str | Path):
            error.where = str(model)
        raise
    assert manifest is not None  # noqa: S101 - there is none only without an optimizer
    return manifest


def _adapter_info(inserted: Inserted) -> AdapterInfo:
    """What the manifest says of the adapter."""
    spec = inserted.spec
    return AdapterInfo(
        kind=spec.kind,
        rank=spec.rank if spec.low_rank else None,
        alpha=float(spec.alpha) if spec.low_rank else None,
        tokens=spec.tokens if spec.kind == "prompt" else None,
        layers=inserted.layers,
        feedforward=inserted.feedforward,
        parameters=inserted.parameters,
    )


def _remarks(
    model: ir.Model,
    cache: Sequence[str],
    trained: Sequence[str],
    loss: Loss | None,
    read: Sequence[str],
) -> Iterator[str]:
    """What is done or assumed without being asked for, a sentence each."""
    if cache:
        more = f" and {len(cache) - 2} more" if cache[2:] else ""
        yield (
            f"the inputs {', '.join(cache[:2])}{more} are left out: in training each sequence "
            "starts with an empty cache, and padding goes to its end"
        )
    for name in unreached(model, read):
        yield f"{name} is not reached from the loss: it stays a constant"
    assumed = None if loss is None else _assumption(model, loss, read)
    if assumed is not None:
        yield assumed
    for each in shared_tensors(model.graph, trained):
        if not each.one_parameter:
            yield each.sentence()


def _assumption(model: ir.Model, loss: Loss, read: Sequence[str]) -> str | None:
    """What a loss takes for granted about the values that it reads."""
    graph = model.graph
    values = (*graph.outputs, *graph.inputs, *(y for node in graph for y in node.outputs))
    known = {value.name: value for value in values}
    predictions = [known[name] for name in read[: len(loss.reads)] if name in known]
    if len(predictions) < len(loss.reads) or any(v.shape is None for v in predictions):
        return None  # attaching the loss says what is wrong
    return loss.assumption(predictions)


def _first_outputs(model: ir.Model, loss: Loss | None) -> tuple[str, ...]:
    """What a loss reads without further instructions."""
    count = 1 if loss is None else len(loss.reads)
    return tuple(str(value.name) for value in model.graph.outputs[:count])
