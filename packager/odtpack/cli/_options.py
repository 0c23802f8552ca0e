"""Arguments and options that mean the same in several commands.

This module imports nothing large: the command line reads its choices from here.
"""

from __future__ import annotations

from enum import StrEnum

import typer


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
    ADAM = "adam"
    SGD = "sgd"
    LION = "lion"
    ADAFACTOR = "adafactor"


MODEL = typer.Argument(metavar="MODEL.onnx", show_default=False, help="Forward model.")
MODEL_OR_RECIPES = typer.Argument(
    metavar="[MODEL.onnx]",
    show_default=False,
    help="Forward model. Default: that of the recipe.",
)
PACKAGE = typer.Argument(metavar="PKG", show_default=False, help="Folder of the package.")
DATA = typer.Option(metavar="DATA.npz", help="One array per input of the model, by its name.")
EPOCHS = typer.Option(min=1, metavar="N", help="Passes over the data.")
LOSS = typer.Option(help="Loss to attach; none if the first output is the loss.")
LOSS_OPTION = typer.Option(
    metavar="KEY=VALUE",
    help="Option of the loss; may be repeated. For example: --loss cross_entropy "
    "--loss-option label_smoothing=0.1 --loss-option weight=0.2,0.8",
)
AS_JSON = typer.Option("--json", help="Print JSON on stdout.")
