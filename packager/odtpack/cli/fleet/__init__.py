"""``odtpack fleet``: simulate the federated training of a package by a fleet of devices."""

from __future__ import annotations

import typer

from odtpack.cli.fleet.compare import compare
from odtpack.cli.fleet.demo import demo
from odtpack.cli.fleet.fit import fit
from odtpack.cli.fleet.run import run

fleet = typer.Typer(
    no_args_is_help=False,
    invoke_without_command=True,
    help="Simulate federated training by a fleet of devices.",
    short_help="Simulate federated training by a fleet of devices.",
)


@fleet.callback()
def _fleet(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


fleet.command(
    epilog="\b\nExamples:\n"
    "  odtpack fleet run package --fleet fleet.toml --data digits.npz\n"
    "  odtpack fleet run package --fleet fleet.toml --data digits.npz --out build/fleet \\\n"
    "      --report html:fleet.html --report json:fleet.json\n"
    "  odtpack fleet run package --fleet fleet.toml --data digits.npz --out build/fleet --resume"
)(run)
fleet.command(
    epilog="\b\nExamples:\n"
    "  odtpack fleet compare before.json fleet.json\n"
    "  odtpack fleet compare before.json fleet.json --accuracy 0.9 --format markdown"
)(compare)
fleet.command(
    epilog="\b\nExamples:\n"
    "  odtpack fleet fit package --fleet fleet.toml --data digits.npz\n"
    "  odtpack fleet fit package --fleet fleet.toml --data digits.npz --clients 10 \\\n"
    "      --clients 20 --epochs 1 --epochs 3 --lr 0.05 --lr 0.1 --seeds 3 --json > fit.json"
)(fit)
fleet.command(epilog="\b\nExamples:\n  odtpack fleet demo --out build/fleet-demo")(demo)
