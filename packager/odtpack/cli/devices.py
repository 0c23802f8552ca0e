"""``odtpack devices``: the device profiles that ship, and what they rest on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from odtpack.cli import _console

if TYPE_CHECKING:
    from odtpack_runtime.simulator.profile import DeviceProfile, ProfileFigure

devices = typer.Typer(
    no_args_is_help=False,
    invoke_without_command=True,
    help="List device profiles, or show where the figures of one come from.",
    short_help="List device profiles, or show one with its sources.",
)

_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]


@devices.callback()
def _devices(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


@devices.command(
    "list", epilog="\b\nExamples:\n  odtpack devices list\n  odtpack devices list --json"
)
def list_devices(as_json: _AsJson = False) -> None:
    """List the device profiles that ship with odtpack."""
    from odtpack_runtime.simulator.profile import list_profiles, load_profile
    from odtpack_runtime.simulator.units import format_bytes

    profiles = [load_profile(name) for name in list_profiles()]
    rows = []
    for profile in profiles:
        limit, rate = profile.memory_limit_bytes(), profile.gemm_flops()
        rows.append(
            (
                profile.name,
                profile.title,
                profile.os,
                "unknown" if limit is None else format_bytes(limit),
                "unknown" if rate is None else f"{rate.typical / 1e9:.3g} GFLOPS",
                "yes" if profile.validated else "no",
            )
        )
    header = ("Name", "Device", "System", "App memory", "fp32 GEMM", "Validated")
    _console.table(rows, header, figures="App memory,fp32 GEMM")
    _console.say("odtpack devices show NAME names the source of every figure.")
    if as_json:
        _console.print_json([_summary(profile) for profile in profiles])


@devices.command(
    "show",
    epilog="\b\nExamples:\n  odtpack devices show pixel-8a\n"
    "  odtpack devices show ./phone.toml --json",
)
def show_device(
    device: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE",
            show_default=False,
            help="A shipped profile, or the path of a .toml file.",
        ),
    ],
    as_json: _AsJson = False,
) -> None:
    """Show every figure of a device profile with unit, kind and source."""
    from odtpack_runtime.simulator.profile import load_profile

    profile = load_profile(device)
    _console.say(f"{profile.title} ({profile.name})", style="bold")
    _console.say(f"  {profile.soc or 'chip not named'}, {profile.os}")
    if not profile.validated:
        _console.say("  not validated: times it predicts were never compared with the device")
    figures = profile.figures()
    width = max(len(figure.key) for figure in figures)
    for figure in figures:
        kind = "" if figure.value is None else f"  ({figure.kind})"
        _console.say(f"{figure.key:<{width}}  {_value(figure)}{kind}")
        _console.say(f"    {figure.source}", style="dim")
    if as_json:
        content = [figure.model_dump(mode="json") for figure in figures]
        _console.print_json({**_summary(profile), "figures": content})


def _summary(profile: DeviceProfile) -> dict[str, Any]:
    return {
        "name": profile.name,
        "title": profile.title,
        "vendor": profile.vendor,
        "soc": profile.soc,
        "os": profile.os,
        "validated": profile.validated,
        "digest": profile.digest,
        "app_memory_foreground_bytes": profile.memory_limit_bytes(),
    }


def _value(figure: ProfileFigure) -> str:
    if figure.value is None:
        return "unknown"
    unit = "" if figure.unit in (None, "1", "cores") else f" {figure.unit}"
    text = f"{figure.value:g}{unit}"
    if figure.low is not None and figure.high is not None:
        text += f" ({figure.low:g} to {figure.high:g})"
    if figure.threads is not None:
        text += f", {figure.threads} thread{'s' if figure.threads > 1 else ''}"
    return text
