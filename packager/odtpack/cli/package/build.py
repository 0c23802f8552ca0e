"""``odtpack build``: a package from a forward model."""

from __future__ import annotations

from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from odtpack.cli import _console
from odtpack.cli._options import LOSS, LOSS_OPTION, MODEL_OR_RECIPES, LossName, OptimizerName
from odtpack.cli._ort import ORT_PLATFORM, ORT_STYLE, StyleChoice, read_formats
from odtpack.ort.choices import Platform

if TYPE_CHECKING:
    from odtpack.recipe import BuildSettings
    from odtpack_runtime.package.manifest import Manifest


class FrozenType(StrEnum):
    """Storages of :data:`odtpack.package.storage.STORAGES`."""

    FLOAT16 = "float16"
    INT8 = "int8"


class TargetName(StrEnum):
    """Runtimes of :data:`odtpack.targets.Runtime`."""

    ONNXRUNTIME = "onnxruntime"
    ORT_TRAINING = "ort-training"


def build(
    model: Annotated[Path | None, MODEL_OR_RECIPES] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(
            metavar="recipe.toml",
            help="Recipe to build by. Options take the place of its keys.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="PKG",
            help="Folder of the package: new, empty, or a package. Default: that of the recipe.",
        ),
    ] = None,
    if_changed: Annotated[
        bool,
        typer.Option(
            "--if-changed",
            help="Leave the package as it is if nothing that decides it has changed since it was "
            "built. Writes PKG.stamp.json beside it.",
        ),
    ] = False,
    loss: Annotated[LossName | None, LOSS] = None,
    loss_option: Annotated[list[str] | None, LOSS_OPTION] = None,
    optimizer: Annotated[
        OptimizerName | None, typer.Option(help="Optimizer.  [default: adamw]")
    ] = None,
    train: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            help="Parameters to train; may be repeated. Default: all that are not frozen.",
        ),
    ] = None,
    freeze: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            help="Parameters to freeze; may be repeated. Default: all that are not trained. "
            "With both, what neither matches stays a constant inside the models.",
        ),
    ] = None,
    untie: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            help="Tensors that several places of the model read, to give each place its own; may "
            "be repeated. odtpack inspect lists them.",
        ),
    ] = None,
    loss_input: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Value that the loss reads: predictions, then values in the place of its "
            "target inputs; may be repeated. Default: the first outputs.",
        ),
    ] = None,
    output: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Further value that the models return; may be repeated."),
    ] = None,
    no_prediction: Annotated[
        bool,
        typer.Option(
            "--no-prediction",
            help="Let the evaluation model return the loss only, and not the prediction that it "
            "compares with labels: no accuracy then.",
        ),
    ] = False,
    weight_decay: Annotated[
        float | None,
        typer.Option(metavar="X", help="Weight decay; adam and sgd: an L2 penalty.  [default: 0]"),
    ] = None,
    momentum: Annotated[
        float | None, typer.Option(metavar="X", help="SGD: momentum.  [default: 0]")
    ] = None,
    beta1: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Adam, AdamW, Lion: decay of the first moment.  [default: 0.9]"
        ),
    ] = None,
    beta2: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Adam, AdamW: decay of the second moment.  [default: 0.999; Lion 0.99]",
        ),
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Adam, AdamW: added to the denominator.  [default: AdamW 1e-6, Adam 1e-8]",
        ),
    ] = None,
    optimizer_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Further setting of the optimizer; may be repeated. adamw: formula (reference, "
            "pytorch), bias_correction; sgd: dampening, nesterov; adafactor: beta2_decay, "
            "epsilon2, clip_threshold.",
        ),
    ] = None,
    clip_norm: Annotated[
        float | None,
        typer.Option(metavar="X", help="Clip gradients by the norm of all of them together."),
    ] = None,
    clip_value: Annotated[
        float | None, typer.Option(metavar="X", help="Clip each element of the gradients.")
    ] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB:lr=X,decay=X",
            help="Parameters with a learning rate times X, or a weight decay of X; may be "
            "repeated, the first pattern that matches counts.",
        ),
    ] = None,
    no_vector_decay: Annotated[
        bool,
        typer.Option(
            "--no-vector-decay",
            help="No weight decay for biases, scales of normalizations and other vectors.",
        ),
    ] = False,
    accumulate: Annotated[
        int | None,
        typer.Option(
            metavar="K", help="Batches whose gradients make one optimizer step.  [default: 1]"
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="KIND[:KEY=X,...]",
            help="Schedule of the learning rate that training uses: constant, linear, cosine, "
            "step or multistep, as in cosine:warmup=100,total=1000,floor=0.1,lr=0.003. Without "
            "total it runs over the whole training.",
        ),
    ] = None,
    target: Annotated[
        TargetName | None,
        typer.Option(
            help="What runs the package: ONNX Runtime as it is, or onnxruntime-training 1.19 "
            "with its own operators.  [default: onnxruntime]"
        ),
    ] = None,
    frozen_dtype: Annotated[
        FrozenType | None,
        typer.Option(
            help="Store large frozen weights in fewer bytes; the models compute in float32."
        ),
    ] = None,
    ort_format: Annotated[
        bool,
        typer.Option(
            "--ort-format", help="Also write ORT format and the operators for a reduced build."
        ),
    ] = False,
    ort_style: Annotated[StyleChoice | None, ORT_STYLE] = None,
    ort_platform: Annotated[list[Platform] | None, ORT_PLATFORM] = None,
    nominal: Annotated[
        bool, typer.Option("--nominal", help="Also write a checkpoint without values.")
    ] = False,
    no_self_check: Annotated[
        bool,
        typer.Option(
            "--no-self-check",
            help="Do not run the first steps, whose losses a device can compare with its own.",
        ),
    ] = False,
    onnxruntime: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION",
            help="Oldest ONNX Runtime that must load the package, as in 1.20. Default: the oldest "
            "that loads the model's opset.",
        ),
    ] = None,
    sample: Annotated[
        Path | None,
        typer.Option(
            metavar="DATA.npz",
            help="Run steps on this data after the build, and warn of every parameter whose "
            "gradient is zero on it.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the manifest as JSON on stdout.")
    ] = False,
) -> None:
    """Build a training package from a forward ONNX model.

    Writes training_model.onnx, eval_model.onnx, optimizer_model.onnx, checkpoint and
    manifest.json. The same model and options give the same bytes, but for ORT format, in
    which ONNX Runtime orders initializers as it likes, and the losses of the self-check, which
    are measured.
    """
    from odtpack.cli._build_options import BuildOptions
    from odtpack.recipe import BuildSettings, read_recipe

    if sample is not None and target is TargetName.ORT_TRAINING:
        from odtpack.errors import OdtpackError

        raise OdtpackError(
            "target-cannot",
            "--sample trains, and this ONNX Runtime cannot train what is built for "
            "onnxruntime-training",
            hint="leave --sample or --target out",
        )
    read = None if recipe is None else read_recipe(recipe)
    settings = BuildOptions(
        model=model,
        loss=None if loss is None else loss.value,
        loss_options=loss_option or (),
        loss_inputs=loss_input or (),
        outputs=output or (),
        no_prediction=no_prediction,
        train=train or (),
        freeze=freeze or (),
        untie=untie or (),
        optimizer=None if optimizer is None else optimizer.value,
        optimizer_settings={
            "weight_decay": weight_decay,
            "momentum": momentum,
            "beta1": beta1,
            "beta2": beta2,
            "epsilon": epsilon,
        },
        optimizer_options=optimizer_option or (),
        clip_norm=clip_norm,
        clip_value=clip_value,
        groups=group or (),
        no_vector_decay=no_vector_decay,
        accumulate=accumulate,
        schedule=schedule,
        runtime=None if target is None else target.value,
        frozen_storage=None if frozen_dtype is None else frozen_dtype.value,
        ort_format=read_formats(ort_format, ort_style, ort_platform),
        nominal=nominal,
        no_self_check=no_self_check,
        onnxruntime=onnxruntime,
    ).over(None if read is None else BuildSettings.of(read))
    folder = out or (None if read is None else read.package)
    if folder is None:
        from odtpack.errors import OdtpackError

        raise OdtpackError(
            "usage", "--out is missing, and no recipe names a package", hint="odtpack build --help"
        )
    content = _build_if_changed(settings, folder) if if_changed else _build(settings, folder)
    if sample is not None:
        from odtpack.cli._gradients import report_zero_gradients

        content["zero_gradients"] = report_zero_gradients(folder, sample)
    if as_json:
        _console.print_json({"path": str(folder), **content})


