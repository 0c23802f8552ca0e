"""Arguments and options that mean the same in several commands.

This module imports nothing large: names of losses and optimizers are those of their files.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import typer

from odtpack.discovery import module_names

if TYPE_CHECKING:  # which cannot follow names that are found when this is imported

    class LossName(StrEnum):
        """Losses of :data:`odtpack.losses.LOSSES`, and none."""

    class OptimizerName(StrEnum):
        """Optimizers of :data:`odtpack.optimizers.OPTIMIZERS`."""

else:
    LossName = StrEnum("LossName", [*module_names("odtpack.losses"), "none"])
    OptimizerName = StrEnum("OptimizerName", module_names("odtpack.optimizers"))

MODEL = typer.Argument(metavar="MODEL.onnx", show_default=False, help="Forward model.")
MODEL_OR_RECIPES = typer.Argument(
    metavar="[MODEL.onnx]",
    show_default=False,
    help="Forward model. Default: that of the recipe.",
)
PACKAGE = typer.Argument(metavar="PKG", show_default=False, help="Folder of the package.")
DATA = typer.Option(metavar="DATA.npz", help="One array per input of the model, by its name.")
EPOCHS = typer.Option(min=1, metavar="N", help="Passes over the data.")
BATCH_SIZE = typer.Option(min=1, metavar="N", help="Samples per batch.  [default: 32]")
SEED = typer.Option(min=0, metavar="N", help="Seed of the sample order and the held-out split.")
TRAINERS = typer.Option(min=0, metavar="N", help="Training processes; 0 for one per core.")
TRAINED = typer.Option(metavar="CK", help="Trained checkpoint.  [default: the package's]")
OLD_PACKAGE = typer.Argument(metavar="OLD", show_default=False, help="Package on the devices now.")
BASE_RESULT = typer.Argument(metavar="BASE.json", show_default=False, help="Baseline result.")
HEAD_RESULT = typer.Argument(metavar="HEAD.json", show_default=False, help="New result.")
COMPARISON_FILE = typer.Option(
    "--out", "-o", metavar="FILE", help="File for the comparison, instead of standard output."
)
LOSS = typer.Option(help="Loss to attach; none if the first output is the loss.")
LOSS_OPTION = typer.Option(
    metavar="KEY=VALUE",
    help="Option of the loss; may be repeated. For example: --loss cross_entropy "
    "--loss-option label_smoothing=0.1 --loss-option weight=0.2,0.8",
)
AS_JSON = typer.Option("--json", help="Print JSON on stdout.")
RESULT_AS_JSON = typer.Option("--json", help="Print the result as JSON on stdout.")
MANIFEST_AS_JSON = typer.Option("--json", help="Print the manifest as JSON on stdout.")
DEMO_FOLDER = typer.Option(
    "--out", "-o", metavar="DIR", help="Folder for everything that the demo writes."
)
