"""``odtpack build``: a package from a forward model."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from odtpack.cli import _console

if TYPE_CHECKING:
    from odtpack_runtime.manifest import Manifest


class LossName(StrEnum):
    """Losses of :data:`odtpack.losses.LOSSES`, and none."""

    CROSS_ENTROPY = "cross_entropy"
    MSE = "mse"
    BCE_WITH_LOGITS = "bce_with_logits"
    L1 = "l1"
    HUBER = "huber"
    SMOOTH_L1 = "smooth_l1"
    NLL = "nll"
    KL_DIV = "kl_div"
    DISTILLATION = "distillation"
    TRIPLET_MARGIN = "triplet_margin"
    CONTRASTIVE = "contrastive"
    INFO_NCE = "info_nce"
    CTC = "ctc"
    NONE = "none"


class FrozenType(StrEnum):
    """Storages of :data:`odtpack.storage.STORAGES`."""

    FLOAT16 = "float16"
    INT8 = "int8"


class OptimizerName(StrEnum):
    """Optimizers of :data:`odtpack.optimizers.OPTIMIZERS`."""

    ADAMW = "adamw"
    ADAM = "adam"
    SGD = "sgd"
    LION = "lion"
    ADAFACTOR = "adafactor"


def build(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL.onnx", show_default=False, help="Forward model.")
    ],
    out: Annotated[
        Path,
        typer.Option(metavar="PKG", help="Folder of the package: new, empty, or a package."),
    ],
    loss: Annotated[
        LossName, typer.Option(help="Loss to attach; none if the first output is the loss.")
    ],
    loss_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Option of the loss; may be repeated. For example: --loss cross_entropy "
            "--loss-option label_smoothing=0.1 --loss-option weight=0.2,0.8",
        ),
    ] = None,
    optimizer: Annotated[OptimizerName, typer.Option(help="Optimizer.")] = OptimizerName.ADAMW,
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
        int,
        typer.Option(metavar="K", help="Batches whose gradients make one optimizer step."),
    ] = 1,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="KIND[:KEY=X,...]",
            help="Schedule of the learning rate that training uses: constant, linear, cosine, "
            "step or multistep, as in cosine:warmup=100,total=1000,floor=0.1,lr=0.003. Without "
            "total it runs over the whole training.",
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
    nominal: Annotated[
        bool, typer.Option("--nominal", help="Also write a checkpoint without values.")
    ] = False,
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
    manifest.json. The same model and options give the same bytes.
    """
    given = {
        "weight_decay": weight_decay,
        "momentum": momentum,
        "beta1": beta1,
        "beta2": beta2,
        "epsilon": epsilon,
    }

    from odtpack.build import build_package
    from odtpack.cli._update import read_optimizer, read_update
    from odtpack.losses import parse_options

    chosen = read_optimizer(optimizer.value, given, optimizer_option or ())
    update = read_update(
        clip_norm=clip_norm,
        clip_value=clip_value,
        groups=group or (),
        decay_vectors=not no_vector_decay,
        schedule=schedule,
    )

    name = None if loss is LossName.NONE else loss.value
    manifest = build_package(
        model,
        out,
        loss=name,
        loss_options=parse_options(loss.value, loss_option or []),
        optimizer=chosen,
        update=update,
        accumulation_steps=accumulate,
        train=train or (),
        freeze=freeze or (),
        loss_inputs=loss_input or (),
        outputs=output or (),
        frozen_storage=None if frozen_dtype is None else frozen_dtype.value,
        ort_format=ort_format,
        nominal=nominal,
        remark=lambda text: _console.say(f"note: {text}", style="yellow"),
    )
    print_built(manifest, out)
    extra = {}
    if sample is not None:
        from odtpack.cli._gradients import report_zero_gradients

        extra["zero_gradients"] = report_zero_gradients(out, sample)
    if as_json:
        _console.print_json({"path": str(out), **manifest.model_dump(mode="json"), **extra})


def print_built(manifest: Manifest, folder: Path) -> None:
    """Print what a package holds: parameters by role, and files."""
    from odtpack.cli._describe import parameter_summary
    from odtpack_runtime.simulator.units import format_bytes

    _console.say(f"built {folder}", style="bold")
    for line in parameter_summary(manifest):
        _console.say(f"  {line}")
    for path in sorted(folder.iterdir()):
        if path.is_file():
            _console.say(f"  {path.name:<24} {format_bytes(path.stat().st_size):>10}")
    _console.say(f"  runs on ONNX Runtime {manifest.minimum_onnxruntime} and newer")
