"""From a forward model to a package on disk: what the command line and the demo call.

``artifacts.generate_artifacts`` is the reference's call with the reference's arguments. Both end
in :func:`odtpack.package.write.write_artifacts`.
"""

from __future__ import annotations

import dataclasses
import glob
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from odtpack import targets
from odtpack.adapters import Inserted, insert_adapter
from odtpack.adapters.inference import decoder_with_adapter
from odtpack.adapters.layers import layer_name, transposed, without_adapter
from odtpack.choices import STOCK
from odtpack.errors import OdtpackError, check_type, located, quoted, some
from odtpack.losses import Loss, make_loss
from odtpack.losses.common.base import settled_on
from odtpack.model import loading
from odtpack.model.exporters import absent, homes
from odtpack.model.head import add_head
from odtpack.model.inputs import settle
from odtpack.model.shared_tensors import shared_tensors
from odtpack.model.source import ModelLike
from odtpack.optimizers import Optimizer, make_optimizer
from odtpack.option import options_of
from odtpack.ort_training.backend import backend_for
from odtpack.package.candidates import (
    Chosen,
    choose,
    constants_like_weights,
    frozen_rows,
    nothing_to_train,
    unreached,
    zero_rows,
)
from odtpack.package.self_check import MEASURE
from odtpack.package.task import Remark, Task, paused_collector, silent
from odtpack.package.training import attach_losses, read_by, select
from odtpack.package.write import check_folder, write_artifacts
from odtpack.passes import opsets
from odtpack.quantized import quantize_base
from odtpack.spec import AdapterSpec, BuildSpec
from odtpack_runtime.apart.worker import worker
from odtpack_runtime.package.adapter import PREFIX
from odtpack_runtime.package.manifest import AdapterInfo, Manifest
from odtpack_runtime.training.loop import check_axes


def build_package(
    model: ModelLike,
    folder: str | os.PathLike[str],
    *,
    remark: Callable[[str], None] | None = None,
    **options: Any,
) -> Manifest:
    """Build a package.

    Args:
        model: Forward model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``.
        folder: As of :func:`build`.
        remark: As of :func:`build`.
        options: Fields of :class:`odtpack.spec.BuildSpec`. ``loss=None`` is ``"none"``;
            ``optimizer`` may be an object, ``SGD(momentum=0.9)``, as may ``adapter``,
            ``AdapterSpec("lora", ("*.q_proj",))``.

    Returns:
        The manifest as written.

    Raises:
        OdtpackError: As :func:`build`.
    """
    optimizer, adapter = options.get("optimizer"), options.get("adapter")
    if optimizer is None:
        options.pop("optimizer", None)
    if isinstance(optimizer, Optimizer):
        options["optimizer"] = optimizer.kind
        options["optimizer_options"] = {
            each.name: getattr(optimizer, each.name)
            for each in options_of(type(optimizer))
            if getattr(optimizer, each.name) != each.default
        }
    if isinstance(adapter, AdapterSpec):
        own = dict(vars(adapter))
        options["adapter"] = own.pop("kind")
        options |= {f"adapter_{name}": value for name, value in own.items()}
    for name, nothing in (("loss", "none"), ("loss_options", {}), ("optimizer_options", {})):
        if name in options and options[name] is None:
            options[name] = nothing
    return build(BuildSpec(model=model, **options), folder, remark=remark)


_KEYWORD = inspect.Parameter.KEYWORD_ONLY
build_package.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        *list(inspect.signature(build_package).parameters.values())[:-1],
        *(
            inspect.Parameter(each.name, _KEYWORD, default=each.default, annotation=each.type)
            for each in options_of(BuildSpec)
            if each.name != "model"
        ),
    ]
)


def load(spec: BuildSpec) -> ir.Model:
    """The loaded model of a build, with the head that is asked for."""
    head, model = spec.head, spec.model
    if head is not None:
        content = add_head(model, head.pool, head.classes, seed=head.seed, name=head.input)
        model = onnx.load_from_string(content)
    named = (*spec.train, *spec.freeze)
    return loading.load_model(model, named, spec.untie, spec.stop_gradient, spec.sizes)


