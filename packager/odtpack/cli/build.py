"""``odtpack build``: a package from a forward model."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from odtpack.cli import _console

if TYPE_CHECKING:
    from odtpack.optimizers import Optimizer
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


class OptimizerName(StrEnum):
    """Optimizers of :data:`odtpack.optimizers.OPTIMIZERS`."""

    ADAMW = "adamw"
    SGD = "sgd"


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
        float | None, typer.Option(metavar="X", help="AdamW: decoupled decay.  [default: 0]")
    ] = None,
    beta1: Annotated[
        float | None,
        typer.Option(metavar="X", help="AdamW: decay of the first moment.  [default: 0.9]"),
    ] = None,
    beta2: Annotated[
        float | None,
        typer.Option(metavar="X", help="AdamW: decay of the second moment.  [default: 0.999]"),
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(metavar="X", help="AdamW: added to the denominator.  [default: 1e-6]"),
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
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the manifest as JSON on stdout.")
    ] = False,
) -> None:
    """Build a training package from a forward ONNX model.

    Writes training_model.onnx, eval_model.onnx, optimizer_model.onnx, checkpoint and
    manifest.json. The same model and options give the same bytes.
    """
    given = {"weight_decay": weight_decay, "beta1": beta1, "beta2": beta2, "epsilon": epsilon}
    chosen = _optimizer(optimizer, {k: v for k, v in given.items() if v is not None})

    from odtpack.build import build_package
    from odtpack.losses import parse_options

    name = None if loss is LossName.NONE else loss.value
    manifest = build_package(
        model,
        out,
        loss=name,
        loss_options=parse_options(loss.value, loss_option or []),
        optimizer=chosen,
        train=train or (),
        freeze=freeze or (),
        loss_inputs=loss_input or (),
        outputs=output or (),
        ort_format=ort_format,
        nominal=nominal,
    )
    print_built(manifest, out)
    if as_json:
        _console.print_json({"path": str(out), **manifest.model_dump(mode="json")})


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


def _optimizer(name: OptimizerName, settings: dict[str, float]) -> Optimizer:
    from odtpack.errors import OdtpackError
    from odtpack.optimizers import SGD, AdamW

    if name is OptimizerName.ADAMW:
        usual = AdamW()
        return AdamW(
            beta1=settings.get("beta1", usual.beta1),
            beta2=settings.get("beta2", usual.beta2),
            epsilon=settings.get("epsilon", usual.epsilon),
            weight_decay=settings.get("weight_decay", usual.weight_decay),
        )
    if settings:
        option = "--" + next(iter(settings)).replace("_", "-")
        raise OdtpackError(
            "option-not-used",
            f"{option} is a setting of AdamW, and the optimizer is sgd",
            hint=f"leave {option} out, or pass --optimizer adamw",
        )
    return SGD()
