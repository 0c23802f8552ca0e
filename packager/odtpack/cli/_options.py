"""Arguments and options that mean the same in several commands, and those of a build.

The options of ``odtpack build`` are declared by :class:`odtpack.spec.BuildSpec`.

This module imports nothing large: names of losses and optimizers are those of their files.
"""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

import typer

from odtpack.choices import OrtFormat, Platform, Style, module_names
from odtpack.option import REQUIRED, Option, options_of
from odtpack.spec import BuildSpec, options

if TYPE_CHECKING:  # which cannot follow names that are found when this is imported
    from odtpack.recipe import Recipe

    LossName = str

    class OptimizerName(StrEnum):
        """Optimizers of :data:`odtpack.optimizers.OPTIMIZERS`."""

else:
    LossName = Literal[(*module_names("odtpack.losses"), "none")]
    # typer reads no list of a Literal.
    OptimizerName = StrEnum("OptimizerName", module_names("odtpack.optimizers"))


_Command = TypeVar("_Command", bound=Callable[..., None])

NOT_MET: Final = 1
"""Exit code of a command whose answer is no: over budget, nothing fits, or something differs."""


def option(text: str, metavar: str | None = None, *flags: str, **settings: Any) -> Any:
    """Declare an option by its help, what stands for its value, and its names where it has more."""
    return typer.Option(*flags, metavar=metavar, help=text, **settings)


def count(text: str, least: int = 1, **settings: Any) -> Any:
    """Declare an option that takes a whole number, by its help and the least of them."""
    return option(text, "N", min=least, **settings)


def flag(name: str, text: str) -> Any:
    """Declare an option without a value."""
    return typer.Option(name, help=text)


def examples(*lines: str) -> str:
    """The examples of a command, for the end of its help."""
    # \b keeps the lines of a paragraph apart.
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))


def command(of: typer.Typer, name: str | None = None) -> Callable[[_Command], _Command]:
    """Add a function as a command; the examples that end its docstring end the help."""

    def decorate(function: _Command) -> _Command:
        text, _, lines = inspect.cleandoc(function.__doc__ or "").partition("\n\nExamples:\n")
        epilog = examples(*textwrap.dedent(lines).split("\n"))
        called = name or function.__name__.strip("_").replace("_", "-")
        return of.command(called, help=text, epilog=epilog)(function)

    return decorate


def group(name: str, text: str, *lines: str) -> typer.Typer:
    """A command that only has commands; alone it prints its help, and is a mistake in usage."""
    made = typer.Typer(
        name=name, invoke_without_command=True, help=text, short_help=text, epilog=examples(*lines)
    )

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
MODEL_OR_RECIPES = argument("MODEL.onnx", "Forward model. Default: that of the recipe.")
PACKAGE = argument("PKG", "Folder of the package.")
DATA = option(
    "One array per input of the model, by its name; or texts (.jsonl), which become samples as "
    "[data] of the recipe says.",
    "DATA.npz",
)
EPOCHS = count("Passes over the data.")
BATCH_SIZE = count("Samples per batch.  [default: 32]")
SEED = count("Seed of the sample order, the held-out split and dropout.", 0)
HOLDOUT = option("Share of the samples held out for evaluation.  [default: 0.2]", "SHARE")
EVALUATION = option("Evaluation data, instead of --holdout.", "EVAL.npz", "--eval")
TRAINERS = count("Training processes; 0 for one per core.", 0)
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


StyleChoice = Literal["fixed", "runtime", "both"]
""":class:`odtpack.choices.Style`, or both."""

ORT_STYLE = option("ORT format: how models are optimized.  [default: fixed]")
ORT_PLATFORM = option(
    "ORT format: processors to optimize for. May be repeated. Default: a model that runs on all."
)

OPTIMIZER_SETTINGS: Final = {
    "weight_decay": "Weight decay; adam and sgd: an L2 penalty.  [default: 0]",
    "momentum": "SGD: momentum.  [default: 0]",
    "beta1": "Adam, AdamW, Lion: decay of the first moment.  [default: 0.9]",
    "beta2": "Adam, AdamW: decay of the second moment.  [default: 0.999; Lion 0.99]",
    "epsilon": "Adam, AdamW: added to the denominator.  [default: AdamW 1e-6, Adam 1e-8]",
}
"""Settings of optimizers that have an option of their own, and its help."""

# Fields that several options make, or one whose choices come from a registry.
_SEVERAL: Final[dict[str, dict[str, tuple[Any, Any]]]] = {
    "loss": {"loss": (LossName, LOSS)},
    "loss_options": {"loss_option": (list[str], LOSS_OPTION)},
    "optimizer": {"optimizer": (OptimizerName, option("Optimizer.  [default: adamw]"))},
    "optimizer_options": {
        **{name: (float, option(text, "X")) for name, text in OPTIMIZER_SETTINGS.items()},
        "optimizer_option": (
            list[str],
            option(
                "Further setting of the optimizer. May be repeated. adamw: formula "
                "(reference, pytorch), bias_correction; sgd: dampening, nesterov; adafactor: "
                "beta2_decay, epsilon2, clip_threshold.",
                "KEY=VALUE",
            ),
        ),
    },
    "ort_format": {
        "ort_format": (
            bool,
            flag("--ort-format", "Also write ORT format, and the operators for a reduced build."),
        ),
        "ort_style": (StyleChoice, ORT_STYLE),
        "ort_platform": (list[Platform], ORT_PLATFORM),
    },
}