@paused_collector()
def build(
    spec: BuildSpec,
    folder: str | os.PathLike[str],
    *,
    remark: Callable[[str], None] | None = None,
    checked: Callable[[float], None] | None = None,
) -> Manifest:
    """Build the package that a specification asks for.

    Args:
        spec: What is asked for.
        folder: Where the package goes: a folder that does not exist, is empty, or holds
            a package, whose files are replaced.
        remark: Takes a sentence about each parameter that is not frozen and still will not
            train, and about each that several places train as one.
        checked: Takes the seconds of processor time that it took to run the models that were
            written.

    Returns:
        The manifest as written.

    Raises:
        OdtpackError: Bad input, or a folder that cannot be written or holds other things.
            Nothing has been written then.
    """
    check_type("folder", folder, (str, os.PathLike), "'package'")
    adapter = spec.adapter_spec()
    memory = spec.memory_spec()
    destination = check_folder(folder)
    chosen = None if spec.loss == "none" else make_loss(spec.loss, spec.loss_options)
    _check_used(spec, chosen)
    optimizer = make_optimizer(spec.optimizer, spec.optimizer_options)
    say = remark or silent
    path = str(spec.model) if isinstance(spec.model, str | Path) else None
    with loading.named_cause(spec.model), located(path):
        loaded = load(spec)
        cache, wanted = loaded.meta.get(loading.CACHE, ()), spec.train
        old = loaded.meta.get(loading.CONVERTED_FROM)
        if old is not None:
            say(f"the model has opset {old}, and is converted to {opsets.TO}")
        if ones := loaded.meta.get(loading.SQUEEZED):
            sizes = [f"axis {axis} of {name}" for name, axis in ones]
            say(
                f"{some(sizes)} {'are' if sizes[1:] else 'is'} taken to have size 1, as squeeze() "
                "in the model needs it: training on other sizes fails"
            )
        if lost := loaded.meta.get(loading.UNREACHED):
            names = [layer_name(name, {}) for name in lost]
            say(
                f"nothing that the model returns depends on {some(names)}: the exporter left what "
                "they compute unread, and they are left out"
            )
        if spec.base is not None:
            if adapter is None and not wanted:
                what = f"everything is trained, and nothing is left to store as {spec.base}"
                hint = "train an adapter (--adapter lora), or name what is trained (--train)"
                raise OdtpackError("base-not-used", what, hint=hint)
            newest = targets.newest_opset(spec.onnxruntime)
            loaded = quantize_base(loaded, spec.base, wanted, newest, say)
        inserted = None if adapter is None else insert_adapter(loaded, adapter)
        if inserted is not None:
            loaded = inserted.model
            if left := without_adapter(loaded.graph, inserted.spec.on):
                say(
                    f"--on also names {some(left)}, without an adapter: one goes on products and "
                    "on convolutions that are neither grouped nor transposed"
                )
            wanted = (*wanted, *map(glob.escape, inserted.parameters))
        served = settle(loaded, spec.inputs) if spec.inputs else None
        attached = None
        if spec.losses:
            attached, said = attach_losses(loaded.graph, spec.losses)
            spec = dataclasses.replace(
                spec,
                loss_inputs=(str(loaded.graph.outputs[0].name),),
                outputs=(*said, *spec.outputs),
                prediction=False,
            )
        # Without further instructions a loss reads the first outputs.
        count = 1 if chosen is None else len(chosen.reads)
        read = spec.loss_inputs or tuple(str(v.name) for v in loaded.graph.outputs[:count])
        found = choose(loaded, spec, wanted, read, () if inserted is None else inserted.parameters)
        rows = frozen_rows(loaded, spec, found.trained, optimizer) if spec.freeze_rows else {}
        if remark is not None:
            for sentence in (
                *_remarks(loaded, found, cache, chosen, read),
                *zero_rows(loaded, found.trained, rows),
            ):
                remark(sentence)
        if not found.trained:
            raise nothing_to_train(loaded.graph, left=bool(spec.freeze))
        task = Task(
            loaded,
            found.trained,
            found.frozen,
            chosen,
            spec,
            optimizer,
            attached,
            frozen_rows=rows,
            memory=memory,
            served=served,
            adapter=None if inserted is None else _adapter_info(inserted, found.trained),
            decoder=_decoder(spec, loaded, inserted, found.trained, say),
            backend=backend_for(spec.runtime),
        )
        # What runs the models gets ready while they are made.
        log = remark and (lambda line: remark(f"ONNX Runtime says: {line}"))
        with worker(log, start=spec.runtime == STOCK) as apart:
            manifest = write_artifacts(task, destination, say)
        if checked is not None and MEASURE in apart.seconds:
            checked(apart.seconds[MEASURE])
    assert manifest is not None  # noqa: S101 - there is none only without an optimizer
    try:
        check_axes(manifest.input_specs())
    except OdtpackError as error:  # where data are fed
        say(f"{error.what} {error.hint}")
    return manifest


