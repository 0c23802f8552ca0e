"""``odtpack delta`` and ``odtpack apply``: bring packages up to date with what changed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from odtpack.cli import _console

_WORDS = {"COPY": "unchanged", "WHOLE": "whole", "PATCH": "what changed"}


def delta(
    old: Annotated[
        Path,
        typer.Argument(metavar="OLD", show_default=False, help="Package that devices have."),
    ],
    new: Annotated[
        Path, typer.Argument(metavar="NEW", show_default=False, help="Package to make of it.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The delta.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what the delta holds as JSON on stdout.")
    ] = False,
) -> None:
    """Write one file that makes the new package of the old one.

    It holds only what changed. The same packages give the same bytes.
    """
    from odtpack.cli._files import check_writable
    from odtpack.update.delta import write_delta
    from odtpack_runtime.package.package import Package
    from odtpack_simulator.values.units import format_bytes

    for package in (old, new):
        check_writable(out, "--out", outside=Package.open(package))
    made = write_delta(old, new, out)
    share = made.size_bytes / made.package_bytes
    _console.say(
        f"wrote {out}: {format_bytes(made.size_bytes)}, {share:.1%} of the package", style="bold"
    )
    for entry in made.entries:
        _console.say(
            f"  {entry.path:<24} {_WORDS[entry.kind.name]:<13}{format_bytes(entry.stored):>10}"
        )
    if as_json:
        files = [
            {
                "path": entry.path,
                "kind": entry.kind.name.lower(),
                "size_bytes": entry.size,
                "stored_bytes": entry.stored,
            }
            for entry in made.entries
        ]
        _console.print_json(
            {
                "path": str(out),
                "size_bytes": made.size_bytes,
                "package_bytes": made.package_bytes,
                "files": files,
            }
        )


def apply(
    package: Annotated[
        Path,
        typer.Argument(
            metavar="PKG", show_default=False, help="Package that the delta starts from."
        ),
    ],
    update: Annotated[
        Path,
        typer.Argument(metavar="DELTA", show_default=False, help="File of odtpack delta."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="NEWPKG",
            help="New folder for the new package. Default: it takes the place of PKG.",
        ),
    ] = None,
) -> None:
    """Make the new package of a delta, whole or not at all.

    The package must be exactly the one that the delta starts from; the result is exactly the
    one that it was made for.
    """
    from odtpack_runtime.delta import apply_delta

    made = apply_delta(package, update, out)
    _console.say(f"{made} is the new package", style="bold")