def takes_spec(before: str, of: type = BuildSpec) -> Callable[[_Command], _Command]:
    """Give a command the options of a build or another class, which it takes as keywords."""

    def decorate(command: _Command) -> _Command:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        place = [parameter.name for parameter in own].index(before)
        own[place:place] = _parameters(options() if of is BuildSpec else options_of(of))
        all_named = [p.replace(kind=p.KEYWORD_ONLY) for p in own]
        command.__signature__ = signature.replace(parameters=all_named)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in own} | {"return": None}
        return command

    return decorate


def _parameters(declared: Iterable[Option]) -> Iterator[inspect.Parameter]:
    """The parameters of a command that takes every option, in the order of the fields."""
    for each in declared:
        kinds = _SEVERAL.get(each.name, {})
        if each.flag:
            given = option(each.help, each.metavar, each.flag)
            kinds = {each.name: (_kind(each), given)}
        needed = each.default is REQUIRED
        for name, (kind, given) in kinds.items():
            yield inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if needed else None,
                annotation=Annotated[kind if needed else kind | None, given],
            )


def _kind(option: Option) -> Any:
    """What typer reads; a text is for the option to parse."""
    if option.many:
        return list[str]
    if option.choices and option.type is not bool:
        return Literal[tuple(option.choices)]
    return option.type if option.is_number or option.type is bool else str


def overlay(given: Mapping[str, Any], read: Recipe | None, command: str = "build") -> BuildSpec:
    """What to build: each option that was given takes the place of the recipe's key."""
    recipe = BuildSpec(model=Path()) if read is None else BuildSpec.of(read)
    given = {
        key: value.value if isinstance(value, StrEnum) else value
        for key, value in given.items()
        if value not in (None, (), [])
    }
    if read is None:
        for name, key in (("MODEL.onnx", "model"), ("--loss", "loss")):
            if key not in given and not (key == "loss" and "losses" in given):
                from odtpack.errors import OdtpackError

                raise OdtpackError(
                    "usage",
                    f"{name} is missing, and no --recipe gives it",
                    hint=f"odtpack {command} --help",
                )
    values = {each.name: given[each.name] for each in options() if each.flag and each.name in given}
    if values.keys() & {"clip_norm", "clip_value"}:
        values = {"clip_norm": None, "clip_value": None, **values}
    formats = read_formats(
        bool(given.get("ort_format")), given.get("ort_style"), given.get("ort_platform")
    )
    if formats is not None:
        values["ort_format"] = formats
    loss = given.get("loss", recipe.loss)
    loss_options = dict(recipe.loss_options) if loss == recipe.loss else {}
    if "loss_option" in given:
        from odtpack.losses import parse_options

        loss_options |= parse_options(loss, list(given["loss_option"]))
    if loss != recipe.loss:
        values.setdefault("loss_inputs", ())
    kind = given.get("optimizer", recipe.optimizer)
    settings = dict(recipe.optimizer_options) if kind == recipe.optimizer else {}
    own = {name: given.get(name) for name in OPTIMIZER_SETTINGS}
    settings |= read_optimizer_options(kind, own, given.get("optimizer_option", ()))
    return dataclasses.replace(
        recipe,
        model=given.get("model", recipe.model),
        loss=loss,
        loss_options=loss_options,
        optimizer=kind,
        optimizer_options=settings,
        **values,
    )


def read_optimizer_options(
    kind: str, settings: Mapping[str, float | None], options: Iterable[str]
) -> dict[str, str | float]:
    """Read the options about an optimizer."""
    from odtpack.errors import OdtpackError

    given: dict[str, str | float] = {}
    for name, value in settings.items():
        if value is None:
            continue
        from odtpack.optimizers import OPTIMIZERS

        fields = [field.name for field in dataclasses.fields(OPTIMIZERS[kind])]
        if name not in fields:
            option = f"--{name.replace('_', '-')}"
            raise OdtpackError(
                "option-not-used",
                f"{option} is not a setting of the optimizer {kind}",
                hint=f"leave {option} out; {kind} has {', '.join(sorted(fields))}",
            )
        given[name] = value
    for option in options:
        name, equals, text = option.partition("=")
        if not equals or name in given:
            raise OdtpackError(
                "bad-option",
                f"--optimizer-option {option!r} "
                + ("is a second value" if equals else "is not KEY=VALUE"),
            )
        given[name] = text
    return given


def read_formats(
    wanted: bool, style: StyleChoice | None, platforms: Iterable[Platform] | None
) -> OrtFormat | None:
    """Return which files in ORT format to write, None for none."""
    if not wanted:
        if style is None and not platforms:
            return None
        from odtpack.errors import OdtpackError

        raise OdtpackError(
            "option-not-used",
            "--ort-style and --ort-platform need --ort-format",
            hint="pass --ort-format too, or leave them out",
        )
    styles = tuple(Style) if style == "both" else (Style(style or "fixed"),)
    return OrtFormat(styles, tuple(dict.fromkeys(platforms or ())) or (None,))
