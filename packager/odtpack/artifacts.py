"""``generate_artifacts``: the reference's call, with plain ONNX operators inside.

Same names, file names and graph conventions as ``onnxruntime.training.artifacts``.
"""

from __future__ import annotations

import enum
import os
import re
import warnings
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from types import NoneType
from typing import TypeVar, get_args

import onnx_ir as ir

from odtpack import choices, losses, optimizers
from odtpack.choices import OrtFormat
from odtpack.errors import OdtpackError, UnknownNameError, WrongTypeError, check_type
from odtpack.graph.graphs import TRAINABLE_TYPES, is_lifted_constant, running_statistics
from odtpack.losses.common.base import Classes, settled_on
from odtpack.model.exporters import known_names, matching
from odtpack.model.loading import load_model, named_cause
from odtpack.model.shared_tensors import copies_of
from odtpack.model.source import ModelLike
from odtpack.onnxblock.blocks import Block
from odtpack.onnxblock.models import attach_block
from odtpack.onnxblock.optim import BlockOptimizer
from odtpack.optimizers import Clip
from odtpack.optimizers.common.model import NO_CLIP
from odtpack.ort_training.backend import backend_for
from odtpack.package.candidates import candidates, reached
from odtpack.package.task import OptimizerStep, Task, paused_collector
from odtpack.package.write import write_artifacts
from odtpack.spec import BuildSpec

__all__ = ["LossType", "OptimType", "generate_artifacts"]


class LossType(enum.IntEnum):
    """Losses that can be attached to a forward model."""

    MSELoss = 1
    CrossEntropyLoss = 2
    BCEWithLogitsLoss = 3
    L1Loss = 4


class OptimType(enum.IntEnum):
    """Optimizers that can be emitted."""

    AdamW = 1
    SGD = 2


_GLOB = re.compile(r"[*?\[]")

_LOSSES = {
    LossType.MSELoss: "mse",
    LossType.CrossEntropyLoss: "cross_entropy",
    LossType.BCEWithLogitsLoss: "bce_with_logits",
    LossType.L1Loss: "l1",
}