def _build(settings: BuildSettings, folder: Path) -> dict[str, Any]:
    manifest = settings.build(
        folder, remark=lambda text: _console.say(f"note: {text}", style="yellow")
    )
    print_built(manifest, folder)
    return manifest.as_dict()


def _build_if_changed(settings: BuildSettings, folder: Path) -> dict[str, Any]:
    """Build unless the package is the one that would be built; what --json shows of it."""
    from odtpack.errors import OdtpackError
    from odtpack.recipe.key import MANIFEST, cache_key, is_current, write_stamp
    from odtpack_runtime.package.manifest import Manifest

    key = cache_key(settings)
    content = None
    if is_current(folder, key):
        name = folder / MANIFEST
        with suppress(OdtpackError):  # of a schema that this version does not read
            content = Manifest.from_json(name.read_bytes(), str(name)).as_dict()
    built = content is None
    if content is None:
        content = _build(settings, folder)
        write_stamp(folder, key)
    else:
        _console.say(f"unchanged {folder}", style="bold")
    _console.say(f"  cache key {key}")
    return {"built": built, "cache_key": key, **content}


def print_built(manifest: Manifest, folder: Path) -> None:
    """Print what a package holds: parameters by role, and files."""
    from odtpack.cli._describe import parameter_summary, runtime_text
    from odtpack_simulator.values.units import format_bytes

    _console.say(f"built {folder}", style="bold")
    for line in parameter_summary(manifest):
        _console.say(f"  {line}")
    files = sorted(path for path in folder.iterdir() if path.is_file())
    width = max(24, *(len(path.name) for path in files))
    for path in files:
        _console.say(f"  {path.name:<{width}} {format_bytes(path.stat().st_size):>10}")
    _console.say(f"  runs on {runtime_text(manifest)}")
