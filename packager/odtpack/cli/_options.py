"""How commands are declared, the parameters that several of them have, and the options of a build.

A command is a function. Its parameters are arguments up to ``*``, and options after it; types and
defaults are theirs. The docstring says what each is, under "Parameters": its name, what stands for
its value, a colon, and the help. What it does not list is in :data:`_SHARED`. A command returns
what ``--json`` prints, with an exit code where that may be another than 0: true stands for
:data:`NOT_MET`. One that returns nothing has no ``--json``.

The options of ``odtpack build`` are declared by :class:`odtpack.spec.BuildSpec`.

This module imports nothing large: names of losses and optimizers are those of their files.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Literal,
    TypeVar,
    get_args,
    get_type_hints,
)  # fmt: skip

import typer

from odtpack.choices import OrtFormat, Platform, Style, module_names
from odtpack.cli import _console
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


_Command = TypeVar("_Command", bound=Callable[..., Any])

NOT_MET: Final = 1
"""Exit code of a command whose answer is no: over budget, nothing fits, or something differs."""

Json = dict[str, Any]
"""What ``--json`` prints of a command."""

# Annotated holds further settings of typer's as pairs.
Count = Annotated[int, ("min", 0), ("metavar", "N")]
PositiveCount = Annotated[int, ("min", 1), ("metavar", "N")]

StyleChoice = Literal["fixed", "runtime", "both"]
""":class:`odtpack.choices.Style`, or both."""


def _texts(section: str) -> dict[str, dict[str, str]]:
    """Metavar and help of parameters by name, of a text that lists them."""
    found = {}
    for entry in re.split(r"\n(?=\S)", section.strip()) if section else ():
        said, _, text = " ".join(entry.split()).partition(": ")
        name, *metavar = said.split()
        text = text.replace(" [default: ", "  [default: ")  # as typer writes its own
        found[name] = {"help": text, **({"metavar": metavar[0]} if metavar else {})}
    return found


_FLAGS: Final = {
    "as_json": ["--json"], "encoder_output": ["--input"], "evaluation": ["--eval"],
    "file_format": ["--format"], "fleet_file": ["--fleet"], "form": ["--format"],
    "out": ["--out", "-o"], "system": ["--os"], "types": ["--types/--no-types"],
}  # fmt: skip
"""Options that are not called as their parameters."""


_SHARED: Final = _texts("""
as_json: Print JSON on stdout.
base BASE.json: Baseline result.
batch_size: Samples per batch. [default: 32]
beta1 X: Adam, AdamW, Lion: decay of the first moment. [default: 0.9]
beta2 X: Adam, AdamW: decay of the second moment. [default: 0.999; Lion 0.99]
budget budgets.toml: Budgets; exceeding one is exit code 1.
checkpoint CK: Trained checkpoint. [default: the package's]
data DATA.npz: One array per input of the model, by its name; or texts (.jsonl), which become
    samples as [data] of the recipe says.
epochs: Passes over the data.
epsilon X: Adam, AdamW: added to the denominator. [default: AdamW 1e-6, Adam 1e-8]
evaluation EVAL.npz: Evaluation data, instead of --holdout.
fleet_file fleet.toml: Clients, rounds and budgets.
form: How to print the comparison. [default: text]
head HEAD.json: New result.
holdout SHARE: Share of the samples held out for evaluation. [default: 0.2]
json: Print JSON on stdout.
loss: Loss to attach; none if the first output is the loss.
loss_option KEY=VALUE: Option of the loss; may be repeated. For example: --loss cross_entropy
    --loss-option label_smoothing=0.1 --loss-option weight=0.2,0.8
model MODEL.onnx: Forward model.
momentum X: SGD: momentum. [default: 0]
optimizer: Optimizer. [default: adamw]
optimizer_option KEY=VALUE: Further setting of the optimizer. May be repeated. adamw: formula
    (reference, pytorch), bias_correction; sgd: dampening, nesterov; adafactor: beta2_decay,
    epsilon2, clip_threshold.
ort_format: Also write ORT format, and the operators for a reduced build.
ort_platform: ORT format: processors to optimize for. May be repeated. Default: a model that runs
    on all.
ort_style: ORT format: how models are optimized. [default: fixed]
package PKG: Folder of the package.
report FORMAT:PATH: Report to write: html, json, junit, markdown or github, a colon and a path; -
    is standard output (not for html). May be repeated.
results RESULT.json: Results of simulate --report json:PATH.
seed: Seed of the sample order, the held-out split and dropout.
strict: Exit code 1 also if a check cannot be judged: unknown limit, or no baseline.
times RESULT.json: Result of odtpack simulate with times and memory. [default: measured now]
weight_decay X: Weight decay; adam and sgd: an L2 penalty. [default: 0]
""")
"""Metavar and help of the parameters that several commands have, by name."""


def _pairs(hint: object) -> dict[str, Any]:
    """The settings in an annotation, and in its parts."""
    found: dict[str, Any] = {}
    for part in get_args(hint):
        found |= dict([part]) if isinstance(part, tuple) else _pairs(part)
    return found


class _Callback:
    """The function of a command, in the form that typer reads."""

    def __init__(self, function: Callable[..., Any], section: str) -> None:
        self.__name__, self.__annotations__ = function.__name__, {}
        self._function, self._section = function, section

    def __call__(self, *, json: bool = False, **given: Any) -> None:
        """Run the command, and print what it returns if ``--json`` asks for it."""
        _console.wants_json.set(json)
        content, code = self._function(**given), 0
        if isinstance(content, tuple):
            content, code = content
        _console.json_result(content)
        if code:
            raise typer.Exit(int(code))

    @functools.cached_property
    def __signature__(self) -> inspect.Signature:
        """The parameters with their options and helps, all of them by name; made when it reads."""
        hints = get_type_hints(self._function, include_extras=True)
        kinds, texts = get_type_hints(self._function), _SHARED | _texts(self._section)
        found = []
        for name, each in inspect.signature(self._function).parameters.items():
            if each.kind is each.VAR_KEYWORD:
                continue
            settings = _pairs(hints[name]) | texts.get(name, {})
            if each.kind is each.KEYWORD_ONLY:
                info = _option(name, kinds[name], settings)
            else:
                info = typer.Argument(show_default=False, **settings)
            found.append(each.replace(annotation=Annotated[kinds[name], info]))
        before, declared = getattr(self._function, "takes", (None, ()))
        at = len(found) if before is None else [each.name for each in found].index(before)
        found[at:at] = _parameters(declared)
        if kinds["return"] is not NoneType:
            info = _option("json", bool, texts["json"])
            found.append(_parameter("json", annotation=Annotated[bool, info], default=False))
        return inspect.Signature([p.replace(kind=p.KEYWORD_ONLY) for p in found])


def _option(name: str, kind: object, settings: Mapping[str, Any]) -> Any:
    """What typer wants to know of an option."""
    usual = [f"--{name.replace('_', '-')}"] if kind is bool else []  # without --no-...
    return typer.Option(*_FLAGS.get(name, usual), **settings)


def examples(*lines: str) -> str:
    """The examples of a command, for the end of its help."""
    # \b keeps the lines of a paragraph apart.
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))


def command(of: typer.Typer, name: str | None = None) -> Callable[[_Command], _Command]:
    """Add a function as a command; the examples that end its docstring end the help."""

    def decorate(function: _Command) -> _Command:
        text, _, lines = inspect.cleandoc(function.__doc__ or "").partition("\n\nExamples:\n")
        text, _, section = text.partition("\n\nParameters:\n")
        epilog = examples(*textwrap.dedent(lines).split("\n"))
        called = name or function.__name__.strip("_").replace("_", "-")
        add = of.command(called, help=text, epilog=epilog)
        add(_Callback(function, textwrap.dedent(section)))
        return function

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


OPTIMIZER_SETTINGS: Final = ("weight_decay", "momentum", "beta1", "beta2", "epsilon")
"""Settings of optimizers that have an option of their own."""

# Fields that several options make, or one whose choices come from a registry.
_SEVERAL: Final[dict[str, dict[str, Any]]] = {
    "loss": {"loss": LossName},
    "loss_options": {"loss_option": list[str]},
    "optimizer": {"optimizer": OptimizerName},
    "optimizer_options": dict.fromkeys(OPTIMIZER_SETTINGS, float) | {"optimizer_option": list[str]},
    "ort_format": {"ort_format": bool, "ort_style": StyleChoice, "ort_platform": list[Platform]},
}


def takes_spec(before: str | None = None, of: type = BuildSpec) -> Callable[[_Command], _Command]:
    """Give a command the options of a build or another class, which it takes as keywords."""

    def decorate(function: _Command) -> _Command:
        declared = options() if of is BuildSpec else options_of(of)
        function.takes = before, declared  # type: ignore[attr-defined]
        return function

    return decorate


_parameter = functools.partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)


def _parameters(declared: Iterable[Option]) -> Iterator[inspect.Parameter]:
    """The parameters of a command that takes every option, in the order of the fields."""
    for each in declared:
        made = {
            name: (kind, _option(name, kind, _SHARED[name]))
            for name, kind in _SEVERAL.get(each.name, {}).items()
        }
        if each.flag:
            info = typer.Option(each.flag, metavar=each.metavar, help=each.help)
            made = {each.name: (_kind(each), info)}
        for name, (kind, info) in made.items():
            if each.default is REQUIRED:
                yield _parameter(name, annotation=Annotated[kind, info])
            else:
                yield _parameter(name, annotation=Annotated[kind | None, info], default=None)


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

                what = f"{name} is missing, and no --recipe gives it"
                raise OdtpackError("usage", what, hint=f"odtpack {command} --help")
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
            what = f"{option} is not a setting of the optimizer {kind}"
            hint = f"leave {option} out; {kind} has {', '.join(sorted(fields))}"
            raise OdtpackError("option-not-used", what, hint=hint)
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

        what = "--ort-style and --ort-platform need --ort-format"
        raise OdtpackError("option-not-used", what, hint="pass --ort-format too, or leave them out")
    styles = tuple(Style) if style == "both" else (Style(style or "fixed"),)
    return OrtFormat(styles, tuple(dict.fromkeys(platforms or ())) or (None,))
