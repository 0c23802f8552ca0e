"""``odtpack adapter``: adapters to and from PEFT's files and ONNX Runtime's."""

from __future__ import annotations

import typer

from odtpack.cli.adapter.export import export
from odtpack.cli.adapter.import_ import import_
from odtpack.cli.adapter.merge import merge

adapter = typer.Typer(
    no_args_is_help=False,
    invoke_without_command=True,
    help="Carry adapters to and from PEFT and ONNX Runtime.",
    short_help="Carry adapters to and from PEFT and ONNX Runtime.",
)


@adapter.callback()
def _adapter(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


adapter.command(
    epilog="\b\nExamples:\n"
    "  odtpack adapter export package --checkpoint trained.ckpt --out adapter\n"
    "  odtpack adapter export package --checkpoint trained.ckpt --out adapter --onnxruntime"
)(export)
adapter.command(
    name="import",
    epilog="\b\nExamples:\n  odtpack adapter import package adapter --out start.ckpt",
)(import_)
adapter.command(
    epilog="\b\nExamples:\n  odtpack adapter merge model.onnx adapter --out merged.onnx"
)(merge)