@paused_collector()
def generate_artifacts(
    model: ModelLike,
    requires_grad: Sequence[str] | None = None,
    frozen_params: Sequence[str] | None = None,
    loss: LossType | Block | None = None,
    optimizer: OptimType | Block | None = None,
    artifact_directory: str | os.PathLike[str] | None = None,
    prefix: str = "",
    ort_format: bool = False,
    custom_op_library: str | os.PathLike[str] | None = None,
    additional_output_names: Sequence[str] | None = None,
    nominal_checkpoint: bool = False,
    loss_input_names: Sequence[str] | None = None,
    *,
    target: choices.Runtime = choices.STOCK,
    untie: Sequence[str] | None = None,
    stop_gradient: Sequence[str] | None = None,
) -> None:
    """Generate the files that training on a device needs.

    Writes ``{prefix}training_model.onnx``, ``{prefix}eval_model.onnx``, with an optimizer
    ``{prefix}optimizer_model.onnx``, and ``{prefix}checkpoint``, and beside the reference's
    files, if there is an optimizer, ``{prefix}manifest.json``, which describes them, and
    ``{prefix}inference_template.onnx``, the forward model for exports.

    Args:
        model: Forward model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``.
        requires_grad: Names of the initializers to train, or patterns as for ``--train``; none
            by default. Where every initializer is named, those train that the loss reaches, and
            a warning names the others. What a block creates to be trained needs no name.
        frozen_params: Names or patterns of initializers that become inputs and checkpoint
            entries but are not trained. All others stay inside the models.
        loss: Loss to attach, or a block that writes one; without one the model's first output
            must be a scalar loss, and its others are returned after it. A block is called with
            the names of all outputs of the model, or with ``loss_input_names``; what it returns
            after the loss are additional outputs.
        optimizer: Optimizer to emit, or a block that writes one, see
            :mod:`odtpack.onnxblock.optim`; none by default.
        artifact_directory: Where to write; created if needed. The current folder by default.
        prefix: Start of every file name.
        ort_format: Also write each model in ORT format, style fixed, for all processors, and
            the operators that a reduced build needs.
        custom_op_library: Shared library with the model's custom operators, which the
            self-check and the ORT format conversion load. They may only stand where no
            gradient flows.
        additional_output_names: Values that the training and evaluation models return
            after the loss.
        nominal_checkpoint: Also write ``{prefix}nominal_checkpoint``, without values.
        loss_input_names: Values that the loss reads: the prediction, and optionally the
            target. The first output by default; for a block all outputs. Without a loss what
            the models return, the loss first.
        target: What is to run the files: ``"onnxruntime"``, or ``"ort-training"`` for
            onnxruntime-training 1.19.
        untie: Patterns of tensors that several places of the model read, of which each place
            gets its own, see :func:`odtpack.model.shared_tensors.untie`.
        stop_gradient: Values that no gradient passes, as for ``--stop-gradient``.

    Raises:
        OdtpackError: Bad input; the message says what, and how to correct it. Nothing has been
            written then.
    """
    check_type("artifact_directory", artifact_directory, (str, os.PathLike, NoneType), "'folder'")
    check_type("prefix", prefix, str, "'small_'")
    check_type("ort_format", ort_format, bool, "True")
    check_type("nominal_checkpoint", nominal_checkpoint, bool, "True")
    check_type("custom_op_library", custom_op_library, (str, os.PathLike, NoneType), "'ops.so'")
    chosen = None
    if loss is not None and not isinstance(loss, Block):
        chosen = losses.make_loss(_LOSSES[_enum(loss, LossType, "loss")])
    method, clip = (None, NO_CLIP) if optimizer is None else _optimizer(optimizer)
    train, frozen = _names(requires_grad, "requires_grad"), _names(frozen_params, "frozen_params")
    if prefix and Path(prefix).name != prefix:
        raise OdtpackError("bad-prefix", f"prefix {prefix!r} must be the start of a file name")
    library = None if custom_op_library is None else Path(custom_op_library)
    if library is not None and not library.is_file():
        raise OdtpackError("library-not-found", f"custom_op_library {str(library)!r} is not a file")
    if target not in get_args(choices.Runtime):
        known = ", ".join(repr(name) for name in get_args(choices.Runtime))
        raise OdtpackError("bad-target", f"target is {target!r}; it must be one of {known}")
    loaded = load_model(
        model,
        named=(*train, *frozen),
        untie=_names(untie, "untie"),
        stop=_names(stop_gradient, "stop_gradient"),
    )
    train = _initializers(loaded, train, "requires_grad")
    frozen = _initializers(loaded, frozen, "frozen_params")
    read = _names(loss_input_names, "loss_input_names")
    additional = _names(additional_output_names, "additional_output_names")
    # Where every initializer of the file is named, that is a list, and no choice.
    stored = {n for n, v in loaded.graph.initializers.items() if not is_lifted_constant(v)}
    attached, everything = None, bool(train) and stored <= set(train)
    if isinstance(loss, Block):
        # The block writes the loss; the model then ends in it.
        given = read or [output.name or "" for output in loaded.graph.outputs]
        loaded, results, attached, created = attach_block(loaded, loss, given)
        train = (*train, *(name for name in created if name not in {*train, *frozen}))
        read, additional = results[:1], (*results[1:], *additional)
    outputs = tuple(str(output.name) for output in loaded.graph.outputs)
    if loss is None:
        read, others = (results := read or outputs)[:1], results[1:]
        if again := [name for name in additional if name in others]:
            warnings.warn(
                f"additional_output_names names {again[0]!r}, which is returned anyway: it is "
                "returned once",
                stacklevel=3,
            )
        additional = tuple(dict.fromkeys((*others, *additional)))
    elif chosen is not None:
        found = settled_on(loaded.graph, chosen, read or outputs[: len(chosen.reads)])
        settled, predictions = found or (None, [])
        if isinstance(settled, Classes) and (r := settled.not_as_the_reference(predictions)):
            warnings.warn(r, stacklevel=3)
    if everything:
        train = _those_that_learn(loaded, train, read)
    if method is not None and not train:
        what = "an optimizer is requested, but requires_grad names no parameter"
        raise OdtpackError("nothing-to-train", what)
    spec = BuildSpec(
        loss_inputs=read,
        outputs=additional,
        prediction=False,
        clip_norm=clip.norm,
        clip_value=clip.value,
        runtime=target,
        ort_format=OrtFormat() if ort_format else None,
        nominal=nominal_checkpoint,
    )
    task = Task(
        loaded,
        train,
        frozen,
        chosen,
        spec,
        method,
        attached,
        backend=backend_for(target),
        prefix=prefix,
        custom_op_library=library,
    )
    with named_cause(model):
        write_artifacts(
            task, Path.cwd() if artifact_directory is None else Path(artifact_directory)
        )