def _check_used(spec: BuildSpec, chosen: Loss | None) -> None:
    """Refuse options of what is not asked for."""
    problem = hint = ""
    if chosen is None and spec.loss_options:
        name = next(iter(spec.loss_options))
        problem = f"the option {name!r} is given for a loss, but no loss is named"
        hint = "leave it out, or name a loss"
    elif spec.losses and (chosen is not None or spec.loss_inputs):
        problem = "a loss is given, and several besides"
        hint = "name each as one of the several: --loss-part 'name=cross_entropy input=logits'"
    elif spec.privacy_clip is None and spec.privacy_noise is not None:
        problem = "--privacy-noise needs --privacy-clip"
        hint = "add --privacy-clip, as in --privacy-clip 1"
    if problem:
        raise OdtpackError("option-not-used", problem, hint=hint)


def _adapter_info(inserted: Inserted, trained: Sequence[str]) -> AdapterInfo:
    spec, graph = inserted.spec, inserted.model.graph
    whole = [name for name in trained if name not in inserted.parameters]
    turned = transposed(graph) if whole else ()
    return AdapterInfo(
        kind=spec.kind,
        rank=spec.rank if spec.low_rank else None,
        alpha=float(spec.alpha) if spec.low_rank else None,
        tokens=spec.tokens if spec.kind == "prompt" else None,
        layers=inserted.layers,
        feedforward=inserted.feedforward,
        parameters=inserted.parameters,
        absent=absent(graph, inserted.layers),
        transposed=tuple(name for name in whole if name in turned),
        tied={
            name: tuple(f"{path}.weight" for path in found if path)
            for name in whole
            if any(found := homes(graph.initializers[name]))
        },
    )


def _decoder(
    spec: BuildSpec,
    loaded: ir.Model,
    inserted: Inserted | None,
    trained: Sequence[str],
    remark: Remark,
) -> ir.Model | None:
    """The model for generation, of a decoder that was exported with its cache."""
    if not spec.segments or loading.CACHE not in loaded.meta or inserted is None:
        return None
    try:
        if inserted.spec.kind != "lora" or {*trained} != {*inserted.parameters} or spec.base:
            what = "it needs LoRA, no other trained parameters and no --base"
            raise OdtpackError("decoder-unsupported", what)
        return decoder_with_adapter(spec.model, _adapter_info(inserted, trained))
    except OdtpackError as error:
        if error.code != "decoder-unsupported":
            raise
        remark(f"the model is not kept for generation: {error.what}")
        return None


def _remarks(
    model: ir.Model, found: Chosen, cache: Sequence[str], loss: Loss | None, read: Sequence[str]
) -> Iterator[str]:
    """What is done or assumed without being asked for, a sentence each."""
    if cache:
        yield (
            f"the inputs {some(cache, 2)} are left out: in training each sequence "
            "starts with an empty cache, and padding goes to its end"
        )
    yield from found.remarks
    if names := unreached(model, found.alike, read):
        yield f"the loss does not depend on {some(names)}: not trained"
    left = [n for n in constants_like_weights(model, found.alike) if n not in found.trained]
    if left:
        yield (
            f"{some(left)}: a Constant node at the place of a weight, in a model "
            f"whose weights are initializers, stays a constant; --train {quoted(left[0])} trains it"
        )
    if loss is None:
        yield from _beside_the_loss(model.graph, read[0])
    known = None if loss is None else settled_on(model.graph, loss, read)
    if known is not None and (assumed := known[0].assumption(known[1])) is not None:
        yield assumed
    for each in shared_tensors(model.graph, found.trained):
        if not each.one_parameter and not each.name.startswith(PREFIX):
            yield each.sentence()


def _beside_the_loss(graph: ir.Graph, loss: str) -> Iterator[str]:
    """Say which outputs of a model that ends in its loss need what inference need not have."""
    values = {value.name: value for node in graph for value in node.outputs}
    inputs = {value.name for value in graph.inputs}
    first, *others = select(graph, [str(value.name) for value in graph.outputs], loss, ()) or [loss]
    if not others or loss not in values:
        return
    beyond = (inputs & read_by(values[loss])) - read_by(values[first])
    for name in others:
        if more := beyond & read_by(values[name]):
            yield (
                f"for inference the output {name!r} needs {', '.join(sorted(map(repr, more)))}, "
                f"which {first!r} does not: export it with --outputs {quoted(first)}"
            )
