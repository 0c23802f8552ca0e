"""``odtpack ops``: which operators can be trained through, in general and in one model."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from odtpack.cli import _console
from odtpack.cli._options import AS_JSON, MODEL

if TYPE_CHECKING:
    from odtpack.package.coverage import Coverage
    from odtpack.package.obstacles import Obstacle

ops = typer.Typer(help="Say which operators a gradient can pass.", no_args_is_help=True)

_OBSTACLES = 1  # exit code, as for a budget that is not met


class Way(StrEnum):
    """How an operator is differentiated, as the support table has it."""

    RULE = "rule"
    EXPANSION = "expansion"
    REWRITTEN = "rewritten"
    NO_GRADIENT = "no gradient"
    NONE = "none"


@ops.command(
    epilog="\b\nExamples:\n  odtpack ops coverage\n  odtpack ops coverage Conv LSTM\n"
    "  odtpack ops coverage --how none --json"
)
def coverage(
    operators: Annotated[
        list[str] | None,
        typer.Argument(metavar="[OPERATOR]...", show_default=False, help="Only these."),
    ] = None,
    how: Annotated[Way | None, typer.Option(help="Only those differentiated so.")] = None,
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Print the support table: operator, opsets, trainable inputs, how.

    rule: by a rule of its own. expansion: by way of the operators that the standard defines
    it with. rewritten: replaced by other operators where the patterns of docs/operators.md
    hold. no gradient: it is constant almost everywhere, so a gradient stops there, as it
    should. none: a parameter cannot be trained through it.
    """
    from odtpack.errors import OdtpackError
    from odtpack.package.coverage import coverage as table

    _console.results(as_json=as_json)
    rows = table()
    known = {row.op_type for row in rows}
    for name in operators or ():
        if name not in known:
            import difflib

            near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            raise OdtpackError(
                "unknown-operator",
                f"there is no operator {name!r}",
                hint=f"did you mean {', '.join(near)}?" if near else "odtpack ops coverage",
            )
    shown = [
        row
        for row in rows
        if (not operators or row.op_type in operators) and (how is None or row.how == how.value)
    ]
    cells = [(_name(row), _opsets(row), ", ".join(row.inputs) or "–", row.how) for row in shown]
    _console.table(cells, ("Operator", "Opsets", "Trainable inputs", "How"))
    if as_json:
        _console.print_json({"operators": [dataclasses.asdict(row) for row in shown]})


def _name(row: Coverage) -> str:
    return row.op_type if row.domain == "ai.onnx" else f"{row.domain}.{row.op_type}"


def _opsets(row: Coverage) -> str:
    return ", ".join(map(str, row.opsets)) or "–"


@ops.command(
    epilog="\b\nExamples:\n  odtpack ops check model.onnx\n"
    "  odtpack ops check model.onnx --train 'head.*' --json"
)
def check(
    model: Annotated[Path, MODEL],
    train: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Parameters to train, as for build. Default: all."),
    ] = None,
    freeze: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Parameters to freeze, as for build."),
    ] = None,
    loss_input: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Output that the loss reads. Default: the first."),
    ] = None,
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Say before a build which nodes stand in a gradient's way, and what to do about each.

    The exit code is 0 if every parameter can be trained, 1 if a node stands in the way.
    """
    from odtpack.errors import OdtpackError
    from odtpack.model.loading import load_model
    from odtpack.package.obstacles import find_obstacles
    from odtpack.package.patterns import resolve

    _console.results(as_json=as_json)
    loaded = load_model(model, named=(*(train or ()), *(freeze or ())))
    trained, _ = resolve(loaded, train or (), freeze or ())
    outputs = [str(value.name) for value in loaded.graph.outputs]
    for name in loss_input or ():
        if name not in outputs:
            raise OdtpackError(
                "unknown-value",
                f"the model has no output {name!r}",
                where=str(model),
                hint=f"its outputs are {', '.join(outputs)}",
            )
    found = find_obstacles(loaded, trained, loss_input or outputs[:1])
    if found:
        _print(found)
    else:
        count = len(trained)
        _console.say(f"{count} parameter{'s' if count != 1 else ''}: a gradient reaches each")
    if as_json:
        content: dict[str, Any] = {
            "path": str(model),
            "trained": list(trained),
            "obstacles": [dataclasses.asdict(item) for item in found],
        }
        _console.print_json(content)
    if found:
        raise typer.Exit(_OBSTACLES)


def _print(found: list[Obstacle]) -> None:
    count = len(found)
    _console.say(f"{count} node{'s' if count != 1 else ''} in the way of a gradient", style="bold")
    for item in found:
        _console.say(f"  {item.op_type} (opset {item.opset}), node {item.node}")
        _console.say(f"    why     {item.why}")
        shown = ", ".join(item.parameters[:4]) + (", ..." if item.parameters[4:] else "")
        _console.say(f"    blocks  {shown}")
        if item.advice:
            _console.say(f"    to do   {item.advice}")