def _initializers(model: ir.Model, patterns: Sequence[str], argument: str) -> tuple[str, ...]:
    """The initializers that names and patterns mean; a name that is unknown stays as it is."""
    # A block may still create it.
    graph = model.graph
    known: list[str] = []
    for pattern in patterns:
        if pattern in graph.initializers or not _GLOB.search(pattern):
            known += copies_of(graph, [pattern])
            continue
        hits = matching(pattern, candidates(model), known_names(graph))
        if not hits:
            what = f"{argument} {pattern!r} matches no parameter of the model"
            raise UnknownNameError("unknown-parameter", what)
        known += hits
    return tuple(dict.fromkeys(known))


def _those_that_learn(
    model: ir.Model, train: Sequence[str], read: Sequence[str]
) -> tuple[str, ...]:
    """Of every initializer those that a gradient can change; a warning names the others."""
    values, state = model.graph.initializers, set(running_statistics(model.graph))
    names = [n for n in train if n in values and values[n].dtype in TRAINABLE_TYPES]
    learn = set(reached(model, names, read or [str(model.graph.outputs[0].name)])) - state
    others = [name for name in train if name in values and name not in learn]
    if others and learn:
        warnings.warn(
            f"requires_grad names every initializer; not trained, as the loss does not depend on "
            f"them, they hold no floating-point numbers or follow the data: {', '.join(others)}",
            stacklevel=4,
        )
    return tuple(name for name in train if name not in others) if learn else tuple(train)


def _optimizer(optimizer: object) -> tuple[optimizers.Optimizer | OptimizerStep, Clip]:
    """What an optimizer step does, and how gradients are clipped before it."""
    if isinstance(optimizer, Block):
        written = BlockOptimizer(optimizer)
        if written.formula is None:
            return written, NO_CLIP
        return written.formula, written.clip
    kind = _enum(optimizer, OptimType, "optimizer")
    return optimizers.AdamW() if kind is OptimType.AdamW else optimizers.SGD(), NO_CLIP


_Kind = TypeVar("_Kind", LossType, OptimType)


def _enum(value: object, kind: type[_Kind], name: str) -> _Kind:
    if not isinstance(value, kind):
        members = ", ".join(f"{kind.__name__}.{member.name}" for member in kind)
        block = value if isinstance(value, type) and issubclass(value, Block) else None
        error = WrongTypeError if kind is OptimType else OdtpackError  # as in the reference
        raise error(
            f"bad-{name}",
            f"{name} is {value!r}; it must be a block or one of {members}",
            hint=None if block is None else f"pass an object: {block.__name__}()",
        )
    return value


def _names(names: Sequence[str] | None, argument: str) -> tuple[str, ...]:
    if names is None:
        return ()
    listed = isinstance(names, Collection) and not isinstance(names, str)
    if not listed or not all(isinstance(name, str) for name in names):
        named = argument.replace("_", "-")  # what the reference does not have has no code
        code = "bad-argument" if argument in ("untie", "stop_gradient") else f"bad-{named}"
        raise OdtpackError(code, f"{argument} must be a list of names")
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise OdtpackError("named-twice", f"{argument} names {repeated[0]!r} more than once")
    return tuple(names)
