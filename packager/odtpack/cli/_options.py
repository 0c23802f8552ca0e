"""Arguments and options that mean the same in several commands.

This module imports nothing large: names of losses and optimizers are those of their files.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Literal

import typer

from odtpack.discovery import module_names

if TYPE_CHECKING:  # which cannot follow names that are found when this is imported
    LossName = str

    class OptimizerName(StrEnum):
        """Optimizers of :data:`odtpack.optimizers.OPTIMIZERS`."""

else:
    LossName = Literal[(*module_names("odtpack.losses"), "none")]
    # typer reads no list of a Literal.
    OptimizerName = StrEnum("OptimizerName", module_names("odtpack.optimizers"))


NOT_MET: Final = 1
"""Exit code of a command whose answer is no: over budget, nothing fits, or something differs."""


def option(text: str, metavar: str | None = None, *flags: str, **settings: Any) -> Any:
    """Declare an option by its help, what stands for its value, and its names where it has more."""
    return typer.Option(*flags, metavar=metavar, help=text, **settings)


def flag(name: str, text: str) -> Any:
    """Declare an option without a value."""
    return typer.Option(name, help=text)


def examples(*lines: str) -> str:
    """The examples of a command, for the end of its help."""
    # \b keeps the lines of a paragraph apart.
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))


def group(text: str) -> typer.Typer:
    """A command that only has commands; alone it prints its help, and is a mistake in usage."""
    made = typer.Typer(invoke_without_command=True, help=text, short_help=text)

    @made.callback()
    def _root(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            typer.echo(context.get_help(), err=True)
            raise typer.Exit(2)

    return made


def argument(metavar: str, text: str, **settings: Any) -> Any:
    """Declare an argument."""
    return typer.Argument(metavar=metavar, help=text, show_default=False, **settings)


def destination(metavar: str, text: str, **settings: Any) -> Any:
    """Declare the destination of a command."""
    return typer.Option("--out", "-o", metavar=metavar, help=text, **settings)


MODEL = argument("MODEL.onnx", "Forward model.")
MODEL_OR_RECIPES = argument("[MODEL.onnx]", "Forward model. Default: that of the recipe.")
PACKAGE = argument("PKG", "Folder of the package.")
DATA = option(
    "One array per input of the model, by its name; or texts (.jsonl), which become samples as "
    "[data] of the recipe says.",
    "DATA.npz",
)
EPOCHS = option("Passes over the data.", "N", min=1)
BATCH_SIZE = option("Samples per batch.  [default: 32]", "N", min=1)
SEED = option("Seed of the sample order and the held-out split.", "N", min=0)
HOLDOUT = option("Share of the samples held out for evaluation.  [default: 0.2]", "SHARE")
EVALUATION = option("Evaluation data, instead of --holdout.", "EVAL.npz", "--eval")
TRAINERS = option("Training processes; 0 for one per core.", "N", min=0)
TRAINED = option("Trained checkpoint.  [default: the package's]", "CK")
OLD_PACKAGE = argument("OLD", "Package on the devices now.")
BASE_RESULT = argument("BASE.json", "Baseline result.")
HEAD_RESULT = argument("HEAD.json", "New result.")
COMPARISON_FORM = option("How to print the comparison.  [default: text]", None, "--format")
COMPARISON_FILE = destination("FILE", "File for the comparison, instead of standard output.")
LOSS = option("Loss to attach; none if the first output is the loss.")
LOSS_OPTION = option(
    "Option of the loss; may be repeated. For example: --loss cross_entropy "
    "--loss-option label_smoothing=0.1 --loss-option weight=0.2,0.8",
    "KEY=VALUE",
)
AS_JSON = flag("--json", "Print JSON on stdout.")
RESULT_AS_JSON = flag("--json", "Print the result as JSON on stdout.")
MANIFEST_AS_JSON = flag("--json", "Print the manifest as JSON on stdout.")
DEMO_FOLDER = destination("DIR", "Folder for all files of the demo.")
